"""Scripted rollouts: TOML files that say what an agent does, without how long it takes.

What may live here: reading a script and the starting files it names. Running one is `app.replay.recorder`.

A script says what a line of `tangram.trace/1` says, with the same keys, and differs in four points:

| key                    | in a script                                                                    |
|------------------------|--------------------------------------------------------------------------------|
| `schema`               | left out                                                                       |
| `files`                | a folder, relative to the script, whose files the environment starts with      |
| `header`               | a TOML file, relative to the script, with the tables `services` and `quotas`   |
| `work_s`               | left out for `cpu.*` actions: it is measured                                   |

An action says with what it is carried out: `command` for `cpu.exec`, `path` for `cpu.read_file`, `path` and `text` for
`cpu.write_file`, `items` or `sequences` or `prompts` for `gpu.score`, `gpu.logprobs` or `gpu.generate`, `url` for `api.call`.
`exit_code` is the exit code that a command is expected to have, 0 by default.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.replay.trace_lines import SCHEMA, TraceError, read_toml, unreadable
from app.replay.traces import parse_header, parse_trajectory
from scheduler.sim.trace import Kind, Trace, TraceAction, Trajectory

LARGEST_FILES_BYTES = 64 * 2**20
_INPUTS: dict[Kind, tuple[str, ...]] = {
    "cpu.read_file": ("path",),
    "cpu.write_file": ("path", "text"),
    "gpu.score": ("items",),
    "gpu.logprobs": ("sequences",),
    "gpu.generate": ("prompts",),
    "api.call": ("url",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A rollout to be recorded: `trajectory` without times, its starting `files`, and its services and quotas in `header`."""

    path: Path
    trajectory: Trajectory
    header: Trace
    files: Path | None


def read_script(path: str | Path) -> Script:
    """Read a script. Raises `TraceError` when the file cannot be read or says something wrong; one line with file and key."""
    path = Path(path)
    said = read_toml(path)
    header_file = _beside(path, said, "header")
    files = _beside(path, said, "files")
    header = Trace(trajectories=()) if header_file is None else _header(header_file)
    if files is not None and not files.is_dir():
        raise TraceError(f"no folder at {files}", key="files", file=str(path))
    _leave_work_open(said)
    try:
        trajectory = parse_trajectory(_json({**said, "schema": SCHEMA}), header)
        _check_inputs(trajectory)
    except TraceError as error:
        raise error.at(str(path)) from None
    return Script(path=path, trajectory=trajectory, header=header, files=files)


def starting_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Give the files under `folder`, each as its path relative to it and its content, in the order of the paths.

    Left out are hidden files and folders, `__pycache__`, and what is not a plain file. Raises `TraceError` when there is no such folder, a
    file cannot be read, or all of them exceed `LARGEST_FILES_BYTES`.
    """
    if not folder.is_dir():
        raise TraceError("no such folder of starting files", file=str(folder))
    total = 0
    for path in sorted(_plain_files(folder)):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise unreadable(error, str(path)) from None
        total += len(content)
        if total > LARGEST_FILES_BYTES:
            raise TraceError(f"the starting files exceed {LARGEST_FILES_BYTES} bytes", file=str(folder))
        yield path.relative_to(folder).as_posix(), content


def action_text(action: TraceAction, key: str) -> str:
    """Give the text that `action` keeps under `key`, one of the inputs named above. Raises `TraceError` if it has none."""
    text = action.extra.get(key)
    if not isinstance(text, str):
        raise TraceError(f"must be a text for {action.kind}", key=key)
    return text


def _plain_files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        for name in names:
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path


def _beside(path: Path, said: dict[str, object], key: str) -> Path | None:
    value = said.pop(key, None)
    if value is None:
        return None
    if not isinstance(value, str) or not value or "\0" in value:
        raise TraceError("must be a path", key=key, file=str(path))
    return path.parent / value


def _header(path: Path) -> Trace:
    try:
        return parse_header(_json({**read_toml(path), "schema": SCHEMA}))
    except TraceError as error:
        raise error.at(str(path)) from None


def _json(said: dict[str, object]) -> str:
    try:
        return json.dumps(said, allow_nan=False)
    except (TypeError, ValueError):
        # TOML also knows dates, NaN and infinity.
        raise TraceError("holds a date or a number that JSON does not know") from None


def _leave_work_open(said: dict[str, object]) -> None:
    steps = said.get("steps")
    for step in steps if isinstance(steps, list) else []:
        actions = [step.get("action"), *(step.get("actions") or [])] if isinstance(step, dict) else []
        for action in actions:
            if isinstance(action, dict) and str(action.get("kind")).startswith("cpu."):
                action.setdefault("work_s", 0.0)


def _check_inputs(trajectory: Trajectory) -> None:
    for index, step in enumerate(trajectory.steps):
        for place, action in enumerate(step.actions):
            key = f"steps[{index}].action" + (f"s[{place}]" if len(step.actions) > 1 else "")
            if action.kind == "cpu.request":
                raise TraceError("cpu.request cannot be recorded: let a command of the script ask its server", key=f"{key}.kind")
            if action.kind == "cpu.exec" and action.command is None:
                raise TraceError("is missing", key=f"{key}.command")
            for needed in _INPUTS.get(action.kind, ()):
                if needed not in action.extra:
                    raise TraceError("is missing", key=f"{key}.{needed}")
                if action.kind.startswith("cpu."):
                    _text_or_refuse(action, needed, key)


def _text_or_refuse(action: TraceAction, needed: str, key: str) -> None:
    try:
        action_text(action, needed)
    except TraceError as error:
        raise error.inside(key) from None
