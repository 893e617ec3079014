#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# bench.sh BUILD [N rooms]: two daemons, bench_rooms over each transport, and an
# idle daemon's wake-ups. Lines of JSON on stdout and in BUILD/../bench/.
set -eu

build=${1:?usage: bench.sh BUILD [ROOMS]}
rooms=${2:-10000}
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
		transports = $2
	END
	"$build/kvd" --config "$dir/$1.conf" 2> "$dir/$1.log" &
	pids="$pids $!"
	eval "$1_pid=$!"
	tries=0
	until "$build/kvd-ctl" --socket "$dir/$1.sock" ping > /dev/null 2>&1; do
		tries=$((tries + 1))
		[ $tries -lt 100 ] || { cat "$dir/$1.log" >&2; exit 1; }
		sleep 0.1
	done
}

stop() {
	for pid in $pids; do
		kill "$pid"
		wait "$pid" || :
	done
	pids=
}

# Voluntary context switches of a daemon's loop thread in ten seconds.
switches() {
	awk '/^voluntary/ { print $2 }' "/proc/$1/task/$1/status"
}

mkdir -p "$out"
: > "$out/rooms.jsonl"
for transport in ${KVD_BENCH_TRANSPORTS:-shm ucx}; do
	start prefill $transport
	start decode $transport
	if [ $transport = shm ]; then
		before=$(switches "$prefill_pid")
		sleep 10
		after=$(switches "$prefill_pid")
		printf '{"work":"idle daemon, no session, no peer","wakeups_in_10_s":%d}\n' \
			$((after - before)) | tee -a "$out/rooms.jsonl"
	fi
	for work in latency pages poll; do
		"$build/bench-rooms" "$dir/prefill.sock" "$dir/decode.sock" $work |
			sed "s/^{/{\"transport\":\"$transport\",/" | tee -a "$out/rooms.jsonl"
	done
	if [ $transport = shm ]; then
		"$build/bench-rooms" "$dir/prefill.sock" "$dir/decode.sock" rooms "$rooms" |
			sed "s/^{/{\"transport\":\"$transport\",/" | tee -a "$out/rooms.jsonl"
	fi
	stop
done
