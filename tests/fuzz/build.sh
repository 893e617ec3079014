#!/bin/bash -eu
# SPDX-License-Identifier: Apache-2.0
# build.sh: the fuzz targets as OSS-Fuzz builds them, from its base-builder image with
# Debian's packages of scripts/install-deps.sh. Takes $CC, $CXX, $CFLAGS,
# $LIB_FUZZING_ENGINE and $OUT from the environment, and $SRC: the tree is $SRC/kvd, or
# where this script lies. Each target comes with its corpus and its options; libraries that
# the runner's image has not lie beside them.
cd "$(dirname "$0")/../.."
[ ! -d "${SRC:-}/kvd" ] || cd "$SRC/kvd"
: "${CC:=clang}" "${CXX:=clang++}" "${OUT:?the folder for what is built}"
: "${CFLAGS:=-O1 -g -fsanitize=fuzzer-no-link,address}"
: "${LIB_FUZZING_ENGINE:=-fsanitize=fuzzer}"
flags=$CFLAGS
unset CFLAGS CXXFLAGS # they come behind kvd's own as FUZZ_FLAGS
build=build/oss-fuzz

# shellcheck disable=SC2016
make -j"$(nproc)" SAN=fuzz B=$build CC="$CC" NVCC= FUZZ_LINK="$CXX" FUZZ_FLAGS="$flags" \
	LIB_FUZZING_ENGINE="$LIB_FUZZING_ENGINE" FUZZ_STATIC='-Wl,-rpath,\$$ORIGIN/lib' \
	fuzz-programs
mkdir -p "$OUT/lib"
for program in "$build"/fuzz/fuzz_*; do
	name=${program##*/fuzz_}
	cp "$program" "$OUT/"
	python3 -m zipfile -c "$OUT/fuzz_${name}_seed_corpus.zip" "tests/fuzz/corpus/$name"/*
	[ ! -f "tests/fuzz/fuzz_$name.options" ] || cp "tests/fuzz/fuzz_$name.options" "$OUT/"
	ldd "$program" | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p' |
		grep -vE '/(libc|libm|libdl|libpthread|libresolv|librt)\.so' |
		xargs -r cp -Lt "$OUT/lib"
done
