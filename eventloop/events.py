"""Every mount point of a run, in the order of a run, and how a user declares another.

An event is a frozen :class:`msgspec.Struct`. Its class name is its mount point: ``AfterTrainIter`` is published at
``"after_train_iter"``. Subclassing :class:`Event` declares a mount point:

    class Densify(Event):
        points: int

    bus.publish(Densify(points=512))        # reaches bus.on("densify") and bus.on(Densify)

Subscribing to a class hears its subclasses too, so ``bus.on(Event)`` hears everything and ``bus.on("after_iter")`` the
iterations of all three stages.

Fields are *plain* (numbers, strings, containers of them; an offloaded handler gets a copy), *live* (``Live[...]``:
references to training state, which an offloaded handler must not touch) or *scalars* (``Scalars``: live for inline
handlers, reduced to its numbers for offloaded ones).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, TypeVar, dataclass_transform

import msgspec
import torch

from eventloop.errors import EventDefinitionError, UnknownEventError
from eventloop.view import RunView

T = TypeVar("T")

Live = Annotated[T, msgspec.Meta(extra={"detach": "live"})]
"""Marks a field as a reference to training state: offloaded handlers cannot touch it, encoders leave it out."""

Scalars = Annotated[Mapping[str, Any], msgspec.Meta(extra={"detach": "scalars"})]
"""Marks a mapping of outputs: offloaded handlers and encoders get its scalar entries, as numbers."""

ABSENT: Any = msgspec.UNSET
"""Default of live fields: an event that was decoded, or made by hand in a test, has no live state."""

Stage = Literal["train", "val", "test"]
Counter = Literal["iter", "epoch", "update", "batch", "validation", "publish"]


class Progress(msgspec.Struct, frozen=True):
    """A snapshot of how far a run has come, made once per iteration. All counts are 0-based, like MMEngine's.

    ``iter`` counts micro-batches, ``update`` optimizer steps that happened (one that the gradient scaler skipped is none),
    ``batch_idx`` batches within the epoch or validation, ``validation`` the validations (or tests) before this one.
    """

    epoch: int = 0
    iter: int = 0
    update: int = 0
    batch_idx: int = 0
    validation: int = 0
    max_epochs: int | None = None
    max_iters: int | None = None
    stage: Stage = "train"


registry: dict[str, type[Event]] = {}
"""Mount-point name → event class, in order of definition, which for the built-in ones is the order of a run."""


def mount_name(class_name: str) -> str:
    """Return the mount point of an event class: ``"AfterTrainIter"`` → ``"after_train_iter"``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name).lower()


# Tells type checkers what subclasses inherit from the line below it; without it each would have to repeat frozen=True.
@dataclass_transform(frozen_default=True, kw_only_default=True, eq_default=False)
class Event(msgspec.Struct, frozen=True, eq=False, kw_only=True, tag_field="event", tag=mount_name):
    """Base of all events. Subclass it to declare a mount point of your own; ``bus.on(Event)`` hears every event.

    Compared by identity (comparing tensors has no truth value). Publishing a subclass without ``progress`` makes filters
    count its publishes.

    Raises:
        EventDefinitionError: when a subclass takes the mount-point name of another module's event. Defining a class
            again in the same module (a notebook cell) replaces it, and what has subscribed stays subscribed.
    """

    counts: ClassVar[Counter] = "publish"
    """What ``every``, ``once``, ``after`` and ``before`` count for this event; see :mod:`eventloop.filters`."""
    group: ClassVar[bool] = False
    """True for a class that only gathers others (``BeforeIter``): subscribed to, never published by the run."""

    def __init_subclass__(cls) -> None:
        """Register the mount point."""
        super().__init_subclass__()
        if "__detached__" in cls.__dict__:
            return  # a generated twin (detach.py), not a mount point
        cls.group = bool(cls.__dict__.get("group", False))
        name = mount_name(cls.__name__)
        taken = Event if name == "event" else registry.get(name)
        if taken is not None and (taken.__module__, taken.__name__) != (cls.__module__, cls.__name__):
            raise EventDefinitionError(
                f"the mount point {name!r} is already declared by {taken.__module__}.{taken.__qualname__}; "
                f"give {cls.__module__}.{cls.__qualname__} another name"
            )
        registry[name] = cls

    @property
    def mount_point(self) -> str:
        """Name of the mount point this event is published at."""
        return name_of(type(self))

    def to_json(self) -> bytes:
        """Encode a detached event (what an offloaded handler gets) as one JSON object tagged with its mount point.

        Non-finite floats become the strings "NaN", "Infinity" and "-Infinity", which :func:`from_json` undoes.

        Raises:
            TypeError: the event holds live state, which has no encoding.
        """
        return msgspec.json.encode(_spell_floats(msgspec.to_builtins(self, enc_hook=_refuse_live)))

    def to_msgpack(self) -> bytes:
        """Encode a detached event as a tagged msgpack map; raises TypeError for live state."""
        return msgspec.msgpack.encode(self, enc_hook=_refuse_live)

    def __repr__(self) -> str:
        fields = (f"{name}={_short(getattr(self, name))}" for name in self.__struct_fields__ if _present(self, name))
        return f"{type(self).__name__}({', '.join(fields)})"

    def __rich_repr__(self) -> Any:
        for name in self.__struct_fields__:
            if _present(self, name):
                yield name, _short(getattr(self, name))


