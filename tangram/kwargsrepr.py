"""What tools of Celery, such as Flower, show of an action: its owner, its work and its grant.

Workers tell these tools the header `kwargsrepr` of a message, a text. The client writes it, the scheduler adds the grant. Only arguments
that are short and no place for secrets are shown: never input, contents of files, variables, addresses or headers of requests. Of a request
to a server of an environment the path is shown, without its query.
"""

from __future__ import annotations

from typing import Final

from tangram.action import Action

SHOWN: Final = ("command", "path", "service", "quota", "method", "image", "environment")
LONGEST: Final = 120
"""Characters of a value that are shown."""


def kwargsrepr(action: Action) -> str:
    """Return the arguments of an action as these tools are to show them, in the form of a Python dictionary."""
    words = {"job": action.job, "trajectory": action.trajectory}
    words |= {name: value for name in SHOWN if isinstance(value := action.arguments.get(name), str)}
    if action.kind == "cpu.request" and isinstance(path := words.pop("path", None), str):
        words["request"] = f"{words.pop('method', '')} :{action.arguments.get('port')}{path.partition('?')[0]}"
    return "{" + ", ".join(f"{name!r}: {_short(value)!r}" for name, value in words.items() if value) + "}"


def with_grant(text: object, node: str, units: int) -> object:
    """Return what is shown of an action, together with its node and its degree of parallelism; what is not ours stays as it is."""
    if not isinstance(text, str) or not (text.startswith("{") and text.endswith("}")):
        return text
    return f"{text[:-1]}{', ' if len(text) > 2 else ''}'dop': {units}, 'node': {node!r}}}"


def _short(value: str) -> str:
    return value if len(value) <= LONGEST else f"{value[: LONGEST - 1]}…"
