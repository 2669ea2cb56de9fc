"""``Host``: what differs between a loop of one's own and another library's trainer. ``OwnLoop`` is the host of one's own loop.

A run is the order of the mount points and the state of the hooks. Its host decides who steps, who saves, how the ranks agree,
and who owns directories, seeds and data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.privates import let_gloo_go
from trainbus.eventloop.training.distributed.ranks import join_ranks
from trainbus.eventloop.training.driver import Driver, watch_steps
from trainbus.eventloop.training.folders import DirectoryLock, free_number, newest_number, numbered
from trainbus.eventloop.training.replicas import Draws, Replicas
from trainbus.eventloop.training.rng import seed_everything
from trainbus.eventloop.training.saved_run import SavedRun
from trainbus.eventloop.training.saves.capture import Capture
from trainbus.eventloop.training.saves.checkpointer import Saver
from trainbus.eventloop.training.saves.contents import loose_parameters
from trainbus.eventloop.training.saves.loose import tell_of_loose
from trainbus.eventloop.training.saves.restore import Restore
from trainbus.eventloop.training.session import open_runs
from trainbus.eventloop.training.update import Update, check_updates
from trainbus.eventloop.user_errors import contextmanager

log = get_logger()


class HostFacts(Struct, frozen=True):
    """Who does what in a run: what is certain when it is made."""

    own_loop: bool
    """True in a loop of one's own: the run evaluates, and an exit code ends the process. False if another trainer does."""
    suffix: str
    """End of the names of checkpoints."""
    update_steps: bool = False
    """True if an update on the bus steps the optimizers; False if the body of the loop or the trainer does."""
    clears_folder: bool = True
    """True if a new training moves the files of an earlier run in its work dir aside."""


class Host(Protocol):
    """Where a run lives. A ``Run`` gets one; a bridge gives it a :class:`~trainbus.bridges.TrainerHost`."""

    around_rates: Callable[[Callable[[], None]], None] | None
    """Called with the function that sets learning rates, to scale the schedule of a trainer along."""
    replicas: Replicas | None
    """The replica groups that this run is one of; None for a run that is alone."""

    @property
    def facts(self) -> HostFacts:
        """Who does what."""

    @property
    def saver(self) -> Saver:
        """Makes the files of checkpoints that hooks request."""

    @property
    def window_open(self) -> bool:
        """True inside an accumulation window: saves and a stop wait for its end."""

    @property
    def accumulation(self) -> int | None:
        """Iterations per optimizer step; None if unknown."""

    @property
    def train_data(self) -> Iterable[Any] | None:
        """The loader of the training data, if known."""

    @property
    def epoch_length(self) -> int | None:
        """Training batches per epoch; None if unknown."""

    @property
    def evaluation_length(self) -> int | None:
        """Batches in the current or last validation or test; None if unknown."""

    def join(self, run: SavedRun, drive: Driver) -> None:
        """Become the host of a run, which ``drive`` drives."""

    def beginning(self) -> AbstractContextManager[None]:
        """Prepare ranks, directories, seeds and steps; inside, ``before_run`` is published; then resume."""

    def training(self) -> AbstractContextManager[None]:
        """Prepare a training; inside, ``before_train`` is published."""


class Accelerator(Protocol):
    """What a run asks of the library that has prepared the loop around it: ``Run(accelerator=...)``."""

    @property
    def window_open(self) -> bool:
        """True inside an accumulation window, before its step."""

    @property
    def accumulation(self) -> int:
        """Iterations per optimizer step."""

    @property
    def precision(self) -> str | None:
        """The mixed precision, if any."""

    def join(self, run: SavedRun, restore: Restore) -> None:
        """Save the state of a run with the library's own checkpoints, and restore it from them."""


