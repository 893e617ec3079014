#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# python-venv.sh DIR PYTHON: a virtual environment in DIR/venv with numpy, pytest, aiohttp
# (kvd.vllm's bootstrap server; vLLM has it) and the package of this tree. What is missing is told in DIR/why, exit status 1.
set -eu
dir=$1 python=$2
rm -f "$dir/why"

missing()
{
	echo "$1" > "$dir/why"
	exit 1
}

header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
[ -f "$header" ] || missing "Python's headers (python3-dev)"
if ! "$dir/venv/bin/python" -c 'import pytest, aiohttp' 2>/dev/null; then
	rm -rf "$dir/venv"
	"$python" -m venv "$dir/venv" || missing "venv of Python (python3-venv)"
	"$dir/venv/bin/pip" install -q numpy pytest aiohttp 'setuptools>=61' wheel ||
		missing "numpy, pytest and aiohttp from PyPI"
fi
"$dir/venv/bin/pip" install -q --force-reinstall --no-deps --no-build-isolation \
	--no-index ./python || missing "a build of python"
rm -rf python/build python/*.egg-info
