#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# check-glibc.sh PROGRAM...: fails where one uses a symbol that is newer than glibc 2.34, which the
# wheel's tag promises. Headers newer than Debian 12's choose newer symbols by themselves: there
# nothing is judged.
set -eu
limit=2.34
here=$(getconf GNU_LIBC_VERSION | cut -d' ' -f2)
newest() { printf '%s\n' "$@" | sort -V | tail -n 1; }
if [ "$(newest "$here" 2.36)" != 2.36 ]; then
	echo "check-glibc: not judged with the headers of glibc $here" >&2
	exit 0
fi
failed=0
for program; do
	symbols=$(objdump -T "$program" | sed -n 's/.*(\{0,1\}GLIBC_\([0-9.]*\))\{0,1\} *\(.*\)/\1 \2/p')
	while read -r version name; do
		if [ "$(newest "$version" $limit)" != $limit ]; then
			echo "$program: $name is of glibc $version; at most $limit (the wheel's tag)" >&2
			failed=1
		fi
	done <<EOF
$(printf '%s\n' "$symbols" | sort -u | awk '{ if (!($1 in seen)) print; seen[$1] = 1 }')
EOF
done
exit $failed
