"""The state of a run as one tree, and taking it apart again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from eventloop.bus import Bus
from eventloop.checkpoint import without_wrappers
from eventloop.errors import CheckpointError
from eventloop.log import get_logger
from eventloop.training.optimizers import stepping, tell_changed
from eventloop.training.rng import get_rng_state, other_rng_state, set_rng_state
from eventloop.training.state import Count, Counters, RunState

FORMAT = 1
"""Version of the tree's shape, in every checkpoint under ``"format"``."""

log = get_logger()


class Resumable(Protocol):
    """What a checkpoint needs to know of its run."""

    models: dict[str, torch.nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    stateful: dict[str, Any]
    counters: Counters
    info: dict[str, Any]
    options: dict[str, Any]
    state: RunState
    bus: Bus

    def data_state(self) -> Mapping[str, Any] | None:
        """Return the place in the data."""

    def set_data_state(self, state: Mapping[str, Any] | None) -> None:
        """Go on at this place in the data."""


def gather(run: Resumable, *, optimizers: bool = True) -> dict[str, Any]:
    """Return the state of ``run`` by reference.

    ``"state_dict"`` holds the weights of the only model, or a mapping of names to weights where there are several; names of
    wrappers (DataParallel's ``module.``, torch.compile's ``_orig_mod.``) are left out of the keys.
    """
    models = {name: unwrapped_state(model) for name, model in run.models.items()}
    state: dict[str, Any] = {
        "format": FORMAT,
        "state_dict": models["model"] if set(models) == {"model"} else models,
        "progress": run.counters.state_dict(),
        "data": run.data_state(),
        "rng": run.state.validation_rng or get_rng_state(),
        "bus": run.bus.state_dict(),
        "stateful": {name: thing.state_dict() for name, thing in run.stateful.items()},
        "info": {name: value for name, value in run.info.items() if _plain(value)},
        "options": dict(run.options),
    }
    if optimizers:
        state["optimizer"] = {name: optimizer.state_dict() for name, optimizer in run.optimizers.items()}
    return state


def apply(run: Resumable, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Put ``state`` back into ``run``; the random states last, so that nothing in between draws from them.

    Raises:
        CheckpointError: it is a checkpoint of another model (missing, unexpected and mis-shaped keys are listed) or optimizer,
            or one without what a resume needs.
    """
    _check(state)
    models = state["state_dict"] if set(run.models) != {"model"} else {"model": state["state_dict"]}
    if lacking := sorted(run.models.keys() - models.keys()):
        raise CheckpointError(f"the checkpoint has no model {', '.join(map(repr, lacking))} but {', '.join(map(repr, models))}")
    # All is compared before anything is loaded: what is refused changes nothing.
    fitting = {name: _fitting(model, models[name], name, strict=strict) for name, model in run.models.items()}
    fits = all(found.complete for found in fitting.values())
    # What an optimizer knows of parameters of another shape would fail at its first step.
    optimizers = state.get("optimizer") if fits else None
    loaded = _load_each("optimizer", run.optimizers, optimizers, partial(_load_optimizer, strict=strict))
    for name, model in run.models.items():
        model.load_state_dict(fitting[name].weights, strict=False)
    _load_each("stateful", run.stateful, state["stateful"])
    run.counters.load_state_dict(state["progress"])
    run.info.update(state["info"])
    run.bus.load_state_dict(state["bus"])
    run.set_data_state(state["data"])
    options = dict(state.get("options", {}))
    if not loaded:
        forget_options(options, "optimizer")
    tell_changed(options, run.options)
    run.options.update(options)  # for the checkpoints to come: what is in force since the run began
    if state["rng"] is not None:  # None: imported from elsewhere
        set_rng_state(state["rng"])


def forget_options(options: dict[str, Any], owner: str) -> None:
    """Leave out the options of what a checkpoint does not hold, or what was not loaded from it."""
    for place in [place for place in options if place.startswith(f"{owner}.")]:
        del options[place]


def placement(
    models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
) -> Callable[[tuple[str | int, ...], torch.Size, torch.dtype], torch.Tensor]:
    """Return what makes an empty tensor for each place in a checkpoint of sharded state, sharded as it is in this run.

    Weights are as the model has them, under whatever entry (averages of weights), what an optimizer knows of a parameter is
    as that is, anything else as the weights of its shape. What is not sharded here is whole.
    """
    weights: dict[tuple[str | int, ...], torch.Tensor] = {}
    for name, model in models.items():
        prefix = ("state_dict",) if set(models) == {"model"} else ("state_dict", name)
        weights |= {(*prefix, key): value for key, value in unwrapped_state(model).items() if isinstance(value, torch.Tensor)}
    of = {name: [p for group in one.param_groups for p in group["params"]] for name, one in optimizers.items()}
    by_shape = {value.shape: value for value in weights.values()}

    def like(place: tuple[str | int, ...], shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        found = weights.get(("state_dict", *place[1:]))
        if found is None and len(place) > 3 and place[0] == "optimizer" and place[1] in of:
            parameters = of[str(place[1])]
            found = parameters[int(place[3])] if int(place[3]) < len(parameters) else None
        if found is None or found.shape != shape:
            found = by_shape.get(shape)
        return torch.empty(shape, dtype=dtype) if found is None else torch.empty_like(found.detach(), dtype=dtype)

    return like


def state_of_rank(state: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """Return the state with the random states and the place in the data that rank ``rank`` had.

    A rank that the saving run did not have draws other random numbers than rank 0. The place in the data is counted in
    batches: it is the same on another number of ranks if the batches of all ranks together are as large as they were.
    """
    ranks = state.get("ranks") or [{"rng": state["rng"], "data": state["data"]}]
    used = (state["data"] or {}).get("used", 0)
    if len(ranks) != world_size and used:
        log.warning(
            "resuming in the middle of an epoch on another number of processes: the place in the data is right if the batches "
            "of all of them together are as large as they were",
            saved=len(ranks),
            now=world_size,
        )
    if rank < len(ranks):
        return {**state, **ranks[rank]}
    return {**state, **ranks[0], "rng": other_rng_state(ranks[0]["rng"], rank)}


def load_weights(model: torch.nn.Module, weights: Mapping[str, Any], name: str = "model", *, strict: bool = True) -> bool:
    """Load ``weights`` (keys without wrapper names) into ``model``; return True if they fit in full.

    Args:
        model: the model, wrapped or not.
        weights: its state dict.
        name: of the model in errors.
        strict: False loads what fits and logs the rest.

    Raises:
        CheckpointError: with ``strict``, and keys are missing, unexpected or of another shape.
    """
    found = _fitting(model, weights, name, strict=strict)
    model.load_state_dict(found.weights, strict=False)
    return found.complete


class _Fitting(NamedTuple):
    weights: dict[str, Any]
    """By the model's own names."""
    complete: bool


def _fitting(model: torch.nn.Module, weights: Mapping[str, Any], name: str, *, strict: bool) -> _Fitting:
    """Return those of ``weights`` that fit; raises CheckpointError as load_weights does."""
    values = model.state_dict()
    own = {short: (name, values[name]) for name, short in checkpoint_keys(model).items()}
    shapes = {
        key: (tuple(weights[key].shape), tuple(value.shape))
        for key, (_, value) in own.items()
        if key in weights and isinstance(value, torch.Tensor) and weights[key].shape != value.shape
    }
    problems = {
        "missing": sorted(own.keys() - weights.keys()),
        "unexpected": sorted(weights.keys() - own.keys()),
        "of another shape": [f"{key} (saved {old}, here {new})" for key, (old, new) in shapes.items()],
    }
    found = "; ".join(f"{kind}: {_first(keys)}" for kind, keys in problems.items() if keys)
    if found and strict:
        raise CheckpointError(f"the checkpoint is of another {name}: {found}")
    if found:
        log.warning("the checkpoint does not fit in full", model=name, **problems)
    fitting = {key: weights[short] for short, (key, _) in own.items() if short in weights and short not in shapes}
    return _Fitting(fitting, complete=not found)


def unwrapped_state(model: torch.nn.Module) -> dict[str, Any]:
    """Return ``model.state_dict()`` without the names of wrappers in its keys."""
    values: dict[str, Any] = model.state_dict()
    keys = _short(values)
    return {keys[name]: value for name, value in values.items()}


def checkpoint_keys(model: torch.nn.Module) -> dict[str, str]:
    """Map the names in ``model.state_dict()`` to keys in checkpoints, which leave out the names of wrappers.

    ``module.`` and ``_orig_mod.`` are left out wherever they stand, so that a part of a model may be wrapped, too; they stay
    where two tensors would get one key (a model with a submodule of its own called ``module``).
    """
    return _short(model.state_dict())


def _short(names: Iterable[str]) -> dict[str, str]:
    short = without_wrappers(names)
    return short if len(set(short.values())) == len(short) else {name: name for name in short}


def _check(state: Mapping[str, Any]) -> None:
    missing = _lacking(state)
    if missing:
        raise CheckpointError(
            f"this file is not a checkpoint of a run (it has no {', '.join(missing)}); only weights can be loaded"
        )
    try:
        msgspec.convert(state, _Form)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"the checkpoint does not hold the state of a run: {error}") from error
    if state["format"] > FORMAT:
        raise CheckpointError(f"the checkpoint has format {state['format']}, this trainbus reads up to {FORMAT}; upgrade it")


class _Form(msgspec.Struct):
    """What a resume takes for granted of the state of a run; a file of something else's may have anything there."""

    format: int
    state_dict: dict[str, Any]
    progress: Counters
    bus: _BusForm
    stateful: dict[str, Any] = {}
    info: dict[str, Any] = {}


class _BusForm(msgspec.Struct):
    hooks: dict[str, Any]
    publishes: dict[str, Count]


def is_resumable(state: Any) -> bool:
    """Whether this is the state of a run, with all that a resume needs."""
    return not _lacking(state)


def _lacking(state: Any) -> list[str]:
    there = state if isinstance(state, Mapping) else {}
    return [key for key in ("format", "state_dict", "progress", "bus", "rng") if key not in there]


def _load_optimizer(name: str, optimizer: torch.optim.Optimizer, state: Any, *, strict: bool) -> bool:
    before = optimizer.state_dict()
    try:
        optimizer.load_state_dict(state)
        # It takes over the options of another kind of optimizer as they are, and fails at its first step.
        needed = stepping(optimizer).defaults.keys()
        lacks = sorted({option for group in optimizer.param_groups for option in needed - group.keys()})
        problem = f"it has no {', '.join(lacks)}" if lacks else ""
    except (ValueError, KeyError) as error:
        problem = f"{type(error).__name__}: {error}"
    if not problem:
        return True
    optimizer.load_state_dict(before)
    if strict:
        raise CheckpointError(
            f"the checkpoint is of another optimizer than the {type(optimizer).__name__} {name!r}: {problem}; "
            "with strict=False it starts afresh"
        )
    log.warning("the checkpoint is of another optimizer; this one starts afresh", name=name, problem=problem)
    return False


def _load(name: str, thing: Any, state: Any) -> bool:
    thing.load_state_dict(state)
    return True


def _load_each(
    kind: str,
    things: Mapping[str, Any],
    saved: Mapping[str, Any] | None,
    load: Callable[[str, Any, Any], bool] = _load,
) -> bool:
    """Return True if all of ``things`` have their state."""
    if saved is None:
        if things:
            log.warning("the checkpoint has nothing that fits; it starts afresh", what=kind)
        return False
    complete = True
    for name, thing in things.items():
        if name in saved:
            complete &= load(name, thing, saved[name])
        else:
            complete = False
            log.warning("the checkpoint has no state for this; it starts afresh", what=kind, name=name, saved=sorted(saved))
    return complete


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _first(keys: list[str], most: int = 8) -> str:
    rest = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + rest


__all__ = ["apply", "checkpoint_keys", "gather", "load_weights", "state_of_rank", "unwrapped_state"]
