#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# fuzz.sh run|cmin FOLDER SECONDS NAME...: FOLDER/fuzz_NAME for each name.
#   run    libFuzzer for so many seconds a target, one on each core. Inputs that it keeps go
#          to build/fuzz/found/NAME, those that fail to build/fuzz/failed; one line each
#   cmin   the least set of inputs, of the tree's and of those found, that reaches as much:
#          new ones go into tests/fuzz/corpus/NAME, those of the tree that add nothing leave
#          it, unless somebody gave them a name that is no checksum
# tests/fuzz/fuzz_NAME.options: libFuzzer's options of a target, as OSS-Fuzz takes them.
set -u
what=$1 folder=$2 seconds=$3
shift 3
base=build/fuzz
bad=

# libFuzzer's options of the target, KEY = VALUE
options()
{
	echo "-max_len=4096 -timeout=20 -rss_limit_mb=2048 -print_final_stats=1"
	[ ! -f "tests/fuzz/fuzz_$1.options" ] ||
		sed -n 's/^\([a-z_]*\) = \(.*\)/-\1=\2/p' "tests/fuzz/fuzz_$1.options"
}

# the last of "KEY: VALUE" or "stat::KEY: VALUE"
figure()
{
	sed -n "s/^stat::$2: *//p" "$1" | tail -n 1
}

run()
{
	local name=$1 log=$base/$1.log status execs
	mkdir -p "$base/found/$name" "$base/failed"
	# shellcheck disable=SC2046
	"$folder/fuzz_$name" $(options "$name") -max_total_time="$seconds" \
		-artifact_prefix="$base/failed/$name-" \
		"$base/found/$name" "tests/fuzz/corpus/$name" > "$log" 2>&1
	status=$?
	execs=$(figure "$log" number_of_executed_units)
	printf '%-12s %11s inputs %7s/s  edges %s\n' "$name" "${execs:-0}" \
		"$(figure "$log" average_exec_per_sec)" \
		"$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -n 1)"
	[ $status -eq 0 ] && return
	tail -n 40 "$log"
	touch "$base/$name.bad"
}

run_all()
{
	local total=0 name execs running=0
	rm -f $base/*.bad
	for name; do
		[ $running -lt "$(nproc)" ] || { wait -n; running=$((running - 1)); }
		run "$name" &
		running=$((running + 1))
	done
	wait
	for name; do
		execs=$(figure "$base/$name.log" number_of_executed_units)
		total=$((total + ${execs:-0}))
		[ ! -e "$base/$name.bad" ] || bad="$bad $name"
	done
	echo "$total inputs"
}

cmin()
{
	local name=$1 corpus=tests/fuzz/corpus/$1 least=$base/least/$1 file
	rm -rf "$least"
	mkdir -p "$least" "$base/found/$name" "$corpus"
	# shellcheck disable=SC2046
	"$folder/fuzz_$name" $(options "$name") -merge=1 "$least" "$corpus" \
		"$base/found/$name" > "$base/$name.log" 2>&1 ||
		{ bad="$bad $name"; tail -n 40 "$base/$name.log"; return; }
	for file in "$corpus"/*; do
		[[ ${file##*/} =~ ^[0-9a-f]{40}$ ]] && rm -f "$file"
	done
	cp "$least"/* "$corpus"/ 2>/dev/null
	printf '%-12s %5d inputs, %s\n' "$name" "$(ls "$corpus" | wc -l)" \
		"$(du -bsh "$corpus" | cut -f1)"
}

if [ "$what" = run ]; then
	run_all "$@"
else
	for name; do
		cmin "$name"
	done
fi
[ -z "$bad" ] || { echo "failed:$bad (inputs in $base/failed, logs $base/NAME.log)"; exit 1; }
