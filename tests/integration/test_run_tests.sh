#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# scripts/run-tests.sh. It tells which cases failed and why, and nothing else, whatever
# the test is written in and however it ends (scripts/failures.awk); and what a test
# leaves behind when it is killed goes with the run.
set -u
. tests/lib/check.sh
build=$(realpath --relative-to=. "$work")/build # as the run wants it
mkdir "$work/t"

# test_of NAME: its text is the input
test_of()
{
	cat >"$work/t/$1"
	chmod +x "$work/t/$1"
}

# Not in the folder of this run, and not as long as others may take.
play() # SECONDS TEST...
{
	local seconds=$1 name tests=()
	shift
	for name; do
		tests+=("$work/t/$name")
	done
	TEST_TIMEOUT=$seconds TMPDIR='' scripts/run-tests.sh "$build" "${tests[@]}" \
		>"$work/log" 2>&1
}

# What is told at the end of the test NAME is the input, and also where it is played.
told() # NAME
{
	local at
	cat >"$work/want"
	awk -v name="$1.log" '
		/^failed: / { mine = substr($0, length($0) - length(name) + 1) == name; next }
		/^[0-9]+ passed/ { mine = 0 }
		mine { sub(/^  /, ""); print }' "$work/log" >"$work/have"
	diff "$work/want" "$work/have" || return 1
	while IFS= read -r at; do
		grep -qF "       ! $at" "$work/log" || return 1
	done <"$work/want"
}

# ---- a test that is killed, and one that is stopped by its time ----

test_of killed <<'END'
#!/bin/bash
echo "$TMPDIR" >>"${0%/*}/root"
python3 -c "import tempfile; print(tempfile.mkdtemp())" >>"${0%/*}/left"
mktemp -d >>"${0%/*}/left"
echo "ok 1 the first (3 ms)"
kill -9 $$
END
test_of stuck <<'END'
#!/bin/bash
echo "ok 1 the second"
exec tail -f /dev/null
END
play 300 killed
check "who is killed has failed" grep -qx '0 passed, 1 failed' "$work/log"
check "the signal has its name" told killed <<'END'
died of SIGKILL after the first
END
play 3 stuck
check "who takes too long has failed" grep -qx '0 passed, 1 failed' "$work/log"
check "and that is told" told stuck <<'END'
timed out after 3 s after the second
END

had_a_folder()
{
	[ "$(sort -u "$work/t/root" | wc -l)" -eq 1 ] && [ "$(wc -l <"$work/t/left")" -ge 2 ] &&
		! grep -qv "^$(head -n 1 "$work/t/root")/" "$work/t/left"
}
check "what they made was in one folder" had_a_folder

is_gone()
{
	local path

	while read -r path; do
		[ ! -e "$path" ] || return 1
	done <"$work/t/root"
}
check "and is gone with it" is_gone

