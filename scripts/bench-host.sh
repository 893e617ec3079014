#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# bench-host.sh BUILD [WORK|all [ROUNDS]]: two daemons on this host and
# bench_host between them. Lines of JSON on stdout and in BUILD/../bench/.
set -eu

build=${1:?usage: bench-host.sh BUILD [WORK|all [ROUNDS]]}
threads=${KVD_BENCH_COPY_THREADS:-$(($(nproc) / 2))}
[ "$threads" -ge 1 ] || threads=1
dir=$(mktemp -d "${TMPDIR:-/tmp}/kvd-bench.XXXXXX")
out=$(dirname "$build")/bench
pids=

finish() {
	for pid in $pids; do
		kill "$pid" 2>/dev/null || :
		wait "$pid" 2>/dev/null || :
	done
	rm -rf "$dir"
}
trap finish EXIT
trap 'exit 130' INT TERM

start() {
	cat > "$dir/$1.conf" <<-END
		[daemon]
		name = $1
		run_dir = $dir
		log_level = warn
		[transport]
		transports = shm
		copy_threads = $threads
		${KVD_BENCH_SLICE:+slice = $KVD_BENCH_SLICE}
	END
	"$build/kvd" --config "$dir/$1.conf" 2> "$dir/$1.log" &
	pids="$pids $!"
	tries=0
	until "$build/kvd-ctl" --socket "$dir/$1.sock" ping > /dev/null 2>&1; do
		tries=$((tries + 1))
		[ $tries -lt 100 ] || { cat "$dir/$1.log" >&2; exit 1; }
		sleep 0.1
	done
}

mkdir -p "$out"
start prefill
start decode
"$build/bench-host" "$dir/prefill.sock" "$dir/decode.sock" "$threads" "${2:-all}" \
	"${3:-20}" > "$out/host.jsonl"
cat "$out/host.jsonl"
