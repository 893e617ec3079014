#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# GPU memory without kernels, as in a build without nvcc: the conformance suite's
# cases of bytes and of aborts, by copy engines alone. (conform has kernels.) With
# KVD_SWEEP the aborts of one backend.
set -u
export KVD_CONFORM_KERNELS=off
backends="local-gpu shm-gpu tcp-gpu ucx-gpu"
passed=0 failed=0
out=$(mktemp) || exit 1
trap 'rm -f "$out"' EXIT
[ -z "${KVD_SWEEP-}" ] || swept=$(echo "$backends" | cut -d ' ' -f $((KVD_SWEEP % 4 + 1)))
for cases in data abort; do
	for backend in $backends; do
		[ $cases = data ] || [ "$backend" = "${swept-$backend}" ] || continue
		"$KVD_BUILD/conform" --backend "$backend" --case $cases >"$out" 2>&1
		status=$?
		line=$(tail -n 1 "$out")
		p=$(expr "$line" : '\([0-9]*\) passed') || p=0
		f=$(expr "$line" : '.* \([0-9]*\) failed') || f=0
		if [ $status -ne 0 ] && [ "$f" -eq 0 ]; then
			f=1
			printf 'not ok %s, %s\n# exit status %d\n' "$backend" $cases $status
		fi
		[ "$f" -eq 0 ] || cat "$out"
		passed=$((passed + p)) failed=$((failed + f))
	done
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
