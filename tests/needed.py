"""What a test needs that a machine may lack."""

from __future__ import annotations

import os

import pytest


def needed(missing: str) -> None:
    """Skip the test for want of something, or fail it with CI set; nothing where `missing` says nothing."""
    if missing and os.environ.get("CI"):
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)
