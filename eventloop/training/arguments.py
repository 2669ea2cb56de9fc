"""Types and checks of the arguments of ``Run`` and ``TrainLoop``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import torch

from trainbus.eventloop.bus import Bus
from trainbus.eventloop.checkpoint import RemotePath, as_path
from trainbus.eventloop.device import devices
from trainbus.eventloop.errors import ConfigurationError

T = TypeVar("T")

Models = torch.nn.Module | Annotated[Mapping[str, torch.nn.Module], msgspec.Meta(description="a mapping of names to them")]
Optimizers = (
    torch.optim.Optimizer
    | Annotated[Mapping[str, torch.optim.Optimizer], msgspec.Meta(description="a mapping of names to them")]
)
OnBus = Annotated[
    Bus, msgspec.Meta(description="a Bus, to which bus.add(...) adds hooks (the model is model=, the optimizer optimizer=)")
]
Stateful = Annotated[
    Mapping[str, Any], msgspec.Meta(description='a mapping of names to objects, such as {"discriminator": discriminator}')
]
Config = Annotated[Mapping[str, Any], msgspec.Meta(description="a mapping, such as a parsed configuration file")]
Data = Annotated[Iterable[Any], msgspec.Meta(description="an iterable of batches, such as a DataLoader")]
Limit = Annotated[int, msgspec.Meta(ge=1)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
Rate = Annotated[float, msgspec.Meta(gt=0)]
Resume = Annotated[str, msgspec.Meta(description='"auto" for the newest checkpoint, or the path or URL of a checkpoint')] | Path
Step = Annotated[Callable[[Any, Any], Any], msgspec.Meta(description="a function of (model, batch)")]


def checked_work_dir(work_dir: str | Path) -> Path:
    """Return the directory as an absolute path; raise ConfigurationError if it is a URL."""
    path = as_path(work_dir)
    if isinstance(path, RemotePath):
        raise ConfigurationError(
            f"work_dir={str(path)!r} is a URL: give a local directory, for logs, and the URL to "
            f'CheckpointHook(out_dir="{path}")'
        )
    return path.absolute()


def check_step(name: str, step: Callable[..., Any]) -> None:
    """Raise ConfigurationError if ``step`` cannot be called with (model, batch)."""
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):
        return  # a builtin may have no signature
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigurationError(f"{name}{signature} cannot be called as {name}(model, batch): {error}") from None


def named(kind: str, things: Any, wanted: type[T]) -> dict[str, T]:
    """Return one or several objects as a mapping of names; raise ConfigurationError for one of another type."""
    found = dict(things) if isinstance(things, Mapping) else {kind: things}
    for name, thing in found.items():
        if not isinstance(thing, wanted):
            raise ConfigurationError(
                f"{kind} {name!r} is {thing if isinstance(thing, type) else 'of type ' + type(thing).__name__}, not a "
                f"{wanted.__module__}.{wanted.__name__}"
            )
    if kind == "model" and not found:
        raise ConfigurationError("give a run at least one model")
    return found


def checked_stateful(things: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict; raise ConfigurationError if an object lacks ``state_dict`` or ``load_state_dict``."""
    for name, thing in things.items():
        if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
            raise ConfigurationError(f"stateful[{name!r}] ({type(thing).__name__}) has no state_dict() and load_state_dict()")
    return dict(things)


def device_of(device: str | torch.device | None, models: Mapping[str, torch.nn.Module]) -> torch.device:
    """Return the given device, or the models' device; raise ConfigurationError if torch cannot use it."""
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:  # each backend raises its own
            reason = str(error).partition("\n")[0].partition(". ")[0]
            here = ", ".join(["cpu", *devices()])
            raise ConfigurationError(f"torch cannot use device={str(device)!r} here ({reason}); it has {here}") from None
        return torch.device(device)
    parameters = (parameter.device for model in models.values() for parameter in model.parameters())
    return next(parameters, torch.device("cpu"))


def no_scalar(value: Any) -> str:
    """Describe a value that is neither a real number nor a tensor or array of one; "" for one that is."""
    if not isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return "" if isinstance(value, int | float) else f"a {type(value).__name__}"
    if math.prod(value.shape) != 1:
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    real = not value.is_complex() if isinstance(value, torch.Tensor) else value.dtype.kind in "biuf" and value.itemsize <= 8
    return "" if real else f"a {type(value).__name__} of dtype {value.dtype}"
