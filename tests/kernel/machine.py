"""Tests in a virtual machine: Linux as Debian builds it, with control groups version 2, two processors, and a Docker engine of its own.

`python -m tests.kernel.machine WORDS…` runs pytest with these words there. The machine sees the files of this one, and writes nothing to
them. It shows what user-mode Linux cannot: containers, and several cores. QEMU works out each instruction, so all takes some ten times as
long, and tests that bound processor time may fail. `ACCEL=kvm` leaves that to the processor; it was not tried.

It needs root, and Debian's qemu-system-x86, linux-image-cloud-amd64, busybox-static, cpio, e2fsprogs, kmod and docker.io.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.deployment.support import ROOT

HERE = Path(__file__).parent
FILES = "/usr/lib/qemu/virtiofsd"
NEEDED = ("qemu-system-x86_64", "busybox", "cpio", "mkfs.ext4", "modprobe", "dockerd")
MODULES = ("virtio_blk", "virtio_pci", "virtiofs", "overlay")
MEMORY, DISK_BYTES = "4G", 12 << 30
FIRST = """#!/bin/busybox sh
for name in ln insmod mount umount mkdir switch_root; do /bin/busybox ln -s busybox /bin/$name; done
{insert}
mount -t devtmpfs dev /dev
mount -t virtiofs machine /machine
mount -t ext4 /dev/vda /disk
mkdir /disk/upper /disk/work
mount -t overlay all -o lowerdir=/machine,upperdir=/disk/upper,workdir=/disk/work /all
mount -o move /dev /all/dev
umount -l /machine
DISK=/dev/vda exec switch_root /all {init} {root} {script}
"""
"""The first process of the kernel. A container needs a root that it can leave, so the memory with which the kernel began is given up."""
SCRIPT = """
for name in bridge veth iptable_nat iptable_filter xt_conntrack xt_MASQUERADE xt_addrtype; do modprobe $name; done
echo "+cpuset +io" >/sys/fs/cgroup/cgroup.subtree_control
mkdir /sys/fs/cgroup/engine
(echo 0 >/sys/fs/cgroup/engine/cgroup.procs
 exec env --default-signal=INT dockerd --data-root /run/disk/docker --exec-root /run/docker >/run/dockerd 2>&1) &
until docker info >/dev/null 2>&1; do sleep 1; done
CI=true {tests}
"""


def main() -> int:
    """Boot the machine, show what pytest prints there, and return 0 if all tests passed."""
    versions = [path.name for path in Path("/lib/modules").glob("*-cloud-amd64")]
    if not versions or not all(map(shutil.which, (FILES, *NEEDED))) or os.geteuid():
        sys.exit(str(__doc__).splitlines()[-1])
    version = max(versions)
    tests = [sys.executable, "-B", "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.sh").write_text(SCRIPT.format(tests=shlex.join(tests)) + f'[ $? = 0 ] && echo "{folder.name}: all passed"\n')
        _pack(folder, version)
        with (folder / "disk").open("wb") as disk:
            disk.truncate(DISK_BYTES)
        subprocess.run(["mkfs.ext4", "-q", "-F", folder / "disk"], check=True)
        words = [FILES, f"--socket-path={folder}/files", "-o", "source=/", "-o", "cache=always", "-o", "sandbox=chroot"]
        with subprocess.Popen(words, stderr=subprocess.DEVNULL):
            while not (folder / "files").exists():
                time.sleep(0.1)
            with subprocess.Popen(_machine(folder, version), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as machine:
                assert machine.stdout is not None
                passed = False
                for line in machine.stdout:
                    sys.stdout.buffer.write(line)
                    sys.stdout.flush()
                    passed |= line.startswith(f"{folder.name}: all passed".encode())
    return 0 if passed else 1


def _pack(folder: Path, version: str) -> None:
    """Write the files that the kernel begins with."""
    shown = [subprocess.check_output(["modprobe", "-S", version, "--show-depends", module], text=True) for module in MODULES]
    paths = list(dict.fromkeys(line.split()[1] for line in "".join(shown).splitlines() if line.startswith("insmod ")))
    first = folder / "first"
    for place in ("bin", "dev", "machine", "disk", "all"):
        (first / place).mkdir(parents=True)
    subprocess.run(["cp", "/bin/busybox", first / "bin"], check=True)
    subprocess.run(["cp", *paths, first], check=True)
    insert = "\n".join(f"insmod /{Path(path).name}" for path in paths)
    (first / "init").write_text(FIRST.format(insert=insert, init=HERE / "init.sh", root=ROOT, script=folder / "run.sh"))
    (first / "init").chmod(0o755)
    subprocess.run("find . | cpio -o -H newc --quiet >../first.cpio", shell=True, cwd=first, check=True)


def _machine(folder: Path, version: str) -> list[str]:
    """Return the command that boots the machine."""
    memory = f"memory-backend-memfd,id=memory,size={MEMORY},share=on"
    accel = os.environ.get("ACCEL", "tcg,thread=multi")
    words = ["setpriv", "--pdeathsig=TERM", NEEDED[0], "-accel", accel, "-cpu", "max", "-smp", "2", "-m", MEMORY]
    words += ["-nographic", "-no-reboot", "-append", "console=ttyS0 quiet panic=-1"]
    words += ["-object", memory, "-numa", "node,memdev=memory", "-chardev", f"socket,id=files,path={folder}/files"]
    words += ["-device", "vhost-user-fs-pci,chardev=files,tag=machine"]
    words += ["-drive", f"file={folder}/disk,format=raw,if=virtio,cache=unsafe"]
    return [*words, "-kernel", f"/boot/vmlinuz-{version}", "-initrd", str(folder / "first.cpio")]


if __name__ == "__main__":
    sys.exit(main())
