#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# check-style.sh [FILE...]: what a compiler does not see. Without arguments all
# tracked and new files are looked at. Each fault is a line FILE:LINE: words.
#
#   - SPDX in the first line (second after #!)
#   - includes follow the order of folders (check_includes below): base, proto, then
#     plan, cost, math, loop, config, then gpu, memory, transport, its backends, link, peer,
#     session, request, handshake, cluster, then room, store, attend, xfer, control, metrics,
#     then daemon/
#   - only modules.c and transports.c include what make can leave out (MODULES=)
#   - only daemon/loop/loop.c includes <ev.h>
#   - circles of sources that use each other are no larger than scripts/circles.py says
#   - .clang-format, 90 columns
#   - functions of at most 100 lines, .c and .h files of at most 900
#   - a .c file over 150 lines opens with an essay
#   - no unfinished work, no sleeps in tests, no names of somebody's machine
#   - what an assert calls changes nothing, for -DNDEBUG takes it out
#   - daemon code allocates through base/mem
#   - nothing but the log's prefix knows the wall clock
#   - no more loops that a turn of the event loop cannot cut (check-turns.sh)
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

# The order of folders: a file may include its own folder and those of lower levels.
check_includes()
{
	pick '\.[ch]$' | xargs -r awk '
	BEGIN {
		order["daemon/base"] = 0
		order["proto"] = 1
		order["daemon/plan"] = order["daemon/loop"] = order["daemon/config"] = 2
		order["daemon/cost"] = order["daemon/math"] = 2
		order["lib"] = order["gpu"] = order["daemon/gate"] = 3
		order["daemon/memory"] = 4
		order["daemon/transport"] = 5
		order["daemon/transport/shm"] = order["daemon/transport/tcp"] = 6
		order["daemon/transport/ucx"] = order["daemon/transport/verbs"] = 6
		order["daemon/link"] = 7
		order["daemon/peer"] = 8
		order["daemon/session"] = 9
		order["daemon/request"] = order["daemon/handshake"] = 10
		order["daemon/cluster"] = 11
		order["daemon/room"] = 12
		order["daemon/store"] = 13
		order["daemon/attend"] = 14
		order["daemon/xfer"] = 15
		order["daemon/control"] = 16
		order["daemon/metrics"] = 17
		order["daemon"] = 18
		# of a module that make can leave out: who but itself may use it
		module["daemon/cluster"] = ""
		module["daemon/store"] = " daemon/attend "
		module["daemon/attend"] = ""
		module["daemon/math"] = " daemon/attend gpu "
		module["daemon/transport/ucx"] = ""
	}
	function folder(path) {
		return path ~ /\// ? substr(path, 1, length(path) - length(base(path)) - 1) : "."
	}
	function base(path) {
		sub(/.*\//, "", path)
		return path
	}
	function allowed(file, path,   from, to) {
		from = folder(file)
		to = folder(path)
		if (from ~ /^tests/ || from == "docs") return 1
		if (from == "examples") return to == from # and <kvd.h>
		if (path ~ /^kvd(_status|_chunk|_attend|_cost|_pick)?\.h$/) return from == "lib" # as it is installed
		if (from ~ /^python/) return to ~ /^(python\/src|\.|lib|proto|daemon\/(base|math|plan))$/
		if (from == "ctl") return to ~ /^(ctl|lib|proto|daemon\/(base|plan|cost))$/
		if (from == "lib") return to ~ /^(lib|proto|gpu|daemon\/(base|cost|math|plan))$/
		if (to == "lib" || !(from in order) || !(to in order)) return 0
		if (to in module && from != to && file !~ "^daemon/(modules|transports)[.]c$" &&
		    index(module[to], " " from " ") == 0)
			return 0
		return from == to || order[to] < order[from]
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

# clang-format 14, which Debian 12 has; it leaves long string literals alone.
check_format()
{
	pick '\.[ch]$' | xargs -r clang-format --dry-run 2>&1 |
		grep -E '^[^ ]+:[0-9]+:[0-9]+:' | sed 's/warning: code should be clang-formatted.*/not as .clang-format says: make fmt/'
	pick '\.[ch]$' | xargs -r awk '{
		gsub(/[\200-\277]/, "") # a character of UTF-8 is one column
		n = 0
		for (i = 1; i <= length($0); i++)
			n = substr($0, i, 1) == "\t" ? n + 8 - n % 8 : n + 1
		if (n > 90)
			print FILENAME ":" FNR ": " n " columns, at most 90"
	}'
}

# Only what is known to change nothing may be called.
check_asserts()
{
	local pure=' token_shard_nests list_empty loop_work_running sm_state idmap_count atomic_load memcmp strcmp strlen
		sizeof ARRAY_LEN copy_pipe_full verbs_flush_begun gpu_module_ready
		fake_event_queued move_phase party_state room_live room_terminal parts_idle session_busy express_is copy_gpu_device atomic_load_explicit '

	pick '\.([ch]|cu|cc)$' | xargs -r awk -v pure="${pure//[$'\n\t']/ }" '
	FNR == 1 { depth = 0 }
	{
		rest = $0
		if (!depth && match(" " rest, /[^_a-zA-Z]assert\(/)) {
			rest = substr(rest, RSTART + RLENGTH - 1)
			depth = 1
			text = ""
			line = FNR
		}
		if (!depth)
			next
		for (i = 1; i <= length(rest) && depth; i++) {
			c = substr(rest, i, 1)
			depth += (c == "(") - (c == ")")
			text = text c
		}
		if (depth)
			next
		if (text ~ /\+\+|--|[^=!<>]=[^=]/)
			print FILENAME ":" line ": an assert that changes something"
		while (match(text, /[A-Za-z_0-9]+\(/)) {
			name = substr(text, RSTART, RLENGTH - 1)
			text = substr(text, RSTART + RLENGTH)
			if (!index(pure, " " name " "))
				print FILENAME ":" line ": an assert calls " name \
					": call it before, or it is to stand in this list"
		}
	}'
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
	pick '^(daemon|gpu|lib|proto)/.*\.c$' | grep -v '^daemon/base/mem\.c$' |
		xargs -r grep -nE '[^_a-z](malloc|calloc|realloc|reallocarray|strdup|strndup|asprintf)\(' /dev/null |
		sed 's/$/  <- memory comes from base\/mem/'
	pick '^(daemon|gpu|lib|proto)/.*\.[ch]$' | grep -v '^daemon/base/log\.c$' |
		xargs -r grep -nE '\bCLOCK_REALTIME|\bgettimeofday\(|[^_a-z]time\((NULL|&)|pthread_cond_timedwait|sem_timedwait' /dev/null |
		sed 's/$/  <- a clock that jumps: CLOCK_MONOTONIC/'
}

{
	check_spdx
	check_includes
	scripts/circles.py
	check_lengths
	check_format
	check_asserts
	check_words
	[ $# -gt 0 ] || "${0%/*}/check-turns.sh"
	[ $# -gt 0 ] || "${0%/*}/check-words.py"
} >"$faults"
cat "$faults"
[ ! -s "$faults" ] || { echo "check-style: $(wc -l <"$faults") faults" >&2; exit 1; }