class RunEvent(Event, kw_only=True):
    """Base of everything a run publishes: who runs, and how far it has come."""

    group: ClassVar[bool] = True
    run: Live[RunView] = ABSENT
    progress: Progress


# ---------------------------------------------------------------------------------------------- groups over all stages


class BeforeEpoch(RunEvent, kw_only=True):
    """An epoch or validation begins, whatever the stage."""

    group: ClassVar[bool] = True
    counts: ClassVar[Counter] = "epoch"


class AfterEpoch(RunEvent, kw_only=True):
    """An epoch or validation has ended, whatever the stage. ``metrics`` is empty for training epochs."""

    group: ClassVar[bool] = True
    counts: ClassVar[Counter] = "epoch"
    metrics: dict[str, Any] = {}


class BeforeIter(RunEvent, kw_only=True):
    """A batch is on its device and about to be used, whatever the stage."""

    group: ClassVar[bool] = True
    counts: ClassVar[Counter] = "iter"
    batch_idx: int = 0
    batch: Live[Any] = ABSENT


class AfterIter(RunEvent, kw_only=True):
    """A batch has been through the model, whatever the stage. ``outputs`` holds ``loss`` and what the step returned."""

    group: ClassVar[bool] = True
    counts: ClassVar[Counter] = "iter"
    batch_idx: int = 0
    batch: Live[Any] = ABSENT
    outputs: Scalars = ABSENT


# ------------------------------------------------------------------------------------------------- the order of a run


class BeforeRun(RunEvent, kw_only=True):
    """The run is set up: models on their device, bus open, nothing has happened yet."""


class AfterLoadCheckpoint(RunEvent, kw_only=True):
    """A checkpoint was read and is about to be applied; hooks may change ``checkpoint`` in place."""

    path: str = ""
    checkpoint: Live[dict[str, Any]] = ABSENT


class BeforeTrain(RunEvent, kw_only=True):
    """Training begins (or goes on, after a resume)."""


class BeforeTrainEpoch(BeforeEpoch, kw_only=True):
    """A training epoch begins; its loader has not been asked for anything yet."""


class BeforeTrainIter(BeforeIter, kw_only=True):
    """A training batch is about to be used."""


class BeforeForward(RunEvent, kw_only=True):
    """The user's step is about to be called (training only)."""

    counts: ClassVar[Counter] = "iter"
    batch: Live[Any] = ABSENT


class AfterForward(RunEvent, kw_only=True):
    """The user's step has returned ``outputs`` (training only)."""

    counts: ClassVar[Counter] = "iter"
    outputs: Scalars = ABSENT


class AfterTrainIter(AfterIter, kw_only=True):
    """The forward pass is done. The optimizer update subscribes at priority 30: handlers after it see new weights."""


class BeforeBackward(RunEvent, kw_only=True):
    """``loss`` (scaled for accumulation) is about to be differentiated. Published while after_train_iter runs."""

    counts: ClassVar[Counter] = "iter"
    loss: Live[torch.Tensor] = ABSENT


class AfterBackward(RunEvent, kw_only=True):
    """Gradients of this micro-batch are in ``.grad``."""

    counts: ClassVar[Counter] = "iter"


