"""Repeat the body of an iteration in which a run validated, so that the resumed run reaches that validation again.

A validation inside ``run.train`` is a part of the loop's own body, and a body can only run from its beginning. A checkpoint
that was saved for it has already counted the iteration. So the body gets the last batch once more, without events, counts and
optimizer steps. Where its validation begins, the state of the checkpoint is put back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Final

import torch
from msgspec.structs import replace

from eventloop.log import get_logger
from eventloop.training.data import Feed
from eventloop.training.optimizers import stepping
from eventloop.training.rng import get_rng_state, set_rng_state
from eventloop.training.saves.contents import SavedRun
from eventloop.training.state import REPEATED, Counters, RunState

log = get_logger()

_LEFT_OUT: Final = (
    "the checkpoint was saved before or in a validation inside run.train(), and this run leaves that validation out, so its "
    "weights may differ from those of an uninterrupted run; if run.drive().validation_comes_first, validate before run.train()"
)


class Repeat:
    """The iteration that a resumed run repeats. The position in ``feed`` goes back to its batch, so begin the epoch next."""

    def __init__(self, run: SavedRun, feed: Feed) -> None:
        self._run = run
        self._feed = feed
        self._rng = get_rng_state()  # the begin of the epoch may draw
        self._possible = feed.repeats_last = feed.can_repeat

    def begin(self) -> tuple[Any] | None:
        """Return the batch of the iteration in a tuple, with its scope open; None if the loader cannot read it again."""
        state, counters = self._run.state, self._run.state.counters
        if not self._possible:
            log.warning(_LEFT_OUT, reason="the loader cannot read its last batch again")
            return None
        batch = self._feed.next()
        state.validate_next()  # until that validation begins: a stop may come first
        put_back = self._kept()
        state.scopes.enter(REPEATED)
        state.scopes.defer(put_back)
        for optimizer in self._run.optimizers.values():
            self._hold(stepping(optimizer), put_back, id(optimizer))
        before = replace(counters.snapshot(), iter=counters.iter - 1, batch_idx=counters.batches - 1)
        state.begin_iteration(replace(before, update=max(0, counters.update - 1)))
        return batch

    def _kept(self) -> Callable[[], None]:
        """Copy the state that the body may change; return a function that puts it back."""
        run, accelerator = self._run, self._run.host.accelerator
        parts = [*run.models.values(), *run.optimizers.values(), *run.stateful.values()]
        kept = [copy.deepcopy(part.state_dict()) for part in parts]
        step = getattr(accelerator, "step", None)

        def put_back() -> None:
            for part, saved in zip(parts, kept, strict=True):
                part.load_state_dict(copy.deepcopy(saved))  # a part may keep what it is given
            if step is not None:
                accelerator.step = step  # the place in its accumulation window
            set_rng_state(self._rng)

        return put_back

    def _hold(self, optimizer: torch.optim.Optimizer, put_back: Callable[[], None], key: int) -> None:
        """Let each step of an optimizer put the state back instead, so that a body that saves files saves the right weights."""
        own, state = vars(optimizer), self._run.state

        @wraps(optimizer.step)
        def step(closure: Callable[[], Any] | None = None, **options: Any) -> Any:
            with torch.enable_grad():
                loss = None if closure is None else closure()
            put_back()
            state.stepped[key] = state.stepped.get(key, 0) + 1
            return loss

        # A schedule may have set a step of its own on the object.
        state.scopes.defer(partial(own.__setitem__, "step", own["step"]) if "step" in own else partial(own.pop, "step", None))
        own["step"] = step


def end_repeated(state: RunState) -> None:
    """End the repeated iteration, if it is open, and put the state back."""
    if REPEATED in state.scopes:
        state.scopes.leave(REPEATED)
        state.begin_iteration(state.counters.snapshot())


def end_unvalidated(state: RunState) -> None:
    """End the repeated iteration, if it is open, after a body that has not validated."""
    if REPEATED in state.scopes:
        end_repeated(state)
        if not state.should_stop():  # a stopped run leaves the validation to the next resume
            state.go_on()
            log.warning(_LEFT_OUT, reason="the repeated body of run.train() did not call run.validate()")


def warn_if_left_out(now: Counters, saved: Counters | None) -> None:
    """Warn if the validation that begins ``now`` follows a checkpoint that was ``saved`` without knowing of it."""
    if saved == now:
        log.warning(
            "a checkpoint was saved just before this validation, when the run did not know that it follows, so a run that "
            "resumes from it leaves this validation out; validate in the body of run.train() or after it, once in a place; in "
            "calls of run.drive(), give end_iteration(validates=True)",
            iter=now.iter,
        )
