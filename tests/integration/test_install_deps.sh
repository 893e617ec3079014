#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# scripts/install-deps.sh on a machine where nobody is root: what the build needs stops
# it, what only some tests or `make check` want does not.
set -u
. tests/lib/check.sh

# without PROGRAM: only what the script calls is in the path, and not that one
without()
{
	rm -rf "$work/bin"
	mkdir "$work/bin"
	for program in sh gcc make pkg-config python3 python3-config systemd-analyze ip man \
		clang-tidy cppcheck; do
		printf '#!/bin/sh\nexit 0\n' >"$work/bin/$program"
	done
	printf '#!/bin/sh\necho 1000\n' >"$work/bin/id"
	chmod +x "$work/bin/"*
	rm -f "$work/bin/$1"
}

# ends STATUS PROGRAM PACKAGE OPTION: so, and it names what is missing
ends()
{
	without "$2"
	PATH=$work/bin /bin/sh scripts/install-deps.sh "$4" >"$work/out" 2>&1
	status=$?
	cat "$work/out"
	[ $status -eq "$1" ] && { [ "$2" = none ] || grep -q "missing:.* $3\b" "$work/out"; }
}

[ -e /bin/kill ] || { echo "skipped: /bin/kill"; exit 77; }
check "nothing is missing" ends 0 none none --if-needed
check "the build needs its compiler" ends 1 gcc libev-dev --if-needed
check "tests do without the tools of make check" ends 0 clang-tidy clang-tidy --if-needed
check "and without those that they skip by" ends 0 systemd-analyze systemd --if-needed
check "make check does not" ends 1 clang-tidy clang-tidy --for-check
check "without root the tools of packages are only named" ends 0 dh debhelper --packages
checks_end
