"""How the environments of a process sandbox are set apart from the host: not at all, or by namespaces.

| kind         | a command has                                                                                         |
|--------------|------------------------------------------------------------------------------------------------------|
| `none`       | the host as the worker's user has it                                                                 |
| `view`       | the same as with bubblewrap, without the promise that no program gets out; see `view.py`             |
| `bubblewrap` | its environment's user, PID, IPC, UTS, cgroup and network namespaces; no capability; of the host's   |
|              | files the system's, read-only, and the folders of programs on PATH; its environment's own folders    |

This file says what is to be seen; `namespace.py` runs bubblewrap's program, `bwrap`.

| path inside              | what is there                                                      |
|--------------------------|--------------------------------------------------------------------|
| `/home/user`             | the work folder: HOME, where commands begin                        |
| `/tmp`, `/var/tmp`       | a folder of the environment on disk                                |
| each of `PLACES`         | a folder of the environment on disk                                |
| `/dev/shm`               | memory, at most `SHARED_BYTES`                                     |
| `/run/tangram`           | the protocol folders of its sessions, which commands may only read |
| `/run/tangram-states`    | the states that its shells write                                   |

Commands may only read protocol folders. Otherwise a command could replace a file to which the worker writes by a link.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from workers.cpu.process.namespace import USER_ID
from workers.cpu.process.programs import folders_of_programs

Isolation = Literal["bubblewrap", "view", "none"]
IsolationChoice = Literal["auto", "bubblewrap", "view", "none"]

HELP_LIMIT_S = 5.0
SHARED_BYTES = 64 << 20
PROCESSES = 512
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
TOPOLOGY = ("/sys/devices/system/cpu", "/sys/devices/system/node")
SWITCHES = ("/proc/sys", "/proc/sysrq-trigger", "/proc/acpi", "/proc/fs", "/proc/mtrr", "/proc/scsi", "/proc/asound")
"""What the kernel lets the host's root write without any capability. A worker that is root is that inside, too, unless it chooses users."""
ETC = "/etc"
PUBLIC = (
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d"),
    *("passwd", "group", "nsswitch.conf", "shells"),
    *("hosts", "host.conf", "hostname", "resolv.conf", "gai.conf", "networks", "protocols", "services", "rpc", "ethertypes"),
    *("ssl/openssl.cnf", "ca-certificates*", "pki/tls/certs", "pki/tls/openssl.cnf", "pki/ca-trust/extracted"),
    *("crypto-policies", "gnutls"),
    *("localtime", "timezone", "locale.*", "os-release", "lsb-release", "debian_version", "*-release", "issue", "login.defs"),
    *("profile", "bash.bashrc", "bashrc", "inputrc", "terminfo", "vim", "manpath.config", "groff"),
    *("magic", "magic.mime", "mime.types", "mailcap", "fonts", "papersize", "sgml", "xml", "ImageMagick*", "ghostscript", "texmf"),
    *("python*", "perl", "java", "java-*", "R", "julia", "octave*", "php", "gdb", "dpkg/origins", "postgresql-common"),
    *("OpenCL", "glvnd", "openmpi*", "matplotlibrc"),
)
"""What an environment sees of /etc: the names, or patterns of them, that programs of many kinds need, and that hold no password and no
key. What may hold one is not here, such as the files for proxies, packages and indices: `environment`, `apt`, `pip.conf`, `gitconfig`.
"""
LARGE = ("alternatives", "ssl/certs")
"""Further such folders. Each has hundreds of links, so it is mounted: the copies would take most of the time in which a sandbox starts."""

HOME, USER = "/home/user", "user"
PLACES = ("/app", "/logs", "/solution", "/tests")
"""What Harbor's tasks write to. Commands can make no folder at the root."""
OWN = (HOME, "/tmp", "/var/tmp")
"""No folder of programs is shown below these: commands could put a link in its way, and choose where on the host it is mounted."""
CONTROL, STATES = "/run/tangram", "/run/tangram-states"
HOST_NAME = "sandbox"
HOSTS = f"127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n127.0.1.1 {HOST_NAME}\n"

ANY_ROOT = "\0"
"""Stands for the root of the folders of any environment; no path has it."""

