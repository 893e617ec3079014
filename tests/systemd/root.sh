#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# root.sh FOLDER: a small Debian with systemd and what kvd links, made once (as root, 210 MB
# from the machine's own mirror, one minute). Exit status 77 names what is missing.
set -eu
dir=${1:?usage: root.sh FOLDER}
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
	--include=systemd,systemd-sysv,dbus,procps \
	--include=libev4,libzmq5,libcjson1,libinih1,libxxhash0 \
	--dpkgopt='path-exclude=/usr/share/doc/*' \
	--dpkgopt='path-exclude=/usr/share/locale/*' \
	"$(. /etc/os-release && echo "$VERSION_CODENAME")" "$dir" > "$log" 2>&1 || {
	rm -rf --one-file-system "$dir"
	missing "packages from Debian ($(tail -n 1 "$log"))"
}
touch "$dir.ready"
