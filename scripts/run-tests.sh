#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# run-tests.sh BUILD TEST...: run each test, one line each, and print the total
# alone on the last line. mk/test.mk has the contract. Logs lie in
# BUILD/test-logs; of a failed test the cases that failed are told, and why
# (scripts/failures.awk), there and at the end. TEST_TIMEOUT: seconds a test
# (default 900): a test that takes longer hangs. TEST_JOBS: cores to keep busy (default:
# all, four at most). TEST_LONG: NAME=N ..., tests that may take N times as long; they
# start first. TEST_WEIGHT: NAME=Q ..., quarters of a core that a test uses, rounded up
# (default 4), so a core has five; a test starts when the sum of those running leaves room
# for it. TEST_SHARDS: NAME=N ..., tests that run as N processes, each with TEST_SHARD=K/N.
# TEST_ALONE: NAME ..., tests that judge times; they run first, one by one, beside at most
# two tests that wait for most of their time (weight 1). KVD_SWEEP: the number that chooses
# the part of long sweeps (tests/lib/sweep.h), the commit's unless it is set; empty: all of
# them. BUILD/test-times has each test's seconds and its seconds of CPU.
# The lines come in the order in which tests end. A test that failed while the
# machine stood still (tests/lib/stalls.py) is played again at the end, twice at
# most, and a line says so; LOG.late is the log of the failure. TMPDIR is a folder of
# the run, which goes with it: what a test that is killed leaves there, too.
set -u
build=$1
shift
logs=$build/test-logs
mkdir -p "$logs"
root=$PWD
passed=0 failed=0 skipped=0 broken=() again=() last=no
limit=${TEST_TIMEOUT:-900}
cores=$(nproc)
jobs=${TEST_JOBS:-$((cores < 4 ? cores : 4))}

# what the user has set is for the user's daemon, GPUs, fabric and shell; and the times
# below have a point
export LC_ALL=C.UTF-8
# shellcheck disable=SC2086
unset ${!UCX_@} ${!FAKE_CUDA_@} ${!NIXL_@} ${!PYTEST_@} CUDA_VISIBLE_DEVICES \
	CUDA_DEVICE_ORDER PYTHONPATH PYTHONWARNINGS PYTHONOPTIMIZE PYTHONDEVMODE \
	PYTHONSAFEPATH CDPATH POSIXLY_CORRECT BASH_ENV ENV GREP_OPTIONS
unset KVD_SOCKET KVD_RUN_DIR KVD_CONFIG KVD_NAME KVD_ADOPT KVD_REQUIRE KVD_AUTOSTART \
	KVD_DAEMON KVD_CUDA_LIBRARY KVD_NIXL_LISTEN \
	NOTIFY_SOCKET WATCHDOG_USEC WATCHDOG_PID LISTEN_FDS LISTEN_PID
