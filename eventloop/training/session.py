"""Begin and end a run: open the bus, join the other ranks, lock directories, and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eventloop import events as ev
from eventloop.bus import Bus
from eventloop.errors import ConfigurationError, LaneFullError
from eventloop.events import Event
from eventloop.events.run_view import RunView
from eventloop.log import get_logger
from eventloop.offload import Deadline
from eventloop.training.data import Feeds
from eventloop.training.distributed.ranks import Wishes, join_ranks, tell_failure, this_rank, world_size
from eventloop.training.locks import DirectoryLock
from eventloop.training.optimizers import stepping, tell_useless
from eventloop.training.rng import seed_everything
from eventloop.training.saves.capture import Saves
from eventloop.training.saves.restore import Restore
from eventloop.training.state import RunState
from eventloop.training.update import check_updates

log = get_logger()

_open: list[RunView] = []
"""Open runs of this process."""


class Session:
    """Open an idle bus, begin and end the run, and release everything even after an error.

    ``moves`` moves the models to the device of the run.
    """

    def __init__(
        self, run: RunView, bus: Bus, state: RunState, feeds: Feeds, saves: Saves, restore: Restore, *, moves: bool
    ) -> None:
        self._run = run
        self._bus = bus
        self._state = state
        self._feeds = feeds
        self._saves = saves
        self._restore = restore
        self._moves = moves
        self._opened = False
        self._patience: Deadline | None = None
        self._locks: dict[Path, DirectoryLock] = {}

    def begin(self, *, loop_driven: bool) -> None:
        """Begin the run; close everything after an error."""
        bus = self._bus
        if bus.state == "idle":
            bus.open()
            self._opened = True
        self._patience = None
        bus.adopt_thread(self._interrupt, self._state.refuse)
        try:
            self._begin(loop_driven=loop_driven)
        except BaseException as error:
            self.abort(error)
            raise

    def end(self) -> None:
        """End the run in order; abort it if that raises."""
        try:
            self._end()
        except BaseException as failure:
            self.abort(failure)
            raise
        self._bus.release_thread(self._interrupt)
        self._close()

    def tell(self, event: type[Event], **payload: Any) -> None:
        """Publish an event between iterations, and advance the version if a handler may have changed the state."""
        self._run.publish(event, **payload)
        self._state.version += self._bus.may_change_state(event)

    def _begin(self, *, loop_driven: bool) -> None:
        run, state = self._run, self._state
        state.scopes.enter("run")
        state.agreement = join_ranks(
            self._bus,
            run.models,
            lambda: Wishes(state.stop, state.save_now, state.cancelled, state.paused, bool(state.rates)),
            lambda: state.stop_reason,
            trains=bool(run.optimizers),
        )
        state.scopes.defer(state.forget_pause)
        state.scopes.defer(run.shared.clear)
        state.scopes.defer(self._feeds.forget)
        check_updates(self._bus.hooks, loop_driven=loop_driven)
        self._tell_others()
        tell_useless(run.optimizers, run.models)
        if run.seed is not None:
            seed_everything(run.seed)
        for model in run.models.values() if self._moves else ():
            model.to(run.device)
        # Before _watch_steps: its fence must precede the handlers of before_optimizer_step, which may change weights.
        self._saves.open(state.ranks)
        for name, optimizer in run.optimizers.items():
            self._watch_steps(name, optimizer)
        if state.trains:
            self.lock()  # before a handler opens a file in them
        run.publish(ev.BeforeRun)
        if state.trains:
            self.lock()  # the directories that hooks added in before_run
        self._restore.load()

    def _end(self) -> None:
        state = self._state
        state.progress = state.counters.snapshot()
        if reason := state.stop_reason or (state.agreement.reason if state.agreement is not None else ""):
            self._run.info["stop_reason"] = reason
        self.tell(ev.AfterRun)
        self._saves.end()
        if state.agreement is not None:  # no rank leaves before all files are written; all ranks see a failure
            self._bus.raise_failures()
            state.settle()
        state.scopes.leave("run")

    def abort(self, error: BaseException) -> None:
        """End the run after an exception; log errors in here and add them to it as notes."""
        if world_size() > 1:
            tell_failure(error)
        self._patience = Deadline(self._bus.abort_timeout)
        # A second Ctrl-C, for example in a handler of on_exception, must not leave anything open.
        try:
            self._tell_exception(error)
        finally:
            try:
                self._state.scopes.unwind()
            finally:
                self._bus.release_thread(self._interrupt)
                self._close(abort=True)

    def _tell_exception(self, error: BaseException) -> None:
        try:
            self._bus.raise_failures()  # else the publish below raises them and reaches no handler
        except Exception as failure:
            log.exception("an offloaded handler failed as well")
            error.add_note(f"an offloaded handler failed at about the same time: {failure!r}")
        try:
            self._run.publish(ev.OnException, error=f"{type(error).__name__}: {error}", exception=error)
        except Exception as failure:
            log.exception("a handler of on_exception failed")
            error.add_note(f"then a handler of on_exception failed: {failure!r}")

    def _close(self, *, abort: bool = False) -> None:
        try:
            if self._opened:
                self._opened = False
                self._bus.close(abort=abort)
        finally:
            while self._locks:
                self._locks.popitem()[1].release()

    def _interrupt(self) -> None:
        """Raise if the training thread must not wait for room in a full lane; the bus calls this before each wait."""
        if self._patience is None:
            self._state.check_cancelled()
        elif not self._patience.left:
            raise LaneFullError(
                f"the run ends after an exception and waits at most {self._bus.abort_timeout:g} s for its lanes"
            )

    def lock(self) -> None:
        """Lock the directories of this training on rank 0; an error is raised on all ranks."""
        problem = ""
        try:
            for path in self._saves.directories if not this_rank() else ():
                # resolve(): links and ".." give one directory several names.
                if isinstance(path, Path) and (directory := path.resolve()) not in self._locks:
                    self._locks[directory] = DirectoryLock(directory)
        except ConfigurationError as error:
            problem = str(error)
        if self._state.ranks is not None:
            problem = self._state.ranks.from_first(problem)
        if problem:
            raise ConfigurationError(problem)

    def _tell_others(self) -> None:
        """Warn about another open run if one of the two has a seed: both draw from the same random state."""
        for other in _open:
            if self._run.seed is not None or other.seed is not None:
                log.warning(
                    "two open runs in one process draw from the same random state, so seeds and resumes do not reproduce their "
                    "numbers; run one after the other, or each in its own process",
                    run=self._run.name,
                    other=other.name,
                )
        _open.append(self._run)
        self._state.scopes.defer(lambda: _open.remove(self._run))

    def _watch_steps(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        # GradScaler does not call step() for a step that it skips, so torch's hooks see only real steps.
        publish, stepped = self._run.publish, self._state.stepped

        def before_step(*step: Any) -> None:
            publish(ev.BeforeOptimizerStep, name=name, optimizer=optimizer)

        def after_step(*step: Any) -> None:
            stepped.add(id(optimizer))
            publish(ev.AfterOptimizerStep, name=name, optimizer=optimizer)

        inner = stepping(optimizer)
        self._state.scopes.defer(inner.register_step_pre_hook(before_step).remove)
        self._state.scopes.defer(inner.register_step_post_hook(after_step).remove)
