"""The tutorial as a script: every block of it, in order, in one shell, as a reader would type it.

    python -m tests.docs.tutorial          # in a fresh clone, with nothing of this environment

clones the project into an empty folder and begins with an empty environment.
"""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from tests.docs.snippets import ROOT, Snippet, snippets

PAGE = ROOT / "docs" / "tutorial.md"
INSTALL = "make install"
PORT = "8090"


def script(*, install: bool, port: int) -> str:
    """Return the tutorial as one Bash script, without the line that installs unless that is wanted.

    The live page gets another port than in the tutorial, since others may work on this machine.
    """
    lines = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT"]
    for snippet in snippets(PAGE):
        lines += [f"echo '== {snippet} at '$SECONDS' s'", *_typed(snippet)]
    typed = [line for text in lines for line in text.splitlines() if install or not line.startswith(INSTALL)]
    return "\n".join(typed).replace(PORT, str(port)) + "\n"


def _typed(snippet: Snippet) -> Iterator[str]:
    """Yield what a reader does with a block: save it, run it, or leave it running in another terminal."""
    if snippet.file:
        yield f"cat >{shlex.quote(snippet.file)} <<'END OF FILE'\n{snippet.code}END OF FILE"
    elif snippet.prints:
        yield f"{snippet.code.strip()} >background.log 2>&1 &"
        yield "background=$!"
        yield f"until grep -qF {shlex.quote(snippet.prints)} background.log; do"
        yield "  kill -0 $background || { cat background.log; exit 1; }; sleep 0.2"
        yield "done"
    else:
        yield snippet.code


def main() -> int:
    """Follow the tutorial in an empty folder."""
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), f"{folder}/project"], check=True)
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8"}
        done = subprocess.run(["bash", "-c", script(install=True, port=port)], cwd=f"{folder}/project", env=env, check=False)
    print(f"{'done' if done.returncode == 0 else 'failed'} after {time.monotonic() - began:.0f} s")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
