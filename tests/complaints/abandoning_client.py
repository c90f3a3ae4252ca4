"""A client that opens a sandbox, leaves a program running in it, says which one, and then waits to be killed.

Arguments: `e2b` or `native`, the address of the gateway, the token, the seconds of the lease.
"""

from __future__ import annotations

import sys
import time


def main(shape: str, url: str, token: str, lease_s: int) -> None:
    """Open a sandbox and do nothing more."""
    if shape == "e2b":
        import e2b

        sandbox = e2b.Sandbox.create(timeout=lease_s, api_key=token, api_url=url, sandbox_url=url)
        running = sandbox.commands.run("sleep 300", background=True, timeout=0)
        print(sandbox.sandbox_id, running.pid, flush=True)
    else:
        import httpx

        http = httpx.Client(base_url=url, headers={"X-API-Key": token}, timeout=60)
        opened = http.post("/api/v1/environments", json={"lease_s": lease_s}).json()["id"]
        print(opened, 0, flush=True)
        http.post(f"/api/v1/environments/{opened}/exec", json={"command": "sleep 300"}, timeout=None)
    time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
