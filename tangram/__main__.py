"""The command `tangram`: hands over to the server's command line where the server is installed."""

from __future__ import annotations

import gc
import os
import sys
from importlib.util import find_spec

SERVER = {"app": "cli", "scheduler": "core", "workers": "cpu"}
"""The server's packages, and a folder that each has. Their names are common, and another project may have them, too."""


def main() -> None:
    """Run the command line, or say in one line what keeps it from running."""
    if problem := _problem():
        print(f"tangram: {problem}", file=sys.stderr)
        raise SystemExit(2)
    try:
        # Nothing of it is garbage yet.
        gc.disable()
        from app.cli import main as run

        gc.enable()
        run()
    except KeyboardInterrupt:  # before the command line could handle it
        print("tangram: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def _problem() -> str:
    """Return why the server's packages cannot be imported, nothing where they can. None is imported: it may be another project's."""
    for name, folder in SERVER.items():
        spec = find_spec(name)
        if spec is not None and any(os.path.isdir(os.path.join(place, folder)) for place in spec.submodule_search_locations or ()):
            continue
        if spec is None or not _server_is_installed():
            return "only the client is installed here; the server comes with `pip install arl-tangram-server`"
        where = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
        return f"{where} hides the server's package `{name}`: start in another folder, or take that one from PYTHONPATH"
    return ""


def _server_is_installed() -> bool:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        distribution("arl-tangram-server")
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
