"""Pass calls to one writer of a logger; keep failed calls in memory and repeat them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any, Final

from trainbus.eventloop import get_logger
from trainbus.eventloop.seams import Seam
from trainbus.hooks.writers.base import Row, RunFacts, Writer

log = get_logger()

MOST_KEPT: Final = Seam(10_000)  # largest number of calls that wait for a failing writer; beyond it the oldest are dropped
MOST_LARGE: Final = 100  # largest number of images, histograms and texts among them; later ones are dropped

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0  # seconds before another try


class Target:
    """Pass calls to a writer during one run, in order, and raise nothing.

    A call is done after the next successful flush. After a failure the target keeps further calls, and repeats the failed call
    after half a second, then after pauses that grow to a minute. If it fails again, or if a flush has failed, the target
    closes and reopens the writer and repeats all calls since the last successful flush. The writer may then get a call twice,
    but misses none. If a call fails and the next one succeeds, the failed call is dropped.
    """

    def __init__(self, writer: Writer, interval: int, run: RunFacts) -> None:
        self.interval = interval
        self._takes_rows = _takes_rows(type(writer))
        self._writer = writer
        self._name = type(writer).__name__
        self._run = run
        self._calls: list[tuple[Any, ...]] = []  # since the last successful flush: name of a method, and arguments
        self._done = 0  # how many of them the writer has taken
        self._opened = False
        self._flushed = False  # False after a failed flush, and before the first one
        self._failures = 0  # in a row
        self._next_try = 0.0
        self._lost = 0
        self._try()

    def takes(self, *methods: str) -> bool:
        """Return True if the writer's class defines one of these optional methods."""
        return any(getattr(type(self._writer), method) is not getattr(Writer, method) for method in methods)

    def give(self, *call: Any) -> None:
        """Call a method of the writer, given by its name and arguments, now or later."""
        if call[0] == "write_text" and not self.takes("write_text"):
            return  # a call that does nothing would look like a success after the failure of the call before
        if self._failures:
            self._keep(call)
            return
        self._calls.append(call)
        try:
            self._make(call)
        except Exception:  # noqa: BLE001 - logged
            self._failed()

    def give_rows(self, rows: Sequence[Row]) -> None:
        """Write training scalars, now or later: by one call, if the writer takes many rows and works."""
        if self._takes_rows and not self._failures:
            self.give("write_rows", rows)
        else:
            for row in rows:
                self.give("write_scalars", *row)

    def flush(self, *, durable: bool = False) -> None:
        """Flush the writer; try a failing one again if its pause is over (with ``durable``, at once)."""
        if durable or not self._failures or monotonic() >= self._next_try:
            self._try(durable=durable)

    def close(self, *, finished: bool) -> None:
        self.flush()
        if self._failures:
            self._try()
        try:
            if not finished:
                self._writer.aborted()
            if self._opened:
                self._writer.close()
        except Exception:
            log.exception("cannot close a writer", id="writer-not-closed", writer=self._name)
        lost = self._lost + sum(call[0] != "write_config" for call in self._calls)
        if lost:
            log.error("a writer has lost data", id="writer-lost-data", writer=self._name, lost=lost)

    def _try(self, *, durable: bool = False) -> None:
        try:
            if self._failures > 1 or not self._flushed:
                self._reopen()
            self._repeat()
            self._flushed = False  # in case flushing fails
            if durable:
                self._writer.sync()
            else:
                self._writer.flush()
        except Exception:  # noqa: BLE001 - logged
            self._failed()
            return
        if self._failures:
            log.warning(
                "a writer works again", id="writer-works-again", writer=self._name, failures=self._failures, lost=self._lost
            )
        self._flushed = True
        self._failures = self._done = 0
        self._calls.clear()

    def _reopen(self) -> None:
        self._done, self._flushed = 0, False
        if self._opened:
            self._opened = False
            try:
                self._writer.close()
            except Exception as error:  # noqa: BLE001 - closing a file fails if writing it has failed
                log.debug("cannot close a failing writer", writer=self._name, error=repr(error))
        self._writer.open(self._run)
        self._opened = True
        self._calls = [("write_config", self._run.config), *(call for call in self._calls if call[0] != "write_config")]

    def _repeat(self) -> None:
        """Make the calls that wait. If one fails and the next succeeds, the call is at fault, not the writer: drop it."""
        while self._done < len(self._calls):
            try:
                self._make(self._calls[self._done])
            except Exception as error:
                try:
                    self._make(self._calls[self._done + 1])
                except Exception:  # noqa: BLE001 - also IndexError, if no other call waits
                    raise error from None
                del self._calls[self._done - 1]
                self._lost += 1
                if self._lost.bit_count() == 1:
                    log.exception(
                        "a writer failed on a call; the call is dropped",
                        id="writer-call-dropped",
                        writer=self._name,
                        exc_info=error,
                    )

    def _make(self, call: tuple[Any, ...]) -> None:
        getattr(self._writer, call[0])(*call[1:])
        self._done += 1

    def _keep(self, call: tuple[Any, ...]) -> None:
        if call[0] == "write_reported" and sum(kept[0] == call[0] for kept in self._calls) >= MOST_LARGE:
            self._lost += 1
            return
        self._calls.append(call)
        if len(self._calls) > MOST_KEPT.value:
            oldest = int(self._calls[0][0] == "write_config")  # a reopened writer gets it again, so it is not lost
            del self._calls[oldest]
            self._done -= self._done > oldest
            self._lost += 1

    def _failed(self) -> None:
        # Single rows from now on: then a bad one costs only itself, and the largest number that is kept counts rows.
        done = _single(self._calls[: self._done])
        self._calls = [*done, *_single(self._calls[self._done :])]
        self._done = len(done)
        self._failures += 1
        pause = min(_FIRST_PAUSE * 2 ** min(self._failures - 1, 10), _LONGEST_PAUSE)
        self._next_try = monotonic() + pause
        if self._failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... time, because a failure may last for days
            facts = {"failures": self._failures, "kept": len(self._calls), "lost": self._lost}
            log.exception(
                "a writer failed and will be tried again", id="writer-failed", writer=self._name, seconds=pause, **facts
            )


def _takes_rows(kind: type[Writer]) -> bool:
    """Return True if ``write_rows`` is made for this class: not if a subclass overrides ``write_scalars`` alone."""
    first = next(base for base in kind.__mro__ if "write_rows" in vars(base) or "write_scalars" in vars(base))
    return first is not Writer and "write_rows" in vars(first)


def _single(calls: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return the calls with one of ``write_scalars`` per row instead of ``write_rows``."""
    return [
        one for call in calls for one in ([("write_scalars", *row) for row in call[1]] if call[0] == "write_rows" else [call])
    ]
