"""Batches: move them to a device, detect the last one, and restore the position in the data after a resume."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import msgspec
import torch

from trainbus.eventloop.device import is_asynchronous, moved_to
from trainbus.eventloop.errors import TrainingError, stopped
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.offload.snapshot import IMMUTABLE
from trainbus.eventloop.privates import READS_NEXT, READS_SAMPLES
from trainbus.eventloop.training.distributed.launch import check_sampler
from trainbus.eventloop.training.distributed.layout import RankLayout
from trainbus.eventloop.training.distributed.samples import global_sampler
from trainbus.eventloop.training.limits import limited_to, shortest
from trainbus.eventloop.training.loaders import (
    SamplerWatch,
    length_of,
    restore_loader,
    sampler_epoch,
    skip_batches,
    stateful_part,
)
from trainbus.eventloop.training.metrics import Metrics, NamedMetrics
from trainbus.eventloop.training.replicas import Draws
from trainbus.eventloop.training.rng import (
    Generator,
    drawn_since,
    generator_states,
    generators_within,
    get_rng_state,
    has_workers,
    own_generators,
    random_states,
    samplers_within,
    set_epoch,
    set_generators,
    set_random_states,
    set_rng_state,
    set_sampler_epoch,
)
from trainbus.eventloop.training.schema import SavedData, SavedEvaluation, SavedPosition, SavedStart
from trainbus.eventloop.training.worker_signals import starting_workers

log = get_logger()

_MISSING: Any = object()
_END: Any = object()


class Feed:
    """Iterate over a loader pass by pass, move batches to ``device``, and track the position in the data.

    Errors call the loader ``name``, such as ``"train_data"``. A pass ends after ``limit`` batches, or that fraction of them.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device,
        name: str = "train_data",
        draws: Draws | None = None,
        limit: float | None = None,
    ) -> None:
        self.loader: Any = loader
        self.limit = limited_to(loader, limit)
        self._measure(length_of(loader))
        self._sampler = global_sampler(loader)
        # A state of one process has no place in others.
        single = self._sampler is None and draws is None
        self._stateful: Any = stateful_part(loader) if single else None
        self._has_state = self._stateful is not None
        self._watch = SamplerWatch(loader)
        self._restored_state = False  # by the loader itself, in a resumed run
        self._generators: list[Any] = []  # their states in the saved run
        self._exhausted = False
        self._cut: SavedPosition | None = None
        self._left: Any = _MISSING  # the loader's state one batch before the end of a pass that was left early
        self._draws = draws
        self.used = 0
        self.passes = 0  # earlier passes of the same epoch, in iteration-based training
        self._device = device
        self._name = name
        self._iterator: Iterator[Any] | None = None
        self._starts = False
        self._ahead: Any = _MISSING
        self._position: Any = _MISSING  # the loader's state before it yielded the batch ahead
        self.start: SavedStart | None = None
        """Random states at the start of the pass, and whether workers were running; None before the first pass."""
        self.resuming = False
        self.before_batch: Callable[[], object] = bool
        """Called before a loop of calls draws a batch."""
        self._again: SavedStart | None = None
        """The random states to begin with, if the saved run had begun the pass and taken no batch."""
        self._warned = False
        self._endless: int | None = None  # the epoch in which an exhausted loader is restarted
        self._samples: int | None = None  # those that the saved run had used, before a resumed run takes the rest
        self._epoch = 0
        self._given: tuple[Any] = (None,)
        self._repeats = False

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches."""
        while True:
            self.before_batch()
            if (batch := self.next()) is None:
                return
            yield batch[0]

    def set_epoch(self, epoch: int, *, endless: bool) -> None:
        """Set the epoch of the datasets; ``endless`` restarts an exhausted loader."""
        self._endless, self._epoch = epoch if endless else None, epoch
        if not self.resuming:
            self.passes = 0
        set_epoch(self.loader, epoch + self.passes)
        if self._sampler is not None:
            self._sampler.set_epoch(epoch + self.passes)
            self._measure(len(self._sampler))

    def start_pass(self) -> None:
        """Make the iterator of a new pass, or of the interrupted pass of a resumed run."""
        with starting_workers(self.loader):
            self._start_pass()
        self._starts = True

    def _start_pass(self) -> None:
        self._ahead = self._position = _MISSING
        self._exhausted, self._cut = False, None
        if self._endless is not None:  # after the hooks, which only know the epoch
            set_sampler_epoch(self.loader, self._endless + self.passes)
        again, self._again = self._again, None
        if again is not None:
            set_random_states(self.loader, again)
        if self._draws is not None:
            self._start_drawn(self._draws)
        elif self.resuming and self.used and self.start is not None:
            self._iterator = self._continued(self.start) if self._restored_state else self._remaining(self.start)
        else:
            self._watch.begin_pass()
            former, self.start = self.start, random_states(self.loader)
            self.used = 0
            if former is not None and self._restored_state and self.resuming and self._left is _MISSING:
                self._iterator = self._begun_behind(former, self.start)
            else:
                self._iterator = iter(self.loader)
            self._left = _MISSING
        self.resuming = False

    def _continued(self, start: SavedStart) -> Iterator[Any]:
        """Return an iterator over the rest of the pass whose position the loader has restored itself."""
        if self._at_limit or (self._stateful is not self.loader and self.used == self._own_length):
            return iter(())  # nothing remains; iter(loader) would begin its next pass
        # A loader may draw an order as it did when the pass began; the interrupted run has drawn these numbers already.
        now, before = get_rng_state(), generator_states(self.loader)
        set_rng_state(start.rng)
        iterator: Iterator[Any] = iter(self.loader)
        set_rng_state(now)
        # Those within parts have drawn the whole order again, and at its end that of the next pass.
        set_generators(self.loader, drawn_since(self.loader, before, self._generators), generators_within(self.loader))
        return iterator

    def _begun_behind(self, former: SavedStart, now: SavedStart) -> Iterator[Any]:
        """Begin the pass after one whose end the loader has restored itself; that one began with the states ``former``."""
        if again := bool(samplers_within(self.loader)):
            set_random_states(self.loader, former)
        iterator: Iterator[Any] = iter(self.loader)
        if again:
            set_random_states(self.loader, now)
        return iterator

    @property
    def _at_limit(self) -> bool:
        return self.limit is not None and self.used >= self.limit

    def _start_drawn(self, draws: Draws) -> None:
        self.start = draws.begin_pass(self.loader, self._epoch + self.passes)
        if self.resuming and self.used:
            self._iterator = self._remaining(self.start)
        else:
            self.used = 0
            self._iterator = iter(self.loader)

    def _measure(self, length: int | None) -> None:
        self._own_length = length  # saved, because a position in the data has nothing to do with limits
        self.length = shortest(length, self.limit)

    @property
    def endless(self) -> bool:
        """True if an exhausted loader is restarted within the same epoch."""
        return self._endless is not None

    def place(self) -> dict[str, int | None]:
        """Return where the current batch is, for :meth:`go_to_place` in another replica group."""
        epoch = sampler_epoch(self.loader)
        return {"used": self.used - 1, "passes": self.passes, "length": self._own_length, "sampler_epoch": epoch}

    def go_to_place(self, place: Mapping[str, Any]) -> None:
        """Make the next :meth:`start_pass` begin at the batch that another replica group is at."""
        self.go_to(place["used"], place["passes"], place["length"])
        if place["sampler_epoch"] is not None:
            set_sampler_epoch(self.loader, place["sampler_epoch"])

    def go_to(self, used: int, passes: int, length: int | None) -> None:
        """Make the next :meth:`start_pass` continue behind ``used`` batches of a pass; replica groups pass over data alike."""
        self.used, self.passes = used, passes
        self.resuming = True
        if self._own_length and length and self._own_length != length:
            log.warning(
                "this replica group has another number of batches in an epoch than the one whose place it takes over, so their "
                "epochs differ",
                id="replica-lengths-differ",
                batches=self._own_length,
                other=length,
            )

    def repeat(self) -> None:
        """Make :meth:`next` return the last batch again."""
        self._repeats = True

    def _remaining(self, start: SavedStart) -> Iterator[Any]:
        """Return an iterator over the rest of the pass that began with the random states ``start``."""
        now, restart = random_states(self.loader), partial(set_random_states, self.loader, start)
        restart()
        if self._sampler is not None and self._samples is not None:
            self.used = self._sampler.begin_at(self._samples)
            self._measure(len(self._sampler))
            iterator: Iterator[Any] = iter(self.loader)
        else:
            iterator = skip_batches(self.loader, self.used, restart if start.workers else None)
        set_random_states(self.loader, now)
        return iterator

    def end(self, *, cut: bool = False) -> None:
        """End the pass, and with its iterator the workers of a DataLoader. It is saved as an open one if a limit ``cut`` it."""
        self._cut = self.saved() if cut else None
        if self._has_state and self._iterator is not None and not self._exhausted and self._left is _MISSING:
            self._left = self._stateful.state_dict() if self._position is _MISSING else self._position
        self._iterator = None
        self._ahead = self._position = _MISSING
        self.used = 0

    def next(self, *, may_be_empty: bool = False) -> tuple[Any] | None:
        """Return the next batch, on its device, in a tuple (a batch may be None), or None at the end of the pass.

        Raise TrainingError if the pass had no batch, unless it ``may_be_empty``, because another rank may have some.
        """
        if self._iterator is None:
            self.start_pass()
        draws = self._draws
        if self._repeats and draws is not None:
            self._repeats = False
            draws.before_step()
            return self._given
        if (batch := self._ahead) is _MISSING:
            batch = _END if self.limit is not None and self.used >= self.limit else self._pull()
        if batch is _END:
            self._check_end(may_be_empty=may_be_empty)
            if self._endless is None:
                return None
            self.passes += 1  # another order: no mount point lets a hook set it
            set_epoch(self.loader, self._endless + self.passes)
            self.start_pass()
            return self.next()
        self._ahead = self._position = _MISSING
        self.used += 1
        if draws is None:
            return (to_device(batch, self._device),)
        self._given = (to_device(batch, self._device),)
        draws.before_step()
        return self._given

    @property
    def last(self) -> bool:
        """True if the last returned batch ends the epoch; a loader without length is asked for one batch ahead."""
        if self._endless is not None or (self.length is None and self._iterator is None):
            return False
        if self.length is not None:
            return self.used >= self.length
        if self._at_limit:
            return True
        if self._ahead is _MISSING:
            self._position = self._stateful.state_dict() if self._has_state else _MISSING
            self._ahead = self._pull()
        return self._ahead is _END

    def saved(self, instead: Mapping[Generator, Any] = {}, *, repeats: bool = False) -> SavedPosition:
        """Return the consumed batches (not prefetched ones) and the random states of the pass; see `generator_states`.

        With ``repeats`` the present batch counts as not consumed, if the loader can read it again.
        """
        if self._cut is not None:
            return self._cut
        saved = SavedPosition(
            used=self.used - (repeats and self._can_repeat),
            repeats=repeats,
            passes=self.passes,
            begun=self._iterator is not None,
            length=self._own_length,
            start=self.start,
            generators=generator_states(self.loader, instead),
            counted=_passes_made(self.loader),
        )
        if self._sampler is not None:
            saved.samples = self._samples if self.resuming else self._sampler.samples_before(self.used)
        if self._has_state:
            saved.left = self._left is not _MISSING if self._iterator is None else self._at_limit
            at = self._left if saved.left else self._position
            saved.loader = self._stateful.state_dict() if at is _MISSING else at
        return saved

    @property
    def _can_repeat(self) -> bool:
        """True if the last batch can be read again by its index."""
        return self.used > 0 and not self._has_state and self._sampler is None and self._draws is None

    def restore(self, saved: SavedPosition, restored: set[Generator]) -> None:
        """Make the next :meth:`start_pass` continue from ``saved``; generators in ``restored`` are restored already."""
        if self._draws is not None:
            self.go_to(saved.used, saved.passes, saved.length)
            return
        self.used, self.passes, self.start = saved.used, saved.passes, saved.start
        self._samples = saved.samples
        self.resuming = True
        if saved.repeats and (self._has_state or self._sampler is not None):
            log.warning(
                "the checkpoint was saved in a validation before the step of its body, and this loader cannot read the batch "
                "of that body again, so the resumed run leaves its update out; validate behind the step, or before run.train()",
                id="batch-not-read-again",
            )
        workers = self.start is not None
        if self.start is not None and not self.used and saved.begun:
            self._again, workers = self.start, self.start.workers
        counts = self._sampler is not None and self._samples is not None
        if not counts and self.used and self._own_length and self._own_length != (before := saved.length or self._own_length):
            log.warning(
                "resuming inside an epoch whose number of batches has changed, so the position in the data is wrong; resume "
                "with the old batch size and data, or from the end of an epoch",
                id="epoch-length-changed",
                before=before,
                now=self._own_length,
                used=self.used,
            )
        self._generators = saved.generators
        self._restored_state = self._has_state and saved.loader is not msgspec.UNSET
        if self._restored_state and saved.left:
            self._left = saved.loader
        restore_loader(self.loader, saved, restored, workers=workers)

    def _pull(self) -> Any:
        """Return the next batch of the loader, or ``_END``."""
        assert self._iterator is not None  # noqa: S101 - next() made it
        if self._starts:  # a loader whose __iter__ is a generator starts its workers now
            self._starts = False
            with starting_workers(self.loader):
                return self._pull()
        # Not before the first batch: a loader whose __iter__ is a generator does not know of its new pass until then.
        if self._has_state and self.limit is not None and 0 < self.used == self.limit - 1:
            self._left = self._stateful.state_dict()
        if self._draws is not None and self.used:  # the first batch draws the order, too
            self._draws.before_batch(self._epoch + self.passes, self.used)
        try:
            return next(self._iterator)
        except StopIteration as end:
            if _of_a_sample(end):
                raise stopped(end, f"the dataset (or collate_fn) of {self._name}") from end
            self._exhausted = True
            return _END

    def check_not_empty(self) -> None:
        """Raise TrainingError if the pass had no batch."""
        if self.used == 0 and isinstance(self.loader, Iterator):
            raise TrainingError(f"{self._name} is an exhausted iterator; give a loader that can be iterated again")
        if self.used == 0:
            raise TrainingError(f"{self._name} yielded no batch; is the dataset smaller than one batch, with drop_last=True?")

    def _check_end(self, *, may_be_empty: bool) -> None:
        if not may_be_empty:
            self.check_not_empty()
        if self.length is not None and self.used < self.length and not self._warned:
            self._warned = True
            log.warning(
                "the loader ended before its length: one of its next() calls raised StopIteration, or its __len__ is wrong",
                id="loader-ended-early",
                data=self._name,
                batches=self.used,
                length=self.length,
            )


class Feeds:
    """Keep the feed of the training data from epoch to epoch, and the feed of the last validation or test."""

    def __init__(self, device: torch.device) -> None:
        self.train: Feed | None = None
        self.evaluated: Feed | None = None
        self.expected: Iterable[Any] | None = None
        """The training data, if it is known before the first epoch."""
        self.draws: Draws | None = None
        """Where the random numbers of training come from, if the run is one of several replica groups."""
        self.limits: Mapping[str, int | float] = {}
        """The most batches of a pass, or a fraction of them, of ``"train_data"`` and ``"val_data"``."""
        self.layout = RankLayout()
        """Which processes need the same batches."""
        self._device = device
        self._warned: set[str] = set()  # metrics already warned about
        self._evaluated: list[Iterable[Any]] = []  # loaders of validations and tests, in order of first use
        self._trained: list[Iterable[Any]] = []  # those of the passes of the training in one epoch
        self._saved = SavedData(None, [])  # what a resumed run has not begun with yet
        self._restored: set[Generator] = set()

    def for_training(self, loader: Iterable[Any], index: int = 0) -> Feed:
        """Return the feed of ``loader``: the current one, or a new one at the position of a resumed run.

        ``index`` counts the passes over training data in one epoch.
        """
        if isinstance(loader, Feed):  # of a pass that has begun, whose loader is noted
            self.train = loader
        else:
            self.pass_over(loader, index)
        if self.train is None or (self.train is not loader and self.train.loader is not loader):
            self.train = Feed(loader, self._device, draws=self.draws, limit=self.limits.get("train_data"))
            check_sampler(loader, "train_data", self.layout)
            if self._saved.train is not None:
                self.train.restore(self._saved.train, self._restored)
                self._saved.train = None
        return self.train

    def pass_over(self, loader: Iterable[Any], index: int) -> None:
        """Note the loader of a pass of the training, also if the saved run has finished that pass."""
        first = index >= len(self._trained)
        self._trained[index : index + 1] = [loader]
        if first and index < len(self._saved.trained):
            saved = self._saved.trained[index]
            restore_loader(loader, saved, self._restored, workers=saved.workers)

    def for_evaluation(self, loader: Iterable[Any], name: str) -> Feed:
        """Return a new feed of ``loader``; errors use ``name``."""
        if isinstance(loader, Feed):
            self.evaluated = loader
            return loader
        self.evaluated = Feed(loader, self._device, name, limit=self.limits.get(name))
        if not any(known is loader for known in self._evaluated):
            index = len(self._evaluated)
            self._evaluated.append(loader)
            check_sampler(loader, name, self.layout)
            if index < len(self._saved.evaluated):
                saved = self._saved.evaluated[index]
                restore_loader(loader, saved, self._restored, workers=saved.workers)
        return self.evaluated

    @property
    def repeats(self) -> bool:
        """True if the saved run was in the body of a batch, which begins once more."""
        return self._saved.train is not None and self._saved.train.repeats

    @property
    def epoch_length(self) -> int | None:
        """The training batches of an epoch, also before the first one; None if unknown."""
        if self.train is not None:
            return self.train.length
        return shortest(length_of(self.expected), limited_to(self.expected, self.limits.get("train_data")))

    def metrics(self, metrics: NamedMetrics | None) -> Metrics:
        """Return metrics on the device of the run; they share its warnings."""
        made = Metrics(metrics, self._device, self._warned)
        made.may_lack = self.layout.data.shares
        return made

    def saved(self, *, validating: bool, repeats: bool = False) -> SavedData | None:
        """Return the position in the data; with ``validating``, that at the start of the current validation.

        With ``repeats``, the present batch of the training counts as not consumed.

        None before the first epoch and the first validation.
        """
        instead: dict[Any, Any] = {}
        workers: dict[int, bool] = {}
        if validating and (feed := self.evaluated) is not None and feed.start is not None:
            instead = dict(zip(own_generators(feed.loader), feed.start.generators, strict=False))
            workers = {id(feed.loader): feed.start.workers}
        # A resumed run may have no training epoch yet.
        train = self._saved.train if self.train is None else self.train.saved(instead, repeats=repeats)
        evaluated, trained = (
            [
                SavedEvaluation(
                    generators=generator_states(loader, instead),
                    workers=workers.get(id(loader), has_workers(loader)),
                    counted=_passes_made(loader),
                )
                for loader in loaders
            ]
            for loaders in (self._evaluated, self._trained)
        )
        evaluated += self._saved.evaluated[len(evaluated) :]
        trained += self._saved.trained[len(trained) :]
        return SavedData(train, evaluated, trained if len(trained) > 1 else []) if train is not None or evaluated else None

    def restore(self, saved: SavedData | None) -> None:
        """Start the next feeds at this position."""
        self._saved = SavedData(None, []) if saved is None else saved

    def forget(self) -> None:
        """Drop references to the data when the run ends."""
        # A run is a reference cycle. If the garbage collector freed a DataLoader with persistent workers in it, the queues
        # would end before the iterator. torch would then wait 5 s for each worker.
        self.train = self.expected = None
        self._evaluated.clear()
        self._trained.clear()


def _passes_made(loader: Iterable[Any]) -> int | None:
    """Return the number of passes that a wrapped loader has counted, which sets its next order; None for others."""
    return getattr(loader, "iteration", None) if hasattr(loader, "base_dataloader") else None


def _of_a_sample(end: StopIteration) -> bool:
    """Return True if a dataset or ``collate_fn`` raised it: DataLoader would pass it on as its own end."""
    trace = end.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code in READS_SAMPLES or (code is READS_NEXT and trace.tb_next and trace.tb_frame.f_locals["self"].auto_collation):
            return True
        trace = trace.tb_next
    return False


def to_device(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with its tensors on ``device``: any nesting of dicts, lists, tuples, and objects with ``.to()``.

    ``.to()`` comes first, also on a mapping (a tokenizer's output) or a tuple (a packed sequence).
    """
    kind = type(batch)  # exact types first: isinstance with torch.Tensor runs Python code in its metaclass
    if (kind is torch.Tensor and batch.device == device) or kind in IMMUTABLE:
        return batch
    if kind is tuple or kind is list:
        for value in batch:
            if type(value) is not torch.Tensor or value.device != device:
                return kind([to_device(value, device) for value in batch])
        return kind(batch)  # a copy of a list, whose entries a step or a hook may replace
    if isinstance(batch, torch.Tensor):
        return moved_to(batch, device)
    if callable(getattr(batch, "to", None)):
        # Tensors in pinned memory would each wait for the device. For any other memory of the host it makes no difference.
        queued = is_asynchronous(device) and _takes_non_blocking(kind)  # type: ignore[arg-type]  # classes have a hash
        return batch.to(device, non_blocking=True) if queued else batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


@cache
def _takes_non_blocking(kind: type) -> bool:
    """Return True if the ``.to()`` of a class has ``non_blocking=``, as torch's have."""
    try:
        parameters = inspect.signature(kind.to).parameters.values()  # type: ignore[attr-defined]  # or it is an instance's own
    except (AttributeError, TypeError, ValueError):
        return False
    return any(one.name == "non_blocking" or one.kind is one.VAR_KEYWORD for one in parameters)
