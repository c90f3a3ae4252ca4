"""More output than a result holds, through each shape over HTTP: it is there as a whole, or the answer says that it is not."""

from __future__ import annotations

import httpx
import pytest

from tangram.results import FINISHED, LEFT_OUT
from tests.gateway.shapes import SHAPES, Shape, beside_shells, in_shell, merged, native, run_jupyter

LIMIT_S = 60.0
PRINT = "head -c 1500000 /dev/zero | tr '\\0' x"
OTHERWISE = {native: '"truncated":true', run_jupyter: "output of cells was dropped, being too long: 1"}
"""What shapes say that have words of their own for it."""


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_says_that_output_is_left_out(http: httpx.Client, shape: Shape) -> None:
    said = OTHERWISE.get(shape, LEFT_OUT)
    assert [said in shape(http, command, LIMIT_S).text for command in (PRINT, "echo x")] == [True, False]


def test_a_submission_that_is_not_whole_is_an_error(http: httpx.Client) -> None:
    for shape in (beside_shells, merged):
        said = shape(http, f"echo {FINISHED}; {PRINT}", LIMIT_S).text
        assert "swerex.exceptions.SwerexException" in said and "the submission is not whole" in said, said[:500]
    for answer in (in_shell(http, PRINT, LIMIT_S, check="raise"), beside_shells(http, PRINT, LIMIT_S, check=True)):
        said = answer.text
        assert "swerex.exceptions.SwerexException" in said and "is not whole" in said, said[:500]
