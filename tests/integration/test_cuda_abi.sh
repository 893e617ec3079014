#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# gpu/cudrv.h beside the cuda.h of a CUDA 13 toolkit, by the compiler: see
# tests/gpu/cuda_abi.cc. CUDA_HOME names a toolkit that is not in /usr/local/cuda.
set -u
include=
for folder in "${CUDA_HOME:-/usr/local/cuda}/include" /usr/include; do
	[ -r "$folder/cuda.h" ] && include=$folder && break
done
version=$(sed -n 's/^#define CUDA_VERSION \([0-9]*\)$/\1/p' "$include/cuda.h" 2>/dev/null)
if [ "${version:-0}" -lt 13000 ]; then
	echo "skipped: cuda.h of CUDA 13 (${version:-none})"
	exit 77
fi
if ! command -v "${CXX:-g++}" >/dev/null; then
	echo "skipped: a C++ compiler (CXX)"
	exit 77
fi
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
compile()
{
	"${CXX:-g++}" -std=c++17 -fsyntax-only -I"$1" -I. -isystem "$include" -x c++ \
		tests/gpu/cuda_abi.cc >"$out/log" 2>&1
}

if ! compile .; then
	cat "$out/log"
	echo "0 passed, 1 failed"
	exit 1
fi
# Would it tell? Each of these is a mistake that a build and the fake do not see.
passed=1 failed=0
mkdir -p "$out/gpu"
while read -r mistake; do
	sed "$mistake" gpu/cudrv.h >"$out/gpu/cudrv.h"
	if cmp -s gpu/cudrv.h "$out/gpu/cudrv.h" || compile "$out"; then
		echo "FAILED: not seen: $mistake"
		failed=$((failed + 1))
	else
		passed=$((passed + 1))
	fi
done <<'MISTAKES'
s/CU_ERROR_NOT_READY = 600/CU_ERROR_NOT_READY = 601/
s/CU_DEVICE_ATTRIBUTE_MAX_PITCH = 11/CU_DEVICE_ATTRIBUTE_MAX_PITCH = 12/
s/int src_type;/long src_type;/
s/size_t attributes_n,/size_t attributes_n, size_t *fail_index,/
s/unsigned int flags, int priority/unsigned int flags, uint64_t priority/
s/(int device)/(long device)/
s/CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12/CU_POINTER_ATTRIBUTE_RANGE_SIZE = 13/
MISTAKES
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
