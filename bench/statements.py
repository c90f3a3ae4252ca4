"""The scheduler as `tangram scheduler` starts it, which counts its SQL statements for `bench.overhead`.

`python -m bench.statements FILE` writes the number so far into the first eight bytes of FILE. A statement for many rows counts once.
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

from sqlalchemy import Engine, event

from app.cli.main import main


def count_into(path: Path) -> None:
    """Count the statements of all engines of this process from now on."""
    with path.open("w+b") as file:
        file.truncate(8)
        counter = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")

    @event.listens_for(Engine, "before_cursor_execute")
    def count(*_: object) -> None:
        counter[0] += 1


if __name__ == "__main__":
    count_into(Path(sys.argv.pop()))
    sys.argv.append("scheduler")
    main()
