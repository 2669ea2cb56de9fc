"""Copies of states that the body of a loop may change: to save how an epoch began, and to put back what a save has.

docs/internals/exactness.md has the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, Final, Self

import torch

from trainbus.eventloop.log import get_logger
from trainbus.eventloop.privates import tensors_of
from trainbus.eventloop.training.copies import copied, is_large, size_of
from trainbus.eventloop.training.keep import KEPT, KeptValues
from trainbus.eventloop.training.optimizers import parameters_of
from trainbus.eventloop.training.rng import get_rng_state, set_rng_state
from trainbus.eventloop.training.saved_run import SavedRun

log = get_logger()

_MOST: Final = 2**31
"""Bytes of states that a resumed run copies at most, and of weights, until it is where the save was taken."""

_MARKS: Final = 4
"""Weights of which one value is kept."""

Undo = Callable[[], object]


def copied_states(things: Mapping[str, Any], large: set[str]) -> dict[str, Any]:
    """Return copies of the states of ``stateful`` objects, but for those that are too large to copy them in each epoch.

    The names of these go into ``large``, and are not looked at again. Each kept value has a name of its own: ``kept.order``.
    """
    states: dict[str, Any] = {}
    for name, thing in things.items():
        if isinstance(thing, KeptValues):
            states[name] = _small({one: partial(thing.state_of, one) for one in dir(thing)}, large, f"{name}.")
        else:
            states |= _small({name: thing.state_dict}, large)
    return states


def _small(states: Mapping[str, Callable[[], Any]], large: set[str], prefix: str = "") -> dict[str, Any]:
    """Return copies of the states that are small; ``large`` gets the names of others."""
    copies = {}
    for name, state_of in states.items():
        if prefix + name in large:
            continue
        state = state_of()
        if is_large(state):
            large.add(prefix + name)
        else:
            copies[name] = copied(state)
    return copies


def with_states(things: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of ``stateful`` objects: those in ``states``, and present ones of what has none there."""
    whole: dict[str, Any] = {}
    for name, thing in things.items():
        if name in states and isinstance(thing, KeptValues):
            whole[name] = {one: states[name][one] if one in states[name] else thing.state_of(one) for one in dir(thing)}
        else:
            whole[name] = states[name] if name in states else thing.state_dict()
    return whole


def names_without(saved: Mapping[str, Any], states: Mapping[str, Any]) -> list[str]:
    """Return the names of saved states that ``states`` lacks: ``kept.order`` is what ``run.keep()`` keeps as ``order``."""
    kept = [f"{KEPT}.{name}" for name in saved.get(KEPT, ()) if KEPT in states and name not in states[KEPT]]
    return kept + [name for name in saved if name not in states]


class Beginning:
    """The states at the beginning of an epoch's body, without weights: random numbers, ``stateful`` objects, learning rates."""

    def __init__(
        self, rng: Any, stateful: dict[str, Any], options: dict[str, list[dict[str, Any]]], left_out: Sequence[str] = ()
    ) -> None:
        self.rng, self.stateful, self.options = rng, stateful, options
        self.left_out = left_out
        """Names of states that the saved run had, but not of this beginning: they are large."""

    @classmethod
    def of(cls, run: SavedRun, large: set[str]) -> Self:
        """Copy the states of a run. ``large`` collects the names of those that are too large, which it leaves out."""
        return cls(get_rng_state(), copied_states(run.stateful, large), copied_options(run.optimizers))

    def apply(self, run: SavedRun) -> None:
        """Restore the states, as far as the run has such objects."""
        for name, thing in run.stateful.items():
            if name in self.stateful:
                thing.load_state_dict(copied(self.stateful[name], inf))
        for name, one in run.optimizers.items():
            for group, saved in zip(one.param_groups, self.options.get(name, ()), strict=False):
                _set_options(group, saved)
        if self.rng is not None:
            set_rng_state(self.rng)


