"""Images made from files of this machine, since no registry need be reachable: a shell and its tools, nothing else."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from pathlib import Path

BUSYBOX = "tangram-test-busybox:1"
TOOLS = (
    "sh cat mkdir chmod ls echo sleep true false env id kill ps dd rm cp mv touch yes head tail wc grep sed find test setsid nohup "
    "nproc mount umount ping wget nc hostname sync seq tr sort awk nslookup ifconfig mknod chroot ln od cut du df stat timeout usleep"
)


def busybox() -> Path | None:
    """Return this machine's statically linked busybox; None where there is none."""
    found = shutil.which("busybox")
    if found is None or b"statically linked" not in subprocess.run(["file", "-bL", found], capture_output=True).stdout:
        return Path("/bin/busybox") if Path("/usr/share/doc/busybox-static").exists() else None
    return Path(found)


def make_busybox(name: str = BUSYBOX) -> None:
    """Import an image whose only program is busybox, under the names of `TOOLS`."""
    program = busybox()
    assert program is not None, "busybox-static is not installed"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for folder in ("bin", "etc", "proc", "sys", "dev", "run", "root"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        archive.add(program, "bin/busybox")
        for tool in TOOLS.split():
            link = tarfile.TarInfo(f"bin/{tool}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
        users = b"root:x:0:0::/root:/bin/sh\nsandbox:x:1000:1000::/work:/bin/sh\n"
        entry = tarfile.TarInfo("etc/passwd")
        entry.size = len(users)
        archive.addfile(entry, io.BytesIO(users))
    change = ["--change", "ENV PATH=/bin"]
    subprocess.run(["docker", "import", *change, "-", name], input=packed.getvalue(), check=True, capture_output=True)
