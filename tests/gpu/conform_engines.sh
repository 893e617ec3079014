#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# GPU memory without kernels, as in a build without nvcc: the conformance suite's
# cases of bytes and of aborts, by copy engines alone. (test_conform has kernels.)
set -u
export KVD_CONFORM_KERNELS=off
passed=0 failed=0
out=$(mktemp) || exit 1
trap 'rm -f "$out"' EXIT
for backend in local-gpu shm-gpu tcp-gpu ucx-gpu; do
	for cases in data abort; do
		"$KVD_BUILD/conform" --quiet --backend $backend --case $cases >"$out" 2>&1
		status=$?
		line=$(tail -n 1 "$out")
		p=$(expr "$line" : '\([0-9]*\) passed') || p=0
		f=$(expr "$line" : '.* \([0-9]*\) failed') || f=0
		[ $status -eq 0 ] || [ "$f" -gt 0 ] || f=1
		[ "$f" -eq 0 ] || cat "$out"
		passed=$((passed + p)) failed=$((failed + f))
	done
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
