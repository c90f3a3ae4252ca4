"""Images made from files of this machine, since no registry need be reachable: a shell and its tools, nothing else."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

BUSYBOX = "tangram-test-busybox:1"
VOLUME = "tangram-test-volume:1"
TASK = Path(__file__).resolve().parents[2] / "examples" / "integrations" / "harbor_task"
TASK_BASE, TASK_IMAGE = "tangram-test-bash-tar:1", "tangram-harbor-task:1"
"""A task of Harbor, the image that its own is built on, and its own."""
TOOLS = (
    "sh cat mkdir chmod ls echo sleep true false env id kill ps dd rm cp mv touch yes head tail wc grep sed find test setsid "
    "nproc mount umount ping wget nc hostname sync seq tr sort awk nslookup ifconfig mknod chroot ln od cut du df stat timeout usleep "
    "tee mkfifo readlink swapon insmod reboot unshare nsenter dmesg sysctl su basename dirname mktemp rmdir stty tar base64"
)
GNU_TOOLS = "sh cat mkdir ls rm cp mv head tail wc grep sed find sort tr make"
"""What prints the same in a container as on this machine only if it is the same program."""
USERS = b"root:x:0:0::/root:/bin/sh\nsandbox:x:1000:1000::/home/user:/bin/sh\n"
SHADOW = b"root:secret-of-the-image:1::::::\n"


def busybox() -> Path | None:
    """Return this machine's statically linked busybox; None where there is none."""
    found = shutil.which("busybox")
    if found is None or b"statically linked" not in subprocess.run(["file", "-bL", found], capture_output=True).stdout:
        return Path("/bin/busybox") if Path("/usr/share/doc/busybox-static").exists() else None
    return Path(found)


def make_busybox(
    name: str = BUSYBOX,
    *,
    programs: Mapping[str, Path] | None = None,
    without: Sequence[str] = (),
    volumes: Sequence[str] = (),
    links: Mapping[str, str] | None = None,
) -> None:
    """Import an image whose programs are busybox, under the names of `TOOLS`, and `programs` by their path inside.

    To the folders `volumes` everybody may write. `links` are further links, by their path inside.
    """
    program = busybox()
    assert program is not None, "busybox-static is not installed"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", dereference=True) as archive:
        for folder in ("bin", "etc", "proc", "sys", "dev", "run", "root"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        add_tools(archive, program, {tool for tool in TOOLS.split() if f"bin/{tool}" in (programs or ())} | {*without})
        for inside, path in (programs or {}).items():
            archive.add(path, inside, filter=_without_time)
        add_file(archive, "etc/passwd", USERS, 0o644)
        add_file(archive, "etc/shadow", SHADOW, 0o640)
        for inside, target in (links or {}).items():
            link = tarfile.TarInfo(inside)
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
        for folder in volumes:
            entry = tarfile.TarInfo(folder.lstrip("/"))
            entry.type, entry.mode = tarfile.DIRTYPE, 0o777
            archive.addfile(entry)
    _import(packed.getvalue(), name, [f"VOLUME {folder}" for folder in volumes])


def add_tools(archive: tarfile.TarFile, program: Path, without: Collection[str] = ()) -> None:
    """Add busybox, under the names of `TOOLS` but for some."""
    archive.add(program, "bin/busybox", filter=_without_time)
    for tool in TOOLS.split():
        if tool not in without:
            link = tarfile.TarInfo(f"bin/{tool}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)


def _import(archive: bytes, name: str, described: Sequence[str]) -> None:
    """Import an image, unless it is there: other tests, in this run or another, may be using it under its name."""
    content = hashlib.sha256(archive).hexdigest()
    with open(f"/tmp/{name.replace(':', '-')}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        asked = ["docker", "image", "inspect", "--format", '{{index .Config.Labels "content"}}', name]
        if subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() != content:
            lines = ["ENV PATH=/bin", f"LABEL content={content}", *described]
            change = [word for line in lines for word in ("--change", line)]
            subprocess.run(["docker", "import", *change, "-", name], input=archive, check=True, capture_output=True)


def _without_time(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.mtime = 0
    return entry


def make_with_volume() -> str:
    """Import an image that asks for a volume at /data, and return its name."""
    make_busybox(VOLUME, volumes=["/data"])
    return VOLUME


def make_with_python(name: str, *, more: Mapping[str, Path] | None = None, links: Mapping[str, str] | None = None) -> None:
    """Import an image with this Python, without packages of others, and this machine's tools in the place of busybox'.

    It has `more` files and `links`, by their path inside. Debian's packages for the same take a minute to fetch and unpack.
    """
    library = Path(sysconfig.get_path("stdlib"))
    python = Path(os.path.realpath(sys.executable))
    left_out = {"site-packages", "dist-packages", "test", "idlelib", "lib2to3", "ensurepip", "turtledemo", "__pycache__"}
    programs: dict[str, Path] = {}
    for folder, below, names in os.walk(library):
        below[:] = sorted(each for each in below if each not in left_out and not each.startswith("config-"))
        programs |= {str(path).lstrip("/"): path for name in sorted(names) if (path := Path(folder, name)).suffix in (".py", ".so")}
    tools = {tool: Path(found) for tool in GNU_TOOLS.split() if (found := shutil.which(tool))}
    linked = [python, *tools.values(), *(path for path in programs.values() if path.suffix == ".so")]
    programs |= _libraries(linked) | {f"bin/{tool}": path for tool, path in tools.items()}
    programs[str(python).lstrip("/")] = python
    make_busybox(name, programs={**programs, **(more or {})}, links={"bin/python3": str(python), **(links or {})})


def _libraries(programs: Sequence[Path]) -> dict[str, Path]:
    """Return the libraries that programs are linked with, by their path inside."""
    listed = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True).stdout
    return {path.lstrip("/"): Path(path) for path in re.findall(r"(/\S+) \(0x", listed)}


def make_with_shell(shell: str, name: str, programs: Mapping[str, Path] | None = None) -> None:
    """Import an image with this machine's `shell`, its libraries and `programs`: bash beside busybox's sh, any other instead of it."""
    found = shutil.which(shell)
    assert found is not None, f"{shell} is not installed"
    own = {"bin/bash" if shell == "bash" else "bin/sh": Path(found)}
    make_busybox(name, programs=_libraries([Path(found)]) | own | dict(programs or {}))


def make_task() -> None:
    """Build the image of Harbor's task, on one with bash, tar and gzip."""
    make_with_shell("bash", shell := "tangram-test-bash:1")
    for arguments, stdin in (
        (["-t", TASK_BASE, "-"], f"FROM {shell}\nRUN ln -sf busybox /bin/tar && ln -sf busybox /bin/gzip\n"),
        (["--build-arg", f"BASE={TASK_BASE}", "-t", TASK_IMAGE, str(TASK / "environment")], ""),
    ):
        subprocess.run(["docker", "build", "-q", *arguments], check=True, input=stdin, text=True, capture_output=True)


def add_file(archive: tarfile.TarFile, path: str, data: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode = len(data), mode
    archive.addfile(entry, io.BytesIO(data))
