#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# image.sh DIR: makes what the two guests boot, out of Debian's packages:
#   DIR/vmlinuz     the distribution's kernel
#   DIR/base.cpio   busybox, RDMA and network modules, RDMA tools, their libraries
#   DIR/qemu        a script that runs qemu-system-x86_64 (installed or unpacked)
# Nothing is installed: packages are fetched once into DIR/debs and unpacked.
set -eu

dir=$(mkdir -p "${1:?usage: image.sh DIR}" && cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
lists=$here/../../scripts/apt-lists.sh
debs=$dir/debs
tree=$dir/tree # packages of the guests, unpacked
root=$dir/root # what goes into the archive
tools='busybox-static iproute2 perftest rdmacm-utils ibverbs-utils ibverbs-providers
libibverbs1 librdmacm1 libibumad3 libpci3 libnl-3-200 libnl-route-3-200'
modules='virtio_pci virtio_net virtio_console crc32_generic rdma_rxe rdma_ucm
sch_netem sch_tbf'

mkdir -p "$debs" "$tree"

download()
{
	apt-get download -q -o APT::Sandbox::User=root "$1"
}

# Packages into debs/, and what of their dependencies this machine lacks. Lists that are
# old name files that the archive does not have any more.
fetch()
{
	(cd "$debs" && for package; do
		ls "${package}"_*.deb > /dev/null 2>&1 || download "$package" ||
			{ "$lists" --now "$package" && download "$package"; }
	done)
}

download_missing()
{
	apt-get install -q -y --no-install-recommends --download-only \
		-o Debug::NoLocking=1 -o APT::Sandbox::User=root \
		-o Dir::Cache::archives="$debs" "$@" > "$dir/apt.log" 2>&1
}

fetch_missing()
{
	download_missing "$@" || { "$lists" --now "$@" && download_missing "$@"; } || {
		cat "$dir/apt.log" >&2
		return 1
	}
}

kernel_package()
{
	apt-cache depends linux-image-amd64 |
		sed -n 's/^ *Depends: *\(linux-image-[0-9].*\)/\1/p' | head -n 1
}

make_qemu()
{
	if command -v qemu-system-x86_64 > /dev/null; then
		printf '#!/bin/sh\nexec qemu-system-x86_64 "$@"\n' > "$dir/qemu.new"
	else
		mkdir -p "$dir/qemu.tree" "$dir/debs.qemu"
		debs=$dir/debs.qemu fetch_missing qemu-system-x86
		for deb in "$dir"/debs.qemu/*.deb; do
			dpkg -x "$deb" "$dir/qemu.tree"
		done
		cat > "$dir/qemu.new" <<-END
			#!/bin/sh
			t=\$(dirname "\$(readlink -f "\$0")")/qemu.tree/usr
			LD_LIBRARY_PATH=\$t/lib/x86_64-linux-gnu:\$t/../lib/x86_64-linux-gnu \\
			exec \$t/bin/qemu-system-x86_64 -L \$t/share/qemu \\
				-L \$t/share/seabios "\$@"
		END
	fi
	chmod +x "$dir/qemu.new"
	"$dir/qemu.new" --version > /dev/null
	mv "$dir/qemu.new" "$dir/qemu"
}

# A file of the unpacked packages, else this machine's own.
find_file()
{
	for at in "$tree$1" "$1"; do
		if [ -e "$at" ]; then
			echo "$at"
			return
		fi
	done
	echo "image.sh: there is no $1" >&2
	return 1
}

put()
{
	mkdir -p "$root$(dirname "$1")"
	cp -L "$(find_file "$1")" "$root$1"
}

# The libraries that ldd names, each under its own path.
put_libraries()
{
	for file; do
		LD_LIBRARY_PATH=$tree/usr/lib/x86_64-linux-gnu:$tree/lib/x86_64-linux-gnu \
			ldd "$file" | sed -n 's/.*=> \(\/[^ ]*\).*/\1/p'
	done | sort -u | while read -r library; do
		to=$root/lib/x86_64-linux-gnu/$(basename "$library")
		[ -e "$to" ] || cp -L "$library" "$to"
	done
}

put_modules()
{
	release=$(basename "$(echo "$tree"/lib/modules/*)")
	mkdir -p "$root/lib/modules/$release"
	cp "$tree/lib/modules/$release"/modules.builtin* \
		"$tree/lib/modules/$release/modules.order" "$root/lib/modules/$release"
	[ -e "$tree/lib/modules/$release/modules.dep" ] ||
		"$tree/bin/busybox" depmod -b "$tree" "$release"
	for module in $modules; do
		sed -n "s|^\([^:]*/$module\.ko[^:]*\): *\(.*\)|\1 \2|p" \
			"$tree/lib/modules/$release/modules.dep" | tr ' ' '\n'
	done | sort -u | while read -r file; do
		[ -n "$file" ] || continue
		mkdir -p "$root/lib/modules/$release/$(dirname "$file")"
		cp "$tree/lib/modules/$release/$file" "$root/lib/modules/$release/$file"
	done
	"$tree/bin/busybox" depmod -b "$root" "$release"
}

pack()
{
	(cd "$root" && find . | "$tree/bin/busybox" cpio -o -H newc 2> /dev/null) > "$1.new"
	mv "$1.new" "$1"
}

make_base()
{
	kernel=$(kernel_package)
	# shellcheck disable=SC2086
	fetch "$kernel" $tools
	fetch_missing perftest rdmacm-utils ibverbs-utils iproute2
	for deb in "$debs"/*.deb; do
		dpkg -x "$deb" "$tree"
	done
	rm -rf "$root"
	mkdir -p "$root/bin" "$root/sbin" "$root/proc" "$root/sys" "$root/dev" "$root/tmp" \
		"$root/run" "$root/etc/libibverbs.d" "$root/lib/x86_64-linux-gnu" \
		"$root/lib64" "$root/kvd"
	for applet in $("$tree/bin/busybox" --list); do
		ln -sf busybox "$root/bin/$applet"
	done
	rm -f "$root/bin/busybox" # it lists itself
	put /bin/busybox
	for tool in /bin/ip /sbin/tc /usr/bin/rping /usr/bin/ibv_devinfo \
		/usr/bin/ib_write_bw /usr/bin/ib_read_bw /usr/bin/rdma; do
		at=$(find_file "$tool")
		rm -f "$root/bin/$(basename "$tool")"
		cp -L "$at" "$root/bin/$(basename "$tool")"
		put_libraries "$at"
	done
	provider=$(find_file "/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so")
	mkdir -p "$root/usr/lib/x86_64-linux-gnu/libibverbs"
	cp "$provider" "$root/usr/lib/x86_64-linux-gnu/libibverbs/"
	put_libraries "$provider"
	cp -L /lib64/ld-linux-x86-64.so.2 "$root/lib64/"
	cp -L /lib/x86_64-linux-gnu/libgcc_s.so.1 "$root/lib/x86_64-linux-gnu/"
	echo 'driver rxe' > "$root/etc/libibverbs.d/rxe.driver"
	put_modules
	cp "$here/init" "$root/init"
	chmod +x "$root/init"
	cp "$tree"/boot/vmlinuz-* "$dir/vmlinuz"
	pack "$dir/base.cpio"
}

command -v qemu-system-x86_64 > /dev/null || "$lists" qemu-system-x86
# shellcheck disable=SC2086
"$lists" linux-image-amd64 $tools
make_qemu
make_base