export KVD_BUILD=$root/$build
export LD_LIBRARY_PATH=$KVD_BUILD${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export ASAN_OPTIONS=allocator_may_return_null=1:detect_stack_use_after_return=1:strict_string_checks=1:abort_on_error=0${ASAN_OPTIONS:+:$ASAN_OPTIONS}
# use_tls=0: at exit the leak checker crashes in the TLS of what libucp loaded
export LSAN_OPTIONS=suppressions=$root/tests/asan.supp:print_suppressions=0:use_tls=0
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1:suppressions=$root/tests/ubsan.supp
# at its exit a process waits a second for what its other threads may yet do; ours have ended
export TSAN_OPTIONS=allocator_may_return_null=1:atexit_sleep_ms=20:halt_on_error=0:second_deadlock_stack=1:suppressions=$root/tests/tsan.supp

export KVD_STALLS=$root/$logs/stalls
rm -f "$KVD_STALLS" "$build/test-times"
commit=$(git rev-parse --short=6 HEAD 2>/dev/null)
export KVD_SWEEP=${KVD_SWEEP-$((16#0${commit:0:6}))}
echo "${KVD_SWEEP:+a part of the }long sweeps${KVD_SWEEP:+ (KVD_SWEEP=$KVD_SWEEP)}"

# short, since a socket's path has 108 bytes; for all, since tests become other users
base=${TMPDIR:-/tmp}
[ ${#base} -le 9 ] || base=/tmp
TMPDIR=$(mktemp -d "$base/kvd-run.XXXXXX") || exit 1
chmod 1777 "$TMPDIR"
export TMPDIR
trap 'kill $(jobs -p) 2>/dev/null; rm -rf --one-file-system "$TMPDIR"' EXIT
tests/lib/stalls.py "$KVD_STALLS" &

# The counts a log tells, as "passed failed skipped", or nothing.
counts_of()
{
	LC_ALL=C awk '
	/^\[==========\] [0-9]+ test\(s\) run/ { cmocka = 1 }
	/^\[  PASSED  \] [0-9]+ test/ { p += $4 }
	/^\[  FAILED  \] [0-9]+ test/ { f += $4 }
	/^\[  ERROR   \] [^-]/ { f++ } # a fixture
	/^\[  SKIPPED \] [0-9]+ test/ { s += $4 }
	NF { last = $0 }
	END {
		if (cmocka) {
			print p + 0, f + 0, s + 0
		} else if (last ~ /^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$/) {
			gsub(/,/, "", last)
			split(last, w, " ")
			print w[1] + 0, w[3] + 0, w[5] + 0
		}
	}' "$1"
}

report()
{
	printf '  %-4s %-44s %4d passed' "$1" "$2" "$3"
	[ "$4" -eq 0 ] || printf ', %d failed' "$4"
	[ "$5" -eq 0 ] || printf ', %d skipped' "$5"
	printf ' %8s\n' "$6"
}

# number_of NAME DEFAULT WORDS: n of the last NAME=n among the words
number_of()
{
	local name=$1 number=$2 word

	shift 2
	for word; do
		[ "${word%=*}" != "$name" ] || number=${word#*=}
	done
	echo "$number"
}

# a test's name in the lists: without its folder of the build and its shard
name_of()
{
	local name=${1#"$build"/}
	echo "${name%@*}"
}

limit_of()
{
	# shellcheck disable=SC2086
	echo $((limit * $(number_of "$(name_of "$1")" 1 ${TEST_LONG-})))
}

log_of()
{
	local name=${1#"$build"/}
	echo "$logs/${name//\//-}.log"
}

# wrong_in LOG: what failed there, and why, behind the words $2.
wrong_in()
{
	local status begin end cpu words

	read -r status begin end cpu words <"$1.end"
	LC_ALL=C awk -v end="$words" -f scripts/failures.awk "$1" | sed "s/^/$2/"
}

# ending STATUS SECONDS MOST: how it ended, when that tells what failed.
ending()
{
	if [ "$1" -eq 124 ] || { [ "$1" -eq 137 ] && [ "$2" -ge "$3" ]; }; then
		echo "timed out after $3 s"
	elif [ "$1" -gt 128 ] && kill -l $(($1 - 128)) >/dev/null 2>&1; then
		echo "died of SIG$(kill -l $(($1 - 128)))"
	elif [ "$1" -ne 0 ]; then
		echo "exit status $1"
	fi
}

# Runs it. LOG.end has its status, begin, end, seconds of CPU, and how it ended.
play()
{
	local test=$1 log start status most cpu shard='' since=$SECONDS TIMEFORMAT='%U %S'
	log=$(log_of "$test")
	most=$(limit_of "$test")
	start=$EPOCHREALTIME
	[ "${test%@*}" = "$test" ] || shard=${test##*@}
	test=${test%@*}
	[ "${test#/}" != "$test" ] || test=./$test
	# the shell reports a test that a signal ended, too
	cpu=$({ time TEST_SHARD=$shard timeout --kill-after=10 "$most" "$test" \
		>"$log" 2>&1 </dev/null; echo "$?" >"$log.end"; } 2>&1 |
		awk 'END { print $1 + $2 }')
	status=$(<"$log.end")
	echo "$status $start $EPOCHREALTIME $cpu" \
		"$(ending "$status" $((SECONDS - since)) "$most")" >"$log.end"
}

# tell TEST: its line, or a word that it will be played again.
tell()
{
	local log status begin end words seconds cpu late p f s word=ok
	log=$(log_of "$1")
	read -r status begin end cpu words <"$log.end"
	seconds=$(awk -v a="$begin" -v b="$end" 'BEGIN { printf "%.1f", b - a }')
	echo "$seconds $cpu ${1#"$build"/}" >>"$build/test-times"
	read -r p f s <<<"$(counts_of "$log")"
	if [ -z "${p-}" ]; then
		p=0 f=0 s=0
		case $status in
		0) p=1 ;;
		77) s=1 ;;
		*) f=1 ;;
		esac
	elif [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; then
		f=1
	fi
	if [ "$f" -ne 0 ] && [ "$last" = no ]; then
		late=$(tests/lib/stalls.py "$KVD_STALLS" "$begin" "$end")
		if [ "$late" -gt 0 ]; then
			again+=("$1")
			printf '  %-4s %-44s the machine stood still for %d ms: %d failed\n' \
				late "${1#"$build"/}" "$late" "$f"
			wrong_in "$log" '       | '
			cp "$log" "$log.late"
			return
		fi
	fi
	passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
	[ "$s" -eq 0 ] || [ "$p" -ne 0 ] || word=skip
	[ "$f" -eq 0 ] || word=FAIL
	report "$word" "${1#"$build"/}" "$p" "$f" "$s" "$seconds s"
	[ "$word" != skip ] || tail -n 1 "$log" | sed 's/^/       /'
	if [ "$f" -ne 0 ]; then
		broken+=("$log")
		wrong_in "$log" '       ! '
	fi
}

is_alone()
{
	case " ${TEST_ALONE-} " in
	*" $(name_of "$1") "*) return 0 ;;
	esac
	return 1
}

is_long()
{
	case " ${TEST_LONG-} " in
	*" $(name_of "$1")="*) return 0 ;;
	esac
	return 1
}

# In the order in which they start: of those that do not judge times the ones that wait
# first, then the long ones.
alone=() waiting=() long=() rest=()
declare -A weight=()
room=$((5 * jobs))
for test in "$@"; do
	# shellcheck disable=SC2086
	shards=$(number_of "$(name_of "$test")" 1 ${TEST_SHARDS-})
	for ((shard = 1; shard <= shards; shard++)); do
		[ "$shards" -eq 1 ] && item=$test || item=$test@$shard/$shards
		# shellcheck disable=SC2086
		weight[$item]=$(number_of "$(name_of "$test")" 4 ${TEST_WEIGHT-})
		if is_alone "$test"; then
			weight[$item]=$((room - 2))
			alone+=("$item")
		elif [ "${weight[$item]}" -eq 1 ]; then
			waiting+=("$item")
		elif [ "$shards" -gt 1 ] || is_long "$test"; then
			long+=("$item")
		else
			rest+=("$item")
		fi
	done
done
queue=("${alone[@]}" "${waiting[@]}" "${long[@]}" "${rest[@]}")

# the running tests by pid, the sum of their weights, and the one that judges times
declare -A playing=()
busy=0 judge=

end_one()
{
	local pid

	wait -n -p pid "${!playing[@]}"
	tell "${playing[$pid]}"
	busy=$((busy - ${weight[${playing[$pid]}]}))
	[ "${playing[$pid]}" != "$judge" ] || judge=
	unset "playing[$pid]"
}

# Starts the first test of the queue for which there is room; the heaviest has room alone.
begin_one()
{
	local at test

	for at in "${!queue[@]}"; do
		test=${queue[$at]}
		[ "$busy" -eq 0 ] || [ $((busy + ${weight[$test]})) -le $room ] ||
			continue
		[ -z "$judge" ] || [ "${weight[$test]}" -eq 1 ] || continue
		! is_alone "$test" || judge=$test
		unset "queue[$at]"
		busy=$((busy + ${weight[$test]}))
		play "$test" &
		playing[$!]=$test
		return 0
	done
	return 1
}

while [ ${#queue[@]} -gt 0 ] || [ ${#playing[@]} -gt 0 ]; do
	begin_one || end_one
done
for turn in 1 2; do
	[ $turn -eq 1 ] || last=yes # what fails now has failed
	once_more=("${again[@]}") again=()
	for test in "${once_more[@]}"; do
		play "$test"
		tell "$test"
	done
done
# Once more at the end: what one sees of a long run is often its end only.
for log in "${broken[@]}"; do
	echo "failed: $log"
	wrong_in "$log" '  '
done
total="$passed passed, $failed failed"
[ $skipped -eq 0 ] || total="$total, $skipped skipped"
echo "$total" >"$build/test-counts"
echo "$total"
[ $failed -eq 0 ]
