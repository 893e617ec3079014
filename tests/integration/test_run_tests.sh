#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What a test leaves behind when it is killed goes with the run: scripts/run-tests.sh
# gives the tests a folder for all that is temporary, and removes it.
set -u
passed=0 failed=0
work=$(realpath --relative-to=. "$(mktemp -d)")
trap 'rm -rf "$work"' EXIT

expect() # WORDS COMMAND...
{
	local words=$1
	shift
	if "$@"; then
		passed=$((passed + 1))
	else
		echo "FAILED: $words"
		failed=$((failed + 1))
	fi
}

# a test that is killed, and one that is stopped by its time
# shellcheck disable=SC2016
begin='#!/bin/bash
echo "$TMPDIR" >>"${0%/*}/root"
python3 -c "import tempfile; print(tempfile.mkdtemp())" >>"${0%/*}/left"
mktemp -d >>"${0%/*}/left"
'
printf '%s' "$begin"'kill -9 $$
' >"$work/killed"
printf '%s' "$begin"'exec tail -f /dev/null
' >"$work/stuck"
chmod +x "$work/killed" "$work/stuck"
# a run of its own: not in the folder of this one
TEST_TIMEOUT=2 TMPDIR='' scripts/run-tests.sh "$work/build" "$work/killed" "$work/stuck" \
	>"$work/log" 2>&1
expect "both were told to have failed" grep -qx '0 passed, 2 failed' "$work/log"

had_a_folder()
{
	[ "$(sort -u "$work/root" | wc -l)" -eq 1 ] && [ "$(wc -l <"$work/left")" -ge 4 ] &&
		! grep -qv "^$(head -n 1 "$work/root")/" "$work/left"
}
expect "what they made was in one folder" had_a_folder

is_gone()
{
	local path

	while read -r path; do
		[ ! -e "$path" ] || return 1
	done <"$work/root"
}
expect "and is gone with it" is_gone

# the longest names of a test's folder and of a daemon's socket follow
is_short()
{
	local root
	root=$(head -n 1 "$work/root")
	[ ${#root} -gt 4 ] && [ ${#root} -le 24 ]
}
expect "sockets have room behind its name" is_short

# programs ask tests/lib/tmp.h
none_in_tmp()
{
	! grep -rnE '"/tmp/[^"]*(X{6}|%)' tests --include='*.[ch]'
}
expect "no test's program names /tmp itself" none_in_tmp
[ $failed -eq 0 ] || cat "$work/log"
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