class OwnLoop:
    """The host of a loop of one's own: its ranks agree by collectives, and trainbus writes its checkpoints.

    Args:
        resume: the checkpoint to resume from; see :class:`~trainbus.eventloop.Run`.
        strict: False loads only the matching part of a checkpoint of another model or optimizer.
        accelerator: what speaks for the library that has prepared the loop, if any. That saves into the work dir itself.
        replicas: the replica groups that the run is one of, if any.
        data_mesh: the mesh of the processes that train on different batches; found from the models by default.
        update_steps: True if an update on the bus steps the optimizers.
        chooses_folder: True if a training that begins or resumes by ``"auto"`` chooses its folder.
    """

    around_rates: Callable[[Callable[[], None]], None] | None = None

    def __init__(
        self,
        *,
        resume: str | Path | None = None,
        strict: bool = True,
        accelerator: Accelerator | None = None,
        replicas: Replicas | None = None,
        data_mesh: Any = None,
        update_steps: bool = False,
        chooses_folder: bool = True,
    ) -> None:
        self.accelerator = accelerator
        self.replicas = replicas
        self._data_mesh = data_mesh
        self.facts = HostFacts(
            own_loop=True, suffix=".safetensors", update_steps=update_steps, clears_folder=accelerator is not None
        )
        self._chooses_folder = chooses_folder and accelerator is None and replicas is None
        self._resume, self._strict = resume, strict
        self._locked: set[Path] = set()
        self._run: SavedRun
        self._drive: Driver
        self.saver: Capture

    def join(self, run: SavedRun, drive: Driver) -> None:
        """Become the host of a run."""
        self._run, self._drive = run, drive
        if self.replicas is not None:
            self._join_replicas(self.replicas)
        self.saver = Capture(run)
        run.checkpointer.restore = restore = Restore(run, self._resume, strict=self._strict)
        if self.accelerator is not None:
            self.accelerator.join(run, restore)

    def stay(self) -> None:
        """Use the work dir as it is: somebody else has made it for this run, and finds its files there."""
        self._chooses_folder = False
        self.facts = replace(self.facts, clears_folder=self.replicas is None)

    def _join_replicas(self, replicas: Replicas) -> None:
        run = self._run
        if run.seed is None:
            raise ConfigurationError(
                "replicas= needs seed=: the random numbers of an iteration are made from it, so that a replica group that "
                "comes back goes on like one that did not stop"
            )
        run.feeds.draws = Draws(run.seed, lambda: run.state.counters.iter)
        if run.work_dir is not None:
            # A group that comes back starts like one of a new training.
            self._resume = self._resume or "auto"
            run.work_dir = run.work_dir / replicas.name
        replicas.join(run, self._drive)

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Join the ranks, choose and lock the directories, seed, move the models, and watch the steps; then resume."""
        run, state = self._run, self._run.state
        group = None if self.replicas is None else self.replicas.size
        trains, mesh = bool(run.optimizers), self._data_mesh
        state.join(join_ranks(run.bus, run.models, state.own, trains=trains, group=group, data_mesh=mesh))
        if state.coordinator.size > 1:
            self._drive.on_close.callback(let_gloo_go)
        run.feeds.layout = state.coordinator.layout
        begins_anew = self._chooses_folder and state.trains and self._choose_folder()
        check_updates(run.bus.hooks, update_steps=self.facts.update_steps)
        self._warn_of_others()
        tell_of_loose(loose_parameters(run), run.models, run.optimizers, saved=True)
        if run.seed is not None:
            seed_everything(run.seed)
        for model in run.models.values() if run.moves_models else ():
            model.to(run.device)
        run.checkpointer.open(begins_anew=begins_anew)
        watch_steps(run, self.saver)
        if state.trains:
            self._lock()  # before a handler opens a file in them
        yield
        if state.trains:
            self._lock()  # the directories that hooks added in before_run
        run.checkpointer.load()
        if self.replicas is not None:
            self.replicas.begin()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Lock the directories that hooks added since the run began."""
        self._lock()
        yield

    @property
    def window_open(self) -> bool:
        """True inside an accumulation window of ``run.train(accumulate=)``, the accelerator or the bus's update."""
        if self._drive.window_open:
            return True
        if self.accelerator is not None and self.accelerator.window_open:
            return True
        return any(hook.window_open for hook in self._run.bus.hooks if isinstance(hook, Update))

    @property
    def accumulation(self) -> int | None:
        """Iterations per optimizer step, from ``run.train()``, the accelerator or the update; None if your code decides."""
        if self._drive.accumulate > 1:
            return self._drive.accumulate
        if self.accelerator is not None:
            return self.accelerator.accumulation
        return next((hook.accumulate for hook in self._run.bus.hooks if isinstance(hook, Update)), None)

    @property
    def train_data(self) -> Iterable[Any] | None:
        """The loader of the training data; None before the first epoch, unless a ``TrainLoop`` knows it."""
        feeds = self._run.feeds
        return feeds.expected if feeds.train is None else feeds.train.loader

    @property
    def epoch_length(self) -> int | None:
        """Training batches per epoch; None if unknown."""
        return self._run.feeds.epoch_length

    @property
    def evaluation_length(self) -> int | None:
        """Batches in the current or last validation or test; None if unknown."""
        feed = self._run.feeds.evaluated
        return None if feed is None else feed.length

    def _lock(self) -> None:
        """Lock the directories of this training on rank 0 until the bus is closed; an error is raised on all ranks."""

        def lock() -> None:
            shared = self.replicas is not None  # then each group locks the folder for its own files
            for path in [self._run.work_dir] if shared else self._run.checkpointer.directories:
                # resolve(): links and ".." give one directory several names.
                if isinstance(path, Path) and (directory := path.resolve()) not in self._locked:
                    release = DirectoryLock(directory).release
                    self._locked.add(directory)
                    self._drive.on_close.callback(self._locked.discard, directory)
                    self._drive.on_close.callback(release)

        self._run.coordinator.from_first(lock)

    def _choose_folder(self) -> bool:
        """Choose the folder of a training that does not resume from a given checkpoint; the same number on all ranks.

        Return True for a training without a work dir that begins anew.
        """
        run = self._run
        self._chooses_folder = False  # a run that is entered again stays there
        restore, wanted, state = run.checkpointer.restore, run.work_dir, run.state
        if restore.given or state.counters.iter or state.counters.epoch:
            return False
        if wanted is None:
            return True
        find = partial(newest_number, wanted) if restore.automatic else partial(free_number, wanted, run.bus.hooks)
        # The highest, because a rank may have a disk of its own with a run that the others do not see.
        folder = numbered(wanted, max(run.coordinator.from_all(find)))
        if folder != wanted:
            what = "going on with the newest run of this name" if restore.automatic else "this work dir has a run already, so"
            log.info(what if restore.automatic else f"{what} this one gets a folder of its own", work_dir=str(folder))
            run.move_to(folder)
        return False

    def _warn_of_others(self) -> None:
        """Warn about another open run if one of the two has a seed: both draw from the same random state."""
        run = self._run
        for other in (one for one in open_runs if one is not run):
            if run.seed is not None or other.seed is not None:
                log.warning(
                    "two open runs in one process draw from the same random state, so seeds and resumes do not reproduce their "
                    "numbers; run one after the other, or each in its own process",
                    id="two-runs-share-random-state",
                    run=run.name,
                    other=other.name,
                )
