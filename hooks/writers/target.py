"""One writer of a logger, and patience with it: what it could not take is kept in memory and tried again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Final

from eventloop import get_logger
from hooks.writers.base import RunFacts, Where, Writer

log = get_logger()

MOST_KEPT: Final = 10_000
"""Calls that wait for a writer in trouble; of more, the oldest are given up."""
MOST_IMAGES: Final = 100
"""How many of them may be images; later ones are given up."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0  # seconds before another try

Entry = Callable[[Writer], object] | tuple[Mapping[str, float], int, Where]
"""What a writer is to be given: arguments of ``write_scalars``, or a call."""


class Target:
    """Hands everything to a writer, in order. Raises nothing.

    What a writer has taken counts as written once a flush has worked. After a failure, all that comes is kept, and the writer
    is tried again after half a second, then after pauses that grow to a minute. It gets the entry that failed once more; if
    that does not help, or it was the flush that failed, it is closed, opened, and given everything since the last flush that
    worked: entries may then come twice, but none is missing. An entry that is refused while the next one is taken is given up.
    """

    def __init__(self, writer: Writer, interval: int) -> None:
        self.interval = writer.interval or interval
        self.takes_images = type(writer).write_image is not Writer.write_image
        self.written = 0
        self._writer = writer
        self._reset(RunFacts("run"))

    def open(self, run: RunFacts) -> None:
        """Open the writer for a run."""
        self.written = 0
        self._reset(run)
        self._try()

    def write(self, scalars: Mapping[str, float], step: int, where: Where) -> None:
        """Hand scalars over."""
        # give(), written out: once an iteration, on a thread that takes the GIL from the training.
        if self._failures:
            self._keep((scalars, step, where))
            return
        try:
            self._writer.write_scalars(scalars, step, where)
        except Exception:  # noqa: BLE001 - logged
            self._keep((scalars, step, where))
            self._failed()
        else:
            self._unsure.append((scalars, step, where))

    def call(self, do: Callable[[Writer], object], *, image: bool = False) -> None:
        """Hand something else over."""
        if self._failures:
            self._images += image
            if image and self._images > MOST_IMAGES:
                self._lost += 1
            else:
                self._keep(do)
            return
        try:
            do(self._writer)
        except Exception:  # noqa: BLE001 - logged
            self._keep(do)
            self._failed()
        else:
            self._unsure.append(do)

    def flush(self, *, durable: bool = False) -> None:
        """Flush the writer; one in trouble is tried again when its pause is over (or at once, if ``durable``)."""
        if self._failures:
            if durable or monotonic() >= self._next_try:
                self._try(durable=durable)
            return
        try:
            _flush(self._writer, durable=durable)
        except Exception:  # noqa: BLE001 - logged
            self._anew = True
            self._failed()
        else:
            self._unsure.clear()

    def close(self, *, finished: bool) -> None:
        """Flush and close the writer, and say what it has lost."""
        self.flush()
        if self._failures:
            self._try()
        try:
            if not finished:
                self._writer.aborted()
            self._writer.close()
        except Exception:
            log.exception("a writer could not be closed", writer=self._name)
        lost = self._lost + len(self._kept) + len(self._unsure)
        if lost:
            log.error("a writer has lost what it could not write", writer=self._name, lost=lost)

    def _reset(self, run: RunFacts) -> None:
        self._run = run
        self._unsure: list[Entry] = []  # taken since the last flush that worked
        self._kept: deque[Entry] = deque()  # not taken yet
        self._anew = True  # it must be opened before it gets anything
        self._opened = False
        self._failures: int = 0  # in a row
        self._images: int = 0  # of those that are kept
        self._next_try: float = 0.0
        self._lost = 0

    @property
    def _name(self) -> str:
        return type(self._writer).__name__

    def _try(self, *, durable: bool = False) -> None:
        try:
            if self._anew or self._failures > 1:
                self._begin_anew()
            self._give_kept()
            _flush(self._writer, durable=durable)
        except Exception:  # noqa: BLE001 - logged
            self._failed()
            return
        if self._failures:
            log.warning("a writer works again", writer=self._name, failures=self._failures, lost=self._lost)
        self._failures = self._images = 0
        self._unsure.clear()

    def _begin_anew(self) -> None:
        self._anew = True
        self._kept.extendleft(reversed(self._unsure))
        self._unsure.clear()
        if self._opened:
            self._opened = False
            try:
                self._writer.close()
            except Exception as error:  # noqa: BLE001 - a file that could not be written cannot be closed in order, either
                log.debug("a writer in trouble could not be closed", writer=self._name, error=repr(error))
        self._writer.open(self._run)
        self._opened = True
        self._anew = False
        self._kept.appendleft(self._write_config)

    def _write_config(self, writer: Writer) -> None:
        writer.write_config(self._run.config)

    def _give_kept(self) -> None:
        told = False
        while self._kept:
            entry = self._kept[0]
            try:
                self._give(entry)
            except Exception as error:
                if not self._takes_the_next():
                    raise
                self._lost += 1
                if not told:
                    log.exception("a writer does not take this, and goes on without it", writer=self._name, exc_info=error)
                told = True
            else:
                self._unsure.append(entry)
            self._kept.popleft()

    def _takes_the_next(self) -> bool:
        """True if the entry after the first is taken, so that the fault is not with what the writer writes to."""
        if len(self._kept) < 2:
            return False
        try:
            self._give(self._kept[1])
        except Exception:  # noqa: BLE001 - the first one's error is raised
            return False
        self._unsure.append(self._kept[1])
        del self._kept[1]
        return True

    def _give(self, entry: Entry) -> None:
        if isinstance(entry, tuple):
            self._writer.write_scalars(*entry)
        else:
            entry(self._writer)

    def _keep(self, entry: Entry) -> None:
        self._kept.append(entry)
        if len(self._kept) > MOST_KEPT:
            self._kept.popleft()
            self._lost += 1

    def _failed(self) -> None:
        self._failures += 1
        pause = min(_FIRST_PAUSE * 2 ** min(self._failures - 1, 10), _LONGEST_PAUSE)
        self._next_try = monotonic() + pause
        if self._failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... time: it may go on for days
            log.exception(
                "a writer failed, and is tried again",
                writer=self._name,
                failures=self._failures,
                seconds=pause,
                kept=len(self._kept) + len(self._unsure),
                lost=self._lost,
            )


def _flush(writer: Writer, *, durable: bool) -> None:
    if durable:
        writer.sync()
    else:
        writer.flush()
