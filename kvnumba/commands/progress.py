"""What commands show: a bar for long work, on stderr and only on a terminal, and a table of what came of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvnumba.commands.streams import printable

#: Least width of a table, which a narrower terminal wraps; and width where there is no terminal: nothing is folded.
NARROW, WIDE = 40, 10_000


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how far work of *total* units is; call what is given with the units done since."""
    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)


def table(told: Mapping[str, Any]) -> None:
    """Print names and values, one a line."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in told.items():
        grid.add_row(name.replace("_", " "), _cell(value))
    _print(grid)


def rows(title: str, found: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> None:
    """Print rows: what is the same in all of them once, a line each, the rest and *columns* under a title."""
    every = dict.fromkeys(name for row in found for name in row)
    common = {
        name: found[0][name]
        for name in every
        if name not in columns and all(name in row and row[name] == found[0].get(name) for row in found)
    }
    if common:
        table(common)
    names = [name for name in every if name not in common]
    if not names:
        return
    listed = Table(title=title)
    for name in names:
        listed.add_column(name.replace("_", " "), overflow="fold")
    for row in found:
        listed.add_row(*(_cell(row.get(name)) for name in names))
    _print(listed)


def _print(what: Any) -> None:
    console = Console()
    folded = console.is_terminal or "COLUMNS" in os.environ
    console.width = max(console.width, NARROW) if folded else WIDE
    console.print(what)


def _cell(value: Any) -> Text:
    """A value as text that is no markup, whatever it holds."""
    return Text(printable(shown(value)))


def shown(value: Any) -> str:
    """A value as people read it."""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e6 else f"{value:,.0f}"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, (list, tuple)):
        return ", ".join(shown(item) for item in value)
    return f"{value:,}" if isinstance(value, int) else str(value)