def copied_options(optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, list[dict[str, Any]]]:
    """Return copies of the options of optimizers, such as learning rates."""
    return {name: copied([_options(group) for group in one.param_groups]) for name, one in optimizers.items()}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _set_options(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for name, value in saved.items():
        if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
            group[name].copy_(value)  # a captured graph reads this tensor
        else:
            group[name] = copied(value)


class KeptStates(Beginning):
    """All states that the code of a body may change, weights and gradients included: :meth:`put_back` restores them."""

    def __init__(self, run: SavedRun) -> None:
        super().__init__(get_rng_state(), {}, copied_options(run.optimizers))
        self._undos: list[Undo] = []
        room, too_large = _MOST, []
        for name, thing in run.stateful.items():
            state = thing.state_dict()
            if (size := size_of(state)) > room:
                too_large.append(name)
                continue
            room -= size
            self.stateful[name] = copied(state, inf)
        if too_large:
            log.warning(
                "these states are too large to copy them: code before the batches of this epoch must not change them, or the "
                "resumed run differs",
                id="states-too-large",
                names=too_large,
            )

    def with_weights(self, run: SavedRun) -> Self:
        """Copy weights, optimizer states and gradients as well, if they take less than 2 GiB."""
        modules = [module for model in run.models.values() for module in model.modules()]
        tensors: list[Any] = [*tensors_of(modules)]
        states = [state for one in run.optimizers.values() for state in one.state.values()]
        tensors += [value for state in states for value in state.values()]
        plain = [one for one in tensors if type(one) in (torch.Tensor, torch.nn.Parameter)]  # no part of a sharded one
        if sum(one.nbytes for one in plain) > _MOST:
            log.warning(
                "the weights are too large to copy them: code before the batches of this epoch must not change them, or the "
                "resumed run differs",
                id="weights-too-large",
            )
            return self
        self._undos += [partial(_copy_back, one.detach(), _aside(one)) for one in dict.fromkeys(plain)]
        for one in run.optimizers.values():
            self._undos.append(partial(_restore_entries, one.state, {key: dict(state) for key, state in one.state.items()}))
            for parameter in parameters_of(one):
                if parameter.grad is not None:
                    self._undos.append(partial(_set_gradient, parameter, parameter.grad.detach().clone()))
        return self

    def put_back(self, run: SavedRun) -> None:
        """Restore all states."""
        with torch.no_grad():
            for undo in reversed(self._undos):
                undo()
        self.apply(run)


class Marks:
    """A few values of a model's weights, to see whether code has changed or exchanged them."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        weights = [one for model in models for one in model.parameters() if type(one) is torch.nn.Parameter and one.numel()]
        self._weights = weights[:: max(1, len(weights) // _MARKS)]
        self._values = [self._mark(one) for one in self._weights]

    @property
    def hold(self) -> bool:
        """True if the weights have these values."""
        return all(torch.equal(self._mark(one), value) for one, value in zip(self._weights, self._values, strict=True))

    @staticmethod
    def _mark(weight: torch.Tensor) -> torch.Tensor:
        return weight.detach()[(0,) * weight.dim()].clone()


class Return:
    """The states of a save, while user code of a resumed run comes to the place where it was taken: there they are put back."""

    def __init__(self) -> None:
        self._kept: KeptStates | None = None
        self.in_batch = False
        """True if the place is in the body of a batch, at its first validation."""

    @property
    def pending(self) -> bool:
        """True until the states are put back."""
        return self._kept is not None

    def forget(self) -> None:
        """Put nothing back."""
        self._kept, self.in_batch = None, False

    def begin(self, run: SavedRun) -> None:
        """Copy the states of a resumed run, and give user code those of the beginning of its body, if the save has them."""
        self._kept, self.in_batch = KeptStates(run).with_weights(run), run.feeds.repeats
        if run.state.gradients:
            for one in run.optimizers.values():
                one.zero_grad(set_to_none=True)
        if run.state.beginning is not None:
            run.state.beginning.apply(run)
            if run.state.beginning.left_out:
                log.warning(
                    "these values are too large to save how they were when this epoch began, so its code before the batches "
                    "sees them as they were saved. If that code changes them, the resumed run differs: change them behind the "
                    "batches, or keep them smaller",
                    id="values-too-large",
                    names=run.state.beginning.left_out,
                )

    def arrive(self, run: SavedRun) -> None:
        """Put the states back at the place of the save; if that is in the body of a batch, now and there."""
        kept = self._kept
        if not self.in_batch:
            self._kept = None
        if kept is not None:
            kept.put_back(run)
            restore_gradients(run.optimizers, run.state.gradients)

    def begin_batch(self, run: SavedRun) -> None:
        """Put back the random states with which the batch of the save began."""
        if self.in_batch and run.state.batch_rng is not None:
            set_rng_state(run.state.batch_rng)

    def reach_batch(self, run: SavedRun) -> None:
        """Put the states back in the body of a batch, where the saved run had validated."""
        if self.in_batch:
            self.in_batch = False
            self.arrive(run)


def _aside(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu() if tensor.device.type != "cpu" else tensor.detach().clone()


def _copy_back(tensor: torch.Tensor, kept: torch.Tensor) -> None:
    if not torch.equal(tensor.cpu(), kept):  # a write would make gradients of the present graph an error
        tensor.copy_(kept)


def _restore_entries(state: Any, entries: Mapping[Any, dict[str, Any]]) -> None:
    for key in [key for key in state if key not in entries]:
        del state[key]
    for key, values in entries.items():
        state[key] = values


def _set_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    parameter.grad = gradient


def open_gradients(optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, list[Any]]:
    """Return the gradients of optimizers that have not stepped in the last body: of an open accumulation window."""
    found: dict[str, list[Any]] = {}
    for name, one in optimizers.items():
        gradients = [parameter.grad for parameter in parameters_of(one)]
        if all(gradient is None for gradient in gradients):
            continue
        if any(gradient is not None and gradient.layout is not torch.strided for gradient in gradients):
            log.warning(
                "sparse gradients of an open accumulation window are not saved: save behind the step",
                id="sparse-gradients-not-saved",
                optimizer=name,
            )
            continue
        found[name] = gradients
    return found


def restore_gradients(optimizers: Mapping[str, torch.optim.Optimizer], saved: Mapping[str, Iterable[Any]]) -> None:
    """Restore what :func:`open_gradients` returned, as far as it fits."""
    for name, gradients in saved.items():
        parameters = parameters_of(optimizers[name]) if name in optimizers else []
        pairs = [*zip(parameters, gradients, strict=False)]
        if any(gradient is not None and gradient.shape != parameter.shape for parameter, gradient in pairs):
            log.warning(
                "the saved gradients of an open accumulation window do not fit; the window starts over",
                id="gradients-do-not-fit",
                optimizer=name,
            )
            continue
        for parameter, gradient in pairs:
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
