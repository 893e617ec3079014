#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# scripts/check-style.sh tells an include that runs against the order of the folders, a
# file that is not formatted and a line that is too long; and finds nothing in one that
# is as it should be.
set -u

root=$PWD
. tests/lib/check.sh

# told PATH WORDS LINE...: a file of these lines has one fault, with the words; "": none
told()
{
	local path=$1 words=$2 said
	shift 2
	rm -rf "$work/tree"
	mkdir -p "$work/tree/$(dirname "$path")"
	cp "$root/.clang-format" "$work/tree"
	{
		echo '/* SPDX-License-Identifier: Apache-2.0 */'
		printf '%s\n' "$@"
	} >"$work/tree/$path"
	said=$(cd "$work/tree" && "$root/scripts/check-style.sh" "$path" 2>/dev/null)
	if [ -z "$words" ]; then
		[ -z "$said" ] || { echo "$said"; return 1; }
	else
		[[ $said == "$path:"*"$words"* && $said != *$'\n'* ]] || { echo "$said"; return 1; }
	fi
}

# from a folder to one above it, each way that the order has
order=(base plan memory transport transport/tcp link peer session handshake room xfer control)
for ((i = 0; i + 1 < ${#order[@]}; i++)); do
	low=${order[i]} high=${order[i + 1]}
	check "include_down_${high//\//_}_to_${low//\//_}_is_fine" \
		told "daemon/$high/a.c" "" "#include \"daemon/$low/b.h\""
	check "include_up_${low//\//_}_to_${high//\//_}_is_told" \
		told "daemon/$low/a.c" "must not include" "#include \"daemon/$high/b.h\""
done
check include_of_a_module_by_the_core_is_told \
	told daemon/control/a.c "must not include" '#include "daemon/store/store.h"'
check include_of_a_module_by_the_list_of_them_is_fine \
	told daemon/modules.c "" '#include "daemon/store/store.h"'
check include_of_a_backend_by_the_list_of_them_is_fine \
	told daemon/transports.c "" '#include "daemon/transport/ucx/ucx.h"'
check include_of_another_backend_is_told \
	told daemon/transport/ucx/a.c "must not include" '#include "daemon/transport/tcp/tcp.h"'
check include_of_a_test_is_told \
	told daemon/room/a.c "must not include" '#include "tests/lib/cluster.h"'
check include_of_the_daemon_by_libkvd_is_told \
	told lib/a.c "must not include" '#include "daemon/loop/loop.h"'
if command -v clang-format >/dev/null; then
	check line_not_formatted_is_told told daemon/base/a.c "make fmt" 'int  a;'
else
	skip line_not_formatted_is_told "clang-format"
fi
long=$(printf 'x%.0s' {1..80})
check line_too_long_is_told told daemon/base/a.h "columns" "#include <$long/$long.h>"
words_over_their_budget_are_told()
{
	printf '/* %s */\n' "it moves bytes between daemons" >"$work/a.c"
	"$root/scripts/check-words.py" "$work/a.c" || return 1
	printf '/* %s */\n' "what it says goes on" >"$work/a.c"
	said=$("$root/scripts/check-words.py" "$work/a.c") && return 1
	[[ $said == *'"what"'*'"say says said saying"'*'"go goes gone went"'* ]]
}
check words_over_their_budget_are_told words_over_their_budget_are_told
checks_end