class BeforeOptimizerStep(RunEvent, kw_only=True):
    """An optimizer is about to step; gradients are unscaled and clipped. Not published for a step the scaler skips."""

    counts: ClassVar[Counter] = "update"
    name: str = ""
    optimizer: Live[torch.optim.Optimizer] = ABSENT


class AfterOptimizerStep(RunEvent, kw_only=True):
    """An optimizer has stepped."""

    counts: ClassVar[Counter] = "update"
    name: str = ""
    optimizer: Live[torch.optim.Optimizer] = ABSENT


class AfterTrainEpoch(AfterEpoch, kw_only=True):
    """A training epoch has ended; ``progress.epoch`` is still its index."""


class BeforeVal(RunEvent, kw_only=True):
    """Validation begins; the model is in evaluation mode."""

    counts: ClassVar[Counter] = "validation"


class BeforeValEpoch(BeforeEpoch, kw_only=True):
    """The pass over the validation data begins."""

    counts: ClassVar[Counter] = "validation"


class BeforeValIter(BeforeIter, kw_only=True):
    """A validation batch is about to be used."""

    counts: ClassVar[Counter] = "batch"


class AfterValIter(AfterIter, kw_only=True):
    """A validation batch has been through the model."""

    counts: ClassVar[Counter] = "batch"


class AfterValEpoch(AfterEpoch, kw_only=True):
    """The pass over the validation data has ended with ``metrics``."""

    counts: ClassVar[Counter] = "validation"


class AfterVal(RunEvent, kw_only=True):
    """Validation has ended; the model is back in the mode it was in."""

    counts: ClassVar[Counter] = "validation"


class ImageReported(RunEvent, kw_only=True):
    """Somebody called ``run.report_image``. An offloaded handler gets a copy of the image on the host."""

    counts: ClassVar[Counter] = "iter"
    name: str
    image: Any


class BeforeSaveCheckpoint(RunEvent, kw_only=True):
    """The state was gathered and is about to be staged; hooks may change ``checkpoint`` in place.

    Also published where the state is only checked (``run.check_savable``); no file follows then.
    """

    path: str = ""
    checkpoint: Live[dict[str, Any]] = ABSENT


class CheckpointStaged(RunEvent, kw_only=True):
    """The state was copied: training may go on while the copy is written."""

    path: str = ""
    job: Live[Any] = ABSENT


class CheckpointCommitted(Event, kw_only=True):
    """A checkpoint is durable on disk. Published, with its inline handlers, on the thread that wrote it."""

    progress: Progress
    path: str
    names: list[str] = []
    bytes: int = 0
    seconds: float = 0.0


class CheckpointFailed(Event, kw_only=True):
    """A checkpoint could not be written; earlier ones are untouched. Published on the thread that tried."""

    progress: Progress
    path: str
    names: list[str] = []
    error: str


class CheckpointSkipped(Event, kw_only=True):
    """A checkpoint that was due was not made, or given up before it was written, because of another (see ``busy=``)."""

    progress: Progress
    path: str
    names: list[str] = []
    reason: str


class AfterTrain(RunEvent, kw_only=True):
    """Training has ended by itself or by ``stop()`` (not by an exception)."""


class BeforeTest(RunEvent, kw_only=True):
    """Testing begins; the model is in evaluation mode."""

    counts: ClassVar[Counter] = "validation"


class BeforeTestEpoch(BeforeEpoch, kw_only=True):
    """The pass over the test data begins."""

    counts: ClassVar[Counter] = "validation"


class BeforeTestIter(BeforeIter, kw_only=True):
    """A test batch is about to be used."""

    counts: ClassVar[Counter] = "batch"


class AfterTestIter(AfterIter, kw_only=True):
    """A test batch has been through the model."""

    counts: ClassVar[Counter] = "batch"


class AfterTestEpoch(AfterEpoch, kw_only=True):
    """The pass over the test data has ended with ``metrics``."""

    counts: ClassVar[Counter] = "validation"


class AfterTest(RunEvent, kw_only=True):
    """Testing has ended; the model is back in the mode it was in."""

    counts: ClassVar[Counter] = "validation"


class OnException(RunEvent, kw_only=True):
    """An exception (Ctrl-C included) ends the run. First to fire; scopes unwind after it, without their ``after_x``."""

    error: str = ""
    exception: Live[BaseException] = ABSENT


class AfterRun(RunEvent, kw_only=True):
    """The run has ended by itself or by ``stop()`` (not by an exception)."""


