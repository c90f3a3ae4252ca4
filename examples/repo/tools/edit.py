"""An agent's editor: `python3 tools/edit.py FILE OLD NEW` replaces OLD, which must be in FILE exactly once."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Edit the file named on the command line; exit 1 where OLD is not there exactly once."""
    if len(sys.argv) != 4:
        sys.exit("usage: edit.py FILE OLD NEW")
    path, old, new = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    text = path.read_text()
    if (times := text.count(old)) != 1:
        sys.exit(f"{path}: the text to replace is there {times} times")
    path.write_text(text.replace(old, new))
    print(f"{path}: edited")


if __name__ == "__main__":
    main()
