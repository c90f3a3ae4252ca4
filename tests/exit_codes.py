"""The exit code of a program that runs in a fork."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable


def exit_code_of(main: Callable[[], None]) -> int:
    """Run a program; return the code with which Python would end, after it has printed what Python would."""
    code = 0
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code
