"""Which code of a model's answer is its solution: fences as CommonMark has them."""

from __future__ import annotations

import pytest

from tangram.integrations.code_blocks import fences, solution_of

RIGHT, OTHER = "def add(a, b):\n    return a + b\n", "print(1)\n"

FENCES = {
    "plain": f"It is so:\n```python\n{RIGHT}```\n",
    "attributes": f'```python title="solution.py" {{1,2}}\n{RIGHT}```',
    "braces": f"``` {{.python .numberLines}}\n{RIGHT}```",
    "file name": f"```python:solution.py\n{RIGHT}```",
    "blanks": f"```  python   \n{RIGHT}```   \n",
    "CRLF": f"```python\n{RIGHT}```\n".replace("\n", "\r\n"),
    "indented": f"   ```python\n   {RIGHT.replace(chr(10) + ' ', chr(10) + '    ')}   ```",
    "in a list": "1. So:\n\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n",
    "in a quote": "> ```python\n> def add(a, b):\n>     return a + b\n> ```\n",
    "unclosed": f"```python\n{RIGHT}",
    "tildes": f"~~~python\n{RIGHT}~~~",
    "longer": f"````python\n{RIGHT}````",
    "in a tag": f"<answer>\n```python\n{RIGHT}```\n</answer>",
    "another case": f"```Python3\n{RIGHT}```",
    "right after a line": f"The code:\n```py\n{RIGHT}```\nThat is all.",
    "behind a text": f"Answer: ```python\n{RIGHT}```\nbye",
    "right behind a tag": f"<answer>```python\n{RIGHT}```</answer>",
    "behind a block that is not closed": f"<think>\n```python\nprint(0)\n</think>\n```python\n{RIGHT}```",
    "within a longer one": f"````markdown\n```python\n{RIGHT}```\n````",
    "in a tag, behind a block that was thought of": f"<think>\n```python\nprint(0)\n```\n</think><answer>```python\n{RIGHT}```</answer>",
    "within a longer one, behind another": f"```python\nprint(0)\n```\nBetter:\n````markdown\n```python\n{RIGHT}```\n````",
    "before its mention": f"```python\n{RIGHT}```\nWhat is in the ```python block above\nis run by\n```sh\npytest\n```",
    "before a mention at the end": f"```python\n{RIGHT}```\nIt is in ```python\nas asked.",
    "cut, behind another": f"```python\nprint(0)\n```\nBetter:\n```python\n{RIGHT}",
    "before an empty one": f"```python\n{RIGHT}```\n```python\n```",
    "indented as code": f"    ```python\n    {RIGHT.replace(chr(10) + ' ', chr(10) + '     ')}    ```",
}


@pytest.mark.parametrize("text", FENCES.values(), ids=FENCES)
def test_a_fence_is_found_however_it_is_written(text: str) -> None:
    assert solution_of(text, "solution.py") == RIGHT


@pytest.mark.parametrize("language", ["python", ""])
def test_fences_in_a_text_of_the_code_are_part_of_it(language: str) -> None:
    code = 'def add(a, b):\n    """Add.\n\n    ```\n    add(1, 2)\n    ```\n    """\n    return a + b\n'
    assert solution_of(f"```{language}\n{code}```\nSo it is.", "solution.py") == code
    flat = code.replace("    ```", "```")
    for text in (flat, flat.replace("```\n    add", "```python\n    add"), 2 * flat.replace("```\n    add", "```python\n    add")):
        assert not language or solution_of(f"```{language}\n{text}```\nSo it is:\n```sh\npytest\n```", "solution.py") == text
        assert not language or solution_of(f"```{language}\n{text}```\nOr:\n```python\n{RIGHT}```", "solution.py") == RIGHT


SEVERAL = f"```python\n{OTHER}```\n```python\n{RIGHT}```\nRun it:\n```sh\npython solution.py\n```\n```\n1 2 3\n```"
TRACEBACK = "Traceback (most recent call last):\n  the longest block of all is no code"
WRONG = "def add(a b):\n"
CHOICES = {
    "an end of a block may end its last line": ("```python\nprint(1)```\nThat is all.", "solution.py", "print(1)"),
    "the last is no better than written": (f"```python\n{RIGHT}```\nNo, so:\n\n```python\n{WRONG}```\n", "solution.py", WRONG),
    "also indented": (f"```python\n{RIGHT}```\nNo, so:\n\n    ```python\n    {WRONG}    ```\n", "solution.py", WRONG),
    "the last that names the language": (SEVERAL, "solution.py", RIGHT),
    "another language": (SEVERAL, "solution.sh", "python solution.py\n"),
    "the largest that parses where none is named": (f"```\n{RIGHT}```\n```\n{OTHER}```\n```\n{TRACEBACK}\n```", "solution.py", RIGHT),
    "the last where none parses": ("```\n1 +\n```\n```\n1 + +\n```", "solution.py", "1 + +\n"),
    "a text that no parser reads": ("(" * 100_000, "solution.py", "(" * 100_000),
    "a block that no parser reads": (f"```\n{RIGHT}```\n```\n{'(' * 300_000}\n```", "solution.py", "(" * 300_000 + "\n"),
}


@pytest.mark.parametrize(("text", "path", "solution"), CHOICES.values(), ids=CHOICES)
def test_one_of_several_blocks_is_the_solution(text: str, path: str, solution: str) -> None:
    assert solution_of(text, path) == solution


def test_a_fence_within_a_longer_one_is_its_content() -> None:
    inner = "```sh\npip install x\n```\n"
    assert fences(f"````markdown\n{inner}````") == [("markdown", inner, 5)]


def test_a_text_without_blocks_is_the_solution_and_a_pattern_goes_first() -> None:
    assert solution_of(RIGHT, "solution.py") == RIGHT
    text = f"<answer>{OTHER}</answer><answer>{RIGHT}</answer>\n```python\nno\n```"
    assert solution_of(text, "solution.py", "<answer>(.*?)</answer>") == RIGHT
    assert solution_of(text, "solution.py", "<result>(.*?)</result>") == "no\n"
    assert solution_of("a 1 b 2", "solution.py", "[0-9]") == "2"
