#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# gpu-bundle.sh BUILD: BUILD/gpu-bundle, a folder that runs the tests and benches of
# GPU memory on a machine with a GPU and nothing installed: the programs without
# debug information, every library that they need, and the loader that takes those
# and no others. The CUDA driver alone is the machine's. `make gpu-bundle`.
set -eu
build=$1
out=$build/gpu-bundle
limit_kib=61440 # 60 MiB

rm -rf "$out"
mkdir -p "$out/lib"
for program in kvd kvd-ctl gpu-works; do
	strip -o "$out/$program" "$build/$program"
done

# "	libev.so.4 => /lib/…/libev.so.4 (0x…)", and the loader's line with its path alone
ldd "$out/kvd" "$out/kvd-ctl" "$out/gpu-works" |
	awk '$2 == "=>" && $3 ~ "^/" { print $3 }' | sort -u |
	while read -r library; do
		cp -L "$library" "$out/lib/"
	done
loader=$(LC_ALL=C readelf -l "$out/kvd" | sed -n 's/.*interpreter: \(.*\)\]/\1/p')
cp -L "$loader" "$out/lib/ld.so"
# The driver's libraries name these parts of libc's, which our programs need not; of
# another libc than the bundle's they would not load. libgcc_s is what libc opens by
# name when a thread is canceled.
for library in libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1 libgcc_s.so.1; do
	path=$(${CC:-gcc} -print-file-name=$library)
	case $path in
	/*) cp -L "$path" "$out/lib/" ;;
	*) echo "$library: not here" >&2 && exit 1 ;;
	esac
done

cp scripts/gpu-bundle-run.sh "$out/run.sh"
chmod 755 "$out/run.sh"
{
	echo "kvd $(git describe --always --dirty 2>/dev/null || echo unknown), $(uname -m)"
	echo "built with $(${CC:-gcc} --version | head -n 1)"
	echo "brings $("$out/lib/ld.so" --version | head -n 1)"
} >"$out/VERSION"
cp scripts/gpu-bundle-readme.txt "$out/README"

kib=$(du -sk "$out" | cut -f1)
if [ "$kib" -gt "$limit_kib" ]; then
	echo "$out: $kib KiB, over $limit_kib" >&2
	exit 1
fi
echo "$out: $kib KiB; copy it to a machine with a GPU, then: sh gpu-bundle/run.sh"
