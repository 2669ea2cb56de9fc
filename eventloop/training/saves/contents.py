"""Fill and restore the keys of a saved state; its layout is in :mod:`eventloop.training.schema`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import msgspec
import torch
from msgspec import UNSET, Struct

from eventloop.bus import Bus
from eventloop.checkpoint import AnyPath, without_wrappers
from eventloop.errors import CheckpointError
from eventloop.events import RunView
from eventloop.log import get_logger
from eventloop.training.data import Feeds
from eventloop.training.optimizers import forget_options, stepping, warn_of_overridden
from eventloop.training.rng import get_rng_state, set_rng_state
from eventloop.training.saves.parameters import arranged
from eventloop.training.schema import FORMAT, SavedBus, SavedCounts, SavedEntry, SavedRank, SavedState, Tree, read
from eventloop.training.state import RunState

log = get_logger()

_named: WeakKeyDictionary[Any, tuple[list[int | str], str]] = WeakKeyDictionary()
"""What the names of an optimizer's parameters depend on, and these: to look for 20,000 of them takes 40 ms."""


class SavedRun(RunView, Protocol):
    """The part of a run that saving and restoring use."""

    bus: Bus
    state: RunState
    feeds: Feeds
    saves: Any
    host: Any
    stateful: dict[str, Any]
    options: dict[str, Any]
    moves_models: bool
    resumed_from: AnyPath | None


# -------------------------------------------------------------------------------------------------------------- gather


def as_tree(saved: Struct) -> Tree:
    """Return a saved state as nested dicts; nothing in it is copied."""
    return {name: _plain(value) for name, value in msgspec.structs.asdict(saved).items() if value is not UNSET}


def _plain(value: Any) -> Any:
    if isinstance(value, Struct):
        return as_tree(value)
    return [*map(_plain, value)] if type(value) is list and value and isinstance(value[0], Struct) else value


def gather_entry(run: SavedRun) -> Tree:
    """Return the state of the bus, for another trainer's checkpoint, by reference."""
    return as_tree(SavedEntry(**_entry(run)))


def gather_state(run: SavedRun, rank: SavedRank, ranks: Sequence[SavedRank], leave_out: Collection[str] = ()) -> Tree:
    """Return the state of the run by reference, without the keys of hooks.

    Args:
        run: the run.
        rank: what only this process has.
        ranks: what each process has; empty if there is one.
        leave_out: keys that the checkpoint does not have.
    """
    with_optimizer = "optimizer" not in leave_out
    saved = SavedState(
        **_entry(run),
        state_dict=flat(gather_weights(run.models)),
        optimizer={name: one.state_dict() for name, one in run.optimizers.items()} if with_optimizer else UNSET,
        parameters=parameter_names(run.models, run.optimizers) if with_optimizer else {},
        rng=rank.rng,
        data=rank.data,
        stateful={name: thing.state_dict() for name, thing in run.stateful.items()},
        options=dict(run.options),
        ranks=[*ranks],
    )
    return as_tree(saved)


def imported_state(weights: Mapping[str, Any], *, epoch: int = 0, iter: int = 0) -> Tree:  # noqa: A002 - as in Progress
    """Return the state of a run that another library trained. Each iteration counts as an update.

    It has no random states and no position in the data: a run resumes from it at the beginning of an epoch.
    """
    counts = SavedCounts(epoch=epoch, iter=iter, update=iter)
    return as_tree(SavedState(format=FORMAT, progress=counts, bus=SavedBus(), state_dict=dict(weights), rng=None))


def gather_rank(run: SavedRun) -> SavedRank:
    """Return what only this process has: random states, and positions in the data."""
    rng = run.state.validation_rng
    return SavedRank(rng=rng or get_rng_state(), data=run.feeds.saved(validating=rng is not None))


def _entry(run: SavedRun) -> Tree:
    return {
        "format": FORMAT,
        "progress": run.state.counters.saved(),
        "bus": msgspec.convert(run.bus.state_dict(), SavedBus),
        "info": {name: value for name, value in run.info.items() if isinstance(value, bool | int | float | str | None)},
    }


# ------------------------------------------------------------------------------------------------------------- restore


def restore_entry(run: SavedRun, saved: SavedEntry) -> None:
    """Restore the counts and the bus."""
    run.state.counters.restore(saved.progress)
    run.info.update(saved.info)
    run.bus.load_state_dict(as_tree(saved.bus))
    run.state.resume()


def restore_state(run: SavedRun, tree: Mapping[str, Any], *, strict: bool) -> None:
    """Restore a tree of the present version; set the random states last, so that no other step draws from them."""
    saved = read(tree, SavedState)
    weights = by_model(run.models, saved.state_dict)
    if absent := sorted(run.models.keys() - weights.keys()):
        raise CheckpointError(
            f"the checkpoint has no model {', '.join(map(repr, absent))}, only {', '.join(map(repr, weights))}"
        )
    # Compare everything before loading anything: a refused checkpoint must change nothing.
    fitting = {name: _fitting(model, weights[name], name, strict=strict) for name, model in run.models.items()}
    # Optimizer state of another shape would fail at the first step.
    optimizers = saved.optimizer if all(complete for _, complete in fitting.values()) else UNSET
    if optimizers is UNSET and run.optimizers:
        log.warning("the checkpoint has no matching state; it starts fresh", what="optimizer")
    known = _with_state("optimizer", run.optimizers, optimizers) if optimizers is not UNSET else []
    names = parameter_names(run.models, run.optimizers)
    loaded = [_load_optimizer(*one, saved.parameters.get(one[0], ""), names[one[0]], strict=strict) for one in known]
    for name, model in run.models.items():
        model.load_state_dict(fitting[name][0], strict=False)
    for _, thing, saved_state in _with_state("stateful", run.stateful, saved.stateful):
        thing.load_state_dict(saved_state)
    restore_entry(run, saved)
    run.feeds.restore(saved.data)
    if optimizers is UNSET or sum(loaded) < len(run.optimizers):
        forget_options(saved.options, "optimizer")
    warn_of_overridden(saved.options, run.options)
    run.options.update(saved.options)  # later checkpoints keep the options that the run began with
    if saved.rng is not None:  # None in an imported checkpoint
        set_rng_state(saved.rng)


