"""What sets commands apart from the host is chosen as asked, and holds.

Attempts to escape, which `bubblewrap` must stop; `none` promises to stop few of them.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from app.services_file import ConfigError
from bench.isolation import FORKS, HOARDS, WATCHES, hoarding
from tangram.settings import Settings
from workers.cpu.abstract import EnvironmentSpec, WindowSize
from workers.cpu.cores import CoreMap
from workers.cpu.errors import SessionUnavailable
from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.isolation import OWN, SYSTEM, IsolationChoice, View, view_for
from workers.cpu.process.limits import ProcessLimits
from workers.cpu.process.programs import folders_of_programs
from workers.cpu.process.sandbox import ProcessSandbox
from workers.cpu.process.users import Users, find_users
from workers.cpu.root import as_user
from workers.start import _process_sandbox

from .conftest import EITHER, Shared, below_this, environment_in, make, none_works
from .support import RUN, admit, groups_like, open_one, printed, processes_with, run, until

# -- which kind ---------------------------------------------------------------------------------------------------------


def test_auto_is_bubblewrap_where_that_works(shared: Shared) -> None:
    assert shared("bubblewrap").isolation == shared("auto").isolation


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have a machine without bwrap; give the folder of its programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "bash", "sleep", "true"):
        (folder / name).symlink_to(shutil.which(name) or "")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(os, "defpath", str(folder))
    # Its shell is in a temporary folder.
    monkeypatch.setattr("workers.cpu.process.isolation.OWN", ())
    return folder


@pytest.mark.parametrize("script", ["", f"exec sleep 316.71875{RUN}", "echo ready; exit 0"], ids=["missing", "hangs", "ends"])
def test_without_a_bubblewrap_auto_is_a_view_or_none(tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr("workers.cpu.process.isolation.HELP_LIMIT_S", 0.3)
    if script:
        (programs / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
        (programs / "bwrap").chmod(0o755)
    with closing(ProcessSandbox(tmp_path / "box")) as box:
        assert box.isolation in ("view", "none")
        assert "bubblewrap does not work here" in box.isolation_reason
        assert printed(open_one(box), "echo runs") == "runs\n"
    assert not processes_with(f"316.71875{RUN}")


def test_where_nothing_can_be_set_apart_auto_is_none_and_more_is_refused(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none_works(monkeypatch)
    with closing(ProcessSandbox(tmp_path / "box")) as box:
        assert box.isolation == "none"
        assert "; view does not work here: " in box.isolation_reason
        assert printed(open_one(box), "echo runs") == "runs\n"
    # When bubblewrap is asked for; then it is refused in one line, by the worker too
    with pytest.raises(SessionUnavailable, match="^bubblewrap does not work here: .*$"):
        ProcessSandbox(tmp_path / "box", isolation="bubblewrap")
    with pytest.raises(ConfigError, match="^TANGRAM_ISOLATION=bubblewrap: bubblewrap does not work here"):
        _process_sandbox(tmp_path / "box", CoreMap.of_this_process(), Settings(isolation="bubblewrap"), "fixed")


def test_the_folders_of_programs_are_found_through_links_and_show_nothing_private(tmp_path: Path) -> None:
    # Given a home with a virtual environment of a python that lies elsewhere, programs of its own, and the sandbox's folder
    home, python = tmp_path / "home", tmp_path / "opt" / "python"
    base = home / ".local/state/box"
    for folder in (home / "venv/bin", home / "venv/lib", home / ".local/bin", base, python / "bin", python / "lib"):
        folder.mkdir(parents=True)
    (python / "bin" / "python3.11").touch()
    (home / "venv/bin/python").symlink_to("python3")
    (home / "venv/bin/python3").symlink_to(python / "bin" / "python3.11")
    (home / "venv/pyvenv.cfg").touch()
    entries = [home, home / "venv/bin", home / ".local/bin", base, Path("/usr/bin"), Path("/no/such"), Path("relative")]
    found = folders_of_programs(":".join(map(str, entries)), SYSTEM, [str(base), str(home)], [])
    # Then what programs need is there, and neither the home, nor the sandbox's folder, nor what is there anyhow
    needed = (home / ".local/bin", home / "venv/bin", home / "venv/lib", home / "venv/pyvenv.cfg", python / "bin", python / "lib")
    assert found == tuple(map(str, needed))


def test_no_program_is_shown_below_a_folder_of_the_environments_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own" / "bin").mkdir(parents=True)
    (tmp_path / "box").mkdir()
    monkeypatch.setattr("workers.cpu.process.isolation.OWN", (str(tmp_path / "own"),))
    assert view_for(tmp_path / "box", f"{tmp_path}/own/bin:/usr/bin", "/bin/sh").shown == ()
    # And where there are some at a place that tasks expect, this place is the host's
    assert View(base=tmp_path, shown=("/app/venv/bin", "/tests-of-others")).places == ("/logs", "/solution", "/tests")


# -- attempts to escape ---------------------------------------------------------------------------------------------------


def test_of_homes_at_most_folders_of_programs_are_there(inside: ProcessEnvironment) -> None:
    here = Path.home()
    listed = set(run(inside, f"ls -A {here}").stdout.decode().split())
    shown = {entry for entry in os.environ["PATH"].split(":") if entry.startswith(f"{here}/")}
    assert listed <= {Path(entry).relative_to(here).parts[0] for entry in shown}


def test_of_etc_only_what_programs_need_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an /etc with keys, passwords and settings that may hold some, among files that programs need
    etc = tmp_path / "etc"
    shutil.copytree("/etc/alternatives", etc / "alternatives", symlinks=True)
    for name in ("ssl/private/server.key", "ssl/certs/ca.pem", "ssh/ssh_host_ed25519_key"):
        (etc / name).parent.mkdir(parents=True, exist_ok=True)
    secret = ("krb5.keytab", "shadow", "ssl/private/server.key", "ssh/ssh_host_ed25519_key", "environment", "pip.conf", "of-a-program")
    public = ("passwd", "ld.so.cache", "nsswitch.conf", "ssl/certs/ca.pem", "os-release")
    for name in (*secret, *public):
        (etc / name).write_bytes(Path(f"/etc/{name}").read_bytes() if name == "ld.so.cache" else f"of-{name}\n".encode())
    monkeypatch.setattr("workers.cpu.process.isolation.ETC", str(etc))
    with closing(make(tmp_path / "box", "bubblewrap")) as box:
        env = open_one(box)
        # When a command looks; then it finds what is needed, and none of the others
        assert printed(env, "grep of- /etc/passwd /etc/ssl/certs/ca.pem -h") == "of-passwd\nof-ssl/certs/ca.pem\n"
        found = set(printed(env, "cd /etc; find . -path ./alternatives -prune -o -type f -print").split())
        assert found == {f"./{name}" for name in (*public, "group", "hosts", "hostname")}


def test_control_files_and_the_systems_own_are_out_of_reach(inside: ProcessEnvironment) -> None:
    control = 'C=$(dirname /run/tangram/*/go); test -e "$C"/go || exit 99; '
    for command in (
        "test -e /sys/kernel || test -e /sys/fs/cgroup",
        "umount /etc/hosts",
        'rm -f "$C"/go || rm -f "$C"/text',
        'ln -sf /etc/passwd "$C"/text',
        'echo wrong > "$C"/text',
    ):
        outcome = run(inside, f"({control}{command})")
        assert outcome.status == "succeeded" and outcome.exit_code not in (0, 99), (command, outcome)


def test_the_shell_cannot_be_traced_before_it_is_inside(inside: ProcessEnvironment) -> None:
    # Given a session whose shell ends and starts again and again, and a watcher inside that looks at every process
    watch = (
        "import os\nopen('begun', 'w')\nwhile True:\n  for p in os.listdir('/proc'):\n    try:\n"
        "      for fd in os.listdir(f'/proc/{p}/fd'):\n"
        "        if os.readlink(f'/proc/{p}/fd/{fd}').startswith(('user:', 'mnt:', 'pid:')): print('found', file=open('found', 'a'))\n"
        "    except OSError: pass\n"
    )
    inside.write_file("watch.py", watch.encode())
    printed(inside, "python3 watch.py >/dev/null 2>&1 & until [ -e begun ]; do sleep 0.01; done")
    for _ in range(10):
        assert run(inside, "exit 3").exit_code == 3
    # Then the watcher runs, and has not come by a descriptor of the host's namespaces
    assert printed(inside, "pgrep -f watch.py | wc -l; ls").split() == ["1", "begun", "watch.py"]


def test_a_fork_bomb_stays_within_the_processes_of_its_environment(tmp_path: Path) -> None:
    box = make(tmp_path / "box", "bubblewrap", ProcessLimits(processes=20))
    if os.geteuid() == 0 and box._users is None:
        pytest.skip("a worker that is root has to choose users to bound processes")
    bombed, other = open_one(box, "bombed"), open_one(box, "other")
    printed(other, ":")
    before = len(below_this())
    outcome = run(bombed, f"python3 -S -c '{FORKS}' 100")
    assert 5 < int(outcome.stdout) <= 20, outcome
    assert printed(other, "python3 -S -c 'print(6 * 7)'") == "42\n"
    bombed.close()
    assert until(lambda: len(below_this()) <= before)
    box.close()


@pytest.mark.parametrize("isolation", ["bubblewrap", "view"])
def test_what_the_kernel_counts_by_user_is_not_taken_from_other_environments(shared: Shared, isolation: IsolationChoice) -> None:
    if shared(isolation)._users is None:
        pytest.skip("a worker that may not choose users has one for all environments")
    for hostile in environment_in(shared(isolation)):
        for other in environment_in(shared(isolation)):
            hostile.write_file("hoards.py", HOARDS.encode())
            printed(hostile, hoarding(most=1000))
            assert hostile.read_file("taken") == b"64\n"
            assert run(other, f"python3 -c '{WATCHES}'").exit_code == 0
            assert admit(other, "tty", cores=(0,), terminal=WindowSize(rows=24, columns=80)).wait().stdout == b"/dev/pts/0\r\n"


def refused(*_: object) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("lacks", ["ids", "files"])
def test_a_worker_that_may_not_choose_users_has_one_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    if find_users() is None:
        pytest.skip("it takes root to choose users")
    # Given a kernel that refuses the ids that the worker chooses, or a file system that refuses that files are given away
    if lacks == "ids":
        monkeypatch.setattr(Users, "take", lambda users: 2**32 - 1)
    else:
        monkeypatch.setattr(os, "chown", refused)
    with closing(make(tmp_path / "box", "bubblewrap")) as box:
        assert (box.isolation, box._users) == ("bubblewrap", None)
        assert re.match("environments are of one user, since .*; a trial of it worked", box.isolation_reason)
        assert printed(open_one(box), "id -u; echo text >file; cat file") == "1000\ntext\n"


@pytest.mark.parametrize("isolation", ["bubblewrap", "view"])
def test_a_root_that_may_choose_neither_users_nor_groups_sets_apart(isolation: IsolationChoice, tmp_path: Path) -> None:
    make(tmp_path / "root", isolation).close()
    # Given a worker that is root in a user namespace of one user, as in rootless containers; then a trial works there
    program = f"""
