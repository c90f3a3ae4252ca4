"""An image with python3 and make, from Debian's packages: `debootstrap` makes a folder, `docker import` an image of it.

`python -m bench.debian_image` makes it by hand; it takes about a minute and is kept under `NAME`.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

NAME = "tangram-debian:bookworm"
PACKAGES = ("python3", "make")
_PATH = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def make() -> str:
    """Make the image unless it is here, and return its name."""
    if subprocess.run(["docker", "image", "inspect", NAME], capture_output=True).returncode != 0:
        with tempfile.TemporaryDirectory(prefix="tangram-debian-") as folder:
            root = str(Path(folder) / "root")
            subprocess.run(["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", "bookworm", root], check=True)
            packed = subprocess.Popen(["tar", "-C", root, "--exclude=./var/cache/apt", "-c", "."], stdout=subprocess.PIPE)
            subprocess.run(["docker", "import", "--change", _PATH, "-", NAME], stdin=packed.stdout, check=True)
            packed.wait()
    return NAME


if __name__ == "__main__":
    print(make())
