#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# boot.sh ROOT CGROUP: systemd of the folder ROOT as PID 1 of new namespaces, under the new
# cgroup CGROUP. ROOT itself is not written: a tmpfs lies over it. The process that execs
# this is the one whose end stops all (unshare --kill-child).
set -eu
root=$(realpath "$1")
mkdir "$2"
echo $$ > "$2/cgroup.procs"
exec unshare --mount --pid --uts --ipc --net --cgroup --fork --kill-child bash -c '
set -e
mount --make-rprivate /
mount -t tmpfs -o size=1G,mode=755 tmpfs /mnt
mkdir /mnt/up /mnt/work /mnt/root
mount -t overlay -o "lowerdir=$1,upperdir=/mnt/up,workdir=/mnt/work" overlay /mnt/root
new=/mnt/root
mount -t proc proc $new/proc
mount -t sysfs -o ro sysfs $new/sys
mount -t cgroup2 cgroup2 $new/sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs $new/run
mount -t tmpfs -o mode=1777 tmpfs $new/tmp
mount -t tmpfs -o mode=755 tmpfs $new/dev
for node in null zero full random urandom tty; do
	touch $new/dev/$node
	mount --bind /dev/$node $new/dev/$node
done
mkdir $new/dev/pts $new/dev/shm
mount -t devpts -o newinstance,ptmxmode=666 devpts $new/dev/pts
ln -s pts/ptmx $new/dev/ptmx
ln -s /proc/self/fd $new/dev/fd
mount -t tmpfs -o mode=1777,size=1G tmpfs $new/dev/shm
hostname kvd-test
ip link set lo up
cd $new
mkdir -p .old
pivot_root . .old
umount -l /.old
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin TERM=dumb \
	/lib/systemd/systemd --show-status=0 < /dev/null
' boot "$root"
