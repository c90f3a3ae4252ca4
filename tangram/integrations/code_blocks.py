"""Which code a text in Markdown gives as its solution. It needs `markdown-it-py` (the extra `verl`)."""

from __future__ import annotations

import ast
import re
from pathlib import PurePosixPath

from markdown_it import MarkdownIt

# Blocks of HTML are left out: models put tags such as `<answer>` around fences. So are indented blocks, which are no code here.
_PARSER = MarkdownIt("zero").enable(["fence", "list", "blockquote"])
_PARSER.core.ruler.disable("inline")

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


def fences(text: str) -> list[tuple[str, str]]:
    """Return language, in lower case, and content of each fenced block of a text, as CommonMark has them."""
    tokens = [token for token in _PARSER.parse(text) if token.type == "fence"]
    return [(found[1].lower() if (found := _LANGUAGE.match(token.info)) else "", token.content) for token in tokens]


def solution_of(text: str, path: str, pattern: str | None = None) -> str:
    """Return the code in a text that is to be the file `path`.

    That is the first group of the last match of `pattern`, or all of it where that has no group, where one is given and matches. Else it
    is the last block that names the language of `path`, else the largest block that parses, where the language is Python, else the largest
    one, else the whole text.
    """
    if pattern is not None and (matches := list(re.finditer(pattern, text, re.DOTALL))):
        found = matches[-1]
        return (found[1] if found.re.groups else found[0]) or ""
    suffix = PurePosixPath(path).suffix
    names, blocks = _NAMES.get(suffix, (suffix[1:],)), fences(text)
    if named := [content for language, content in blocks if language in names]:
        return named[-1]
    contents = [content for _, content in blocks]
    parsed = [content for content in contents if suffix == ".py" and _parses(content)]
    return max(parsed or contents, key=len, default=text)


def _parses(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
