"""The table of languages of `/run_code`: those of `languages.toml` and those of a file of the user's."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from tangram.errors import TangramError, first_problem

_OURS = Path(__file__).with_name("languages.toml")


class LanguagesFileError(TangramError):
    """Raised when a file of languages cannot be used; the message is one line for a person."""


class Language(BaseModel):
    """How code of a language is run; the fields are those of `languages.toml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str = Field(min_length=1)
    run: str = Field(min_length=1)
    compile: str | None = Field(None, min_length=1)
    tool: str = Field(min_length=1)
    head: str = ""
    image: str | None = None

    @field_validator("file")
    @classmethod
    def _stays_inside(cls, file: str) -> str:
        if not is_inside(file):
            raise ValueError("must be a relative path without `..`")
        return file

    def source(self, code: str) -> str:
        """Return what is put into the file."""
        return code if not self.head or self.head.strip() in code else self.head + code


_TABLE = TypeAdapter(dict[str, Language])


def read_languages(path: Path | None) -> Mapping[str, Language]:
    """Return the languages that the gateway comes with, and those of the file `path`.

    Raises `LanguagesFileError` when the file cannot be read, or is no table of languages.
    """
    table = _read(_OURS)
    return table if path is None else {**table, **_read(path)}


def is_inside(path: str) -> bool:
    """Say whether a path of a file leads into the work folder and not out of it."""
    parts = PurePosixPath(path)
    return bool(parts.name) and not parts.is_absolute() and ".." not in parts.parts and "\0" not in path


def _read(path: Path) -> dict[str, Language]:
    try:
        return _TABLE.validate_python(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise LanguagesFileError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LanguagesFileError(f"{path} is no TOML: {error}") from None
    except ValidationError as error:
        raise LanguagesFileError(f"{path}: {first_problem(error)}") from None
