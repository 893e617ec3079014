#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# rpm.sh FOLDER: RPM packages in FOLDER, built of the release tarball by
# contrib/rpm/kvd.spec. On Debian rpmbuild knows nothing of what is installed: it is
# told not to ask.
set -eu
out=${1:?usage: rpm.sh FOLDER}
command -v rpmbuild > /dev/null || {
	echo "rpm.sh: no rpmbuild: make deps-packages" >&2
	exit 1
}
scripts/fresh-folder.sh "$out"
scripts/dist.sh "$out"
unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES CALLER_FLAGS CALLER_CPPFLAGS CALLER_CFLAGS \
	CALLER_LDFLAGS
out=$(realpath "$out")
export PATH="/usr/bin:/bin:$PATH" # the distribution's Python, whatever stands before it
nodeps=
[ ! -e /etc/debian_version ] || nodeps=--nodeps
rpmbuild -bb $nodeps -D "_topdir $out/work" -D "_sourcedir $out" -D "_rpmdir $out" \
	-D "_smp_mflags -j$(nproc)" contrib/rpm/kvd.spec
rm -rf --one-file-system "$out/work"
find "$out" -name '*.rpm'