# ---------------------------------------------------------------------------------------------- inside the model


class ModuleEvent(Event, kw_only=True):
    """Base of the mount points inside a model that ``bus.watch`` watches; ``module_name`` is qualified: ``"encoder.0"``."""

    group: ClassVar[bool] = True
    module_name: str = ""
    module: Live[torch.nn.Module] = ABSENT


class BeforeModuleForward(ModuleEvent, kw_only=True):
    """A watched submodule is about to be called with ``inputs`` and ``kwargs``."""

    inputs: Live[tuple[Any, ...]] = ABSENT
    kwargs: Live[dict[str, Any]] = ABSENT


class AfterModuleForward(ModuleEvent, kw_only=True):
    """A watched submodule has returned ``outputs``."""

    inputs: Live[tuple[Any, ...]] = ABSENT
    kwargs: Live[dict[str, Any]] = ABSENT
    outputs: Live[Any] = ABSENT


class BeforeModuleBackward(ModuleEvent, kw_only=True):
    """Gradients with respect to a watched submodule's outputs have arrived."""

    grad_outputs: Live[tuple[Any, ...]] = ABSENT


class AfterModuleBackward(ModuleEvent, kw_only=True):
    """Gradients with respect to a watched submodule's inputs are computed."""

    grad_inputs: Live[tuple[Any, ...]] = ABSENT
    grad_outputs: Live[tuple[Any, ...]] = ABSENT


BUILTIN = tuple(registry)
"""Names of the mount points that trainbus itself declares."""


# ------------------------------------------------------------------------------------------------------ names


def name_of(event: type[Event]) -> str:
    """Return the mount-point name of an event class."""
    return mount_name(event.__name__)


def lineage(event: type[Event]) -> list[str]:
    """Return the names under which a subscription hears ``event``: its own, its groups', and ``"event"``."""
    return [name_of(base) for base in event.__mro__ if isinstance(base, type) and issubclass(base, Event)]


def resolve(event: type[Event] | str) -> type[Event]:
    """Return the event class for a class or a mount-point name.

    Raises:
        UnknownEventError: no event declares that name; the message lists the nearest ones.
        TypeError: ``event`` is neither.
    """
    if isinstance(event, str):
        if event == "event":
            return Event
        try:
            return registry[event]
        except KeyError:
            raise UnknownEventError(f"there is no mount point {event!r}{suggest(event)}") from None
    if isinstance(event, type) and issubclass(event, Event):
        return event
    raise TypeError(
        f"expected an event class or a mount-point name, got {event!r}; "
        'write bus.on("after_train_iter") or bus.on(AfterTrainIter)'
    )


def suggest(name: str) -> str:
    """Return a sentence that names the mount points nearest to ``name``."""
    near = get_close_matches(name.lower(), registry, n=3, cutoff=0.6)
    if near:
        return f"; did you mean {' or '.join(repr(match) for match in near)}?"
    return "; declare it by subclassing Event, or list the known ones with `eventloop.mount_points()`"


def mount_points() -> list[str]:
    """Return the names of all mount points in the order of a run, users' own last."""
    return [name for name, event in registry.items() if not event.group]


# --------------------------------------------------------------------------------------------------- encodings

_SPELLED = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def _spell_floats(value: Any) -> Any:
    """JSON knows no NaN, and a loss that became NaN must not arrive as null."""
    if isinstance(value, dict):
        return {key: _spell_floats(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_spell_floats(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


def unspell(value: Any) -> Any:
    """Undo the spelling of non-finite floats that :meth:`Event.to_json` does."""
    if isinstance(value, dict):
        return {key: unspell(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [unspell(entry) for entry in value]
    return _SPELLED.get(value, value) if isinstance(value, str) else value


def _refuse_live(value: Any) -> Any:
    raise TypeError(
        f"cannot encode a {type(value).__name__}: this event still refers to live training state. Encode the event that an "
        "offloaded handler receives, or pick plain values with capture="
    )


def _present(event: Event, name: str) -> bool:
    if isinstance(getattr(type(event), name), property):
        return False  # a live field of a detached event: reading it raises
    return getattr(event, name) is not msgspec.UNSET


def _short(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str | Progress):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_short(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, torch.Tensor):
        return f"tensor{tuple(value.shape)}"
    return f"<{type(value).__name__}>"
