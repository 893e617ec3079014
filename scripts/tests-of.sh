#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# tests-of.sh MODULE...: sources under tests/ that use one of these modules of the daemon:
# they include a header of its folder, or one of tests/ that does, or whose source does.
export LC_ALL=C
folders=
for module in "$@"; do
	folders="$folders|daemon/$module/|daemon/transport/$module/"
	[ "$module" = store ] && folders="$folders|daemon/(base/breaker|plan/canon|cost/(fit|live|pace))[.]"
	[ "$module" = attend ] && folders="$folders|daemon/math/|gpu/attend_plan"
done
find tests python/src -name '*.[ch]' | xargs awk -v folders="${folders#|}" '
	/^#include "/ {
		split($0, part, "\"")
		if (part[2] ~ "^(" folders ")")
			uses[FILENAME] = 1
		else if (part[2] ~ /^tests\//)
			includes[FILENAME] = includes[FILENAME] " " part[2]
	}
	END {
		do {
			found = 0
			for (file in includes) {
				n = uses[file] ? 0 : split(includes[file], header, " ")
				for (i = 1; i <= n; i++) {
					source = header[i]
					sub(/h$/, "c", source)
					if (uses[header[i]] || uses[source])
						uses[file] = found = 1
				}
			}
		} while (found)
		for (file in uses)
			if (uses[file] && file ~ /c$/)
				print file
	}' | sort
