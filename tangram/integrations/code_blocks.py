"""Which code a text in Markdown gives as its solution. It needs `markdown-it-py` (the extra `verl`)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from itertools import islice
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
MOST_TRIED = 100
"""Ways to read fences as parts of code that are tried."""

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


def fences(text: str, *, indented: bool = True) -> list[tuple[str, str, int]]:
    """Return language, in lower case, content and last line of each fenced block of a text, as CommonMark has them.

    Fences that are `indented` like code are fences all the same. Blocks without content are left out.
    """
    tokens = [token for token in _PARSERS[not indented].parse(text) if token.type == "fence" and token.content.strip()]
    return [(found[1].lower() if (found := _LANGUAGE.match(each.info)) else "", each.content, (each.map or [0, 0])[1]) for each in tokens]


def solution_of(text: str, path: str, pattern: str | None = None) -> str:
    """Return the solution that an answer of a model has for the file `path`.

    That is the first group of the last match of `pattern`, or all of it where that has no group, where one is given and matches. Else it
    is the last block that names the language of `path`, else the largest block that parses, where the language is Python, else the largest
    one, else the whole text. The fence of a block may follow or end a line of text. Fences in texts of Python code are part of it.
    """
    if pattern is not None and (matches := list(re.finditer(pattern, text, re.DOTALL))):
        found = matches[-1]
        return (found[1] if found.re.groups else found[0]) or ""
    suffix, lines = PurePosixPath(path).suffix, re.sub("\r\n?", "\n", text)
    names, is_python = _NAMES.get(suffix, (suffix[1:],)), suffix == ".py"
    blocks = fences(lines)
    named = [(content, end) for language, content, end in blocks if language in names][-1:]
    if openings := _openings(lines, names, is_named=bool(named)):
        fence, start, behind = openings[-1]
        if is_python and (whole := _whole(lines, openings)):
            return whole
        last = lines.count("\n", 0, start)
        named = [*(block for block in named if block[1] > last), (lines[behind:].partition(fence)[0], last)]
    if contents := [content for content, _ in named]:
        return next((content for content in contents if not is_python or _parses(content)), contents[0])
    contents = [content for _, content, _ in blocks + fences(lines, indented=False)]
    parsed = [content for content in contents if is_python and _parses(content)]
    return max(parsed or contents, key=len, default=text)


def _openings(lines: str, names: Iterable[str], *, is_named: bool) -> list[tuple[str, int, int]]:
    """Return fence, start and end of all that opens a block of a language, wherever in a line; no mere mentions, and no empty blocks."""
    languages, openings = "|".join(map(re.escape, names)), []
    for each in re.finditer(rf"(?<![`~])(`{{3,}}+|~{{3,}}+)[ \t{{.]*(?:{languages})(?![\w+#-])([^\n`]*)\n", lines, re.IGNORECASE):
        closed, is_in_line = lines.find(each[1], each.end()), lines[lines.rfind("\n", 0, each.start()) + 1 : each.start()].strip()
        is_mentioned = is_named and is_in_line and (closed < 0 or each[2].strip(" \t}"))
        if not is_mentioned and lines[each.end() : None if closed < 0 else closed].strip():
            openings.append((each[1], each.start(), each.end()))
    return openings


def _whole(lines: str, openings: Sequence[tuple[str, int, int]]) -> str:
    """Return the code that parses and has the last opening in it, or other fences, as parts of its texts; empty where there is none."""
    last = openings[-1][2]
    spans = (
        (behind, end.start())
        for fence, _, behind in openings
        if _is_in_text(lines[behind : lines.find(fence, behind)])
        for end in re.compile(fence).finditer(lines, last)
    )
    codes = (lines[start:end] for start, end in islice(spans, MOST_TRIED) if end - start <= MOST_PARSED)
    return next(filter(_parses, codes), "")


def _is_in_text(code: str) -> bool:
    return any(code.count(quotes) % 2 for quotes in ('"""', "'''"))


def _parses(code: str) -> bool:
    if len(code) > MOST_PARSED:
        return True
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
