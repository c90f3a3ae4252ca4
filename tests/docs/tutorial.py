"""The tutorial as a script: its blocks in order, in one shell, as a reader would type them. Those marked as not for a test are left out."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from tests.docs.snippets import ROOT, Snippet, snippets

PAGE = ROOT / "docs" / "tutorial.md"
INSTALL = "make install"
PORT = "8090"


def script(port: int) -> str:
    """Return the tutorial as one Bash script, without the line that installs.

    The live page gets another port than in the tutorial, since others may work on this machine.
    """
    lines = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT"]
    for snippet in (one for one in snippets(PAGE) if not one.excuse):
        lines += [f"echo '== {snippet} at '$SECONDS' s'", *_typed(snippet)]
    typed = [line for text in lines for line in text.splitlines() if not line.startswith(INSTALL)]
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
