"""Where commands print what a person reads, and tables for that.

What is shown comes from users: names, reasons and paths may look like rich's markup or like an emoji's name. So a console of the
command line reads no text as either, be it a line, a cell, a title or a caption.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

LEAST_NAME: Final = 6
"""Columns that a name keeps beside figures."""

UNBOUNDED: Final = 10_000


def make_console(*, width: int | None = None) -> Console:
    """Return a console on standard output that shows every text as it is; `width` in columns, by default the terminal's."""
    return Console(width=width, markup=False, emoji=False)


class Figures(Table):
    """A table whose figures are whole at any width.

    Columns to the right and columns that do not wrap have figures, and take what they need. Names give way to them. Where even that is
    too wide, each row is a paragraph: the first cell, and below it the others, each after the name of its column.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        too_much = self._least_width(console, options) - options.max_width
        if too_much <= 0:
            for column in self.columns:
                if _is_figure(column):
                    column.no_wrap = True
                elif column.no_wrap:
                    column.max_width = min(_width(column), _least(column) - too_much)
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield self.title
        names = [_plain(column.header) for column in self.columns]
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            first, *others = map(_plain, cells)
            yield Text(first, style="bold", overflow="fold")
            rest = ", ".join(f"{name} {cell}".strip() for name, cell in zip(names[1:], others, strict=True) if cell)
            yield Padding(Text(rest, overflow="fold"), (0, 0, 0, 2))
        if self.caption:
            yield self.caption

    def _least_width(self, console: Console, options: ConsoleOptions) -> int:
        """Return the width with names as short as they may be."""
        whole = self.__rich_measure__(console, options.update(width=UNBOUNDED)).maximum
        return whole - sum(_width(column) - _least(column) for column in self.columns)


def figures_table(title: str, columns: Sequence[str], *, first: Literal["left", "right"] = "left") -> Figures:
    """Return a table whose `first` column has names, or sizes to the right, and the others figures."""
    table = Figures(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 0, 0, 1))
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else first, no_wrap=True)
    return table


def _is_figure(column: Column) -> bool:
    return column.justify == "right" or (column.no_wrap and column.overflow != "ellipsis")


def _width(column: Column) -> int:
    lines = (line for cell in (column.header, *column.cells) for line in _plain(cell).splitlines())
    return min(max(map(cell_len, lines), default=0), column.max_width or UNBOUNDED)


def _least(column: Column) -> int:
    return _width(column) if _is_figure(column) else min(_width(column), LEAST_NAME)


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)
