#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# setup.sh VENV: the peers that kvd is measured beside, from PyPI (500 MB): NIXL
# and Mooncake. NIXL's Python layer imports torch only for callers that did, so
# torch and its 3 GB stay away (--no-deps). Versions are pinned: figures are
# compared from run to run.
set -eu
venv=${1:?usage: setup.sh VENV}
python=/usr/bin/python3
stamp=$venv/.ready
wanted='nixl-cu12==1.5.1 numpy==2.4.6 nvidia-cufile-cu12==1.14.1.1
nvidia-cuda-runtime-cu12==12.9.79 mooncake-transfer-engine-non-cuda==0.3.13.post1'

[ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && exit 0
echo "bench: building $venv from PyPI" >&2
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
	[ "$(id -u)" -eq 0 ] || { echo "bench: as root: apt-get install python3-venv" >&2; exit 1; }
	"$(dirname "$0")/../../../scripts/apt-lists.sh" python3-venv
	DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
		python3-venv >/dev/null
fi
rm -rf "$venv"
"$python" -m venv "$venv"
# shellcheck disable=SC2086
"$venv/bin/pip" install -q --disable-pip-version-check --no-deps $wanted
echo "$wanted" > "$stamp"
