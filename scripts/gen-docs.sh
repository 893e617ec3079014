#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# gen-docs.sh BUILD [--check]: write config/kvd.conf and man/kvd.conf.5 from the
# option table, docs/reference.md from the tables of commands, errors and peer
# messages; or only tell whether they are up to date.
set -eu
kvd=$1/kvd
version=$("$kvd" --version | sed -n '1s/^kvd //p')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$kvd" --print-config >"$work/kvd.conf"
"$1/reference" >"$work/reference.md"
"$kvd" --print-man >"$work/options"
sed -e "s/@VERSION@/$version/" -e "/^@OPTIONS@\$/{
r $work/options
d
}" man/kvd.conf.5.in >"$work/kvd.conf.5"

if [ "${2-}" = --check ]; then
	stale=0
	cmp -s "$work/kvd.conf" config/kvd.conf || stale=1
	cmp -s "$work/kvd.conf.5" man/kvd.conf.5 || stale=1
	cmp -s "$work/reference.md" docs/reference.md || stale=1
	[ $stale -eq 0 ] || echo "gen-docs: a generated file is old: run make docs" >&2
	exit $stale
fi
cp "$work/kvd.conf" config/kvd.conf
cp "$work/kvd.conf.5" man/kvd.conf.5
cp "$work/reference.md" docs/reference.md
