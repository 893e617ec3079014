#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Install into a DESTDIR tree and let systemd's own tools judge what lies there.
set -u
KVD_BUILD=${KVD_BUILD:-$PWD/build/rel}
. tests/lib/check.sh
tree=$work/tree

command -v systemd-analyze >/dev/null || { echo "skipped: systemd-analyze"; exit 77; }
units=$tree/usr/lib/systemd/system

files_are_installed()
{
	make -s install DESTDIR="$tree" PREFIX=/usr SAN="$san" || return 1
	for file in usr/bin/kvd usr/lib/systemd/system/kvd@.service \
		usr/lib/systemd/system/kvd@.socket usr/lib/sysusers.d/kvd.conf \
		usr/lib/tmpfiles.d/kvd.conf etc/kvd/kvd.conf.sample \
		usr/share/man/man8/kvd.8 usr/share/man/man5/kvd.conf.5 \
		usr/lib/libkvd.so.0 usr/include/kvd.h usr/lib/pkgconfig/libkvd.pc; do
		[ -s "$tree/$file" ] || { echo "$file is missing or empty"; return 1; }
	done
	! grep -rn '@[A-Z]*@' "$units" "$tree/usr/lib/pkgconfig" || return 1
	grep -q '^ExecStart=/usr/bin/kvd ' "$units/kvd@.service"
}

# But for the directory that systemd-tmpfiles makes.
sample_is_valid()
{
	mkdir -p "$tree/run/kvd" &&
		sed "s|^#run_dir = /run/kvd$|run_dir = $tree/run/kvd|" \
			"$tree/etc/kvd/kvd.conf.sample" > "$tree/sample.conf" &&
		grep -q "^run_dir" "$tree/sample.conf" &&
		"$KVD_BUILD/kvd" --check-config --config "$tree/sample.conf"
}

# The units need the targets and tools of a system around them.
system_is_around()
{
	local from=/usr/lib/systemd/system
	[ -d $from ] || from=/lib/systemd/system
	cp -a $from/. "$units/" && mkdir -p "$tree/bin" "$tree/usr/bin" &&
		cp /bin/kill "$tree/bin/"
}

unit_verifies()
{
	local out
	out=$(systemd-analyze verify --man=no --root="$tree" "$1" 2>&1)
	local status=$?
	echo "$out"
	# other units of the host may be odd; ours must not be named
	[ $status -eq 0 ] && ! grep -q kvd <<<"$out"
}

# verify finds what is wrong: without the program it must fail
verify_can_fail()
{
	mv "$tree/usr/bin/kvd" "$tree/usr/bin/kvd.away"
	systemd-analyze verify --man=no --root="$tree" kvd@x.service >/dev/null 2>&1
	local status=$?
	mv "$tree/usr/bin/kvd.away" "$tree/usr/bin/kvd"
	[ $status -ne 0 ]
}

# exposure_is MOST: GPU and RDMA devices are allowed, and the network
exposure_is()
{
	local line
	line=$(systemd-analyze security --offline=true --no-pager --root="$tree" kvd@x.service |
		grep -o 'Overall exposure level for kvd@x.service: [0-9.]*')
	echo "$line" >&3
	awk -v v="${line##* }" -v most="$1" 'BEGIN { exit !(v > 0 && v <= most) }'
}

user_and_directory_are_made()
{
	touch "$tree/etc/passwd" "$tree/etc/group"
	systemd-sysusers --root="$tree" "$tree/usr/lib/sysusers.d/kvd.conf" || return 1
	grep -q '^kvd:' "$tree/etc/passwd" && grep -q '^kvd:' "$tree/etc/group" || return 1
	systemd-tmpfiles --root="$tree" --create "$tree/usr/lib/tmpfiles.d/kvd.conf" || return 1
	[ "$(stat -c %a "$tree/run/kvd")" = 755 ] &&
		[ "$(stat -c %u "$tree/run/kvd")" = "$(awk -F: '/^kvd:/ {print $3}' "$tree/etc/passwd")" ]
}

# library_links [--static]: -l:libkvd.a, and what pkg-config says that it needs
library_links()
{
	local prefix=$tree/usr
	cat >"$tree/t.c" <<-END
		#include <kvd.h>
		#include <stdio.h>
		int main(void) { return puts(kvd_version()) < 0; }
	END
	flags=$(PKG_CONFIG_PATH=$prefix/lib/pkgconfig pkg-config --define-variable=prefix="$prefix" \
		--define-variable=libdir="$prefix/lib" \
		--define-variable=includedir="$prefix/include" --cflags --libs "$@" libkvd) || return 1
	[ $# -eq 0 ] || flags=${flags/-lkvd/-l:libkvd.a}
	# shellcheck disable=SC2086
	${CC:-gcc} ${san:+-fsanitize=$san} -o "$tree/t" "$tree/t.c" $flags &&
		LD_LIBRARY_PATH=$prefix/lib "$tree/t" || return 1
	[ $# -eq 0 ] || ! ldd "$tree/t" | grep libkvd
}

archive_has_the_same_symbols()
{
	nm -D --defined-only "$tree/usr/lib/libkvd.so" | sed -n 's/.* T \([^@]*\).*/\1/p' >"$work/so"
	nm -g --defined-only "$tree/usr/lib/libkvd.a" | sed -n 's/.* [A-Z] //p' | sort >"$work/a"
	[ -s "$work/so" ] && diff "$work/so" "$work/a"
}

# dpkg-gensymbols refuses what the package does not name
package_names_the_symbols()
{
	nm -D --defined-only "$tree/usr/lib/libkvd.so" | sed -n 's/.* T \([^@]*\).*/\1/p' | sort >"$work/so"
	sed -n 's/^ \(kvd_[^@]*\)@.*/\1/p' debian/libkvd0.symbols | sort >"$work/named"
	[ -s "$work/so" ] && diff "$work/named" "$work/so"
}

uninstall_leaves_nothing()
{
	rm -rf "$tree" && mkdir "$tree" || return 1
	make -s install DESTDIR="$tree" PREFIX=/usr SAN="$san" || return 1
	make -s uninstall DESTDIR="$tree" PREFIX=/usr SAN="$san" || return 1
	[ -z "$(find "$tree" ! -type d -print | tee /dev/stderr)" ]
}

exec 3>&1
san=${KVD_BUILD##*/}
[ "$san" != rel ] || san=
check files_are_installed files_are_installed
check sample_is_valid sample_is_valid
check system_is_around system_is_around
check service_verifies unit_verifies kvd@x.service
check socket_verifies unit_verifies kvd@x.socket
check verify_can_fail verify_can_fail
check exposure_is_low exposure_is 1.5
if [ "$(id -u)" -eq 0 ]; then
	check user_and_directory_are_made user_and_directory_are_made
else
	skip user_and_directory_are_made root
fi
check library_links library_links
check library_links_statically library_links --static
check archive_has_the_same_symbols archive_has_the_same_symbols
check package_names_the_symbols package_names_the_symbols
check uninstall_leaves_nothing uninstall_leaves_nothing
checks_end
