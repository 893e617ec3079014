#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# docs/deployment.md is true: its shell blocks run in order, as they are written, on two hosts
# of network, mount and host name namespaces. "# on HOST" in a block's first line says where.
# systemctl starts the daemon itself, ssh enters the other host, apt does nothing, kvd-ctl waits
# longer and measures once.
set -u

build=$(realpath "${KVD_BUILD:-build/rel}")
. tests/lib/check.sh
document=docs/deployment.md
hosts=

# blocks: each becomes $work/block.N
blocks()
{
	awk -v to="$work/block." '
		/^```sh$/ { inside = 1; file = to sprintf("%02d", ++n); next }
		/^```$/ { inside = 0 }
		inside { print > file }' $document
	[ -e "$work/block.01" ]
}

# host NAME ADDRESS: namespaces of its own, held by a process
host()
{
	unshare --net --mount --uts bash -ec '
		hostname "$1"
		ip link set lo up
		mount -t tmpfs tmpfs /mnt
		cp -a /etc /mnt/etc
		mount --bind /mnt/etc /etc
		mount -t tmpfs tmpfs /run
		mount -t tmpfs -o mode=1777 tmpfs /dev/shm
		mkdir -p /etc/kvd /run/kvd
		echo up
		exec tail -f /dev/null' host "$1" > "$work/up" &
	eval "$1=$!"
	hosts="$hosts $!"
	until grep -q up "$work/up"; do
		kill -0 "$!" || return 1
	done
	: > "$work/up"
}

on()
{
	nsenter -t "${!1}" --net --mount --uts --wd=/mnt env PATH="$work/bin:$build:$PATH" \
		p0="$p0" d0="$d0" bash -ec "$2"
}

programs()
{
	mkdir "$work/bin" && printf '#!/bin/sh\n' > "$work/bin/apt" || return 1
	cat > "$work/bin/ssh" <<-'END'
		#!/bin/bash
		host=$1
		shift
		exec nsenter -t "${!host}" --net --mount --uts --wd=/mnt bash -c "$*"
	END
	cat > "$work/bin/systemctl" <<-'END'
		#!/bin/bash
		# enable --now, start, restart: of kvd@NAME, without systemd
		all=$*
		name=${all##*kvd@}
		[ ! -e "/run/$name.pid" ] || [ "$1" != restart ] || {
			kill "$(cat "/run/$name.pid")"
			tail --pid="$(cat "/run/$name.pid")" -f /dev/null
		}
		grep -q dead_after "/etc/kvd/$name.conf" || # of tests: a busy machine
			sed -i '/^\[peer\]/a dead_after = 20 s' "/etc/kvd/$name.conf"
		setsid kvd --name "$name" > "/mnt/$name.log" 2>&1 < /dev/null &
		echo $! > "/run/$name.pid"
		until kvd-ctl --name "$name" ping > /dev/null 2>&1; do
			kill -0 $! 2> /dev/null || { cat "/mnt/$name.log"; exit 1; }
		done
	END
	cat > "$work/bin/kvd-ctl" <<-END
		#!/bin/bash
		[ "\${*: -1}" != - ] || set -- "\$@" --count 1
		exec $build/kvd-ctl --timeout 60 "\$@"
	END
	chmod +x "$work"/bin/*
}

two_hosts()
{
	p0=0 d0=0
	host p0 && host d0 && programs || return 1
	nsenter -t "$p0" --net ip link add v0 type veth peer name v0 netns "$d0" &&
		on p0 'ip addr add 10.0.0.2/24 dev v0 && ip link set v0 up' &&
		on d0 'ip addr add 10.0.0.3/24 dev v0 && ip link set v0 up'
}

# play FILE: on the hosts that its first line names
play()
{
	local host names
	names=$(sed -n '1s/^# on //p' "$1")
	[ "$names" ] || return 1
	for host in ${names//and/}; do
		echo "--- on $host: $(sed -n 2p "$1")"
		on "$host" "set -o pipefail; $(cat "$1")" || return 1
	done
}

all_blocks()
{
	local file
	for file in "$work"/block.*; do
		play "$file" || return 1
	done
}

commands_work()
{
	all_blocks > "$work/said" 2>&1
	local status=$?
	cat "$work/said"
	[ $status -eq 0 ] && grep -q '; bytes verified$' "$work/said" &&
		grep -qE '^d0\.gpu0 +tcp://10\.0\.0\.3:7400 .* up .* tcp\+aes' "$work/said" &&
		! grep -q '^FAIL' "$work/said" &&
		[ "$(grep -c '^kvd_build_info' "$work/said")" -eq 2 ]
}

finish()
{
	local host file
	for host in $hosts; do
		for file in "/proc/$host/root/run/gpu0.pid"; do
			[ ! -e "$file" ] || kill "$(cat "$file")" 2> /dev/null
		done
		kill "$host" 2> /dev/null
	done
	wait
	rm -rf "$work"
}
trap finish EXIT

check blocks_are_found blocks
why=$(unshare --net --mount --uts ip link add v0 type veth peer name v1 2>&1 > /dev/null) ||
	why=${why:-refused}
if [ "$why" ]; then
	skip commands_work "namespaces and veth, as root: $why"
elif [[ $KVD_BUILD == *-without-* ]] || ! command -v curl > /dev/null; then
	skip commands_work "a whole build, and curl"
elif two_hosts; then
	check commands_work commands_work
else
	check two_hosts false
fi
checks_end
