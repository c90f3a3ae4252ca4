"""What a program learns about its degree of parallelism.

Pure values only. Common runtimes read these variables by themselves. A value that the caller gave wins.
"""

from __future__ import annotations

from collections.abc import Mapping

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
MOST_VARIABLE = "TANGRAM_DOP_MAX"
"""The variable with the DoP to which a program may grow while it runs.

A pool of processes may have this size from the start, since it is held to its cores anyway. Threads that wait for each other
need the DoP of the start, so the other variables have that value."""

COUNT_VARIABLES = ("TANGRAM_DOP", *THREAD_VARIABLES, "PYTEST_XDIST_AUTO_NUM_WORKERS")


def dop_variables(dop: int) -> dict[str, str]:
    """Return the environment variables that tell a program to use `dop` cores, 1 at least."""
    if dop < 1:
        raise ValueError(f"dop must be at least 1, not {dop}")
    variables = dict.fromkeys(COUNT_VARIABLES, str(dop))
    variables["MAKEFLAGS"] = f"-j{dop}"
    return variables


def with_dop(dop: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` and, for the names that are not among them, what `dop_variables` says."""
    return {**dop_variables(dop), **variables}
