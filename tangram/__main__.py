"""The command `tangram`: hands over to the server's command line where the server is installed."""

from __future__ import annotations

import gc
import importlib.util
import sys


def main() -> None:
    """Run the command line, or say in one line what is missing for it."""
    if importlib.util.find_spec("app.cli") is None:
        print("tangram: only the client is installed here; the command line comes with the server's source tree", file=sys.stderr)
        raise SystemExit(2)
    # Nothing of it is garbage yet.
    gc.disable()
    from app.cli import main as run

    gc.enable()
    run()


if __name__ == "__main__":
    main()
