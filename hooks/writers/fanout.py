"""Smooth scalars on the logger's thread, and pass them to the writers that are due."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import gcd
from threading import Lock
from typing import Any, ClassVar

import msgspec

from trainbus.eventloop import get_logger
from trainbus.eventloop.events import AfterTrainIter
from trainbus.eventloop.plain import encodable
from trainbus.hooks.copies import CopiedAnew
from trainbus.hooks.log_state import Waiting
from trainbus.hooks.smoothing import Smoother
from trainbus.hooks.writers.base import Row, RunFacts, Where, Writer, as_image
from trainbus.hooks.writers.histogram import as_histogram
from trainbus.hooks.writers.target import Target

log = get_logger()

_NUMBERS = (int, float)


class Fanout(CopiedAnew):
    """Pass the scalars, images, histograms and texts of a run to writers. Options are LoggerHook's.

    Only one thread at a time may use it; any thread may call :meth:`state_dict`.
    """

    of_run: ClassVar = {
        **dict.fromkeys(("_targets", "_raw", "_smoothed"), list),
        "_smoothing": Lock,
        "_last": partial(Where, "train", 0, 0),
        "_opened": bool,
        "_warned": set,
        "_run": None,
    }

    def __init__(
        self, writers: Sequence[Writer], *, interval: int, ignore_last: bool, interval_exp_name: int, smoother: Smoother
    ) -> None:
        self.writers = writers
        self._interval = interval
        self._ignore_last = ignore_last
        self._interval_exp_name = interval_exp_name
        self._smoother = smoother
        self._smoothing = Lock()  # never held while a writer is called
        self._last = Where("train", 0, 0)
        self._targets: list[Target] = []
        self._raw: list[Target] = []
        self._smoothed: list[Target] = []
        self._opened = False
        self._warned: set[str] = set()  # what no writer takes, and names of histograms with values that are not finite

    def open(self, run: RunFacts) -> None:
        """Begin a run; without a work dir, without the writers that need one."""
        self._opened = True
        with self._smoothing:
            self._smoother.reach = self._longest
            self._smoother.begin_run()
            self._run, self._last = run, Where("train", 0, 0)
        chosen = [writer for writer in self.writers if run.work_dir is not None or not writer.needs_work_dir]
        self._targets = [Target(writer, writer.interval or self._interval, run) for writer in chosen]
        # A writer of every iteration gets raw values, which can still be smoothed later.
        self._raw = [target for target in self._targets if target.interval == 1 and not self._smoother.customised]
        self._smoothed = [target for target in self._targets if target not in self._raw]

    def train(self, iterations: Iterable[AfterTrainIter], epoch_length: int | None) -> None:
        self._open_late()
        rows: list[Row] = []
        # This thread shares the GIL with training: few calls per iteration, and only values that a writer reads.
        each, named = gcd(*(target.interval for target in self._targets)) or 1, self._interval_exp_name
        epoch = self._last.epoch
        empty: list[AfterTrainIter] = []
        for event in iterations:
            progress, outputs, batch = event.progress, event.outputs, event.batch_idx + 1
            if not (outputs or batch % each == 0 or (progress.iter + 1) % named == 0 or progress.epoch + 1 != epoch):
                empty.append(event)
                continue
            if empty:
                self._pass_over(empty, epoch_length)
                empty = []
            where = Where.of(progress, batch, epoch_length)
            epoch = where.epoch
            if self._raw:
                rows.append((_named(outputs), where.iter, where))
            if self._smoothed:
                self._smooth(outputs, where)
            self._last = where
            if where.iter % named == 0:
                self._write_rows(rows)
                rows = []
                for target in self._targets:
                    target.give("write_text", "experiment", self._run.name, where)
        if empty:
            self._pass_over(empty, epoch_length)
        self._write_rows(rows)

    def _pass_over(self, iterations: Sequence[AfterTrainIter], epoch_length: int | None) -> None:
        """Count iterations of one epoch that have no scalars, and in which no writer is due."""
        last = iterations[-1]
        with self._smoothing:
            self._last = Where.of(last.progress, last.batch_idx + 1, epoch_length)
            self._smoother.pass_over([one.progress.update for one in iterations])

    def end_epoch(self) -> None:
        """Write the last iterations of a training epoch that are not written yet."""
        for target in self._smoothed:
            if left := self._last.batch % target.interval:
                line = not self._ignore_last or self._last.batch < target.interval
                self._write_train(target, self._smoother.end(self._smoother.count - left + 1, line=line))

    @property
    def reach(self) -> int | None:
        """The number of iterations that a line may depend on besides its own; None if it may depend on all."""
        if self._smoother.customised:
            return None
        return self._longest if self._intervals - {1} else 0

    @property
    def _intervals(self) -> set[int]:
        return {writer.interval or self._interval for writer in self.writers}  # they may not be open yet

    @property
    def _longest(self) -> int:
        return max([self._smoother.window_size, *self._intervals])

    def state_dict(self) -> tuple[dict[str, Any], int]:
        """Return what the next line depends on, and the number of iterations of the run that are in it."""
        with self._smoothing:
            return {"smoother": self._smoother.state_dict(), "last": msgspec.to_builtins(self._last)}, self._last.iter

    def load_state_dict(self, state: Mapping[str, Any] | None, skipped: int, since: Iterable[Waiting]) -> None:
        """Continue from ``state`` (None: anew) after ``skipped`` iterations, and those ``since``, whose lines are written."""
        with self._smoothing:
            if state is not None:
                self._smoother.load_state_dict(state["smoother"])
                self._last = msgspec.convert(state["last"], Where)
            self._smoother.count += skipped
        for one in since:
            self._push(one.outputs, one.where)

    def evaluated(self, scalars: Mapping[str, float], step: int, where: Where) -> None:
        self._open_late()
        named = encodable({f"{where.stage}/{name}": value for name, value in scalars.items()})
        for target in self._targets if named else ():
            target.give("write_scalars", named, step, where)

    def image(self, name: str, image: Any, step: int, where: Where) -> None:
        self._open_late()
        if takers := self._takers("image", name):
            pixels = as_image(image)
            for target in takers:
                target.give("write_reported", encodable(f"{where.stage}/{name}"), pixels, step, where)

    def histogram(self, name: str, values: Any, bins: int, step: int, where: Where) -> None:
        self._open_late()
        if takers := self._takers("histogram", name):
            made, full = as_histogram(values, bins), encodable(f"{where.stage}/{name}")
            if (made.nan or made.infinite) and full not in self._warned:
                self._warned.add(full)
                facts = {"nan": made.nan, "infinite": made.infinite, "finite": made.total, "step": step}
                log.warning(
                    "a histogram leaves out values that are not finite; said once",
                    id="histogram-not-finite",
                    histogram=full,
                    **facts,
                )
            for target in takers:
                target.give("write_reported", full, made, step, where)

    def text(self, name: str, text: str, step: int, where: Where) -> None:
        self._open_late()
        for target in self._takers("text", name):
            target.give("write_reported", encodable(f"{where.stage}/{name}"), encodable(text), step, where)

    def _takers(self, kind: str, name: str) -> list[Target]:
        takers = [target for target in self._targets if target.takes("write_reported", f"write_{kind}")]
        if not takers and kind not in self._warned:
            self._warned.add(kind)
            log.warning(
                f"none of the writers takes {kind}s; add a JSONLinesWriter, which needs a work dir",
                id="no-writer-for-kind",
                **{kind: name},
            )
        return takers

    def flush(self, *, durable: bool = False) -> None:
        for target in self._targets:
            target.flush(durable=durable)

    def close(self, *, finished: bool = True) -> None:
        for target in self._targets:
            target.close(finished=finished)
        self._targets, self._raw, self._smoothed = [], [], []
        self._opened = False

    def _open_late(self) -> None:
        """Open the writers if the logger was added while a run was going on."""
        if not self._opened:
            self.open(RunFacts("run"))

    def _write_rows(self, rows: list[Row]) -> None:
        if rows:
            for target in self._raw:
                target.give_rows(rows)

    def _push(self, outputs: Mapping[str, Any], where: Where) -> None:
        with self._smoothing:
            if where.epoch != self._last.epoch:
                self._smoother.begin_epoch()
            self._last = where
            self._smoother.push({name: value for name, value in outputs.items() if isinstance(value, _NUMBERS)}, where.update)

    def _smooth(self, outputs: Mapping[str, Any], where: Where) -> None:
        self._push(outputs, where)
        smoother = self._smoother
        for target in self._smoothed:
            behind = where.batch % target.interval
            if not behind:
                rows = smoother.line(smoother.count - target.interval + 1, smooth=target.interval > 1)
                self._write_train(target, rows)
            elif events := smoother.events(smoother.count - behind + 1):
                self._write_train(target, events)

    def _write_train(self, target: Target, rows: Mapping[int, Mapping[str, float]]) -> None:
        for number, values in sorted(rows.items()):
            where, ago = self._last, self._smoother.count - number
            if ago:
                where = msgspec.structs.replace(where, iter=where.iter - ago, batch=where.batch - ago)
            if values:
                target.give("write_scalars", _named(values), where.iter, where)


def _named(scalars: Mapping[str, Any]) -> dict[str, float]:
    named = {f"train/{name}": value for name, value in scalars.items() if isinstance(value, _NUMBERS)}
    return named if "".join(named).isascii() else encodable(named)
