# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
# check.sh: what tests in sh have in common; they source it, from the top of the tree.
#   check NAME COMMAND...   ok or FAIL; of one that fails what the command said
#   skip NAME NEED          not played here
#   checks_end              the counts, last; its status is the test's
# $work is a folder of the test's own, which goes with it; programs can be run there.
passed=0 failed=0 skipped=0
work=$(mktemp -d) || exit 1
printf '#!/bin/sh\n' >"$work/runs"
chmod +x "$work/runs"
if ! "$work/runs" 2>/dev/null; then # mounted noexec, as /tmp on some machines
	rm -rf "$work"
	work=$(realpath "$(mktemp -d "${KVD_BUILD:-build/rel}/work.XXXXXX")") || exit 1
fi
trap 'rm -rf "$work"' EXIT

check()
{
	check_name=$1
	shift
	if "$@" >"$work/check.log" 2>&1; then
		echo "ok   $check_name"
		passed=$((passed + 1))
	else
		echo "FAIL $check_name"
		sed 's/^/     /' "$work/check.log"
		failed=$((failed + 1))
	fi
}

skip()
{
	echo "skip $1: $2"
	skipped=$((skipped + 1))
}

checks_end()
{
	check_total="$passed passed, $failed failed"
	[ "$skipped" -eq 0 ] || check_total="$check_total, $skipped skipped"
	echo "$check_total"
	[ "$failed" -eq 0 ]
}
