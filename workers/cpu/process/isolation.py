"""How the shells of a process sandbox are set apart from the host: not at all, or by bubblewrap.

| kind         | a shell has                                                                                          |
|--------------|------------------------------------------------------------------------------------------------------|
| `none`       | the host as the worker's user has it                                                                 |
| `bubblewrap` | user, PID, IPC, UTS, cgroup and network namespaces of its own; no capability; of the host's files the |
|              | system's, read-only, and the folders of programs on PATH; its environment's two folders              |

This file chooses the arguments of `bwrap`, the program of bubblewrap; `namespace.py` runs it. Paths are the same inside as outside.
Commands may only read the folder of their session's protocol, apart from the file of its state. Otherwise a command could replace a
file to which the worker writes by a link. Nothing is mounted below a folder that commands can write to.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from workers.cpu.process.programs import folders_of_programs
from workers.cpu.shell.dialect import ProtocolFolder

Isolation = Literal["bubblewrap", "none"]
IsolationChoice = Literal["auto", "bubblewrap", "none"]

HELP_LIMIT_S = 5.0
TEMPORARY_BYTES = 1 << 30
PROCESSES = 512
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
TOPOLOGY = ("/sys/devices/system/cpu", "/sys/devices/system/node")
SWITCHES = ("/proc/sys", "/proc/sysrq-trigger", "/proc/acpi", "/proc/fs", "/proc/mtrr", "/proc/scsi", "/proc/asound")
"""What the kernel lets the host's root write without any capability, which a worker that is root is inside too."""
ETC = "/etc"
PUBLIC = (
    *("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d"),
    *("passwd", "group", "nsswitch.conf", "shells"),
    *("hosts", "host.conf", "hostname", "resolv.conf", "gai.conf", "networks", "protocols", "services", "rpc", "ethertypes"),
    *("ssl/certs", "ssl/openssl.cnf", "ca-certificates*", "pki/tls/certs", "pki/tls/openssl.cnf", "pki/ca-trust/extracted"),
    *("crypto-policies", "gnutls"),
    *("localtime", "timezone", "locale.*", "os-release", "lsb-release", "debian_version", "*-release", "issue", "login.defs"),
    *("profile", "bash.bashrc", "bashrc", "inputrc", "terminfo", "vim", "manpath.config", "groff"),
    *("magic", "magic.mime", "mime.types", "mailcap", "fonts", "papersize", "sgml", "xml", "ImageMagick*", "ghostscript", "texmf"),
    *("python*", "perl", "java", "java-*", "R", "julia", "octave*", "php", "gdb", "dpkg/origins", "postgresql-common"),
    *("OpenCL", "glvnd", "openmpi*", "matplotlibrc"),
)
"""What a session sees of /etc: the names, or patterns of them, that programs of many kinds need, and that hold no password and no
key. What may hold one is not here, such as the files for proxies, packages and indices: `environment`, `apt`, `pip.conf`, `gitconfig`.
"""

NAMESPACES = ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net", "--unshare-cgroup-try")
HARDENING = ("--die-with-parent", "--new-session", "--cap-drop", "ALL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubblewrap:
    """The `bwrap` of this host, and what every session of a sandbox with the folder `base` is started with."""

    program: str
    base: Path
    has_disable_userns: bool
    has_size: bool
    shown: tuple[str, ...]

    def arguments(self) -> list[str]:
        """Return the part of bwrap's arguments that is the same for all environments."""
        nested = ["--disable-userns"] if self.has_disable_userns else []
        size = ["--size", str(TEMPORARY_BYTES)] if self.has_size else []
        etc = ["--ro-bind", str(self.base / "etc"), "/etc"]
        kernel = ["--proc", "/proc", "--dev", "/dev"]
        places = [*size, "--tmpfs", "/tmp", *size, "--tmpfs", "/var/tmp", "--dir", "/run"]
        read_only = [word for path in (*TOPOLOGY, *SWITCHES, *self.shown) for word in ("--ro-bind-try", path, path)]
        return [*NAMESPACES, *HARDENING, *nested, *_system(), *etc, *kernel, *places, *read_only, "--tmpfs", str(self.base)]


@dataclass(frozen=True, slots=True)
class SessionIsolation:
    """How the sessions of one environment, with the folders `work` and `temporary`, are set apart."""

    bubblewrap: Bubblewrap
    work: Path
    temporary: Path

    def message(self, control: ProtocolFolder) -> dict[str, object]:
        """Return what the supervisor needs to know to start the session of `control`."""
        if not os.path.exists(control.state):
            control.keep_state()
        own = [word for path in (self.work, self.temporary) for word in ("--bind", str(path), str(path))]
        protocol = ["--ro-bind", str(control.folder), control.inside, "--bind", control.state, control.seen(control.state)]
        closed = ["--remount-ro", str(self.bubblewrap.base), "--remount-ro", "/"]
        return {
            "program": self.bubblewrap.program,
            "arguments": [*self.bubblewrap.arguments(), *own, *protocol, *closed],
        }


def find_bubblewrap(base: Path, search_path: str, shell: str) -> Bubblewrap | None:
    """Return the `bwrap` of this host, for commands with PATH `search_path`; None where there is none that runs."""
    program = shutil.which("bwrap", path=f"{os.environ.get('PATH', '')}:{os.defpath}")
    if program is None:
        return None
    try:
        help_text = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=HELP_LIMIT_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    copy_etc(base / "etc")
    private = (str(base), os.path.realpath(Path.home()), str(Path.home()))
    return Bubblewrap(
        program=os.path.abspath(program),
        base=base,
        has_disable_userns="--disable-userns" in help_text,
        has_size="--size " in help_text,
        shown=folders_of_programs(search_path, (*SYSTEM, "/etc"), private, [shell]),
    )


def counts_by_namespace() -> bool:
    """Return whether RLIMIT_NPROC binds the worker's user inside of a user namespace, and there alone.

    The limit is counted by user namespace since Linux 5.14, and never holds for the host's root.
    """
    major, minor = os.uname().release.split(".")[:2]
    return os.geteuid() != 0 and (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)


def _system() -> list[str]:
    words: list[str] = []
    for path in SYSTEM:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            words += ["--ro-bind", path, path]
    return words


def copy_etc(folder: Path) -> None:
    """Copy to `folder` what sessions see of /etc. One mount of the copy starts a session faster than one mount for each file."""
    for name in PUBLIC:
        for source in glob.glob(f"{ETC}/{name}"):
            target = folder / os.path.relpath(source, ETC)
            target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            # What the worker's user may not read is no more there than before, and links lead where they led.
            with contextlib.suppress(OSError, shutil.Error):
                if os.path.isdir(source) and not os.path.islink(source):
                    shutil.copytree(source, target, symlinks=True)
                else:
                    shutil.copy2(source, target, follow_symlinks=False)
    (folder / "mtab").symlink_to("/proc/self/mounts")
