"""Which code a text in Markdown gives as its solution. It needs `markdown-it-py` (the extra `verl`)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from markdown_it import MarkdownIt

# Blocks of HTML are left out: models put tags such as `<answer>` around fences. So are indented blocks, which are no code here. Where
# there are some, fences are indented by three blanks at most: others, as in texts in the code, end no block.
_RULES = ["fence", "list", "blockquote"]
_PARSERS = [MarkdownIt("zero").enable(_RULES), MarkdownIt("zero").enable([*_RULES, "code"])]
for _parser in _PARSERS:
    _parser.core.ruler.disable("inline")

MOST_PARSED = 200_000
"""Characters up to which it is looked whether code parses, which takes a second for some more: longer code is taken as it is."""

_LANGUAGE = re.compile(r"[{.\s]*([\w+#-]+)")
_NAMES = {
    ".py": ("python", "python3", "py"),
    ".js": ("javascript", "js"),
    ".ts": ("typescript", "ts"),
    ".sh": ("bash", "sh", "shell"),
    ".cpp": ("cpp", "c++", "cc"),
    ".rs": ("rust", "rs"),
    ".go": ("go", "golang"),
}


def fences(text: str, *, indented: bool = True) -> list[tuple[str, str]]:
    """Return language, in lower case, and content of each fenced block of a text, as CommonMark has them.

    Fences that are `indented` like code are fences all the same. Blocks without content are left out.
    """
    tokens = [token for token in _PARSERS[not indented].parse(text) if token.type == "fence" and token.content.strip()]
    return [(found[1].lower() if (found := _LANGUAGE.match(token.info)) else "", token.content) for token in tokens]


def solution_of(text: str, path: str, pattern: str | None = None) -> str:
    """Return the code in a text that is to be the file `path`.

    That is the first group of the last match of `pattern`, or all of it where that has no group, where one is given and matches. Else it
    is the last block that names the language of `path`, else the largest block that parses, where the language is Python, else the largest
    one, else the whole text. A block of Python that does not parse is read in other ways: its fence may follow or end a line of text, or be
    part of its code.
    """
    if pattern is not None and (matches := list(re.finditer(pattern, text, re.DOTALL))):
        found = matches[-1]
        return (found[1] if found.re.groups else found[0]) or ""
    suffix = PurePosixPath(path).suffix
    names, is_python = _NAMES.get(suffix, (suffix[1:],)), suffix == ".py"
    readings = [fences(text), fences(text, indented=False)]
    named = [content for blocks in readings for content in [each for language, each in blocks if language in names][-1:]]
    if named := [*named, *_behind_last_fence(text, names)]:
        return next((content for content in named if not is_python or _parses(content)), named[0])
    contents = [content for blocks in readings for _, content in blocks]
    parsed = [content for content in contents if is_python and _parses(content)]
    return max(parsed or contents, key=len, default=text)


def _behind_last_fence(text: str, names: Iterable[str]) -> list[str]:
    """Return what is between the last fence that names a language, wherever in a line, and the next one or the last one."""
    lines = text.replace("\r\n", "\n")
    languages = "|".join(map(re.escape, names))
    opened = list(re.finditer(rf"(?<![`~])(`{{3,}}+|~{{3,}}+)[ \t{{.]*(?:{languages})(?![\w+#-])[^\n`]*\n", lines, re.IGNORECASE))
    if not opened:
        return []
    behind, fence = lines[opened[-1].end() :], opened[-1][1]
    return [content for content in (behind.partition(fence)[0], behind.rpartition(fence)[0]) if content.strip()]


def _parses(code: str) -> bool:
    if len(code) > MOST_PARSED:
        return True
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
