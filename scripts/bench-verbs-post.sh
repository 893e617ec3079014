#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# bench-verbs-post.sh BUILD [ROWS]: what a posted work request costs the daemon,
# in CPU time and, where valgrind is, in instructions of verbs_move_pump() and all
# below it (the adapter's post is a stub that walks the chain).
set -eu
build=$1
rows=${2:-100000}
"$build/bench/verbs_post" "$rows" 5 2> /dev/null
command -v valgrind > /dev/null || {
	echo "instructions: valgrind is not here"
	exit 0
}
out=$(mktemp)
trap 'rm -f "$out" "$out.callgrind"' EXIT
for name in write read gather; do
	valgrind --tool=callgrind --callgrind-out-file="$out.callgrind" \
		--toggle-collect=verbs_move_pump "$build/bench/verbs_post" "$rows" 1 $name \
		> "$out" 2>&1
	wrs=$(sed -n 's/.*"wrs": \([0-9]*\).*/\1/p' "$out")
	all=$(sed -n 's/.*Collected : \([0-9]*\).*/\1/p' "$out")
	echo "{\"name\": \"$name\", \"wrs\": $wrs, \"instructions\": $all," \
		"\"for one\": $((all / wrs)), \"for a row\": $((all / rows))}"
done
