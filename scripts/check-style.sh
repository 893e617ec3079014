#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# check-style.sh [FILE...]: what a compiler does not see. Without arguments all
# tracked and new files are looked at. Each fault is a line FILE:LINE: words.
#
#   - SPDX in the first line (second after #!)
#   - includes point one way: base <- plan, cost <- loop, offload, settings <-
#     gpu <- transport <- the rest of the daemon; plan sees proto/json.h; proto sees
#     base's cursor, err, mem and list; ctl sees proto, plan, cost and base; nobody
#     sees tests
#   - only daemon/loop/loop.c includes <ev.h>
#   - functions of at most 100 lines, .c and .h files of at most 900
#   - a .c file over 150 lines opens with an essay
#   - no unfinished work, no sleeps in tests, no names of somebody's machine
#   - daemon code allocates through base/mem
#   - nothing but the log's prefix knows the wall clock
set -u
export LC_ALL=C
faults=$(mktemp)
trap 'rm -f "$faults"' EXIT

if [ $# -gt 0 ]; then
	files=("$@")
else
	mapfile -t files < <(git ls-files --cached --others --exclude-standard | sort -u)
fi

pick()
{
	printf '%s\n' "${files[@]}" | grep -E "$1" | while read -r f; do
		[ -f "$f" ] && printf '%s\n' "$f"
	done
}

check_spdx()
{
	pick '\.([ch]|cu|sh|py|mk|supp|map)$|(^|/)Makefile$|^\.ci/run$' | while read -r f; do
		head -n 2 "$f" | grep -q 'SPDX-License-Identifier: Apache-2.0' ||
			echo "$f:1: no SPDX line"
	done
}

# Layers of daemon/ and gpu/: a file may include its own layer and those below.
check_includes()
{
	pick '\.[ch]$' | xargs -r awk '
	function layer(path) {
		if (path ~ /^daemon\/base\//) return 0
		if (path ~ /^daemon\/(plan|cost)\//) return 1
		if (path ~ /^daemon\/(loop|offload|setting|config|config_table)\.[ch]$/)
			return 2
		if (path ~ /^gpu\//) return 3
		if (path ~ /^daemon\/(stage|transport)\//) return 4
		if (path ~ /^daemon\//) return 5
		return -1
	}
	function allowed(from, to) {
		if (from ~ /^tests\//) return 1
		if (to ~ /^tests\//) return 0
		if (from ~ /^proto\/python\// && to ~ /^daemon\/plan\//) return 1
		if (from ~ /^proto\//)
			return to ~ /^proto\// || to ~ /^daemon\/base\/(cursor|err|mem|list)\.h$/ ||
				to == "kvd_status.h"
		if (from ~ /^ctl\//)
			return to ~ /^(ctl|proto|daemon\/(base|plan|cost))\//
		if (layer(from) < 0) return 1
		if (to == "proto/json.h" && from ~ /^daemon\/plan\//) return 1
		if (to ~ /^proto\//) return layer(from) == 5
		if (to ~ /^ctl\// || to !~ /\//) return 0
		return layer(to) <= layer(from)
	}
	/^#[ \t]*include[ \t]*"/ {
		split($0, part, "\"")
		if (!allowed(FILENAME, part[2]))
			print FILENAME ":" FNR ": must not include \"" part[2] "\""
	}
	/^#[ \t]*include[ \t]*<(ev\.h|ev\+\+\.h)>/ && FILENAME != "daemon/loop/loop.c" {
		print FILENAME ":" FNR ": only daemon/loop/loop.c includes <ev.h>"
	}'
}

check_lengths()
{
	pick '\.([ch]|cu)$' | xargs -r awk '
	function finish() {
		if (name != "" && lines > 900)
			print name ":900: a file of " lines " lines, at most 900"
		if (name ~ /\.c$/ && lines > 150 && essay < (name ~ /^tests\// ? 1 : 3))
			print name ":2: over 150 lines without an essay at its head"
	}
	FNR == 1 { finish(); name = FILENAME; essay = 0; in_essay = 0; start = 0 }
	{ lines = FNR }
	FNR == 2 && /^\/\*/ { in_essay = 1 }
	in_essay { essay++; if (/\*\//) in_essay = 0 }
	/^\{/ { start = FNR }
	/^\}/ && start {
		if (FNR - start + 1 > 100)
			print FILENAME ":" start ": a function of " FNR - start + 1 \
				" lines, at most 100"
		start = 0
	}
	END { finish() }'
}

# The words are put together here so that this file passes its own check.
check_words()
{
	local unfinished='\b(TO''DO|FIX''ME|X''XX|HA''CK)\b'
	local machine='/wo''rk/|/ho''me/[a-z]'

	pick '\.([ch]|cu|sh|py|mk|md|in|socket|conf)$|(^|/)Makefile$' |
		xargs -r grep -nEH "$unfinished" | sed 's/$/  <- unfinished work/'
	pick '\.([ch]|cu|sh|py|mk|md|in|socket|conf)$|(^|/)Makefile$' |
		xargs -r grep -nEH "$machine" | sed 's/$/  <- a path of one machine/'
	pick '^tests/(unit|integration|conform|sim|lib)/.*\.(c|h)$' | xargs -r grep -nE '\b(u|nano|clock_nano)?sleep[ ]*\(' /dev/null |
		sed 's/$/  <- a test waits for a condition, it does not sleep/'
	pick '^tests/.*\.py$' | xargs -r grep -nE '\btime\.sleep\b|\bsleep\(' /dev/null |
		sed 's/$/  <- a test waits for a condition, it does not sleep/'
	pick '^tests/.*\.sh$' | xargs -r grep -nE '^[^#]*\bsleep [0-9.]' /dev/null |
		sed 's/$/  <- a test waits for a condition, it does not sleep/'
	pick '^(daemon|gpu|proto)/.*\.c$' | grep -v '^daemon/base/mem\.c$' |
		xargs -r grep -nE '[^_a-z](malloc|calloc|realloc|reallocarray|strdup|strndup|asprintf)\(' /dev/null |
		sed 's/$/  <- memory comes from base\/mem/'
	pick '^(daemon|gpu|proto)/.*\.[ch]$' | grep -v '^daemon/base/log\.c$' |
		xargs -r grep -nE '\bCLOCK_REALTIME|\bgettimeofday\(|[^_a-z]time\((NULL|&)|pthread_cond_timedwait|sem_timedwait' /dev/null |
		sed 's/$/  <- a clock that jumps: CLOCK_MONOTONIC/'
}

{
	check_spdx
	check_includes
	check_lengths
	check_words
} >"$faults"
cat "$faults"
[ ! -s "$faults" ] || { echo "check-style: $(wc -l <"$faults") faults" >&2; exit 1; }
