"""Fill and restore the keys of a saved state; its layout is in :mod:`trainbus.eventloop.training.schema`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import torch
from msgspec import UNSET, Struct

from trainbus.eventloop.checkpoint import WrapperNames, is_dtensor
from trainbus.eventloop.errors import CheckpointError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.privates import has_wrapper_names, metadata_of, with_metadata
from trainbus.eventloop.training.body import Beginning, names_without, open_gradients, restore_gradients, with_states
from trainbus.eventloop.training.keep import KEPT
from trainbus.eventloop.training.optimizers import forget_options, options_path, parameters_of, warn_of_overridden
from trainbus.eventloop.training.rng import get_rng_state, set_rng_state
from trainbus.eventloop.training.saved_run import SavedRun
from trainbus.eventloop.training.saves.loose import Loose, SavedLoose
from trainbus.eventloop.training.saves.optimizer_state import SavedOptimizer
from trainbus.eventloop.training.saves.weights import SavedWeights
from trainbus.eventloop.training.schema import (
    FORMAT,
    SavedBody,
    SavedBus,
    SavedCounts,
    SavedEntry,
    SavedRank,
    SavedState,
    Tree,
    read,
)
from trainbus.eventloop.training.state import RunState

log = get_logger()


_named: WeakKeyDictionary[Any, tuple[list[int | str], str]] = WeakKeyDictionary()
"""What the names of an optimizer's parameters depend on, and these: to look for 20,000 of them takes 40 ms."""


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
    state = run.state
    rewound = state.again.stateful if state.again is not None and state.begins_again else state.validation_stateful
    saved = SavedState(
        **_entry(run),
        state_dict=flat(gather_weights(run.models)),
        optimizer={name: one.state_dict() for name, one in run.optimizers.items()} if with_optimizer else UNSET,
        parameters=parameter_names(run.models, run.optimizers) if with_optimizer else {},
        loose=loose_parameters(run) or UNSET,
        rng=rank.rng,
        data=rank.data,
        body_rng=rank.body_rng,
        batch_rng=rank.batch_rng,
        stateful=with_states(run.stateful, rewound)
        if rewound
        else {name: one.state_dict() for name, one in run.stateful.items()},
        options=dict(run.options),
        gradients=_open_gradients(run) if with_optimizer else {},
        body=_body(state),
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
    state, again = run.state, run.state.again if run.state.begins_again else None
    rng = state.validation_rng if again is None else again.rng
    data = run.feeds.saved(validating=state.validation_rng is not None, repeats=again is not None)
    body_rng = None if state.beginning is None else state.beginning.rng
    number = run.coordinator.layout.data.rank if run.coordinator.size > 1 else UNSET
    return SavedRank(rng or get_rng_state(), data, body_rng, None if again is None else state.batch_rng, number)


def _body(state: RunState) -> SavedBody | None:
    """Return how the open body of an epoch began; None between two epochs of a loop of one's own."""
    if state.beginning is None:
        return None
    return SavedBody(stateful=state.beginning.stateful, options=state.beginning.options, metrics=[*state.finished])


def _open_gradients(run: SavedRun) -> dict[str, list[Any]]:
    """Return the gradients of an accumulation window that the user's own loop has open."""
    own = run.state.has_trained and not run.host.facts.update_steps and run.host.replicas is None
    open_ones = {name: one for name, one in run.optimizers.items() if own and id(one) not in run.state.stepped}
    return open_gradients(open_ones) if open_ones else {}


def _entry(run: SavedRun) -> Tree:
    info = {name: value for name, value in run.info.items() if isinstance(value, bool | int | float | str | None)}
    # What a file says of its own state is never the score of an earlier one.
    former = {} if run.state.validated else {name: info.pop(name) for name in [*info] if name.startswith("val/")}
    progress, bus = run.state.counters.saved(), run.bus.state_dict()
    if run.state.begins_again and (again := run.state.again) is not None:
        progress.validations, progress.tests, bus = again.validations, again.tests, again.bus
    return {
        "format": FORMAT,
        "progress": progress,
        "bus": msgspec.convert(bus, SavedBus),
        "info": info,
        "last_validation": former,
    }


# ----------------------------------------------------------------------------------------- weights and their names


def flat(weights: Mapping[str, Any]) -> Any:
    """Return weights by model as checkpoints have them: without the name of the only model."""
    return weights["model"] if set(weights) == {"model"} else weights


def by_model(models: Collection[str], saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the weights in a checkpoint by model."""
    return {"model": saved} if set(models) == {"model"} else saved


def gather_weights(models: Mapping[str, torch.nn.Module]) -> dict[str, Any]:
    """Return the weights of each model without wrapper names in their keys, by reference."""
    return {name: unwrapped_state(model) for name, model in models.items()}


def unwrapped_state(model: torch.nn.Module) -> Any:
    """Return ``model.state_dict()`` as it is, but for wrapper names in its keys and in the names of its ``_metadata``."""
    values: dict[str, Any] = model.state_dict()
    if not has_wrapper_names(map(str, values)):
        return values
    names = WrapperNames(model, values)
    short = {names.short[name]: value for name, value in values.items()}
    return with_metadata(short, names.metadata_without(metadata_of(values))) if names.wrapped else values


def parameter_names(models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, str]:
    """Return the names of each optimizer's parameters as keys in checkpoints, one a line.

    Of several models, the model's name stands before the key. The line of a parameter that is in no model is empty.
    """
    facts: dict[str, list[int | str]] = {
        name: [*(len(group["params"]) for group in one.param_groups), *models, *map(id, models.values())]
        for name, one in optimizers.items()
    }
    if any(_named.get(one, ([], ""))[0] != facts[name] for name, one in optimizers.items()):
        names: dict[int, str] = {}
        for name, model in models.items():
            prefix, named = "" if set(models) == {"model"} else f"{name}.", dict(model.named_parameters(remove_duplicate=False))
            for long, key in WrapperNames(model, named).short.items():
                names.setdefault(id(named[long]), f"{prefix}{key}")
        for owner, one in optimizers.items():
            _named[one] = facts[owner], "\n".join(names.get(id(parameter), "") for parameter in parameters_of(one))
    return {name: _named[one][1] for name, one in optimizers.items()}


def loose_parameters(run: SavedRun) -> Loose:
    """Return the loose parameters of each optimizer that has some; those of modules in ``stateful=`` are saved there."""
    found: Loose = {}
    for name, lines in parameter_names(run.models, run.optimizers).items():
        if f"\n{lines}\n".find("\n\n") < 0:
            continue  # the usual case, of maybe 20,000 parameters
        modules = [one for one in run.stateful.values() if isinstance(one, torch.nn.Module)]
        kept = {id(parameter) for module in modules for parameter in module.parameters()}
        all_of_it = parameters_of(run.optimizers[name])
        pairs = zip(all_of_it, lines.split("\n")[: len(all_of_it)], strict=True)  # "" has one line; there may be no parameter
        # A sharded model makes new parameters in its forward pass, so that its own seem to be in no model.
        some = [one for one, key in pairs if not key and id(one) not in kept and not is_dtensor(one)]
        if some:
            found[name] = some
    return found


# ------------------------------------------------------------------------------------------------------------- restore


def restore_entry(run: SavedRun, saved: SavedEntry) -> None:
    """Restore the counts and the bus."""
    run.state.counters.restore(saved.progress)
    run.info.update(saved.last_validation | saved.info)
    run.bus.load_state_dict(as_tree(saved.bus))
    run.state.resume(validated=any(name.startswith("val/") for name in saved.info))


def restore_state(run: SavedRun, tree: Mapping[str, Any], *, strict: bool) -> None:
    """Restore a tree of the present version; set the random states last, so that no other step draws from them."""
    saved = read(tree, SavedState)
    weights = by_model(run.models, tree["state_dict"])  # the tree's: read() copies mappings without their attributes
    if absent := sorted(run.models.keys() - weights.keys()):
        raise CheckpointError(
            f"the checkpoint has no model {', '.join(map(repr, absent))}, only {', '.join(map(repr, weights))}"
        )
    given = {} if saved.loose is UNSET else saved.loose
    loose = SavedLoose(given, loose_parameters(run), strict=strict)
    complete, loaded = _restore_trained(run, saved, weights, strict=strict)
    loose.load()
    if not complete or loaded < len(run.optimizers):
        forget_options(saved.options, "optimizer")
    run.kept.resume(saved.stateful.get(KEPT), saved.rng)
    for _, thing, saved_state in _with_state("stateful", run.stateful, saved.stateful):
        thing.load_state_dict(saved_state)
    restore_entry(run, saved)
    run.feeds.restore(saved.data)
    _restore_body(run, saved)
    warn_of_overridden(saved.options, run.options)
    run.options.update(saved.options)  # later checkpoints keep the options that the run began with
    if saved.rng is not None:  # None in an imported checkpoint
        set_rng_state(saved.rng)


def _restore_body(run: SavedRun, saved: SavedState) -> None:
    """Restore how the open body of an epoch began, and the gradients of an open window."""
    body = saved.body
    beginning = None
    if body is not None:
        beginning = Beginning(saved.body_rng, body.stateful, body.options, names_without(saved.stateful, body.stateful))
    run.state.resume_body(beginning, [] if body is None else body.metrics, saved.batch_rng, saved.gradients)
    if not run.host.facts.update_steps:
        restore_gradients(run.optimizers, saved.gradients)


def _restore_trained(run: SavedRun, saved: SavedState, weights: Mapping[str, Any], *, strict: bool) -> tuple[bool, int]:
    """Restore models and optimizers; return whether the models are complete, and the number of optimizers with their state.

    A checkpoint that one of them refuses changes none.
    """
    models = [SavedWeights(name, model, weights[name]) for name, model in run.models.items()]
    optimizers, fits = _saved_optimizers(run, saved), all(one.fits for one in models)
    recast = set().union(*(one.recast() for one in models)) if optimizers else set()
    with ExitStack() as undo:
        if not fits:  # they may refuse the weights, and a copy takes memory
            for one in models:
                undo.callback(one.copied())
        # Before the models, which will hardly refuse then, as their loading cannot be undone without a copy.
        first = [one for one in optimizers if fits and one.undoable and one.load(recast, undo, strict=strict)]
        whole = [one.load(strict=strict) for one in models]
        complete = all(whole)
        if not complete and not fits:
            undo.pop_all()  # what fits was asked for
        elif complete:
            rest = [one for one in optimizers if not (fits and one.undoable)]
            loaded = len(first) + sum([one.load(recast, undo, strict=strict) for one in rest])
            undo.pop_all()
            if saved.optimizer is not UNSET:
                return True, loaded
    if run.optimizers:
        log.warning("the checkpoint has no matching state; it starts fresh", id="no-state-for-optimizer", what="optimizer")
    return complete, 0


def _saved_optimizers(run: SavedRun, saved: SavedState) -> list[SavedOptimizer]:
    if saved.optimizer is UNSET:
        return []
    names = parameter_names(run.models, run.optimizers)
    return [
        SavedOptimizer(
            name,
            optimizer,
            state,
            kind=saved.options.get(f"{options_path(name)}.type"),
            saved=saved.parameters.get(name, ""),
            names=names[name],
        )
        for name, optimizer, state in _with_state("optimizer", run.optimizers, saved.optimizer)
    ]


def _with_state(kind: str, things: Mapping[str, Any], saved: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (name, object, state) for each object with a saved state; warn about the others."""
    for name in things:
        if name not in saved:
            log.warning(
                "the checkpoint has no state for this object; it starts fresh",
                id="no-state-for-object",
                what=kind,
                name=name,
                saved=sorted(saved),
            )
    return [(name, thing, saved[name]) for name, thing in things.items() if name in saved]
