#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# gen-docs.sh BUILD 'HEADERS' [--check]: write config/kvd.conf and man/kvd.conf.5 from
# the option table, docs/reference.md from the tables of commands, errors and peer
# messages, man/libkvd.3 from the public HEADERS (kvd.h, kvd_status.h, …), docs/python.md
# from the Python package's type stubs and docstrings; or only report whether they are up
# to date.
set -eu
build=$1
kvd=$build/kvd
version=$("$kvd" --version | sed -n '1s/^kvd //p')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

header() {
	for file in $headers; do
		[ "${file##*/}" != "$1" ] || echo "$file"
	done
}

headers=$2
"$kvd" --print-config >"$work/kvd.conf"
"$build/reference" >"$work/reference.md"
"$build/reference" options >"$work/options"
scripts/gen-python-doc.py >"$work/python.md"
sed -e "s/@VERSION@/$version/" -e "/^@OPTIONS@\$/{
r $work/options
d
}" man/kvd.conf.5.in >"$work/kvd.conf.5"
scripts/gen-man3.py "$version" "$(header kvd.h)" "$(header kvd_chunk.h)" \
	"$(header kvd_attend.h)" "$(header kvd_cost.h)" \
	--states "$(header kvd_status.h)" >"$work/libkvd.3"

if [ "${3-}" = --check ]; then
	stale=0
	for file in config/kvd.conf man/kvd.conf.5 docs/reference.md docs/python.md \
		man/libkvd.3; do
		cmp -s "$work/${file##*/}" $file || { stale=1; echo "gen-docs: $file is old" >&2; }
	done
	[ $stale -eq 0 ] || echo "gen-docs: run make docs" >&2
	exit $stale
fi
cp "$work/kvd.conf" config/kvd.conf
cp "$work/kvd.conf.5" "$work/libkvd.3" man/
cp "$work/reference.md" "$work/python.md" docs/
