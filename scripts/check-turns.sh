#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# check-turns.sh [-v]: loops that a turn of the event loop cannot cut. In the folders below a
# loop over a list, a map, a cursor, or a count needs loop_enough() or a loop_work in its
# function, or on its line "at most N: why". The others are counted by folder, and the
# numbers only fall: lower one with each loop that goes. -v names each place.
set -u
export LC_ALL=C
budgets='store 190 attend 49 cluster 75 peer 4 handshake 35 xfer 76 room 142 session 11'
verbose=0
[ "${1-}" != -v ] || verbose=1
git ls-files --cached --others --exclude-standard 'daemon/*.c' |
	grep -E '^daemon/(store|attend|cluster|peer|handshake|xfer|room|session)/' |
	while read -r f; do [ -f "$f" ] && printf '%s\n' "$f"; done |
	xargs -r awk -v budgets="$budgets" -v verbose="$verbose" '
BEGIN {	for (i = split(budgets, part, " "); i > 1; i -= 2) most[part[i - 1]] = part[i] }
function finish(   i) { # the function is over
	for (i = 1; i <= loops && !cut; i++) {
		count[folder]++
		if (verbose) print place[i]
	}
	loops = cut = 0
}
FNR == 1 { finish(); split(FILENAME, path, "/"); folder = path[2] }
/loop_enough\(|loop_work|struct loop_work/ { cut = 1 }
/^\}/ { finish(); next }
{	text = $0
	bounded = text ~ /at most [^:]+: /
	sub(/\/\*.*/, "", text)
	if (!bounded && text ~ /^[ \t]+(}? ?while|for|list_foreach(_safe)?|(idmap|strmap)_foreach) ?\(/ &&
	    text ~ /_foreach|count|len[^a-z_]|_first\(|_pop_front\(|_next\(|cursor|->next|->used/)
		place[++loops] = FILENAME ":" FNR ":" $0
}
END {	finish()
	for (folder in most) {
		if (count[folder] + 0 > most[folder])
			printf "daemon/%s:1: %d loops without a bound, at most %d (scripts/check-turns.sh -v)\n",
				folder, count[folder], most[folder]
		else if (verbose && count[folder] + 0 < most[folder])
			printf "daemon/%s:1: %d loops without a bound: lower the number in scripts/check-turns.sh, %d\n",
				folder, count[folder], most[folder]
	} }'
