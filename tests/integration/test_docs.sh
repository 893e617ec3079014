#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What make check and make docs do with documents: scripts/check-links.py and
# check-messages.py find what is wrong, and only that; gen-man3.py makes libkvd(3) of a
# header; every manual page renders without a warning.
set -u

dir=$(mktemp -d "${TMPDIR:-/tmp}/kvd-docs.XXXXXX")
trap 'rm -rf "$dir"' EXIT
passed=0
failed=0

# expect NAME WORDS SCRIPT FILE: the script refuses FILE, whose first fault has WORDS; no
# WORDS: it finds nothing
expect() {
	local said status
	said=$("$3" "$4" 2> /dev/null)
	status=$?
	if [ -z "$2" ] && [ $status -eq 0 ] && [ -z "$said" ]; then
		passed=$((passed + 1))
	elif [ -n "$2" ] && [ $status -eq 1 ] && [[ $said == "$4:"*"$2"* ]]; then
		passed=$((passed + 1))
	else
		failed=$((failed + 1))
		echo "FAILED $1: status $status: $said"
	fi
}

# link NAME WORDS LINE: a document with this line
link() {
	printf '# Head\n\n## A `code` head, twice\n\n## A `code` head, twice\n\n%s\n' "$3" > "$dir/a.md"
	expect "$1" "$2" scripts/check-links.py "$dir/a.md"
}

mkdir "$dir/folder"
printf '# Other *head*\n' > "$dir/folder/b.md"
link link_to_a_file_is_fine '' '[b](folder/b.md), [folder](folder), ![b](folder/b.md)'
link link_to_a_heading_is_fine '' '[b](folder/b.md#other-head) [here](#a-code-head-twice-1)'
link link_with_a_scheme_is_not_followed '' '[x](https://nowhere.invalid/) <mailto:x@y>'
link link_in_code_is_none '' '`[x](gone.md)`'
link path_that_is_there_is_fine '' '`docs/architecture.md` `mk/*.mk`'
link missing_file_is_told 'gone.md: no such file' '[x](gone.md)'
link missing_heading_is_told '#gone: no such heading' '[x](#gone)'
link missing_heading_of_another_is_told 'b.md#gone: no such heading' '[x](folder/b.md#gone)'
link second_link_of_a_line_is_seen 'gone.md: no such file' '[b](folder/b.md) and [x](gone.md)'
link reference_is_a_link 'gone.md: no such file' '[x]: gone.md'
link path_of_a_machine_is_refused 'a path of one machine' '[x](/etc/passwd)'
link missing_path_is_told '`docs/gone.md`: no such file' '`docs/gone.md`'
printf '```\n[x](gone.md)\n```\n' > "$dir/a.md"
expect fenced_code_is_not_looked_at '' scripts/check-links.py "$dir/a.md"

# row NAME WORDS SECTION ROW: an operator's page with this row
row() {
	printf '## %s\n\n| `name` | `kvd` |\n%s\n' "$3" "$4" > "$dir/c.md"
	expect "$1" "$2" scripts/check-messages.py "$dir/c.md"
}

row option_is_known '' 'Options' '| `offer_lease` | 30 s | |'
row option_that_is_none_is_told 'no option leese' 'Options' '| `leese` | 30 s | |'
row default_that_is_another_is_told 'lease: the default is 30 s, not 31 s' \
	'Options' '| `offer_lease` | 31 s | |'
printf '## Messages\n\n| `no daemon found: …` `Too many open files` | x | y |\n' > "$dir/c.md"
expect message_is_said '' scripts/check-messages.py "$dir/c.md"
printf '## Messages\n\n| `the moon is not admitted` | x | y |\n' > "$dir/c.md"
expect message_that_nothing_says_is_told "no source says 'the moon" scripts/check-messages.py "$dir/c.md"
printf '# Nothing\n' > "$dir/c.md"
expect page_without_tables_is_told 'no tables' scripts/check-messages.py "$dir/c.md"

# manual NAME WORDS LINE...: the page of a header with these lines has the words; no WORDS:
# it is refused
manual() {
	local name=$1 words=$2 said
	shift 2
	printf '/* x.h: An opening. */\n/* ---- things ---- */\n' > "$dir/x.h"
	printf '%s\n' "$@" >> "$dir/x.h"
	said=$(scripts/gen-man3.py 1.2.3 "$dir/x.h" 2>&1)
	if [ $? -eq 0 ] && [ -n "$words" ] && [[ $said == *"$words"* ]]; then
		passed=$((passed + 1))
	elif [ -z "$words" ] && [[ $said == "gen-man3: "* ]]; then
		passed=$((passed + 1))
	else
		failed=$((failed + 1))
		echo "FAILED $name: $said"
	fi
}

manual comment_is_of_the_function_behind_it $'\\fBint f(void);\\fR\n.fi\n.RS 4\n.PP\nWhat f does.' \
	'/* What f does. */' 'int f(void);'
manual structure_keeps_its_remarks '  int a; /* its a */' 'struct s {' '	int a; /* its a */' '};'
manual section_has_its_heading $'.SH THINGS\n' 'int f(void);'
manual character_without_a_name_is_refused '' '/* 你 */' 'int f(void);'

# what an installed header names is there to be read
for document in $(grep -ohE 'docs/[a-z0-9/_-]+\.md|DESIGN[^,;. ]*' lib/kvd.h proto/kvd_*.h); do
	if [ -e "$document" ]; then
		passed=$((passed + 1))
	else
		failed=$((failed + 1))
		echo "FAILED public headers: no document $document"
	fi
done

# both warn on standard error only
if command -v man > /dev/null; then
	for page in man/*.[1-8]; do
		said=$(LC_ALL=C.UTF-8 MANROFFOPT=-ww man --warnings=w -l "$page" 2>&1 > /dev/null)
		if [ -z "$said" ]; then
			passed=$((passed + 1))
		else
			failed=$((failed + 1))
			echo "FAILED $page: $said"
		fi
	done
	skipped=
else
	echo "skipped manual pages: needs man"
	skipped=", 1 skipped"
fi

echo "$passed passed, $failed failed$skipped"
[ $failed -eq 0 ]
