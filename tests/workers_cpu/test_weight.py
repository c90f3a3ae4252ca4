"""What is written to a control group for its weight, in folders made to look like groups of each kind of kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.cpu import weight


def group(folder: Path, *names: str) -> str:
    for name in names:
        (folder / name).touch()
    return str(folder)


@pytest.mark.parametrize(("name", "low"), [("cpu.shares", "2"), ("cpu.weight", "1")])
def test_the_background_is_a_flag_where_there_is_one_else_the_least_weight(tmp_path: Path, name: str, low: str) -> None:
    folder = group(tmp_path, name)
    weight.set_background(folder)
    assert (tmp_path / name).read_text() == low
    # Given the flag; when it is sent there again; then the flag is set, and the weight is left alone, as the kernel demands
    group(tmp_path, name, weight.IDLE)
    (tmp_path / name).write_text("")
    weight.set_background(folder)
    assert ((tmp_path / weight.IDLE).read_text(), (tmp_path / name).read_text()) == ("1", "")
    weight.set_foreground(folder)
    assert (tmp_path / weight.IDLE).read_text() == "0"
    assert int((tmp_path / name).read_text()) > 2


def test_a_group_without_control_files_is_refused(tmp_path: Path) -> None:
    for set_weight in (weight.set_background, weight.set_foreground):
        with pytest.raises(FileNotFoundError):
            set_weight(str(tmp_path))
