"""Modules that take seconds to import, and may be missing: imported by the first test that uses them, and by no other process of tests."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest


class Lazily:
    """A module that is imported when something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_mock_name":  # pytest asks for these while it looks for tests and fixtures
            raise AttributeError(name)
        return getattr(import_module(self._name), name)


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip tests where one of these is not installed."""
    missing = [name for name in names if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
