"""What a program learns about its degree of parallelism.

Pure values only. The names are those that common runtimes read by themselves; a value that the caller gave wins.
"""

from __future__ import annotations

from collections.abc import Mapping

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
MOST_VARIABLE = "TANGRAM_DOP_MAX"
"""The variable that names the DoP which a program may grow to while it runs, as its cores change. A pool of processes
may well be that large from the start: it is held to the cores that there are. A pool of threads that wait for each other
is better off with the DoP of its start, which is why the other variables name that one."""

COUNT_VARIABLES = ("TANGRAM_DOP", *THREAD_VARIABLES, "PYTEST_XDIST_AUTO_NUM_WORKERS")


def dop_variables(dop: int) -> dict[str, str]:
    """Return the environment variables that tell a program to use `dop` cores.

    Raises:
        ValueError: `dop` is below 1.

    """
    if dop < 1:
        raise ValueError(f"dop must be at least 1, not {dop}")
    variables = dict.fromkeys(COUNT_VARIABLES, str(dop))
    variables["MAKEFLAGS"] = f"-j{dop}"
    return variables


def with_dop(dop: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` and, for the names that are not among them, what `dop_variables` says."""
    return {**dop_variables(dop), **variables}
