#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# deb.sh FOLDER: the Debian packages in FOLDER, built of the release tarball as
# anybody would build them; lintian judges them where it is installed.
# DEB_BUILD_OPTIONS (nocheck, parallel=N, terse) is for dpkg-buildpackage.
set -eu
out=${1:?usage: deb.sh FOLDER}
command -v dpkg-buildpackage > /dev/null || {
	echo "deb.sh: no dpkg-buildpackage: make deps-packages" >&2
	exit 1
}
scripts/fresh-folder.sh "$out"
tarball=$(scripts/dist.sh "$out")
tar -C "$out" -xzf "$tarball"
# what a make around this one exports is not for the build
unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES CALLER_FLAGS CALLER_CPPFLAGS CALLER_CFLAGS \
	CALLER_LDFLAGS
export PATH="/usr/bin:/bin:$PATH" # Debian's Python, whatever stands before it
export DEB_BUILD_OPTIONS="parallel=$(nproc) ${DEB_BUILD_OPTIONS-}"
tree=${tarball%.tar.gz}
(cd "$tree" && dpkg-buildpackage -us -uc -b)
if command -v lintian > /dev/null; then
	lintian --fail-on error,warning --allow-root "$out"/*.changes
else
	echo "deb.sh: no lintian" >&2
fi
rm -rf --one-file-system "$tree"
ls "$out"/*.deb
