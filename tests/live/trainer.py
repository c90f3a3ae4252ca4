"""A trainer in a process of its own: it opens environments, leaves a command running, and obeys its standard input until it is killed.

Arguments: the job. It prints the ids of its environment, of a detached one and of the command, then answers each line with what became
of running that line in its environment.
"""

from __future__ import annotations

import sys

from tangram import ActionError, Client


def main(job: str) -> None:
    """Run until standard input ends; a client whose process dies is not closed."""
    client = Client(job=job)
    env = client.open(trajectory="t")
    detached = client.open(trajectory="t", detached=True)
    handle = env.submit("sleep 317.40625", session="other")
    print(env.id, detached.id, handle.id, flush=True)
    for line in sys.stdin:
        try:
            print(env.exec(line).stdout.strip(), flush=True)
        except ActionError as error:
            print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
