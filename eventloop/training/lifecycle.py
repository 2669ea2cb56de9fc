"""How a run begins, ends, and ends by an exception: what happens in ``with run:`` before and after the body."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from eventloop import events as ev
from eventloop.bus import Bus
from eventloop.errors import ConfigurationError, LaneFullError
from eventloop.events import Event
from eventloop.events.shared import Shared
from eventloop.log import get_logger
from eventloop.offload import Deadline
from eventloop.training.arguments import tell_useless
from eventloop.training.distributed.joining import join_ranks
from eventloop.training.distributed.ranks import Ranks, tell_failure, this_rank, world_size
from eventloop.training.feeds import Feeds
from eventloop.training.locks import DirectoryLock
from eventloop.training.progress import Counters
from eventloop.training.rng import seed_everything
from eventloop.training.saves.checkpoints import RunCheckpoints
from eventloop.training.state import Order
from eventloop.training.update import check_updates

log = get_logger()


class Begun(Protocol):
    """The run that begins and ends."""

    name: str
    bus: Bus
    models: dict[str, torch.nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    device: torch.device
    seed: int | None
    counters: Counters
    info: dict[str, Any]
    shared: Shared
    order: Order
    trains: bool

    def publish(self, event: type[Event], **payload: Any) -> None:
        """Publish an event of the run."""


_open: list[Begun] = []
"""Runs of this process that have begun and not ended."""


class RunLifecycle:
    """Opens the bus if it is not open, begins the run, and leaves nothing behind, however it ends.

    Args:
        run: that begins and ends.
        feeds: of the run.
        checkpoints: of the run.
        moves: True if its models are to be moved to its device.
        loop_driven: True if a hook makes the updates, not the body of the user's loop.
    """

    def __init__(self, run: Begun, feeds: Feeds, checkpoints: RunCheckpoints, *, moves: bool, loop_driven: bool) -> None:
        self._run = run
        self._feeds = feeds
        self._checkpoints = checkpoints
        self._moves = moves
        self._loop_driven = loop_driven
        self._opened = False
        self._patience: Deadline | None = None
        self._ranks: Ranks | None = None
        self._locks: dict[Path, DirectoryLock] = {}

    def enter(self) -> None:
        """Begin the run.

        Raises:
            Exception: what a handler of ``before_run`` raised, or the checkpoint that it was to go on from; nothing is left
                open then.
        """
        bus = self._run.bus
        if bus.state == "idle":
            bus.open()
            self._opened = True
        bus.adopt_thread(self._interrupt, self._run.order.refuse)
        try:
            self._begin()
        except BaseException as error:
            self._abort(error)
            raise

    def exit(self, error: BaseException | None) -> None:
        """End the run, in order or by the exception that left its body."""
        if error is not None:
            self._abort(error)
            return
        try:
            self._end()
        except BaseException as failure:
            self._abort(failure)
            raise
        self._run.bus.release_thread(self._interrupt)
        try:
            if self._opened:
                self._run.bus.close()
        finally:
            self._unlock()

    def _begin(self) -> None:
        run = self._run
        run.order.scopes.enter("run")
        self._ranks = join_ranks(run.bus, run.order, run.models, trains=bool(run.optimizers))
        self._checkpoints.join(self._ranks)
        run.order.scopes.defer(run.shared.clear)
        run.order.scopes.defer(run.order.forget_data)
        run.order.scopes.defer(self._feeds.forget)
        check_updates(run.bus.hooks, loop_driven=self._loop_driven)
        self._tell_others()
        tell_useless(run.optimizers, run.models)
        if run.seed is not None:
            seed_everything(run.seed)
        for model in run.models.values() if self._moves else ():
            model.to(run.device)
        # Before the steps are watched: its fence comes before the handlers of before_optimizer_step, which may change weights.
        self._checkpoints.open()
        for name, optimizer in run.optimizers.items():
            run.order.watch_steps(name, optimizer)
        if run.trains:
            self.lock()  # before a handler opens a file there
        run.publish(ev.BeforeRun)
        if run.trains:
            self.lock()  # where hooks save, too
        self._checkpoints.load()

    def lock(self) -> None:
        """Have the directories of this training for it alone. Rank 0 locks them for all.

        Raises:
            ConfigurationError: another training has one; on all ranks.
        """
        problem = ""
        try:
            for place in self._checkpoints.directories if not this_rank() else ():
                # One directory may have several names: a link to it, a way with "..".
                if isinstance(place, Path) and (directory := place.resolve()) not in self._locks:
                    self._locks[directory] = DirectoryLock(directory)
        except ConfigurationError as error:
            problem = str(error)
        if self._ranks is not None:
            problem = self._ranks.from_first(problem)
        if problem:
            raise ConfigurationError(problem)

    def _unlock(self) -> None:
        while self._locks:
            self._locks.popitem()[1].release()

    def _tell_others(self) -> None:
        """Warn of runs at the same time whose random numbers are not those that a seed promises."""
        for other in _open:
            if self._run.seed is not None or other.seed is not None:
                log.warning(
                    "two runs at once in one process draw from the same random state: neither gets the numbers of its seed, "
                    "and no resume is bitwise; run one after the other, or each in a process of its own",
                    run=self._run.name,
                    other=other.name,
                )
        _open.append(self._run)
        self._run.order.scopes.defer(lambda: _open.remove(self._run))

    def _end(self) -> None:
        run = self._run
        run.order.abandon_evaluation()
        run.order.break_epoch()
        run.order.end_train()
        run.order.progress = run.counters.snapshot()
        if reason := run.order.stop_reason or (run.order.agreement.reason if run.order.agreement is not None else ""):
            run.info["stop_reason"] = reason
        run.order.tell(ev.AfterRun)
        self._checkpoints.end()
        if self._ranks is not None:  # no process leaves before all is written, and all hear if it is not
            run.bus.raise_failures()
            run.order.settle()
        run.order.scopes.leave("run")

    def _abort(self, error: BaseException) -> None:
        """The exception is what the user must see: whatever fails in here is logged and added to it as a note."""
        run = self._run
        if world_size() > 1:
            tell_failure(error)
        self._patience = Deadline(run.bus.abort_timeout)
        # Finally: a second Ctrl-C strikes in a handler of on_exception, say, and must not leave anything open.
        try:
            self._tell(error)
        finally:
            try:
                run.order.scopes.unwind()
            finally:
                run.bus.release_thread(self._interrupt)
                try:
                    if self._opened:
                        run.bus.close(abort=True)
                finally:
                    self._unlock()

    def _tell(self, error: BaseException) -> None:
        try:
            self._run.bus.raise_failures()  # publishing would raise them instead of being heard
        except Exception as failure:
            log.exception("an offloaded handler failed, too")
            error.add_note(f"at about the same time, an offloaded handler failed: {failure!r}")
        try:
            self._run.publish(ev.OnException, error=f"{type(error).__name__}: {error}", exception=error)
        except Exception as failure:
            log.exception("a handler of on_exception failed")
            error.add_note(f"while handling it, a handler of on_exception failed: {failure!r}")

    def _interrupt(self) -> None:
        """Called where the training thread is about to wait for a place in a full lane; raises if it should not."""
        if self._patience is None:
            self._run.order.check_cancelled()
        elif not self._patience.left:
            raise LaneFullError(
                f"the run ends by an exception, and no longer than {self._run.bus.abort_timeout:g} s are waited"
            )
