"""Pass calls to one writer of a logger; keep failed calls in memory and repeat them."""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import Any, Final

from eventloop import get_logger
from hooks.writers.base import RunFacts, Writer

log = get_logger()

MOST_KEPT: Final = 10_000
"""Largest number of calls that wait for a failing writer; beyond it the oldest are dropped."""
MOST_IMAGES: Final = 100
"""Largest number of waiting images; later ones are dropped."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0  # seconds before another try

Call = tuple[Any, ...]
"""The name of a method of the writer, and its arguments."""


class Target:
    """Pass calls to a writer, in order, and raise nothing.

    A call is done after the next successful flush. After a failure the target keeps further calls, and repeats the failed call
    after half a second, then after pauses that grow to a minute. If it fails again, or if a flush has failed, the target
    closes and reopens the writer and repeats all calls since the last successful flush. The writer may then get a call twice,
    but misses none. If a call fails and the next one succeeds, the failed call is dropped.

    Args:
        writer: the writer.
        interval: iterations between training scalars, if the writer has no interval of its own.
    """

    def __init__(self, writer: Writer, interval: int) -> None:
        self.interval = writer.interval or interval
        self.takes_images = type(writer).write_image is not Writer.write_image
        self.written = 0
        self._writer = writer
        self._name = type(writer).__name__
        self._reset(RunFacts("run"))

    def open(self, run: RunFacts) -> None:
        self.written = 0
        self._reset(run)
        self._try()

    def give(self, *call: Any) -> None:
        """Call a method of the writer, given by its name and arguments, now or later."""
        if self._failures:
            self._keep(call)
            return
        try:
            self._do(call)
        except Exception:  # noqa: BLE001 - logged
            self._keep(call)
            self._failed()

    def flush(self, *, durable: bool = False) -> None:
        """Flush the writer; try a failing one again if its pause is over (with ``durable``, at once)."""
        if self._failures:
            if durable or monotonic() >= self._next_try:
                self._try(durable=durable)
            return
        try:
            self._flush(durable=durable)
        except Exception:  # noqa: BLE001 - logged
            self._reopen = True
            self._failed()

    def close(self, *, finished: bool) -> None:
        """Flush and close the writer, and log the number of lost calls."""
        self.flush()
        if self._failures:
            self._try()
        try:
            if not finished:
                self._writer.aborted()
            self._writer.close()
        except Exception:
            log.exception("cannot close a writer", writer=self._name)
        lost = self._lost + len(self._kept) + len(self._unsure)
        if lost:
            log.error("a writer has lost data", writer=self._name, lost=lost)

    def _reset(self, run: RunFacts) -> None:
        self._run = run
        self._unsure: list[Call] = []  # done since the last successful flush
        self._kept: deque[Call] = deque()  # waiting
        self._reopen = True  # open the writer before its next call
        self._opened = False
        self._failures: int = 0  # in a row
        self._images: int = 0  # images among the waiting calls
        self._next_try: float = 0.0
        self._lost = 0

    def _do(self, call: Call) -> None:
        getattr(self._writer, call[0])(*call[1:])
        self._unsure.append(call)

    def _flush(self, *, durable: bool) -> None:
        if durable:
            self._writer.sync()
        else:
            self._writer.flush()
        self._unsure.clear()

    def _try(self, *, durable: bool = False) -> None:
        try:
            if self._reopen or self._failures > 1:
                self._open_again()
            self._give_kept()
            self._flush(durable=durable)
        except Exception:  # noqa: BLE001 - logged
            self._failed()
            return
        if self._failures:
            log.warning("a writer works again", writer=self._name, failures=self._failures, lost=self._lost)
        self._failures = self._images = 0

    def _open_again(self) -> None:
        self._reopen = True
        self._kept.extendleft(reversed(self._unsure))
        self._unsure.clear()
        if self._opened:
            self._opened = False
            try:
                self._writer.close()
            except Exception as error:  # noqa: BLE001 - closing a file fails if writing it has failed
                log.debug("cannot close a failing writer", writer=self._name, error=repr(error))
        self._writer.open(self._run)
        self._opened = True
        self._reopen = False
        self._kept.appendleft(("write_config", self._run.config))

    def _give_kept(self) -> None:
        logged = False
        while self._kept:
            try:
                self._do(self._kept[0])
            except Exception as error:
                if not self._takes_the_next():
                    raise
                self._lost += 1
                if not logged:
                    log.exception("a writer failed on a call, which is dropped", writer=self._name, exc_info=error)
                logged = True
            self._kept.popleft()

    def _takes_the_next(self) -> bool:
        """Return True if the second waiting call succeeds: then the first call is at fault, not the writer."""
        if len(self._kept) < 2:
            return False
        try:
            self._do(self._kept[1])
        except Exception:  # noqa: BLE001 - the caller raises the error of the first call
            return False
        del self._kept[1]
        return True

    def _keep(self, call: Call) -> None:
        image = call[0] == "write_image"
        self._images += image
        if image and self._images > MOST_IMAGES:
            self._lost += 1
            return
        self._kept.append(call)
        if len(self._kept) > MOST_KEPT:
            self._kept.popleft()
            self._lost += 1

    def _failed(self) -> None:
        self._failures += 1
        pause = min(_FIRST_PAUSE * 2 ** min(self._failures - 1, 10), _LONGEST_PAUSE)
        self._next_try = monotonic() + pause
        if self._failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... time, because a failure may last for days
            facts = {"failures": self._failures, "kept": len(self._kept) + len(self._unsure), "lost": self._lost}
            log.exception("a writer failed, and is tried again", writer=self._name, seconds=pause, **facts)
