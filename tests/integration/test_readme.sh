#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The commands and the C of documents are true: the two daemons of docs/install.md run as
# they are written there (in a folder of the test's, with the programs of this build), and
# the C of docs/clients.md is examples/decode.c's, which is compiled with everything else, also
# as an engine in C++ would see the header. Commands that README.md names exist. Python is
# run by tests/python/test_readme.py, the commands of docs/deployment.md by test_deployment.sh.
set -u

build=${KVD_BUILD:-build/rel}
. tests/lib/check.sh
dir=$work


# block FILE LANGUAGE WORD: the first block of it that has the word
block() {
	awk -v begin="^\`\`\`$2\$" -v word="$3" '
		$0 ~ begin { inside = 1; text = ""; next }
		/^```$/ && inside { if (index(text, word)) { printf "%s", text; exit } inside = 0 }
		inside { text = text $0 "\n" }' "$1"
}

c_is_the_examples() {
	block docs/clients.md c kvd_room_open > "$dir/shown.c"
	[ -s "$dir/shown.c" ] && awk '
		NR == FNR { want = want $0 "\n"; next }
		{ have = have $0 "\n" }
		END { exit !index(have, want) }' "$dir/shown.c" examples/decode.c
}

example_without_daemon_says_so() {
	words=$(KVD_SOCKET=/nonexistent/kvd.sock "$build/examples/decode" 2>&1 > /dev/null)
	[ $? -eq 1 ] && case $words in *"no daemon"*) true ;; *) false ;; esac
}

header_is_cplusplus() {
	echo '#include <kvd.h>
int main() { return kvd_version() == nullptr; }' |
		c++ -std=c++11 -Wall -Wextra -Werror -Ilib -Iproto -fsyntax-only -x c++ -
}

# word for word, but for the folder, the build and the second that it waits
configuration_has_six_lines() {
	block docs/install.md sh kvd.conf | sed -n "/<<'END'/,/^END$/p" > "$dir/lines"
	[ "$(wc -l < "$dir/lines")" -eq 8 ]
}

quick_start_moves_rows() {
	block docs/install.md sh kvd.conf > "$dir/start.sh"
	sed -i -e "s|/tmp/kvd|$dir/run|g" -e "s|build/rel/|$build/|g" \
		-e '/^sleep /c pids="$(jobs -p)"; answers prefill; answers decode' "$dir/start.sh"
	grep -q answers "$dir/start.sh" || return 1
	(
		trap 'kill $(jobs -p) 2> /dev/null || :' EXIT
		answers() {
			until "$build/kvd-ctl" --socket "$dir/run/$1.sock" ping > /dev/null 2>&1; do
				for pid in $pids; do
					kill -0 "$pid" || exit 1
				done
			done
		}
		set -e
		. "$dir/start.sh"
		wait
	) > "$dir/said" 2>&1 || {
		cat "$dir/said"
		return 1
	}
	grep -q '; bytes verified$' "$dir/said" &&
		[ "$(grep -cE '^(push|pull) ' "$dir/said")" -eq 6 ] &&
		grep -qE '^[^ ]+\.decode +tcp://127\.0\.0\.1:[0-9]+ .* up ' "$dir/said" || {
		cat "$dir/said"
		return 1
	}
}

# each "make TARGET" of the text
readme_commands_exist()
{
	local target
	grep -oE '\bmake [a-z][a-z-]*( [a-z]+)?' README.md | tr ' ' '\n' | sort -u |
		grep -vx make > "$dir/targets"
	[ -s "$dir/targets" ] || return 1
	while read -r target; do
		grep -qE "^([a-z-]+ )*$target( [a-z-]+)*:" Makefile mk/*.mk || {
			echo "no target $target"
			return 1
		}
	done < "$dir/targets"
}

# at most so many bytes: a page that is read whole
pages_are_short()
{
	local page most
	while read -r page most; do
		[ "$(wc -c < "$page")" -le "$most" ] || {
			echo "$page: more than $most bytes"
			return 1
		}
	done <<-END
		README.md 7000
		docs/concepts.md 12000
	END
}

check readme_commands_exist readme_commands_exist
check pages_are_short pages_are_short
check c_is_the_examples c_is_the_examples
check example_without_daemon_says_so example_without_daemon_says_so
check configuration_has_six_lines configuration_has_six_lines
check quick_start_moves_rows quick_start_moves_rows
if command -v c++ > /dev/null; then
	check header_is_cplusplus header_is_cplusplus
else
	skip header_is_cplusplus "a C++ compiler"
fi
checks_end
