"""Load the saved state of an optimizer as its own ``load_state_dict`` decides, and give back what torch's loses."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from trainbus.eventloop.errors import CheckpointError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training.optimizers import has_load_hooks, optimizers_in, parameters_of, stepping
from trainbus.eventloop.training.saves.parameters import arranged, has_torch_layout, sizes_of
from trainbus.eventloop.user_errors import contextmanager

log = get_logger()


class SavedOptimizer:
    """The saved state of an optimizer.

    Args:
        name: the name of the optimizer in the run.
        optimizer: the optimizer to load it.
        state: what its ``state_dict()`` gave.
        kind: the name of the class of the optimizer that gave it; None in a checkpoint of another program.
        saved: the names of its parameters then, one a line.
        names: those of the parameters here.
    """

    def __init__(
        self, name: str, optimizer: torch.optim.Optimizer, state: Any, *, kind: str | None, saved: str, names: str
    ) -> None:
        self._name = name
        self._optimizer = optimizer
        self._state = arranged(state, saved, names, sizes_of(optimizer))
        self._kind = kind
        self.undoable = type(stepping(optimizer)).load_state_dict is torch.optim.Optimizer.load_state_dict
        """True if torch's method loads it, which replaces the state and changes no tensor of it."""

    def load(self, recast: Collection[int], undo: ExitStack, *, strict: bool) -> bool:
        """Load the state; return True, or False where ``strict=False`` lets the optimizer start fresh instead.

        Args:
            recast: the ids of parameters that have another dtype than they had.
            undo: gets what gives the optimizer the state from before, if that is still there.
            strict: whether it is an error that the optimizer refuses the state.

        Raises:
            CheckpointError: the optimizer refuses the state, or it is that of another class and lacks options of this one.
        """
        optimizer, before = self._optimizer, self._optimizer.state_dict()
        if not (self.undoable or strict):  # a loader of its own may copy into the tensors of the state
            before = copy.deepcopy(before)
        needed = _options_in(optimizer)
        cause: Exception | None = None
        with ExitStack() as back:
            if self.undoable or not strict:
                back.callback(optimizer.load_state_dict, before)
            try:
                with torch_exact(optimizer, recast):
                    optimizer.load_state_dict(self._state)
                problem = self._lacks(needed)
            except Exception as error:  # noqa: BLE001 - any: optimizers load their own state
                problem, cause = f"{type(error).__name__}: {error}", error
            if not problem:
                undo.push(back.pop_all())
                return True
        if strict:
            raise CheckpointError(
                f"the checkpoint belongs to another optimizer than the {type(optimizer).__name__} {self._name!r}: {problem}; "
                "strict=False starts the optimizer fresh"
            ) from cause
        log.warning(
            "the checkpoint belongs to another optimizer; this one starts fresh",
            id="optimizer-starts-fresh",
            name=self._name,
            problem=problem,
        )
        return False

    def _lacks(self, needed: Collection[str]) -> str:
        """Return what the state of another class lacks: torch accepts it, and the first step would fail."""
        if self._kind == type(self._optimizer).__name__:
            return ""
        groups = self._optimizer.param_groups
        lacks = sorted({option for group in groups for option in needed if option not in group})
        whose = f"it is that of {self._kind} and has" if self._kind else "it has"
        return f"{whose} no {', '.join(lacks)}" if lacks else ""


def _options_in(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the options of an optimizer that all of its groups have."""
    defaults = getattr(stepping(optimizer), "defaults", {})
    return {option for option in defaults if all(option in group for group in optimizer.param_groups)}


@contextmanager
def torch_exact(optimizer: torch.optim.Optimizer, recast: Collection[int] = ()) -> Iterator[None]:
    """Let states that torch's ``Optimizer.load_state_dict`` loads in a block keep their types.

    torch gives tensors the dtype of their parameter, and makes new containers: ``_cast`` in torch/optim/optimizer.py. That of
    parameters in ``recast`` (ids), which have another dtype than they had, is left so. Optimizers inside are treated alike.
    """
    with ExitStack() as hooks:
        for one in filter(has_load_hooks, optimizers_in(optimizer)):
            given: dict[str, Any] = {}
            devices: list[dict[str, Any]] = []

            def take(
                inner: torch.optim.Optimizer,
                state: dict[str, Any],
                given: dict[str, Any] = given,
                devices: list[dict[str, Any]] = devices,
            ) -> None:
                given.update(state)
                devices[:] = [dict(group) for group in inner.param_groups]

            def give_back(
                inner: torch.optim.Optimizer, given: dict[str, Any] = given, devices: list[dict[str, Any]] = devices
            ) -> None:
                if has_torch_layout(given):
                    _give_back(inner, given, recast)
                    _move_options(inner, devices)

            hooks.callback(one.register_load_state_dict_pre_hook(take).remove)
            hooks.callback(one.register_load_state_dict_post_hook(give_back, prepend=True).remove)  # before the user's
        yield


def _give_back(optimizer: torch.optim.Optimizer, given: Mapping[str, Any], recast: Collection[int]) -> None:
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=False):
        if number in given["state"] and id(parameter) not in recast:
            optimizer.state[parameter] = _as_saved(given["state"][number], optimizer.state.get(parameter), parameter.device)


def _as_saved(saved: Any, loaded: Any, device: torch.device, key: object = None) -> Any:
    """Return a value as it was saved, with its tensors on the device to which torch has moved them."""
    if isinstance(saved, torch.Tensor):
        if isinstance(loaded, torch.Tensor):
            # torch has a rule of its own for "step", which depends on the kernel.
            return loaded if loaded.dtype == saved.dtype or key == "step" else saved.to(loaded.device)
        return saved.to(device)
    if isinstance(saved, dict):
        parts = loaded if isinstance(loaded, Mapping) else {}
        made = {name: _as_saved(value, parts.get(name), device, name) for name, value in saved.items()}
        if type(saved) is dict:
            return made
        kept = copy.copy(saved)
        dict.update(kept, made)
        return kept
    if type(saved) in (list, tuple):
        same = isinstance(loaded, list | tuple) and len(loaded) == len(saved)
        return type(saved)(_as_saved(one, loaded[index] if same else None, device) for index, one in enumerate(saved))
    return saved


def _move_options(optimizer: torch.optim.Optimizer, before: list[dict[str, Any]]) -> None:
    """Move options that are tensors, such as the learning rate, to the device that they had here; torch moves none."""
    for group, former in zip(optimizer.param_groups, before, strict=False):
        for name, value in group.items():
            if isinstance(value, torch.Tensor) and isinstance(former.get(name), torch.Tensor):
                group[name] = value.to(former[name].device)
