#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# demo.sh BUILD: two kvd daemons, a prefill and a decode engine; requests of
# different length cross by push and by pull, over each transport; one is aborted
# in the middle, one prefill engine is killed. Every byte is verified by the
# engines themselves (tests/demo). Exit status 0: all as it should be.
set -eu

build=${1:?usage: demo.sh BUILD}
base=${TMPDIR:-/tmp}
[ ${#base} -le 60 ] || base=/tmp # a socket's path has 107 bytes
dir=$(mktemp -d "$base/kvd-demo.XXXXXX")
pids=
status=0
TICKET=$(od -An -tx1 -N16 /dev/urandom | tr -d ' \n') # the router's, for all rooms
export TICKET

finish() {
	for pid in $pids; do
		kill "$pid" 2>/dev/null || :
	done
	for pid in $pids; do
		wait "$pid" 2>/dev/null || :
	done
	if [ "$1" -ne 0 ]; then
		for log in "$dir"/*.log; do
			[ -s "$log" ] || continue
			echo "--- $(basename "$log")"
			tail -n 20 "$log"
		done
	fi
	rm -rf "$dir"
}
trap 'finish $?' EXIT
trap 'exit 130' INT TERM

ctl() {
	name=$1
	shift
	"$build/kvd-ctl" --socket "$dir/$name.sock" --timeout 10 "$@"
}

# start NAME TRANSPORT: returns when the daemon answers
start() {
	cat > "$dir/$1.conf" <<-END
		[daemon]
		name = $1
		run_dir = $dir
		log_level = warn
		[peer]
		dead_after = 20 s
		[transport]
		transports = $2
	END
	"$build/kvd" --config "$dir/$1.conf" > "$dir/$1.log" 2>&1 &
	eval "$1_pid=$!"
	pids="$pids $!"
	tries=0
	until ctl "$1" ping > /dev/null 2>&1; do
		tries=$((tries + 1))
		if [ $tries -gt 600 ] || ! kill -0 "$!" 2> /dev/null; then
			echo "demo: daemon $1 does not answer" >&2
			exit 1
		fi
		sleep 0.1
	done
}

# a daemon ends by SIGTERM with nothing left and status 0
stop() {
	eval "pid=\$$1_pid"
	kill "$pid"
	wait "$pid" || {
		echo "demo: daemon $1 ended with status $?" >&2
		status=1
	}
}

# the value of a gauge or counter
figure() {
	ctl "$1" stats | awk -v name="$2" '$1 == name { print $2 }'
}

# after its engine was killed, a daemon holds nothing of it
expect_empty() {
	tries=0
	until [ "$(figure "$1" regions)" = 0 ] && [ "$(figure "$1" pools)" = 0 ]; do
		tries=$((tries + 1))
		if [ $tries -gt 600 ]; then
			echo "demo: daemon $1 still holds memory of an engine that is gone" >&2
			status=1
			return
		fi
		sleep 0.1
	done
	printf '       %s: the killed engine left nothing behind in its daemon\n' "$2"
}

cross() {
	start prefill "$1"
	start decode "$1"
	endpoint=$(ctl prefill status | awk '$1 == "endpoint" { print $2 }')
	"$build/demo-prefill" "$dir/prefill.sock" > "$dir/engine-prefill.log" 2>&1 &
	engine=$!
	"$build/demo-decode" "$dir/decode.sock" "$endpoint" "$1" || {
		status=1
		kill -9 $engine 2> /dev/null || : # it waits for nobody
	}
	ended=0
	wait $engine 2> /dev/null || ended=$?
	if [ $ended -ne 137 ]; then
		echo "demo: the prefill engine ended with status $ended, not by its SIGKILL" >&2
		status=1
	fi
	expect_empty prefill "$1"
	stop decode
	stop prefill
	pids=
}

began=$(date +%s)
echo "kvd demo: 32 layers x 8 KV heads x 128 x bf16, pages of 16 tokens, chunks of 512 tokens"
printf '%-6s %-5s %-9s %6s %12s %9s %7s  %s\n' room by transport tokens bytes ms GB/s verified
for transport in ${KVD_DEMO_TRANSPORTS:-shm tcp $("$build/kvd" --version | grep -ow ucx)}; do
	cross "$transport"
done
if [ $status -eq 0 ]; then
	echo "all as it should be, in $(($(date +%s) - began)) s"
else
	echo "something was wrong"
fi
exit $status
