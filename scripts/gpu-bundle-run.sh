#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# run.sh [FOLDER [test|bench|all [WORDS]]]: kvd's tests and figures on this machine's
# GPU. What they say goes to FOLDER (default: results, beside this file). Nothing has
# to be installed but the CUDA driver. KVD_CUDA_LIB names another driver,
# KVD_GPU_DEVICE another device than the first. Exit status 77: there is no GPU.
case $0 in
*/*) here=$(cd "${0%/*}" && pwd) ;;
*) here=$(pwd) ;;
esac
out=${1:-$here/results}
what=${2:-all}
[ $# -lt 2 ] || shift
[ $# -lt 1 ] || shift

# What the machine's own programs say, with the machine's own libraries.
mkdir -p "$out" || exit 1
{
	cat "$here/VERSION"
	date -u 2>/dev/null
	uname -srm 2>/dev/null
	(
		PATH=$PATH:/usr/local/nvidia/bin
		nvidia-smi 2>/dev/null || echo "nvidia-smi: not here"
		nvidia-smi topo -m 2>/dev/null
	)
	cat /proc/driver/nvidia/version 2>/dev/null
} >"$out/machine.txt"

# The driver's own libraries may be found beside it, nothing else of the machine's:
# whatever the programs need lies in lib/, which comes first. (A driver in none of these
# folders is found by the loader's cache, or is named by KVD_CUDA_LIB.)
folders=$here/lib
IFS=:
if [ -z "${KVD_CUDA_LIB-}" ]; then
	for folder in ${LD_LIBRARY_PATH-} /usr/local/nvidia/lib64 /usr/local/nvidia/lib \
		/usr/lib/x86_64-linux-gnu /usr/lib/aarch64-linux-gnu /usr/lib64 /usr/lib \
		/lib64 /lib /usr/lib/wsl/lib /run/opengl-driver/lib; do
		if [ -e "$folder/libcuda.so.1" ]; then
			KVD_CUDA_LIB=$folder/libcuda.so.1
			folders=$folders:$folder
			break
		fi
	done
else
	case $KVD_CUDA_LIB in
	/?*/*) folders=$folders:${KVD_CUDA_LIB%/*} ;;
	/*) folders=$folders:/ ;;
	esac
fi
unset IFS LD_LIBRARY_PATH LD_PRELOAD
[ -z "${KVD_CUDA_LIB-}" ] || export KVD_CUDA_LIB
export KVD_BUNDLE="$here" KVD_BUNDLE_PATH="$folders"

works()
{
	"$here/lib/ld.so" --library-path "$folders" "$here/gpu-works" "$@"
}

status=0
for one in test bench; do
	[ "$what" = all ] || [ "$what" = "$one" ] || continue
	works "$one" "$@" >"$out/$one.txt" 2>&1
	s=$?
	cat "$out/$one.txt"
	[ $s -eq 0 ] || [ $status -eq 1 ] || status=$s
done
echo "written to $out"
exit $status
