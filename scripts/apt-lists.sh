#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# apt-lists.sh PACKAGE...: apt's lists have these packages; where one is missing they are
# updated first (as root; else it is said how, and this fails).
#   apt-lists.sh --now PACKAGE...   they are updated in any case: a download was refused
set -eu

now=
[ "${1-}" = --now ] && now=yes && shift
[ $# -gt 0 ] || { echo "usage: $0 [--now] PACKAGE..." >&2; exit 2; }

lacks()
{
	for package; do
		apt-cache show --no-all-versions "$package" >/dev/null 2>&1 || echo "$package"
	done
}

missing=$(lacks "$@" | tr '\n' ' ')
[ -n "$missing$now" ] || exit 0
if [ "$(id -u)" -ne 0 ]; then
	echo "apt-lists.sh: ${missing:-$*}: not in apt's lists, or not as they are now (no root); run as root: apt-get update" >&2
	exit 1
fi
apt-get -o Acquire::Retries=3 update -q
missing=$(lacks "$@" | tr '\n' ' ')
[ -z "$missing" ] || {
	echo "apt-lists.sh: $missing: not in apt's lists after apt-get update; see /etc/apt/sources.list.d" >&2
	exit 1
}
