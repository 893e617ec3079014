#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# python-wheel-check.sh WHEELS PYTHON DAEMON: the wheel in WHEELS installs in a new
# environment whose PATH has no compiler, brings its libraries along, and moves bytes by
# a DAEMON that it starts. Last line: N passed, N failed.
set -eu
wheels=$1 python=$2 daemon=$3
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"$python" -m venv "$dir/venv"
bare="env -i PATH=$dir/venv/bin HOME=$dir TMPDIR=$dir KVD_AUTOSTART=1 KVD_RUN_DIR=$dir/none"
bare="$bare KVD_DAEMON=$daemon"
passed=0 failed=0

check()
{
	what=$1
	shift
	if "$@" > "$dir/said" 2>&1; then
		passed=$((passed + 1))
		echo "ok   $what"
	else
		failed=$((failed + 1))
		echo "FAIL $what"
		cat "$dir/said"
	fi
}

without()
{
	# shellcheck disable=SC2086
	! $bare "$dir/venv/bin/python" -c "$1"
}

# shellcheck disable=SC2086
run()
{
	$bare "$dir/venv/bin/python" "$@"
}

moves='
import sys, kvd.nixl
sys.path.insert(0, kvd.nixl.path())
import numpy as np
from nixl._api import nixl_agent
a = nixl_agent("alone")
m = np.arange(1 << 14, dtype=np.uint8)
at = m.ctypes.data
a.register_memory([(at, m.size, 0, "")], "DRAM")
h = a.initialize_xfer("WRITE", a.get_xfer_descs([(at, 4096, 0)], "DRAM"),
                      a.get_xfer_descs([(at + 8300, 4096, 0)], "DRAM"), "alone")
a.transfer(h)
while a.check_xfer_state(h) != "DONE":
    pass
assert (m[:4096] == m[8300:8300 + 4096]).all()
'
check "no compiler is in the path" without \
	'import shutil, sys; sys.exit(not any(map(shutil.which, ("cc", "gcc", "clang"))))'
check "it is not there yet" without 'import kvd'
check "it installs" run -m pip install -q "$(echo "$wheels"/kvd-*.whl)"
check "it is of the stable ABI" sh -c "ls $wheels/kvd-*-cp39-abi3-manylinux*.whl"
check "kvd is imported, nixl is not in the way" \
	run -c 'import kvd, importlib.util as u; assert u.find_spec("nixl") is None'
check "stubs came with it" run -c '
import kvd, os
assert os.path.exists(os.path.join(os.path.dirname(kvd.__file__), "client.pyi"))'
check "bytes move" run -c "$moves"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
