#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What runs on machines with a GPU runs here, too, over the tests' driver: all cases
# of gpu-works, its benches (their figures mean nothing), and, where there is no
# sanitizer, the bundle in a folder that it takes for the whole machine.
set -u
build=${KVD_BUILD:-build/rel}
fake=$build/fakegpu/libcuda.so.1
. tests/lib/check.sh

counted() # NAME COMMAND...: its last line "N passed, N failed[, N skipped]" is added
{
	name=$1
	shift
	"$@" >"$work/out" 2>&1
	status=$?
	cat "$work/out"
	line=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$work/out" | tail -n 1)
	if [ -z "$line" ]; then
		echo "FAIL $name: no counts, status $status"
		failed=$((failed + 1))
		return
	fi
	set -- $(echo "$line" | tr -d ,)
	passed=$((passed + $1)) failed=$((failed + $3)) skipped=$((skipped + ${5:-0}))
}

KVD_CUDA_LIB=$fake
KVD_GPU_SHRINK=64
export KVD_CUDA_LIB KVD_GPU_SHRINK
counted test "$build/gpu-works" test
counted sweep "$build/gpu-works" sweep
counted bench "$build/gpu-works" bench

none()
{
	KVD_CUDA_LIB=libno-such-driver.so.1 "$build/gpu-works" test >"$work/none" 2>&1
	[ $? -eq 77 ] && grep -q 'skipped: no CUDA driver: libno-such-driver' "$work/none"
}
check "without a driver it skips by name" none

# Nothing but the bundle, a shell and /proc. The shell brings a libc of its own, which
# the bundle's programs must not take: what they have mapped is looked at.
alone()
{
	root=$work/root
	mkdir -p "$root/tmp" "$root/proc" "$root/bin" "$root/dev"
	cp -r "$build/gpu-bundle" "$root/bundle"
	cp "$fake" "$root/libcuda.so.1"
	for file in /bin/sh $(ldd /bin/sh /bin/mkdir /bin/cat |
		awk '{ for (i = 1; i <= NF; i++) if ($i ~ "^/[^:]*$") print $i }' | sort -u) \
		/bin/mkdir /bin/cat; do
		mkdir -p "$root${file%/*}"
		cp -L "$file" "$root$file"
	done
	unshare -m sh -c 'mount -t proc proc "$1/proc" && exec chroot "$1" /bin/sh -c "
		KVD_CUDA_LIB=/libcuda.so.1 KVD_GPU_SHRINK=64 PATH=/bin
		export KVD_CUDA_LIB KVD_GPU_SHRINK PATH
		/bin/sh /bundle/run.sh /out all local order abort room"' - "$root" || return 1
	grep -q ' passed, 0 failed' "$root/out/test.txt"
}

own_libraries()
{
	for program in kvd kvd-ctl gpu-works; do
		"$build/gpu-bundle/lib/ld.so" --library-path "$build/gpu-bundle/lib" --list \
			"$build/gpu-bundle/$program" >"$work/list" || return 1
		if grep '=>' "$work/list" | grep -qv "=> $build/gpu-bundle/lib/"; then
			cat "$work/list"
			return 1
		fi
	done
}

if [ "${build##*/}" != rel ]; then
	skip "the bundle" "a build without sanitizer"
else
	check "the bundle is made and small enough" scripts/gpu-bundle.sh "$build"
	check "it needs no library of the machine" own_libraries
	if unshare -m mount -t proc proc /proc 2>/dev/null; then
		check "it runs where there is nothing else" alone
	else
		skip "the bundle alone" "a mount namespace (root)"
	fi
fi
checks_end
