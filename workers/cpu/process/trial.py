"""Which means of holding the background works here: each is tried on a child, which is sent there and taken back."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

from workers.cpu import control_files, weight
from workers.cpu.process.background import LOW, MEANS, ORDINARY
from workers.cpu.process.groups import Groups, remove_folder
from workers.cpu.weight import Means

AUTOGROUPS = "/proc/sys/kernel/sched_autogroup_enabled"


def find_means(groups: Groups) -> Means:
    """Return the best means that works here; a control group is tried where `groups` has one for `cpu`."""
    return next(means for means in MEANS if works(means, groups))


def works(means: Means, groups: Groups) -> bool:
    """Return whether this process can hold processes in the background by these means."""
    if means == "affinity":
        return True
    if means == "autogroup":
        return _succeeds(_try_autogroup)
    if groups.cpu is None:
        return False
    folder = f"{groups.cpu}-trial"
    try:
        return _succeeds(lambda child: _try_group(folder, child))
    finally:
        remove_folder(folder)


def _succeeds(trial: Callable[[int], None]) -> bool:
    with subprocess.Popen(["/bin/sh", "-c", "read -r line"], stdin=subprocess.PIPE, start_new_session=True, env={}) as child:
        try:
            trial(child.pid)
        except OSError:
            return False
        finally:
            child.communicate()
    return True


def _try_group(folder: str, child: int) -> None:
    os.makedirs(folder, exist_ok=True)
    control_files.write(f"{folder}/cgroup.procs", str(child))
    weight.set_background(folder)
    weight.set_foreground(folder)


def _try_autogroup(child: int) -> None:
    # Without CAP_SYS_ADMIN the kernel takes one such write in a tenth of a second, over all processes: the second fails.
    for nice in (LOW, ORDINARY) if _has_autogroups() else ():
        control_files.write(f"/proc/{child}/autogroup", nice)
    for policy in (os.SCHED_IDLE, os.SCHED_OTHER):
        os.sched_setscheduler(child, policy, os.sched_param(0))


def _has_autogroups() -> bool:
    try:
        with open(AUTOGROUPS, encoding="ascii") as file:
            return file.read().strip() == "1"
    except OSError:
        return False
