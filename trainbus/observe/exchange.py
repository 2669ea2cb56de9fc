"""``RankExchange``: compare the time of all ranks, beside the training.

Every two seconds (with more than 512 ranks, less often) a thread of each rank writes the rank's times to the key-value store of
the process group. Rank 0 compares them and writes the result. The other ranks read it. No rank waits for another rank: one that
hangs, has died or does not measure is missing from the result. If the process with the store hangs, only this thread hangs
with it.

All ranks write at the same full seconds of their clocks, so that they compare the same iterations.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training.distributed.mailbox import Mailbox
from trainbus.observe.ranks import RankCosts, Spent, Straggler, slow_at
from trainbus.observe.straggler import compare, seconds_of

PERIOD: Final = 2.0  # seconds between two comparisons of up to 512 ranks

_RANKS: Final = 512  # with more, the period grows with them, so that rank 0's share of time for comparisons does not

_COMPARES: Final = 0.25  # of a period after all have written
_READS: Final = 0.5
_IN_A_ROW: Final = 3  # comparisons in which a rank must stand out; in a single one, it may have begun a new epoch before others
_SILENT: Final = 5  # periods without an answer

log = get_logger()


class Report(msgspec.Struct, frozen=True):
    """The times of one rank since its run began. ``number`` increases with each report."""

    number: int
    spent: Spent


class ComparedRanks(msgspec.Struct, frozen=True):
    """The comparison by rank 0: of the last iterations, and of the whole run."""

    number: int
    recent: RankCosts
    whole: RankCosts


class _Latest(NamedTuple):
    report: Report
    periods: int  # number of periods since it was new


class RankExchange:
    """Exchange the times of the ranks, on a separate thread, until :meth:`stop`.

    ``name``, of the run, is equal on all ranks. ``report`` gets the comparison of the last iterations, on the thread.
    ``trains`` returns True while a run is open; all ranks are then expected to report.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        world_size: int,
        *,
        measure: Callable[[], Spent],
        report: Callable[[RankCosts], object],
        trains: Callable[[], bool],
    ) -> None:
        self.whole: RankCosts | None = None  # the comparison of the whole run
        self._name = f"costs/{name}"
        self._rank = rank
        self._measure, self._report, self._trains = measure, report, trains
        self._comparison = Comparison(world_size)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"trainbus costs of rank {rank}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; abandon it if the store hangs."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self) -> None:
        number, period = 0, self._comparison.period
        try:
            mailbox = Mailbox(self._name)
            while not self._stopped.wait(period - time.time() % period):
                number += 1
                mailbox.put(str(self._rank), Report(number, self._measure()))
                if not self._stopped.wait(period * (_READS if self._rank else _COMPARES)):
                    self._take(self._read(mailbox) if self._rank else self._compare(mailbox))
        except ReferenceError:  # the bus is gone
            return
        except (RuntimeError, OSError, ValueError):  # the process with the store has ended, or the group is destroyed
            log.debug("the comparison of the ranks' times has ended", exc_info=True)

    def _compare(self, mailbox: Mailbox) -> ComparedRanks | None:
        """Compare all reports and put the result."""
        comparison = self._comparison
        there = [rank for rank in range(comparison.world_size) if rank in comparison.latest or mailbox.has(str(rank))]
        comparison.update(dict(zip(there, mailbox.get(Report, *map(str, there)), strict=True)))
        if self._trains():
            comparison.warn_of_silent()
        result = comparison.result()
        if result is not None:
            mailbox.put("result", result)
        return result

    def _read(self, mailbox: Mailbox) -> ComparedRanks | None:
        """Return the result of rank 0; None if there is no new one."""
        result = mailbox.get(ComparedRanks, "result")[0] if mailbox.has("result") else None
        if result is None or result.number == self._comparison.number:
            return None
        self._comparison.number = result.number
        return result

    def _take(self, result: ComparedRanks | None) -> None:
        if result is not None and not self._stopped.is_set():
            self.whole = result.whole
            try:
                self._report(result.recent)
            except Exception:
                log.exception("a handler of ranks_measured failed", id="ranks-handler-failed")


class Comparison:
    """The state of the comparison on rank 0."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.period = PERIOD * max(1.0, world_size / _RANKS)
        """Seconds between two comparisons."""
        self.latest: dict[int, _Latest] = {}  # the last report of each rank
        self.number = 0
        self._compared: dict[int, Spent] = {}  # where the last comparison of recent iterations ended
        self._windows: deque[tuple[Straggler | None, dict[int, Spent]]] = deque(maxlen=_IN_A_ROW)
        self._named: set[tuple[int, str]] = set()

    def update(self, reports: dict[int, Report]) -> None:
        """Keep the reports that are in the store now."""
        for rank, report in reports.items():
            before = self.latest.get(rank)
            old = before is not None and before.report.number == report.number
            self.latest[rank] = _Latest(report, before.periods + 1 if before is not None and old else 0)

    def warn_of_silent(self) -> None:
        """Warn once about each rank that stops reporting."""
        for rank, one in self.latest.items():
            if one.periods == _SILENT:
                log.warning(
                    f"rank {rank} on {one.report.spent.host} has not reported its times for {_SILENT * self.period:g} s: it "
                    "ended, was stopped, or is busy in a single call; see its own log",
                    id="silent-rank",
                )

    def result(self) -> ComparedRanks | None:
        """Compare the reporting ranks; None if one of them had no iteration since the last comparison."""
        latest = {rank: one.report.spent for rank, one in self.latest.items() if one.periods < _SILENT}
        # An iteration may begin with compiling, and a run with files: the first report only marks the beginning.
        started = {rank: spent for rank, spent in latest.items() if spent.iterations}
        recent = {rank: spent.since(self._compared[rank]) for rank, spent in started.items() if rank in self._compared}
        if not all(spent.iterations for spent in recent.values()):
            return None
        self._compared = started
        found, whole = compare(recent, self.world_size), compare(latest, self.world_size)
        if found is None or whole is None:
            return None
        self.number += 1
        self._windows.append((found.straggler, recent))
        found = msgspec.structs.replace(found, straggler=self._confirmed(found))
        slow = whole.straggler  # one figure of the whole run has no spread that it could be held against
        named = slow is not None and (slow.rank, slow.name) in self._named
        return ComparedRanks(self.number, found, whole if named else msgspec.structs.replace(whole, straggler=None))

    def _confirmed(self, found: RankCosts) -> Straggler | None:
        """Return the straggler if the last comparisons carry it; warn about it once.

        All must have found this rank at this part. Its smallest lead must exceed the spread of every rank's own figures: a busy
        machine delays any rank, now one and now another.
        """
        now, windows = found.straggler, list(self._windows)
        if now is None or len(windows) < _IN_A_ROW:
            return None
        leads = [one.seconds - one.others for one, _ in windows if one is not None and _place(one) == _place(now)]
        ranks = set.intersection(*(set(spent) for _, spent in windows))
        if len(leads) < _IN_A_ROW or now.rank not in ranks:
            return None
        figures = [[seconds_of(spent[rank], now.group, now.name) for _, spent in windows] for rank in ranks]
        if min(leads) <= max(max(own) - min(own) for own in figures):
            return None
        if (now.rank, now.name) not in self._named:
            self._named.add((now.rank, now.name))
            log.warning(
                f"the other ranks wait for rank {now.rank} on {now.host}, "
                f"{now.waited * 1e3:.3g} ms of each iteration of {found.seconds * 1e3:.3g} ms: {slow_at(now)}",
                id="slow-rank",
            )
        return now


def _place(one: Straggler) -> tuple[int, str, str]:
    return one.rank, one.group, one.name
