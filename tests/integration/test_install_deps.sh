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

# Each "make TARGET" that the documents give as a first command runs this before all else.
# `install` needs a build, `deb` and `rpm` follow deps-packages: none of them is the first.
documented_targets_install_first()
{
	grep -ohE '\bmake [a-z][a-z-]+' README.md docs/install.md | cut -d ' ' -f 2 | sort -u |
		grep -vxE 'install|deb|rpm' >"$work/targets"
	grep -qx wheel "$work/targets" && grep -qx demo "$work/targets" || return 1
	while read -r target; do
		env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL make -n "$target" 2>&1 | head -n 1 >"$work/out"
		grep -qx 'scripts/install-deps.sh --if-needed' "$work/out" || {
			echo "make $target: $(cat "$work/out")"
			return 1
		}
	done <"$work/targets"
}
check "documented first commands install what is missing" documented_targets_install_first

# ---- apt-lists.sh: apt knows a package once `known` is there, and an update makes that ----

# lists UID OPTION…: with so many updates in the end
lists()
{
	uid=$1
	shift
	rm -rf "$work/bin" "$work/updates"
	mkdir "$work/bin"
	for program in sh tr rm; do
		ln -s "$(command -v $program)" "$work/bin/$program"
	done
	printf '#!/bin/sh\necho %s\n' "$uid" >"$work/bin/id"
	printf '#!/bin/sh\n[ -e "%s/known" ]\n' "$work" >"$work/bin/apt-cache"
	printf '#!/bin/sh\necho "$@" >>"%s/updates"\n[ -e "%s/gone" ] || : >"%s/known"\n' \
		"$work" "$work" "$work" >"$work/bin/apt-get"
	chmod +x "$work/bin/id" "$work/bin/apt-cache" "$work/bin/apt-get"
	PATH=$work/bin /bin/sh scripts/apt-lists.sh "$@" >"$work/out" 2>&1
}

updates()
{
	[ "$(grep -c update "$work/updates" 2>/dev/null || true)" = "$1" ]
}

empty_lists_are_updated() { rm -f "$work/known"; lists 0 qemu perftest && updates 1; }
known_ones_are_left_alone() { lists 0 qemu && ! [ -e "$work/updates" ]; }
old_ones_are_updated() { lists 0 --now qemu && updates 1; }
without_root_it_is_said()
{
	rm -f "$work/known"
	! lists 1000 qemu && grep -q 'qemu.*run as root: apt-get update' "$work/out" &&
		! [ -e "$work/updates" ]
}
unknown_ones_are_named()
{
	: >"$work/gone"
	! lists 0 qemu && grep -q 'qemu.*after apt-get update' "$work/out"
}
# an archive's files come and go: who fetches some looks first whether the lists know them
every_script_does()
{
	grep -rlE --include='*.sh' --include=Dockerfile 'apt-get [^"]*(install|download)' \
		scripts tests contrib | while read -r file; do
		grep -qE 'apt-lists\.sh|apt-get .*update' "$file" || echo "$file: no update"
	done >"$work/out"
	cat "$work/out"
	! [ -s "$work/out" ]
}

check "empty lists are updated" empty_lists_are_updated
check "lists that know the packages are not" known_ones_are_left_alone
check "lists that are old are" old_ones_are_updated
check "without root it is said" without_root_it_is_said
check "packages that do not exist are named" unknown_ones_are_named
check "every script updates before it installs" every_script_does
checks_end
