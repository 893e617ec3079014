#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The README's example is docs/example.c, and that is a program: it is compiled
# with everything else, also as an engine in C++ would see the header, and tells
# that no daemon is there.
set -u

build=${KVD_BUILD:-build/rel}
passed=0
failed=0

check() {
	name=$1
	shift
	if "$@"; then
		passed=$((passed + 1))
	else
		failed=$((failed + 1))
		echo "FAILED $name"
	fi
}

readme_example_is_the_file() {
	want=$(tail -n +3 docs/example.c)
	have=$(sed -n '/^```c$/,/^```$/p' README.md | sed '1d;$d')
	[ "$want" = "$have" ]
}

example_without_daemon_says_so() {
	words=$(KVD_SOCKET=/nonexistent/kvd.sock "$build/example" 2>&1 > /dev/null)
	[ $? -eq 1 ] && case $words in *"no daemon"*) true ;; *) false ;; esac
}

header_is_cplusplus() {
	echo '#include <kvd.h>
int main() { return kvd_version() == nullptr; }' |
		c++ -std=c++11 -Wall -Wextra -Werror -Iproto -fsyntax-only -x c++ -
}

check readme_example_is_the_file readme_example_is_the_file
check example_without_daemon_says_so example_without_daemon_says_so
skipped=
if command -v c++ > /dev/null; then
	check header_is_cplusplus header_is_cplusplus
else
	echo "skipped header_is_cplusplus: needs a C++ compiler"
	skipped=", 1 skipped"
fi
echo "$passed passed, $failed failed$skipped"
[ $failed -eq 0 ]