NAMESPACES = ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net", "--unshare-cgroup-try")
HARDENING = ("--die-with-parent", "--new-session", "--cap-drop", "ALL")


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders of one environment on the host."""

    root: str

    @property
    def work(self) -> str:
        """Return the work folder."""
        return f"{self.root}/work"

    @property
    def temporary(self) -> str:
        """Return what is `/tmp`, or `TMPDIR` where `/tmp` is the host's."""
        return f"{self.root}/tmp"

    def place(self, path: str) -> str:
        """Return what is at one of `PLACES`."""
        return f"{self.root}/places/{os.path.basename(path)}"

    @property
    def control(self) -> str:
        """Return the folder of the protocol folders of its sessions."""
        return f"{self.root}/control"

    @property
    def states(self) -> str:
        """Return the folder of what shells write themselves."""
        return f"{self.control}/states"

    @property
    def record(self) -> str:
        """Return the file that says what a successor of the worker must know."""
        return f"{self.root}/record.json"

    def put_in(self, words: Sequence[str]) -> list[str]:
        """Return words with these folders in the place of those of `ANY_ROOT`."""
        return [word.replace(ANY_ROOT, self.root) for word in words]

    def make(self, places: Sequence[str] = (), owner: int | None = None) -> None:
        """Make those that are needed, with `places` of `PLACES`. Raises `OSError`.

        What commands may write belongs to the user `owner`, if there is one, else to the worker's.
        """
        os.mkdir(self.root, 0o700)
        places = [self.place(path) for path in places]
        above = [os.path.dirname(places[0])] if places else []
        for folder in (self.work, self.temporary, self.control, self.states, *above, *places):
            os.mkdir(folder)
            # The worker's umask must not keep the environment's user out.
            os.chmod(folder, 0o1777 if folder == self.temporary else 0o755)
        if owner is not None:
            for folder in (self.work, self.temporary, self.states, *places):
                os.chown(folder, owner, owner)


