"""Print scalars on the terminal: one line per interval, above the progress bar."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from math import isfinite

from rich import get_console
from rich.console import Console
from rich.text import Text

from trainbus.eventloop import check_options, get_logger
from trainbus.eventloop.notebook import Output, in_notebook, text
from trainbus.eventloop.registry import register
from trainbus.eventloop.terminal import cell
from trainbus.hooks.options import NonNegativeInt, PositiveInt
from trainbus.hooks.writers.base import RunFacts, Where, Writer

log = get_logger()

_LAST = ("time", "data_time", "eta")
_MOST_LINES = 20  # in a notebook
_MOST_TEXT = 1_000  # characters of a text that are printed
_INDENT = " " * 4


@register
class ConsoleWriter(Writer):
    """Print lines such as ``epoch 3/20  iter 40/57  lr 1.2e-03  loss 0.1234  time 0.0021  eta 0:00:12``.

    In a notebook, an output of the cell shows the last 20 lines.

    Args:
        console: console to print on; by default rich's shared one, as for the progress bar. The bar stays below the lines if
            both use the same console.
        interval: iterations between lines; None uses the logger's.
        num_digits: digits after the decimal point.
    """

    @check_options
    def __init__(
        self, console: Console | None = None, *, interval: PositiveInt | None = None, num_digits: NonNegativeInt = 4
    ) -> None:
        super().__init__(interval)
        self._console = console
        self._digits = num_digits
        self._cell: Output | None = None
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._late = False  # the last line is not shown

    def write_scalars(self, scalars: Mapping[str, float], step: int, where: Where) -> None:
        short = {name.removeprefix(f"{where.stage}/"): value for name, value in scalars.items()}
        # Learning rates first, times last; the sort is stable, so the rest stays in the order of the outputs.
        names = sorted(short, key=lambda name: _LAST.index(name) + 2 if name in _LAST else not _is_rate(name))
        values = [Text.assemble(cell(name, "dim"), " ", format_number(name, short[name], self._digits)) for name in names]
        self._print([_position(where), *values])

    def write_text(self, name: str, text: str, where: Where) -> None:
        if name == "experiment":
            return  # for files that hold several runs; the log names the run in its first line
        shown = text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}… ({len(text) - _MOST_TEXT:,} more characters)"
        self._print([Text.assemble(cell(name, "dim"), " ", cell(shown, keep="\n"))])

    def open(self, run: RunFacts) -> None:
        self._lines.clear()
        self._cell = Output() if self._console is None and in_notebook() else None

    def flush(self) -> None:
        if self._cell is not None and self._late:
            lines, self._late = "\n".join(self._lines), False
            self._cell.show(f'<pre style="background:none;margin:0">{text(lines)}</pre>', lines)

    def close(self) -> None:
        self.flush()

    def _print(self, parts: list[Text]) -> None:
        if self._cell is not None:
            self._lines.append(Text("  ").join(parts).plain)
            self._late = True
            if self._cell.due():
                self.flush()
            return
        console = self._console if self._console is not None else get_console()
        # In a pipe one line, so that grep finds it whole.
        line = _fitted(parts, console.width) if console.is_terminal else Text("  ").join(parts)
        try:
            console.print(line, soft_wrap=True, highlight=False, markup=False, emoji=False)
        except SystemExit:  # rich raises it once for a broken pipe; `| head` must not end the training
            log.info("the reader of the console's output has closed it; training continues without lines on it")


def format_number(name: str, value: float, digits: int = 4) -> str:
    """Return ``value`` as text; learning rates and very small or large numbers have an exponent."""
    if not isfinite(value):
        return str(value)
    if name == "eta":
        return str(timedelta(seconds=round(value)))
    if isinstance(value, int):
        return str(int(value))
    if _is_rate(name):
        return f"{value:.1e}"
    in_range = value == 0 or 10.0**-digits <= abs(value) < 1e6
    return f"{value:.{digits}f}" if in_range else f"{value:.{max(1, digits - 3)}e}"


def _is_rate(name: str) -> bool:
    return name == "lr" or name.startswith("lr/") or "/lr" in name


def _fitted(parts: list[Text], width: int) -> Text:
    """Join the parts of a line; one that would not fit in ``width`` columns begins an indented line."""
    line, length = parts[0].copy(), parts[0].cell_len
    for part in parts[1:]:
        fits = length + 2 + part.cell_len <= width
        line.append("  " if fits else f"\n{_INDENT}").append_text(part)
        length = (length + 2 if fits else len(_INDENT)) + part.cell_len
    return line


def _position(where: Where) -> Text:
    """Return ``epoch 3/20  iter 40/57``, in an iteration-based run ``iter 400/5000``, in a validation ``epoch 3/20  val``."""
    training = where.stage == "train"
    counts = {}
    if where.max_iters is not None:
        counts["iter"] = _of(where.iter, where.max_iters)
    elif training:
        counts = {"epoch": _of(where.epoch, where.max_epochs), "iter": _of(where.batch, where.epoch_length)}
    elif where.epoch:
        counts["epoch"] = _of(where.epoch, where.max_epochs)
    parts = [Text.assemble((name, "dim"), " ", (count, "cyan")) for name, count in counts.items()]
    return Text("  ").join(parts if training else [*parts, Text(where.stage, "bold")])


def _of(count: int, total: int | None) -> str:
    # Right-aligned, so that the columns of successive lines align.
    return str(count) if total is None else f"{count:>{len(str(total))}}/{total}"
