#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# root.sh FOLDER PACKAGE...: a small Debian of this machine's release with these packages,
# made once (as root, from the machine's own mirror; 210 MB and a minute for systemd's).
# Exit status 77 names what is missing.
set -eu
dir=${1:?usage: root.sh FOLDER PACKAGE...}
shift
[ ! -e "$dir.ready" ] || exit 0
missing() {
	echo "skipped: $1"
	exit 77
}
[ "$(id -u)" -eq 0 ] || missing root
command -v mmdebstrap > /dev/null || missing mmdebstrap
rm -rf --one-file-system "$dir"
mkdir -p "$(dirname "$dir")"
log=$dir.log
mmdebstrap --quiet --mode=root --variant=minbase \
	--include="$*" \
	--dpkgopt='path-exclude=/usr/share/doc/*' \
	--dpkgopt='path-exclude=/usr/share/locale/*' \
	"$(. /etc/os-release && echo "$VERSION_CODENAME")" "$dir" > "$log" 2>&1 || {
	rm -rf --one-file-system "$dir"
	missing "packages from Debian ($(tail -n 1 "$log"))"
}
touch "$dir.ready"
