#!/bin/sh
# `init.sh FOLDER SCRIPT`: the first process of the booted kernel, whose files are this machine's. It runs a script in a folder as a login
# does, in a group of its own that has controllers, and ends the kernel.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TMPDIR=/run/disk
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /run
mkdir /dev/pts /dev/shm /run/disk
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
ln -s /proc/self/fd /dev/fd
mount -t ext4 "${DISK:-/dev/ubda}" /run/disk
ip link set lo up
mount -t cgroup2 cgroup2 /sys/fs/cgroup
echo "+cpu +memory +pids" >/sys/fs/cgroup/cgroup.subtree_control
mkdir /sys/fs/cgroup/login
echo $$ >/sys/fs/cgroup/login/cgroup.procs
cd "$1" && sh "$2"
echo o >/proc/sysrq-trigger
sleep 60
