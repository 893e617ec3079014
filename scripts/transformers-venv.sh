#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# transformers-venv.sh DIR KVD: a virtual environment in DIR/venv with torch and transformers
# from PyPI (5 GB: PyPI's torch for Linux is the one with CUDA, which runs without), and beside
# them what is in the virtual environment KVD: kvd, numpy, pytest. Versions are pinned: the
# client names the release that it was tested with.
set -eu
dir=${1:?usage: transformers-venv.sh DIR KVD}
kvd=${2:?usage: transformers-venv.sh DIR KVD}
python=$dir/venv/bin/python

if [ ! -e "$dir/.ready" ]; then
	echo "transformers: building $dir from PyPI" >&2
	rm -rf "$dir/venv"
	mkdir -p "$dir"
	"$kvd/bin/python" -m venv "$dir/venv"
	"$python" -m pip install -q uv
	"$python" -m uv pip install -q --python "$python" torch==2.13.0 transformers==5.19.0
	touch "$dir/.ready"
fi
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$kvd/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/kvd.pth"
