"""A check of a training before it begins: two batches with all hooks, a save and a resume, on copies that are then dropped."""

from __future__ import annotations

import copy
import io
import math
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from rich import filesize
from rich.console import Console, ConsoleOptions, RenderableType

from trainbus.eventloop.bus import Bus
from trainbus.eventloop.device import most_memory_allocated
from trainbus.eventloop.errors import ConfigurationError, TrainbusError
from trainbus.eventloop.events import Event, RunView
from trainbus.eventloop.events.event import lineage, registry
from trainbus.eventloop.events.mount_points import BUILTIN
from trainbus.eventloop.log import collected
from trainbus.eventloop.platform import most_memory
from trainbus.eventloop.terminal import cell, plain, printable
from trainbus.eventloop.training.limits import limited_to, shortest
from trainbus.eventloop.training.loaders import length_of
from trainbus.eventloop.training.preflight import copies_of, first_batches, unmet_needs
from trainbus.eventloop.training.rng import random_states, set_random_states
from trainbus.eventloop.user_errors import contextmanager, notes_of
from trainbus.eventloop.world import world_size

_BATCHES: Final = 2
_RARE: Final = re.compile(r"test|exception|failed|skipped|load_checkpoint|train_epoch")
"""Mount points that a check may lack although the training has them."""


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a check found. It prints as text; ``ok`` is True if there are no ``errors``.

    Attributes:
        errors: what would end or spoil the training.
        warnings: what may be meant otherwise, such as a hook whose events never came, and the warnings of the training.
        metrics: names of the validation metrics.
        hooks: number of hooks that were called.
        epoch_seconds: estimated seconds of a training epoch; None if its number of batches is unknown.
        val_seconds: estimated seconds of a validation; None if there is none, or its number of batches is unknown.
        total_seconds: estimated seconds of the whole training, without its saves.
        checkpoint_bytes: size of a checkpoint; None if none was written.
        memory_bytes: most memory so far: of tensors on the GPU, or else resident in this process; None if unknown.
        seconds: how long the check took.
    """

    errors: list[str]
    warnings: list[str]
    metrics: list[str]
    hooks: int
    epoch_seconds: float | None
    val_seconds: float | None
    total_seconds: float | None
    checkpoint_bytes: int | None
    memory_bytes: int | None
    seconds: float

    @property
    def ok(self) -> bool:
        """True if the check found no error."""
        return not self.errors

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        facts = {
            "metrics": ", ".join(map(printable, self.metrics)) or "none",
            "hooks": f"{self.hooks} called",
            "epoch": _duration(self.epoch_seconds, "unknown: the number of batches is unknown"),
            "validation": _duration(self.val_seconds, "none, or unknown"),
            "training": _duration(self.total_seconds, "unknown"),
            "checkpoint": "none written" if self.checkpoint_bytes is None else filesize.decimal(self.checkpoint_bytes),
            "memory": "unknown" if self.memory_bytes is None else f"{filesize.decimal(self.memory_bytes)} at most so far",
        }
        for name, fact in facts.items():
            yield cell(f"{name:<12}{fact}")
        for text in self.warnings:
            yield cell(f"warning: {text}", "yellow", keep="\n")
        for text in self.errors:
            yield cell(f"error: {text}", "red", keep="\n")
        found = f"{_count(self.errors, 'error')}, {_count(self.warnings, 'warning')}"
        yield cell(
            f"{'ok' if self.ok else 'failed'}: {found}, in {self.seconds:.1f} s", "bold green" if self.ok else "bold red"
        )

    def __str__(self) -> str:
        return plain(self).rstrip()


class Job(msgspec.Struct, kw_only=True):
    """The parts of the loop to check. ``options`` are further ones of the loop."""

    kind: Any
    model: Any
    optimizer: Any
    steps: dict[str, Any]
    data: dict[str, Any]
    limits: Mapping[str, float]
    metrics: Mapping[str, Any]
    bus: Bus
    options: dict[str, Any]
    max_epochs: int | None
    max_iters: int | None
    validations: int


def check(job: Job) -> CheckResult:
    """Train, validate, save and resume copies of a job; see :meth:`TrainLoop.check`."""
    if world_size() > 1:
        raise ConfigurationError("a check runs in one process: check the loop without torchrun")
    began = time.perf_counter()
    found = _Check(job)
    with ExitStack() as undo:
        for loader in filter(None, job.data.values()):
            undo.callback(set_random_states, loader, random_states(loader))
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="trainbus-check-")))
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        undo.enter_context(redirect_stdout(io.StringIO()))
        undo.enter_context(redirect_stderr(io.StringIO()))
        lines = undo.enter_context(collected())
        found.run(folder / str(job.options.get("name") or "check"))
    found.warnings += [one for one in dict.fromkeys(lines) if not any(one in error for error in found.errors)]
    return found.result(time.perf_counter() - began)


class _Check:
    """The findings of a check, and the steps to them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.metrics: dict[str, Any] = {}
        self.called = 0
        self.folder = Path()
        self.device = torch.device("cpu")
        self.bytes: int | None = None
        self.loading: dict[str, float] = {}
        self.seconds: dict[str, list[float]] = {"train": [], "val": []}

    def run(self, folder: Path) -> None:
        job = self.job
        batches = {stage: self._batches(stage) for stage in ("train", "val") if job.data[stage] is not None}
        if not batches["train"]:
            return
        self.folder = folder
        with self._noted("training"):
            first, bus = self._copy(batches, folder)
            runs: list[RunView] = []
            bus.on("before_train", lambda event: runs.append(event.run), priority=0)
            bus.on("after_val_epoch", lambda event: self.metrics.update(event.metrics), priority=0)
            try:
                first.run()
            finally:
                self._look_at(bus)
            saved = [path for path in folder.rglob("*.safetensors") if path.is_file() and not path.is_symlink()]
            self.bytes = max((path.stat().st_size for path in saved), default=None)
            with self._noted("the resume"):
                second, again = self._copy(batches, folder)
                again.on("before_train", lambda event: self._compare(runs[0], event.run), priority=0)
                second.run(resume=str(folder))

    def _batches(self, stage: str) -> list[Any]:
        loader = self.job.data[stage]
        began = time.perf_counter()
        with self._noted(f"{stage}_data"):
            batches = first_batches(loader, _BATCHES)
            self.loading[stage] = (time.perf_counter() - began) / _BATCHES if not getattr(loader, "num_workers", 0) else 0.0
            if batches:
                return batches
            why = (
                "yielded no batch"
                if batches is not None
                else "cannot be read without consuming it: give a DataLoader or a list"
            )
            self.errors.append(f"{stage}_data {why}")
        return []

    def _copy(self, batches: Mapping[str, list[Any]], folder: Path) -> tuple[Any, Bus]:
        """Return a loop of copies over these batches, and its bus. It saves and stops after the first validation."""
        job, bus = self.job, Bus()
        # Hooks may refer to all of these. What the loop does not own stays shared.
        memo: dict[int, Any] = {id(job.bus): bus}
        memo |= {id(job.data[stage]): data for stage, data in batches.items()}
        for loader in filter(None, job.data.values()):
            dataset = getattr(loader, "dataset", loader)
            memo.setdefault(id(dataset), dataset)
        model, optimizer = copy.deepcopy((job.model, job.optimizer), memo)
        options = {**job.options, "stateful": copy.deepcopy(job.options.get("stateful"), memo), "work_dir": folder}
        metrics, steps = copies_of(job.metrics, memo), copy.deepcopy(job.steps, memo)
        chosen = []
        for hook in job.bus.hooks:
            try:
                own = copy.deepcopy(hook, memo).in_check()
            except (TypeError, RuntimeError, NotImplementedError) as error:
                self.warnings.append(f"{hook.label} was left out, because it cannot be copied: {error}")
                continue
            if own is None:
                self.warnings.append(f"{hook.label} was left out, because it acts outside of the run")
                continue
            priorities = {one.priority for one in job.bus.subscriptions if one.hook is hook}
            chosen.append((own, priorities.pop() if len(priorities) == 1 else None))
        bus.internal.add_chosen(chosen)
        for one in job.bus.subscriptions:
            if one.hook is None:
                self.warnings.append(f"{one.label} of {one.mount_point} was left out, because a function cannot be copied")
        bus.on("before_train", lambda event: setattr(self, "device", event.run.device), priority=0)
        self._time(bus)
        self._end(bus)
        total = None if job.max_epochs is None else self._length("train")
        # As many iterations as in the training, so that schedules and averages know its length; the check stops it.
        lengths = (
            {"max_iters": job.max_iters, "val_interval": _BATCHES}
            if total is None and job.max_iters
            else {
                "max_epochs": max(
                    2, job.max_epochs or 0, math.ceil((job.max_epochs or 0) * (total or 0) / len(batches["train"]))
                )
            }
        )
        loop = job.kind(
            model,
            optimizer,
            train_data=copy.deepcopy(batches["train"]),
            val_data=copy.deepcopy(batches["val"]) if batches.get("val") else None,
            metrics=metrics,
            bus=bus,
            **steps,
            **lengths,
            **options,
        )
        return loop, bus

    def _end(self, bus: Bus) -> None:
        """Stop after the batches and their validation, and save."""
        job = self.job
        if job.data["val"] is not None:
            bus.on("after_val", lambda event: event.run.stop("the check is done"), priority=0)
        elif job.max_iters is None:
            bus.on("after_train_epoch", lambda event: event.run.stop("the check is done"), priority=0)
        else:
            bus.on("after_train_iter", lambda event: event.run.stop("the check is done"), every=_BATCHES, priority=0)
        bus.on("after_train", lambda event: event.run.checkpoints.save(), priority=0)

    def _time(self, bus: Bus) -> None:
        for stage, seconds in self.seconds.items():
            begun: list[float] = []

            def begin(event: Event, begun: list[float] = begun) -> None:
                begun.append(time.perf_counter())

            def end(event: Event, begun: list[float] = begun, seconds: list[float] = seconds) -> None:
                seconds.append(time.perf_counter() - begun[-1])

            bus.on(f"before_{stage}_iter", begin, priority=0)
            bus.on(f"after_{stage}_iter", end, priority=100)

    def _look_at(self, bus: Bus) -> None:
        """Look for hooks whose events never came, and for metrics that hooks need and no validation reported."""
        published = bus.state_dict()["publishes"]
        came = {*published, *(name for one in published if one in registry for name in lineage(registry[one]))}
        for hook in bus.hooks:
            events = {name for one in bus.subscriptions if one.hook is hook for name in one.mount_points}
            self.called += bool(events & came)
            absent = sorted(name for name in events - came if not (name in BUILTIN and _RARE.search(name)))
            # A hook that was called may have methods for cases that are absent here; but events of the user's own are meant.
            missed = [name for name in absent if not events & came or _is_of_user(name)]
            if missed and not self.errors and sys.exc_info()[0] is None:
                self.warnings.append(f"{hook.label} was not called by {', '.join(missed)}, which never came")
        if self.metrics and sys.exc_info()[0] is None:
            self.errors += unmet_needs(bus, self.metrics, "the validation")

    def _compare(self, first: RunView, second: RunView) -> None:
        """Compare the state that the copy has resumed with that at the save."""
        for what, one, other in (
            ("model", first.models, second.models),
            ("optimizer", first.optimizers, second.optimizers),
        ):
            for name, part in one.items():
                if not _same(part.state_dict(), other[name].state_dict()):
                    self.errors.append(f"the resumed {what} {name!r} is not the one that was saved")

    @contextmanager
    def _noted(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the check reports it
            # The advice to continue from a file of the check would be wrong.
            kept = [note for note in notes_of(error) if str(self.folder) not in note]
            notes = "".join(f"\n  {note}" for note in kept)
            kind = "" if isinstance(error, TrainbusError) else f"{type(error).__name__}: "
            frames = traceback.extract_tb(error.__traceback__)
            where = "" if isinstance(error, TrainbusError) or not frames else f" ({frames[-1].filename}:{frames[-1].lineno})"
            self.errors.append(f"{what}: {kind}{error}{where}{notes}")

    def result(self, seconds: float) -> CheckResult:
        job = self.job
        epoch = self._estimate("train")
        val = None if job.data["val"] is None else self._estimate("val")
        if job.max_iters is None:
            total = None if epoch is None else epoch * (job.max_epochs or 0)
        else:
            total = self._of_batch("train") * job.max_iters if self.seconds["train"] else None
        if total is not None and job.data["val"] is not None:
            total = None if val is None else total + val * job.validations
        return CheckResult(
            errors=self.errors,
            warnings=list(dict.fromkeys(self.warnings)),
            metrics=[*self.metrics],
            hooks=self.called,
            epoch_seconds=epoch,
            val_seconds=val,
            total_seconds=total,
            checkpoint_bytes=self.bytes,
            memory_bytes=_memory(self.device),
            seconds=seconds,
        )

    def _of_batch(self, stage: str) -> float:
        return min(self.seconds[stage]) + self.loading.get(stage, 0.0)  # the first one is slow

    def _length(self, stage: str) -> int | None:
        loader = self.job.data[stage]
        return shortest(length_of(loader), limited_to(loader, self.job.limits.get(f"{stage}_data")))

    def _estimate(self, stage: str) -> float | None:
        length = self._length(stage)
        return None if length is None or not self.seconds[stage] else self._of_batch(stage) * length


def _same(one: Any, other: Any) -> bool:
    """Return True if two trees have equal values; NaN equals NaN. Other objects than numbers and tensors count as equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one.cpu().nan_to_num(), other.cpu().nan_to_num())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, Sequence) and isinstance(other, Sequence) and not isinstance(one, str):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return not isinstance(one, int | float | str) or bool(one == other)


def _is_of_user(name: str) -> bool:
    return name in registry and registry[name].__module__.partition(".")[0] != "trainbus"


def _memory(device: torch.device) -> int | None:
    if (most := most_memory_allocated(device)) is not None:
        return most
    return most_memory()


def _duration(seconds: float | None, unknown: str) -> str:
    if seconds is None:
        return unknown
    if seconds < 60:
        return f"about {seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"about {minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"about {minutes} min {rest} s"


def _count(found: Sequence[str], name: str) -> str:
    return f"{len(found)} {name}{'' if len(found) == 1 else 's'}"
