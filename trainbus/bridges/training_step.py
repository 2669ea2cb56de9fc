"""Find the models and optimizers that a training step uses, for a trainer that gets only the function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch

from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.training.arguments import named
from trainbus.eventloop.training.optimizers import parameters_of

T = TypeVar("T")


def trained_by(step: Callable[..., Any], models: Any, optimizers: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return the models and optimizers, given or found in the training step, and the schedules and scalers in it."""
    used = _used_by(step)
    optimizers = _only(_distinct(used, torch.optim.Optimizer)) if optimizers is None else optimizers
    if models is None:
        models = _only(_models_in(used, named("optimizer", optimizers, torch.optim.Optimizer)))
    lacking = [kind for kind, found in (("optimizer", optimizers), ("model", models)) if found == {}]
    if lacking:
        raise ConfigurationError(
            f"attach() found no {lacking[0]} in the training step "
            f"{getattr(step, '__qualname__', step)}; give attach(bus, trainer, model=..., optimizer=...)"
        )
    stateful = {**_distinct(used, torch.optim.lr_scheduler.LRScheduler), **_distinct(used, torch.amp.GradScaler)}
    return models, optimizers, stateful


def _only(found: Mapping[str, Any]) -> Any:
    return next(iter(found.values())) if len(found) == 1 else found


def outputs_of(output: Any) -> dict[str, Any]:
    """Return the output of a step by name: a number or a scalar tensor is the loss."""
    if output is None:
        return {}
    if isinstance(output, Mapping):
        return {str(name): value for name, value in output.items()}
    is_loss = isinstance(output, int | float) or (isinstance(output, torch.Tensor) and output.numel() == 1)
    return {"loss" if is_loss else "output": output}


def _used_by(step: Callable[..., Any]) -> dict[str, Any]:
    """Return the objects that a function uses, by name: globals, variables of its closure, arguments of a ``partial``.

    For a method or an object with ``__call__``, also the attributes of the object.
    """
    if isinstance(step, functools.partial):
        unnamed = {f"argument {index}": value for index, value in enumerate(step.args)}
        return {**_used_by(step.func), **unnamed, **step.keywords}
    if inspect.ismethod(step):
        return {**getattr(step.__self__, "__dict__", {}), **_used_by(step.__func__)}
    function = inspect.unwrap(step)
    if not inspect.isfunction(function):
        call: Any = getattr(step, "__call__", None)  # noqa: B004 - its method is wanted
        return _used_by(call) if inspect.ismethod(call) else {}
    names, cells = function.__code__.co_names, zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    seen = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, cell in cells:
        with suppress(ValueError):  # a variable without a value yet
            seen[name] = cell.cell_contents
    return seen


def _models_in(objects: Mapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, torch.nn.Module]:
    """Return the outermost modules among ``objects`` that have a parameter of the optimizers (no frozen models, no losses)."""
    trained = {id(parameter) for optimizer in optimizers.values() for parameter in parameters_of(optimizer)}
    found = _distinct(objects, torch.nn.Module)
    models = {
        name: module for name, module in found.items() if not trained.isdisjoint(id(each) for each in module.parameters())
    }
    inner = {id(part) for model in models.values() for part in model.modules() if part is not model}
    return {name: model for name, model in models.items() if id(model) not in inner}


def _distinct(objects: Mapping[str, Any], kind: type[T]) -> dict[str, T]:
    """Return the objects of one kind, each under its first name."""
    found: dict[int, tuple[str, T]] = {}
    for name, value in objects.items():
        if isinstance(value, kind):
            found.setdefault(id(value), (name, value))
    return dict(found.values())
