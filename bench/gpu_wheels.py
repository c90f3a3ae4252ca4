"""Print what the checks of a GPU need besides torch, a requirement a line, as client and server have it in their `pyproject.toml`."""

from __future__ import annotations

import tomllib
from pathlib import Path

LEFT_OUT = ("torch", "flower", "arl-tangram")
"""The machine with the GPU has a torch that fits its driver and this tree, and the checks show nothing in a browser."""


def main() -> None:
    """Run `python -m bench.gpu_wheels`."""
    root = Path(__file__).parents[1]
    files = (root / "tangram" / "pyproject.toml", root / "pyproject.toml")
    client, server = (tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files)
    wanted = [*client["dependencies"], *server["dependencies"], *server["optional-dependencies"]["gpu"]]
    print("\n".join(one for one in wanted if not one.startswith(LEFT_OUT)))


if __name__ == "__main__":
    main()