def load_weights(model: torch.nn.Module, weights: Mapping[str, Any], *, strict: bool = True) -> bool:
    """Load ``weights`` (keys without wrapper names) into ``model``, wrapped or not; return True if all of them fit.

    Raises:
        CheckpointError: keys are missing or unexpected, or shapes differ; ``strict=False`` logs that and loads the others.
    """
    fitting, complete = _fitting(model, weights, "model", strict=strict)
    model.load_state_dict(fitting, strict=False)
    return complete


def _fitting(model: torch.nn.Module, weights: Mapping[str, Any], name: str, *, strict: bool) -> tuple[dict[str, Any], bool]:
    """Return the matching weights by the model's own names, and whether all match; raise like load_weights."""
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
    several = {kind: f" and {len(keys) - 8} more" if len(keys) > 8 else "" for kind, keys in problems.items()}
    found = "; ".join(f"{kind}: {', '.join(keys[:8])}{several[kind]}" for kind, keys in problems.items() if keys)
    if found and strict:
        raise CheckpointError(f"the checkpoint belongs to another {name}: {found}")
    if found:
        log.warning("the checkpoint fits the model only in part", model=name, **problems)
    fitting = {key: weights[short] for short, (key, _) in own.items() if short in weights and short not in shapes}
    return fitting, not found


def _load_optimizer(name: str, optimizer: torch.optim.Optimizer, state: Any, saved: str, names: str, *, strict: bool) -> bool:
    before = optimizer.state_dict()
    try:
        optimizer.load_state_dict(arranged(state, saved, names, _sizes(optimizer)))
        # torch accepts the options of another optimizer class, and fails at the first step.
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
            f"the checkpoint belongs to another optimizer than the {type(optimizer).__name__} {name!r}: {problem}; "
            "strict=False starts the optimizer fresh"
        )
    log.warning("the checkpoint belongs to another optimizer; this one starts fresh", name=name, problem=problem)
    return False


def _with_state(kind: str, things: Mapping[str, Any], saved: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (name, object, state) for each object with a saved state; warn about the others."""
    for name in things:
        if name not in saved:
            log.warning(
                "the checkpoint has no state for this object; it starts fresh", what=kind, name=name, saved=sorted(saved)
            )
    return [(name, thing, saved[name]) for name, thing in things.items() if name in saved]


# -------------------------------------------------------------------------------------------------- names of weights


def flat(weights: Mapping[str, Any]) -> Any:
    """Return weights by model as checkpoints have them: without the name of the only model."""
    return weights["model"] if set(weights) == {"model"} else weights


def by_model(models: Collection[str], saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the weights in a checkpoint by model."""
    return {"model": saved} if set(models) == {"model"} else saved


def gather_weights(models: Mapping[str, torch.nn.Module]) -> dict[str, dict[str, Any]]:
    """Return the weights of each model without wrapper names in their keys, by reference."""
    return {name: unwrapped_state(model) for name, model in models.items()}


def unwrapped_state(model: torch.nn.Module) -> dict[str, Any]:
    """Return ``model.state_dict()`` without wrapper names in its keys."""
    values: dict[str, Any] = model.state_dict()
    return {short: values[name] for name, short in _keys(values).items()} if _wrapped(values) else dict(values)


def checkpoint_keys(model: torch.nn.Module) -> dict[str, str]:
    """Map the names in ``model.state_dict()`` to keys in checkpoints, which omit wrapper names.

    ``module.`` and ``_orig_mod.`` are removed anywhere in a name, because parts of a model may be wrapped. They stay if two
    tensors would get the same key (a model with a submodule called ``module``).
    """
    return _keys(model.state_dict())


def parameter_names(models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, str]:
    """Return the names of each optimizer's parameters as keys in checkpoints, one a line.

    Of several models, the model's name stands before the key. The line of a parameter that is in no model is empty.
    """
    facts: dict[str, list[int | str]] = {
        name: [*_sizes(one), *models, *map(id, models.values())] for name, one in optimizers.items()
    }
    if any(_named.get(one, ([], ""))[0] != facts[name] for name, one in optimizers.items()):
        names: dict[int, str] = {}
        for name, model in models.items():
            prefix, keys = "" if set(models) == {"model"} else f"{name}.", checkpoint_keys(model)
            for key, parameter in model.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), f"{prefix}{keys.get(key, key)}")
        for owner, one in optimizers.items():
            parameters = (parameter for group in one.param_groups for parameter in group["params"])
            _named[one] = facts[owner], "\n".join(names.get(id(parameter), "") for parameter in parameters)
    return {name: _named[one][1] for name, one in optimizers.items()}


def _sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _keys(names: Iterable[str]) -> dict[str, str]:
    same = {name: name for name in names}
    if not _wrapped(same):
        return same  # substitutions in 20,000 names would take 16 ms
    short = without_wrappers(same)
    return short if len(set(short.values())) == len(short) else same


def _wrapped(names: Iterable[str]) -> bool:
    together = "\0".join(names)
    return "module." in together or "_orig_mod." in together