Step = list[str]
"""One step of making the view of an environment; `view.py` says which there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What all environments of a sandbox with the folder `base` see of the host: its system, and the folders `shown`."""

    base: Path
    shown: tuple[str, ...]
    kind: ClassVar[Isolation] = "view"

    @property
    def places(self) -> tuple[str, ...]:
        """Return those of `PLACES` below which no program of the host is shown; see `OWN`."""
        return tuple(place for place in PLACES if not any(f"{path}/".startswith(f"{place}/") for path in self.shown))

    @property
    def new_root(self) -> Path:
        """Return the empty folder on which each environment has its own root folder mounted, where bubblewrap does not do that."""
        return self.base / "root"

    def anchor(self, folders: Folders, user: int | None) -> dict[str, object]:
        """Return what the fork server is asked, to make the namespaces of the environment with these folders, for a user of the host."""
        steps = [["root", str(self.new_root)], *_steps(self), ["remount-ro", ""]]
        return {"view": [folders.put_in(step) for step in steps], "host_name": HOST_NAME, "user": user or 0}

    def steps(self) -> list[Step]:
        """Return what is to be seen, with `ANY_ROOT` as the root of the environment's folders."""
        folders = Folders(ANY_ROOT)
        return [
            *_system(),
            ["proc", "/proc"],
            ["dev", "/dev"],
            ["tmpfs", "/dev/shm", str(SHARED_BYTES)],
            ["remount-ro", "/dev"],
            ["ro-bind", str(self.base / "etc"), "/etc"],
            *(["ro-bind-try", f"{ETC}/{name}", f"/etc/{name}"] for name in LARGE if _is_folder(self.base / "etc" / name)),
            ["ro-bind", folders.control, CONTROL],
            ["symlink", "/tmp", "/var/tmp"],
            ["bind", folders.work, HOME],
            ["bind", folders.temporary, "/tmp"],
            *(["bind", folders.place(path), path] for path in self.places),
            ["bind", folders.states, STATES],
            *(["ro-bind-try", path, path] for path in (*TOPOLOGY, *SWITCHES, *self.shown)),
            # Where the system's folders show the sandbox's own.
            *([["tmpfs", str(self.base), "0"]] if str(self.base).startswith(SYSTEM) else []),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubblewrap(View):
    """The same by `bwrap`, the program of bubblewrap."""

    program: str
    has_disable_userns: bool
    has_size: bool
    kind: ClassVar[Isolation] = "bubblewrap"

    def anchor(self, folders: Folders, user: int | None) -> dict[str, object]:
        return {"anchor": [self.program, *folders.put_in(_arguments(self, bool(user)))], "user": user or 0}

    def arguments(self, *, has_user: bool) -> list[str]:
        """Return the arguments of the program, with `ANY_ROOT` as the root of the environment's folders."""
        own = [] if has_user else ["--unshare-user", "--uid", str(USER_ID), "--gid", str(USER_ID)]
        nested = ["--disable-userns"] if self.has_disable_userns and not has_user else []
        steps = _steps(self)
        above = dict.fromkeys(os.path.dirname(step[-1 if step[0] != "tmpfs" else 1]) for step in steps)
        # The folders above a place would be made for the worker's user alone.
        open_to_all = [word for folder in above if not folder.startswith(("/proc", "/dev")) for word in ("--dir", folder)]
        words = [word for step in steps for word in self._words(step)]
        return [*own, *NAMESPACES, "--hostname", HOST_NAME, *HARDENING, *nested, *open_to_all, *words, "--remount-ro", "/"]

    def _words(self, step: Step) -> list[str]:
        kind, *paths = step
        if kind == "tmpfs":
            place, size = paths
            return [*(["--perms", "1777", "--size", size] if self.has_size and size != "0" else []), "--tmpfs", place]
        return [f"--{kind}", *paths]


def view_for(base: Path, search_path: str, shell: str) -> View:
    """Return what environments see, whose commands have PATH `search_path`.

    Makes their /etc, unless environments that stand see it.
    """
    if not (base / "etc").is_dir() or not any((base / "etc").iterdir()):
        copy_etc(base / "etc", shell)
    private = (str(base), os.path.realpath(Path.home()), str(Path.home()))
    view = View(base=base, shown=folders_of_programs(search_path, (*SYSTEM, *OWN, "/etc"), private, [shell]))
    view.new_root.mkdir(mode=0o700, exist_ok=True)
    return view


def find_bubblewrap(view: View) -> Bubblewrap | None:
    """Return the `bwrap` of this host, for the same view; None where there is none that runs."""
    program = shutil.which("bwrap", path=f"{os.environ.get('PATH', '')}:{os.defpath}")
    if program is None:
        return None
    try:
        help_text = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=HELP_LIMIT_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return Bubblewrap(
        program=os.path.abspath(program),
        base=view.base,
        shown=view.shown,
        has_disable_userns="--disable-userns" in help_text,
        has_size="--size " in help_text,
    )


def counts_by_namespace() -> bool:
    """Return whether RLIMIT_NPROC binds the worker's user inside of a user namespace, and there alone.

    The limit is counted by user namespace since Linux 5.14, and never holds for the host's root.
    """
    major, minor = os.uname().release.split(".")[:2]
    return os.geteuid() != 0 and (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)


# What all environments have in common is found out once: it takes a good part of an open.
@functools.cache
def _steps(view: View) -> list[Step]:
    return view.steps()


@functools.cache
def _arguments(view: Bubblewrap, has_user: bool) -> list[str]:
    return view.arguments(has_user=has_user)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _system() -> list[Step]:
    there = [path for path in SYSTEM if os.path.isdir(path)]
    return [["symlink", os.readlink(path), path] if os.path.islink(path) else ["ro-bind", path, path] for path in there]


def copy_etc(folder: Path, shell: str) -> None:
    """Copy to `folder` what environments see of /etc: one mount of the copy is faster than one for each file."""
    made = {folder}
    for name in (*PUBLIC, *LARGE):
        for source in glob.glob(f"{ETC}/{name}"):
            target = folder / os.path.relpath(source, ETC)
            target.parent.mkdir(parents=True, exist_ok=True)
            made.update(path for path in target.parents if path.is_relative_to(folder))
            # What the worker's user may not read is no more there than before, and links lead where they led.
            with contextlib.suppress(OSError, shutil.Error):
                if name in LARGE and _is_folder(Path(source)):
                    made.add(target)
                    target.mkdir()
                elif _is_folder(Path(source)):
                    shutil.copytree(source, target, symlinks=True)
                else:
                    shutil.copy2(source, target, follow_symlinks=False)
    (folder / "mtab").symlink_to("/proc/self/mounts")
    for name, text in (("hostname", f"{HOST_NAME}\n"), ("hosts", HOSTS)):
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(text)
    for name, line in (("passwd", f"{USER}:x:{USER_ID}:{USER_ID}::{HOME}:{shell}"), ("group", f"{USER}:x:{USER_ID}:")):
        known = (folder / name).read_text(errors="surrogateescape").splitlines() if (folder / name).exists() else []
        others = [row for row in known if row.split(":")[0] != USER and row.split(":")[2:3] != [str(USER_ID)]]
        (folder / name).write_text("\n".join([*others, line, ""]), errors="surrogateescape")
    # The worker's umask must not keep the environments' users out. What was copied has the mode that it had.
    for path in made:
        path.chmod(0o755)
    for name in ("hostname", "hosts", "passwd", "group"):
        (folder / name).chmod(0o644)
