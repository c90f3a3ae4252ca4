"""`tarfile` with the filters of what is unpacked, which Python has since 3.11.4. Debian 12 has 3.11.2, for which a package brings them."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING or sys.version_info >= (3, 11, 4):
    import tarfile
else:
    from backports import tarfile

__all__ = ["tarfile"]
