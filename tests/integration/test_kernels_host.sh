#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# gpu/kernels.cu itself, compiled for the CPU, against its reference: see
# tests/gpu/kernels_host.cc. And mistakes in it, each of which has to be told.
set -u
cxx=${CXX:-g++}
if ! command -v "$cxx" >/dev/null; then
	echo "skipped: a C++ compiler (CXX)"
	exit 77
fi
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
passed=0 failed=0

compile() # KERNELS PROGRAM
{
	"$cxx" -std=c++17 -O1 -g -fno-strict-aliasing -fsanitize=alignment \
		-fno-sanitize-recover=all -Wno-unknown-pragmas -I. \
		-DKERNELS_CU="\"$1\"" tests/gpu/kernels_host.cc "$out/ref.o" -o "$2" \
		>"$out/log" 2>&1
}

if ! ${CC:-gcc} -std=gnu11 -O2 -I. -c tests/gpu/kernels_ref.c -o "$out/ref.o" ||
	! compile "$PWD/gpu/kernels.cu" "$out/kernels"; then
	cat "$out/log"
	echo "0 passed, 1 failed"
	exit 1
fi
if "$out/kernels" 200; then
	passed=1
else
	failed=1
fi
while read -r mistake; do
	sed "$mistake" gpu/kernels.cu >"$out/kernels.cu"
	if cmp -s gpu/kernels.cu "$out/kernels.cu" || ! compile "$out/kernels.cu" "$out/bad"; then
		echo "FAILED: no mistake: $mistake"
		failed=$((failed + 1))
	elif timeout 60 "$out/bad" 40 >"$out/said" 2>&1; then
		echo "FAILED: not seen: $mistake"
		failed=$((failed + 1))
	else
		passed=$((passed + 1))
	fi
done <<'MISTAKES'
s/__syncthreads();//
s/uint32_t i = threadIdx.x;/uint32_t i = threadIdx.x + 1;/
s/e += KERN_WARPS)/e += 2 * KERN_WARPS)/
s/e < per_block \&\& first/e < 8 \&\& first/
s/first += gridDim.x/first += 2 * gridDim.x/
s/blockIdx.x \* per_block/blockIdx.x * KERN_WARPS/
s/lane < w.total)/lane + 1 < w.total)/
s/if (i >= w->total)/if (i > w->total)/
s/i += KERN_AT_ONCE \* w->groups/i += w->groups + KERN_AT_ONCE/
s/row_find(w, i + w->group,/if (i + w->group < w->total) row_find(w, i + w->group,/
MISTAKES
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
