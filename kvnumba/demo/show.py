"""What the demo puts on the screen: lines, progress bars, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvnumba.commands.streams import printable
from kvnumba.demo import pair_name
from kvnumba.demo.measure import Row

#: What a text of a model, or of its user, may do on a terminal.
LAYOUT = "\n\t"


class Screen:
    """A rich console with the few things that the demo shows."""

    def __init__(self, console: Console | None = None, stderr: bool = False) -> None:
        self.console = console or Console(highlight=False, stderr=stderr)

    def say(self, text: str = "", style: str | None = None) -> None:
        """One paragraph."""
        self.console.print(printable(text, LAYOUT), style=style, markup=False, emoji=False)

    def stream(self, piece: str) -> None:
        """A piece of generated text, with no line break after it."""
        self.console.out(printable(piece, LAYOUT), end="", highlight=False)
        self.console.file.flush()

    @contextmanager
    def bar(self, label: str, total: int | None = None) -> Iterator[Bar]:
        """A progress bar while the block runs; one without *total* moves until the first ``to``.

        Where the block fails the bar goes away, so that the error stands alone.
        """
        columns = (SpinnerColumn(), TextColumn("{task.description:<24}"), BarColumn(), TaskProgressColumn())
        with Progress(*columns, TimeElapsedColumn(), console=self.console) as progress:
            try:
                yield Bar(progress, label, total)
            except BaseException:
                progress.live.transient = True
                raise


class Bar:
    """One progress bar, moved by steps (``advance``) or to a place (``to``)."""

    def __init__(self, progress: Progress, label: str, total: int | None) -> None:
        self.progress = progress
        self.task = progress.add_task(label, total=total)

    def advance(self, count: int) -> None:
        self.progress.advance(self.task, count)

    def to(self, done: int, total: int) -> None:
        if done:
            self.progress.update(self.task, completed=done, total=total)


def table(title: str, caption: str, columns: Sequence[str]) -> Table:
    """An empty table: the first column holds words, the others numbers."""
    made = Table(title=title, caption=caption, title_justify="left", caption_justify="left", title_style="bold")
    made.add_column(columns[0])
    for column in columns[1:]:
        made.add_column(column, justify="right")
    return made


def relative(value: float, reference: float) -> str:
    """Difference to the reference in per cent, with a sign."""
    return f"{100 * (value / reference - 1):+.2f} %"


#: A column: its head, and its cell for (row, reference row).
Column = tuple[str, Callable[[Row, Row], str]]

COST: tuple[Column, ...] = (
    ("cache bytes", lambda row, first: f"{row.nbytes:,}"),
    ("smaller", lambda row, first: f"{first.nbytes / row.nbytes:.2f} x"),
    ("bits per value", lambda row, first: f"{row.bits_per_value:.2f}"),
)
QUALITY: tuple[Column, ...] = (
    ("perplexity", lambda row, first: f"{row.quality.perplexity:.3f}"),
    ("change", lambda row, first: relative(row.quality.perplexity, first.quality.perplexity)),
    ("KL", lambda row, first: f"{row.quality.kl:.5f}"),
    ("same top token", lambda row, first: f"{100 * row.quality.agreement:.1f} %"),
)
ERROR: tuple[Column, ...] = (("error of attention output", lambda row, first: f"{100 * row.output_error:.3f} %"),)


def cost_table(title: str, caption: str, rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    """One line per pair of formats, with *columns* and what the cache takes."""
    made = table(title, caption, ["K/V format", *(head for head, _ in columns)])
    for row in rows:
        made.add_row(pair_name(*row.pair), *(cell(row, rows[0]) for _, cell in columns))
    return made


def time_table(title: str, caption: str, rows: Sequence[Row]) -> Table:
    """One line per pair of formats: milliseconds per token for each length, and of these in the cache."""
    lengths = sorted(rows[0].step_ms)
    made = table(title, caption, ["K/V format", *(f"{length:,} tokens" for length in lengths)])
    for row in rows:
        cells = (f"{row.step_ms[length]:.1f} ({row.cache_ms[length]:.1f})" for length in lengths)
        made.add_row(pair_name(*row.pair), *cells)
    return made