from pathlib import Path
from workers.cpu.process.sandbox import ProcessSandbox
ProcessSandbox(Path({str(tmp_path / "box")!r}), isolation={isolation!r}).close()
"""
    if subprocess.run(["unshare", "--map-root-user", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("user namespaces cannot be made here")
    done = subprocess.run(["unshare", "--map-root-user", sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.stderr == ""


def test_files_are_opened_without_the_groups_of_the_worker(tmp_path: Path) -> None:
    # Given a file for root's group, and a worker that is root with that group
    if find_users() is None:
        pytest.skip("only a worker that is root opens files as somebody else")
    os.chmod(tmp_path, 0o755)
    (tmp_path / "file").touch()
    os.chmod(tmp_path / "file", 0o640)
    before, seen = os.getgroups(), {}

    def look() -> None:
        with as_user(12345, 12345):
            seen["inside"] = os.getgroups()
            with pytest.raises(PermissionError):
                (tmp_path / "file").read_bytes()
        seen["after"] = os.getgroups()

    os.setgroups([0, 4])
    try:
        # When a thread opens it as somebody else; then it is refused, and no group is lost
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert seen == {"inside": [], "after": [0, 4]}
    finally:
        os.setgroups(before)


@pytest.mark.parametrize("isolation", ["bubblewrap", "view"])
def test_files_of_commands_and_of_file_calls_are_of_one_user(shared: Shared, isolation: IsolationChoice) -> None:
    for env in environment_in(shared(isolation)):
        env.write_file("a/b", b"old")
        env.write_file("/tmp/a/b", b"old")
        owned = printed(env, "id -u; id -g; stat -c '%u %g' . a a/b /tmp/a /tmp/a/b; umask 077; echo new >a/b; rm -r /tmp/a; echo c >c")
        assert owned.split("\n") == ["1000", "1000", *["1000 1000"] * 5, ""]
        assert (env.read_file("a/b"), env.read_file("c")) == (b"new\n", b"c\n")


@pytest.mark.parametrize("isolation", ["bubblewrap", "view"])
def test_limits_hold_for_all_that_a_program_can_trace_and_whatever_it_lowers(shared: Shared, isolation: IsolationChoice) -> None:
    # Given what an environment's programs are held to, but for the number in the name of a session's group
    def held(process: str) -> str:
        looks = f"grep -e processes -e files /proc/{process}/limits; cat /proc/{process}/oom_score_adj /proc/{process}/cgroup"
        return re.sub(r"-\d+$", "", printed(env, looks), flags=re.MULTILINE)

    for env in environment_in(shared(isolation)):
        wanted = held("self")
        # Then the two processes that hold its namespaces are held to the same
        assert held("1") == held("2") == wanted
        # When a program leaves less and less descriptors to its supervisor, and ends the shell; then the next shell is held as before
        for count in (12, *range(8, 0, -1)):
            lowers = f"prlimit --pid $PPID --nofile={count}:{count}; sleep 309.5{RUN} >/dev/null 2>&1 & kill -9 $$"
            assert run(env, lowers).exit_code == 137, count
            assert held("self") == wanted, count
            assert not processes_with(f"309.5{RUN}\0"), count


@pytest.mark.parametrize("isolation", EITHER)
def test_the_worker_removes_the_groups_that_it_made(tmp_path: Path, isolation: IsolationChoice) -> None:
    box = make(tmp_path / "box", isolation)
    names = {Path(prefix).name for prefix in (box._groups.cpu, box._groups.memory) if prefix}

    def groups() -> list[Path]:
        return [path for name in names for path in groups_like(f"{name}*")]

    environment = box.open(EnvironmentSpec(id=f"gone-{RUN}", memory_mb=64))
    printed(environment, f"sleep 311.5{RUN} >/dev/null 2>&1 &")
    if not groups():
        pytest.skip("no control group can be made here, or none is needed")
    # When the environment is closed; then nothing runs, and its own group is gone; with the sandbox all of them are
    environment.close()
    assert not groups_like(f"tangram-*-gone-{RUN}") and not processes_with(f"sleep\x00311.5{RUN}\x00")
    box.close()
    assert groups() == []


@pytest.mark.skipif(sys.prefix.startswith(OWN), reason="this interpreter is below a folder of the environment's own")
def test_a_virtual_environment_on_the_path_runs(tmp_path: Path) -> None:
    with closing(make(tmp_path / "box", "bubblewrap", search_path=f"{Path(sys.executable).parent}:/usr/bin:/bin")) as box:
        assert printed(open_one(box), "python -c 'import pytest, sys; print(sys.prefix)'") == f"{sys.prefix}\n"
