"""Scalars on the terminal: one tidy line per interval, above a progress bar if there is one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from math import isfinite

from rich import get_console
from rich.console import Console
from rich.text import Text

from eventloop import check_options, register
from hooks.options import NonNegativeInt, PositiveInt
from hooks.writers.base import Where, Writer

_LAST = ("time", "data_time", "eta")


@register
class ConsoleWriter(Writer):
    """Prints ``epoch 3/20  iter 40/57  lr 1.2e-03  loss 0.1234  time 0.0021  data_time 0.0003  eta 0:00:12``.

    Args:
        console: where to; by default rich's shared one, which is the progress bar's default too. The two must share
            one: the bar then stays below the lines.
        interval: iterations between lines; None takes the logger's.
        num_digits: digits after the decimal point.

    Raises:
        ConfigurationError: an interval that is not positive.
    """

    @check_options
    def __init__(
        self, console: Console | None = None, *, interval: PositiveInt | None = None, num_digits: NonNegativeInt = 4
    ) -> None:
        super().__init__(interval)
        self._console = console
        self._digits = num_digits

    @property
    def console(self) -> Console:
        """The console that lines are printed on."""
        return self._console if self._console is not None else get_console()

    def write_scalars(self, scalars: Mapping[str, float], step: int, where: Where) -> None:
        """Print a line."""
        line = Text("  ").join([_place(where), *self._entries(scalars, where.stage)])
        self._print(line)

    def write_text(self, name: str, text: str, where: Where) -> None:
        """Print a line."""
        self._print(Text.assemble((name, "dim"), " ", text))

    def _entries(self, scalars: Mapping[str, float], stage: str) -> Iterator[Text]:
        short = {name.removeprefix(f"{stage}/"): value for name, value in scalars.items()}
        for name in sorted(short, key=_rank):
            yield Text.assemble((name, "dim"), " ", format_number(name, short[name], self._digits))

    def _print(self, line: Text) -> None:
        # Lines longer than the terminal go on in the next row; wrapped at words they could not be grepped.
        try:
            self.console.print(line, soft_wrap=True, highlight=False, markup=False, emoji=False)
        except SystemExit as error:  # what rich makes of a broken pipe; `| head` must not end the training
            raise BrokenPipeError("the reader of the console's output has closed it") from error


def format_number(name: str, value: float, digits: int = 4) -> str:
    """Return ``value`` as the console shows it: learning rates and very small or large numbers with an exponent."""
    if not isfinite(value):
        return str(value)
    if name == "eta":
        return str(timedelta(seconds=round(value)))
    if isinstance(value, int):
        return str(int(value))
    if name == "lr" or name.startswith("lr/") or "/lr" in name:
        return f"{value:.1e}"
    small, large = 10.0**-digits, 1e6
    return f"{value:.{digits}f}" if value == 0 or small <= abs(value) < large else f"{value:.{max(1, digits - 3)}e}"


def _rank(name: str) -> tuple[int, int]:
    """Sort key: learning rates first, times last; the sort is stable, so the rest stays in the order of the outputs."""
    if name in _LAST:
        return 2, _LAST.index(name)
    return (0, 0) if name == "lr" or name.startswith("lr/") or "/lr" in name else (1, 0)


def _place(where: Where) -> Text:
    """Return ``epoch 3/20  iter 40/57``, ``iter 400/5000`` of an iteration-based run, ``epoch 3/20  val`` of a validation."""
    training = where.stage == "train"
    counts = {}
    if where.max_iters is None and (training or where.epoch):
        counts["epoch"] = _of(where.epoch, where.max_epochs)
        if training:
            counts["iter"] = _of(where.batch, where.epoch_length)
    elif where.max_iters is not None:
        counts["iter"] = _of(where.iter, where.max_iters)
    parts = [Text.assemble((name, "dim"), " ", (count, "cyan")) for name, count in counts.items()]
    return Text("  ").join(parts if training else [*parts, Text(where.stage, "bold")])


def _of(count: int, total: int | None) -> str:
    if total is None:
        return str(count)
    # Right-aligned, so that the columns of successive lines stand below each other.
    return f"{count:>{len(str(total))}}/{total}"