# the longest names of a test's folder and of a daemon's socket follow
is_short()
{
	local root
	root=$(head -n 1 "$work/t/root")
	[ ${#root} -gt 4 ] && [ ${#root} -le 24 ]
}
check "sockets have room behind its name" is_short

# programs ask tests/lib/tmp.h
none_in_tmp()
{
	! grep -rnE '"/tmp/[^"]*(X{6}|%)' tests --include='*.[ch]'
}
check "no test's program names /tmp itself" none_in_tmp

# ---- what the user has set ----

test_of settings <<'END'
#!/bin/sh
env | grep -E '^(KVD_SOCKET|KVD_CONFIG|UCX_TLS|CUDA_VISIBLE_DEVICES|PYTHONOPTIMIZE)=' &&
	exit 1
[ "$KVD_TEST_FILTER$LC_ALL" = wordC.UTF-8 ]
END
(
	export KVD_SOCKET=/x KVD_CONFIG=/x UCX_TLS=rc CUDA_VISIBLE_DEVICES='' PYTHONOPTIMIZE=1
	export KVD_TEST_FILTER=word LC_ALL=C
	play 300 settings
)
check "is for the user's own programs" grep -qx '1 passed, 0 failed' "$work/log"

# ---- who runs beside whom ----

# of a pair each waits at a pipe until the other is there, or is stopped by its time
mkfifo "$work/t/rest" "$work/t/both"
test_of left <<'END'
#!/bin/sh
echo left >"${0%/*}/rest" && echo left >>"${0%/*}/order"
END
test_of right <<'END'
#!/bin/sh
read -r word <"${0%/*}/rest" && echo right >>"${0%/*}/order"
END
test_of short <<'END'
#!/bin/sh
echo short >"${0%/*}/both" && echo short >>"${0%/*}/order"
END
test_of long <<'END'
#!/bin/sh
read -r word <"${0%/*}/both" && echo long >>"${0%/*}/order"
END
(
	export TEST_JOBS=3 TEST_LONG=$work/t/long=2
	play 60 left right short long
)
check "three at a time" grep -qx '4 passed, 0 failed' "$work/log"
# when the one beside has ended there is room for half a core, which must stay empty
mkfifo "$work/t/beside" "$work/t/nobody"
test_of judge <<'END'
#!/bin/bash
echo judge >>"${0%/*}/began"
read -r word <"${0%/*}/beside" && ! read -r -t 1 word <>"${0%/*}/nobody" &&
	[ "$(cat "${0%/*}/began")" = judge ]
END
test_of waits <<'END'
#!/bin/sh
echo waits >"${0%/*}/beside"
END
test_of half <<'END'
#!/bin/sh
echo half >>"${0%/*}/began"
END
(
	export TEST_JOBS=2 TEST_ALONE=$work/t/judge TEST_WEIGHT="$work/t/waits=1 $work/t/half=2"
	play 60 half waits judge
)
check "one that judges times first, beside one that waits and none of half a core" \
	grep -qx '3 passed, 0 failed' "$work/log"
(
	export TEST_JOBS=1 TEST_WEIGHT="$work/t/long=1 $work/t/short=3"
	play 60 short long
)
check "two that share a core" grep -qx '2 passed, 0 failed' "$work/log"
test_of part <<'END'
#!/bin/sh
echo "$TEST_SHARD" >>"${0%/*}/parts"
END
(
	export TEST_SHARDS=$work/t/part=3
	play 60 part
)
check "three shards of a test" grep -qx '3 passed, 0 failed' "$work/log"
check "each of another number" \
	test "$(sort "$work/t/parts" | tr '\n' ' ')" = "1/3 2/3 3/3 "
test_of one <<'END'
#!/bin/sh
echo one >>"${0%/*}/turns"
END
test_of two <<'END'
#!/bin/sh
echo two >>"${0%/*}/turns"
[ "$(tr '\n' ' ' <"${0%/*}/turns")" = "one two " ]
END
(
	export TEST_JOBS=1
	play 60 one two
)
check "one at a time, in their order" grep -qx '2 passed, 0 failed' "$work/log"

# ---- who failed, and why ----

test_of tap <<'END'
#!/bin/sh
# An error that is provoked: it failed, died, FAILED, Error, fault.
for i in 1 2 3 4 5 6 7 8 9; do
	echo "# the comment of a case that failed: error $i"
	echo "<4>shm: refused a connection reason=\"it failed: Error $i\""
	echo "ok $i shm a good one that failed before ($i ms)"
done
echo "not ok 10 shm hostile: garbage (0 ms)"
echo "# case_hostile.c:293: the door is closed: No such file"
echo "# with boot id 40"
echo "ok 11 shm another # SKIP needs two daemons"
echo "not ok 12 tcp: the run crashed or hung"
echo "# died of signal 11 after: ok 3 tcp one"
echo "ok 13 tcp the last one"
echo "# 2 failed cases, errors, faults"
echo "10 passed, 2 failed"
exit 1
END
test_of python <<'END'
#!/usr/bin/env python3
import subprocess
import sys
sys.path.insert(0, "tests/lib")
import kvd_daemon

def good():
    print("Error: failed, as it should")

def equal():
    assert 1 + 1 == 3

def in_the_log():
    try:
        equal()
    except AssertionError:
        raise RuntimeError("ended with 1; log:\n<3>one\n<3>two\n<3>three\n<3>four\n<3>why")

def in_a_library():
    subprocess.run(["/no/such/program"])

def needs():
    raise kvd_daemon.Skip("an error")

kvd_daemon.run([good, equal, in_the_log, in_a_library, needs])
END
test_of crashed.py <<'END'
#!/usr/bin/env python3
print("ok   one error")
raise ValueError("of no case")
END
test_of shell <<'END'
#!/bin/sh
. tests/lib/check.sh
check "a failed error" true
check "what it says" sh -c 'echo "the door is shut"; exit 1'
check "no words" false
skip "that error" "a failure"
checks_end
END
test_of faults <<'END'
#!/bin/sh
echo "again tcp push: it failed: Error"
echo "FAIL tcp push kill: Traceback (most recent call last):"
echo '  File "/x/faults/faults.py", line 12, in once'
echo '    raise Wrong("late")'
echo 'world.Wrong: late'
echo
echo "FAIL shm pull: an engine never ends"
echo "FAILED: seed 7: a promise (at 3 ms)"
echo "tcp  12 cells, 10 passed, errors"
echo "10 passed, 3 failed"
exit 1
END
test_of pytest <<'END'
#!/bin/sh
echo "E   AssertionError: an error"
echo "Traceback (most recent call last):"
echo '  File "thread.py", line 3, in run'
echo '    os.close(fd)'
echo "OSError: of a thread"
echo "===== short test summary info ====="
echo "FAILED tests/python/test_x.py::test_a[x y] - AssertionError: one"
echo "ERROR tests/python/test_y.py - ImportError: two"
echo "0 passed, 2 failed"
exit 1
END
test_of works <<'END'
#!/bin/sh
echo "    skipped: one error"
echo "  skip local-a      0.0 s  what fails"
echo "    a row is wrong"
echo "  FAIL local-b      0.1 s  rows that failed"
echo "    the room: failed"
echo "  ok   local-c      0.1 s  an error"
echo "  FAIL local-d      0.1 s  a failure"
echo "    it hung, or died by a signal"
echo "0 passed, 2 failed"
exit 1
END
test_of silent <<'END'
#!/bin/sh
echo "failed: something"
echo "3 passed, 0 failed"
exit 3
END
test_of fine <<'END'
#!/bin/sh
echo "FAILED to fail, an Error died"
echo "3 passed, 0 failed"
END
play 300 tap python crashed.py shell faults pytest works silent fine
check "all are counted" grep -qx '28 passed, 16 failed, 2 skipped' "$work/log"
check "TAP: the failed cases and their reasons" told tap <<'END'
shm hostile: garbage: case_hostile.c:293: the door is closed: No such file | with boot id 40
tcp: the run crashed or hung: died of signal 11 after: ok 3 tcp one
END
check "Python: what was raised, and where" told python <<'END'
equal: AssertionError: assert 1 + 1 == 3 (python:11)
in_the_log: RuntimeError: ended with 1; log: | <3>one | <3>two | <3>three | ... | <3>why (python:17)
in_a_library: FileNotFoundError: [Errno 2] No such file or directory: '/no/such/program' (python:20)
END
check "Python: raised outside of a case" told crashed.py <<'END'
after one error: ValueError: of no case (crashed.py:3)
END
check "sh: what the command said" told shell <<'END'
what it says: the door is shut
no words
END
check "the matrix of faults, the simulation" told faults <<'END'
tcp push kill: world.Wrong: late (faults.py:12)
shm pull: an engine never ends
seed 7: a promise (at 3 ms)
END
check "pytest" told pytest <<'END'
OSError: of a thread (thread.py:3)
tests/python/test_x.py::test_a[x y]: AssertionError: one
tests/python/test_y.py: ImportError: two
END
check "gpu-works" told works <<'END'
local-b: a row is wrong
local-d: it hung, or died by a signal
END
check "of no case: the end of the log" told silent <<'END'
exit status 3; the log ends so:
  failed: something
  3 passed, 0 failed
END
check "nothing of who passed" told fine </dev/null

# ---- what libraries and the compiler's own say: by themselves, not from memory ----

cat >"$work/unit.c" <<'END'
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>
static void good(void **state) { (void)state; fprintf(stderr, "Error: failed\n"); }
static void letter(void **state) { (void)state; assert_string_equal("a", "b"); }
static void words(void **state) { (void)state; fail_msg("waited in vain: %d", 3); }
static void crash(void **state) { (void)state; *(volatile int *)state = *(volatile int *)8; }
static int bad(void **state) { (void)state; return -1; }
static int worse(void **state) { (void)state; assert_true(!"tidy"); return 0; }
int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(good), cmocka_unit_test(letter), cmocka_unit_test(words),
		cmocka_unit_test(crash), cmocka_unit_test_setup_teardown(good, bad, NULL),
		cmocka_unit_test_setup_teardown(letter, NULL, worse),
	};

	return cmocka_run_group_tests_name("group", tests, NULL, NULL);
}
END
cat >"$work/wrong.c" <<'END'
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(int argc, char **argv)
{
	const char *how = strrchr(argv[0], '-') + 1;
	char *volatile p = malloc(3);
	volatile int n = 39;

	puts("[ RUN      ] the_case");
	fflush(stdout);
	if (!strcmp(how, "leak"))
		p = NULL;
	free(p);
	if (!strcmp(how, "freed"))
		return p[argc];
	if (!strcmp(how, "assert"))
		assert(argc == 7);
	n += argc;
	return 1 << n == 3;
}
END

# build NAME SOURCE WORDS FLAGS...: what has been built stands in `built`. A sanitizer that
# does not find what it is there for (WORDS), or is not there, is no failure of ours.
built=()
build()
{
	local name=$1 source=$work/$2 words=$3
	shift 3
	# shellcheck disable=SC2086
	if ${CC:-cc} -g "$source" -o "$work/t/$name" "$@" 2>"$work/cc" &&
		{ [ -z "$words" ] || "$work/t/$name" 2>&1 | tee "$work/cc" | grep -q "$words"; }; then
		built+=("$name")
	else
		skip "$name" "cc $*: $(tail -n 1 "$work/cc")"
	fi
}
# told_of NAME, when it was built
told_of()
{
	case " ${built[*]} " in
	*" $1 "*) check "$1" told "$1" ;;
	esac
}
build unit unit.c '' -lcmocka
build plain-assert wrong.c ''
build san-freed wrong.c heap-use-after-free -fsanitize=address
build san-leak wrong.c 'detected memory leaks' -fsanitize=address
build san-shift wrong.c 'shift exponent' -fsanitize=undefined -fno-sanitize-recover=all
play 300 "${built[@]}"
told_of unit <<END
letter: "a" != "b" ($work/unit.c:8)
words: waited in vain: 3 ($work/unit.c:9)
crash: Test failed with exception: Segmentation fault(11)
good: Test setup failed
letter: "a" != "b" | !"tidy" | Test teardown failed ($work/unit.c:8)
END
told_of plain-assert <<END
the_case: plain-assert: $work/wrong.c:19: main: Assertion \`argc == 7' failed.
died of SIGABRT in the_case
END
told_of san-freed <<END
the_case: AddressSanitizer: heap-use-after-free ($work/wrong.c:17)
END
told_of san-leak <<END
the_case: LeakSanitizer: detected memory leaks ($work/wrong.c:8)
END
told_of san-shift <<END
the_case: $work/wrong.c:21:11: runtime error: shift exponent 40 is too large for 32-bit type 'int'
END
[ "$failed" -eq 0 ] || cat "$work/log"
checks_end
