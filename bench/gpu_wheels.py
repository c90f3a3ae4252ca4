"""Print what the checks of a GPU need besides torch, a requirement a line, as `pyproject.toml` has it."""

from __future__ import annotations

import tomllib
from pathlib import Path

EXTRAS = ("server", "gpu")
LEFT_OUT = ("torch", "flower")
"""The machine with the GPU has a torch that fits its driver, and the checks show nothing in a browser."""


def main() -> None:
    """Run `python -m bench.gpu_wheels`."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(one for extra in EXTRAS for one in project["optional-dependencies"][extra])]
    print("\n".join(one for one in wanted if not one.startswith(LEFT_OUT)))


if __name__ == "__main__":
    main()
