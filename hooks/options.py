"""Types of options that hooks and writers share; ``check_options`` checks their bounds."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import Annotated

from msgspec import Meta

from trainbus.eventloop import ConfigurationError
from trainbus.eventloop.events import BeforeTrainEpoch, RunView

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max, description="a finite number")]
Distance = Annotated[float, Meta(ge=0, le=sys.float_info.max, description="a finite number of at least 0")]
PositiveFinite = Annotated[float, Meta(gt=0, le=sys.float_info.max, description="a finite number above 0")]
Share = Annotated[float, Meta(gt=0, lt=1)]
Name = Annotated[str, Meta(min_length=1, description="a non-empty string")]


def one_or_more(option: str, given: str | Iterable[str], advice: str = "a name or a list of names") -> tuple[str, ...]:
    """Return one or several strings without duplicates; raise ConfigurationError if one is empty or not a string."""
    chosen = (given,) if isinstance(given, str) else tuple(given)
    if not chosen or not all(isinstance(one, str) and one for one in chosen):
        raise ConfigurationError(f"{option}={given!r}: give {advice}")
    return tuple(dict.fromkeys(chosen))


def model_name(label: str, models: Collection[str], name: str | None) -> str:
    """Return the model name that a hook's option ``model`` selects; None selects the only one, or raises ConfigurationError."""
    if name in models or (name is None and len(models) == 1):
        return name or next(iter(models))
    there = ", ".join(map(repr, models))
    raise ConfigurationError(f"{label}: model={name!r}, but the models of this run are {there}; name one of them")


def added_late(label: str) -> ConfigurationError:
    """Return the error of a hook that was added to a bus during a run, after the event in which it finds its model."""
    return ConfigurationError(f"{label} was added during a run; add it before the run begins")


def check_epochs(event: BeforeTrainEpoch, subject: str, instead: str) -> None:
    """Raise ConfigurationError for a hook that counts epochs, if the training is one long epoch.

    Args:
        event: the beginning of the epoch.
        subject: the hook and its option, for the message.
        instead: what to write instead.
    """
    if event.run.data.one_epoch:
        raise ConfigurationError(
            f"{subject} counts epochs, and this training has one: it counts iterations (max_iters={event.progress.max_iters}). "
            f"{instead}"
        )


def check_averages_alone(label: str, run: RunView) -> None:
    """Raise ConfigurationError if the trainer around a run averages the weights, too: a validation has one average."""
    if run.foreign.averages:
        others = ", ".join(run.foreign.averages)
        raise ConfigurationError(f"{label} averages the weights, and so does the trainer's {others}: remove one of them")
