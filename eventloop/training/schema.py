"""The saved state of a run: its layout, the version of that layout, and how an earlier version becomes the present one.

A checkpoint holds a :class:`SavedState`, an entry in another trainer's checkpoint a :class:`SavedEntry`, both as nested dicts.
Hooks add keys of their own. :mod:`trainbus.eventloop.training.saves.contents` fills and restores the keys that stand here.

To change the layout: change the classes, increase ``FORMAT``, and add a function to ``UPGRADES``. A new key that has a default
needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from trainbus.eventloop.errors import CheckpointError

FORMAT: Final = 2
"""Version of the layout. trainbus 0.1 and 0.2 wrote 1."""

LAST: Final = "last_checkpoint"
"""File with the relative path (or URL) of the newest committed checkpoint, in its directory and in the work dir."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Tree = dict[str, Any]
_Saved = TypeVar("_Saved", bound="SavedEntry")


class SavedCounts(Struct):
    """How far the run came."""

    epoch: Count = 0
    """finished epochs"""
    iter: Count = 0
    """finished iterations"""
    update: Count = 0
    """optimizer steps, of the optimizer with the most; with accumulation fewer than iterations"""
    batches: Count = 0
    """batches that the current pass over the training data has used"""
    validations: Count = 0
    """finished validations"""
    tests: Count = 0
    """finished tests"""
    phase: Literal["train", "val"] = "train"
    """what a resumed run does first: train, or validate"""
    body: Count | None = None
    """index of the epoch in whose body the run is, in a loop of one's own; null between two epochs"""
    place: Count = 0
    """where in that body: how often a training pass, a validation or a test has begun or ended in it"""
    cut: Count = 0
    """batches of the last epoch if the limit of iterations has cut it short: a longer training begins behind them"""


class SavedBus(Struct):
    """The state of the bus."""

    hooks: dict[str, Any] = {}
    """`state_dict()` of each hook that has one, by its label"""
    publishes: dict[str, Count] = {}
    """how often each event was published, for filters such as `every=`"""


class SavedStart(Struct):
    """How a pass over data began."""

    rng: Any
    """random states, as in `rng` above"""
    generators: list[Any]
    """states of the generators that the loader and its samplers own"""
    workers: bool
    """whether persistent workers were running"""


class SavedLoader(Struct, kw_only=True):
    """What the next pass over a loader depends on."""

    generators: list[Any]
    """states of the generators that the loader and its samplers own"""
    counted: int | None = None
    """passes that a wrapped loader has counted"""


class SavedPosition(SavedLoader, kw_only=True):
    """The position in the training data."""

    used: Count
    """batches used in the current pass"""
    passes: Count
    """earlier passes in the same epoch, in iteration-based training"""
    begun: bool
    """whether the pass has begun"""
    length: int | None
    """batches of a whole pass, if known"""
    start: SavedStart | None
    """how the current pass began"""
    samples: Count | None = None
    """samples that all processes have used in the current pass; null without a `GlobalBatchSampler`"""
    loader: Any = UNSET
    """the `state_dict()` of the loader, or of its sampler, if one of them has it"""
    left: bool = False
    """whether `loader` is one batch before the end of a pass that was left early, by a limit or `break`"""
    repeats: bool = False
    """whether the body of the next batch had begun, and begins once more"""


class SavedEvaluation(SavedLoader, kw_only=True):
    """A loader of validations or tests."""

    workers: bool
    """whether persistent workers were running"""


class SavedData(Struct):
    """The positions in the data."""

    train: SavedPosition | None
    """the training data; null before the first epoch"""
    evaluated: list[SavedEvaluation]
    """the loaders of validations and tests, in order of first use"""
    trained: list[SavedEvaluation] = []
    """the loaders of the training, in order of first use, if there are several"""


class SavedRank(Struct):
    """What differs between processes."""

    rng: Any
    """random states of Python, NumPy, torch and accelerators; null in an imported file"""
    data: SavedData | None
    """positions in the data; null before the first pass"""
    body_rng: Any = None
    """random states at the beginning of the epoch's body; null outside of one"""
    batch_rng: Any = None
    """random states at the beginning of the batch's body that begins once more; null if unknown"""
    data_rank: Count | UnsetType = UNSET
    """number of the copy of the model, among those that train on different batches; of several processes"""


class SavedBody(Struct):
    """The body of an epoch in a loop of one's own, which a resumed run enters once more."""

    stateful: dict[str, Any] = {}
    """`state_dict()` of each object in `stateful=` at its beginning"""
    options: dict[str, list[dict[str, Any]]] = {}
    """options of each optimizer's groups, such as learning rates, at its beginning"""
    metrics: list[dict[str, Any]] = []
    """metrics of its finished passes, in order; those of a training pass are empty"""


class SavedEntry(Struct, kw_only=True):
    """The state of a bus in another trainer's checkpoint."""

    format: int
    """version of this layout"""
    progress: SavedCounts
    """how far the run came"""
    bus: SavedBus
    """the state of the bus and its hooks"""
    info: dict[str, Any] = {}
    """plain values of `run.info`; `val/…` only if this state was validated"""
    last_validation: dict[str, Any] = {}
    """`val/…` of `run.info` from the validation before, if this state had none of its own yet; a resumed run has them"""


class SavedState(SavedEntry, kw_only=True):
    """The state of a run in its own checkpoint."""

    state_dict: dict[str, Any]
    """weights of the model; by the name of the model if there are several. Averaged weights with `EMAHook`"""
    optimizer: dict[str, Any] | UnsetType = UNSET
    """`state_dict()` of each optimizer, by name; absent with `save_optimizer=False`"""
    parameters: dict[str, str] = {}
    """names of each optimizer's parameters, one a line, in the order in which its `state_dict()` numbers them"""
    loose: dict[str, list[Any]] | UnsetType = UNSET
    """values of parameters that an optimizer trains and no model has, by the name of the optimizer; absent without any"""
    rng: Any
    """random states of Python, NumPy, torch and accelerators; null in an imported file"""
    data: SavedData | None = None
    """positions in the data; null before the first pass"""
    stateful: dict[str, Any] = {}
    """`state_dict()` of each object in `stateful=`, by name"""
    options: dict[str, Any] = {}
    """options that the run began with, to warn of changed ones"""
    gradients: dict[str, list[Any]] = {}
    """gradients of an accumulation window that a loop of one's own has open, by optimizer"""
    body: SavedBody | None = None
    """how the open body of an epoch began; null between two epochs"""
    body_rng: Any = None
    """random states at its beginning"""
    batch_rng: Any = None
    """random states at the beginning of the batch's body that begins once more; null if unknown"""
    ranks: list[SavedRank] = []
    """what differs between processes, of each, if there are several"""


# ------------------------------------------------------------------------------------------------------------- readers


def lacking(tree: object) -> list[str]:
    """Return the keys that a resume needs but ``tree`` lacks; empty for the state of a run, of any version."""
    there = tree if isinstance(tree, Mapping) else {}
    return [key.name for key in msgspec.structs.fields(SavedState) if key.required and key.name not in there]


def how_far(tree: object) -> tuple[int, ...]:
    """Return the counts in a checkpoint of any version, as a tuple to compare; () for another kind of file."""
    progress = tree.get("progress") if isinstance(tree, Mapping) else None
    if not isinstance(progress, Mapping):
        return ()
    # Iterations first: the other counts change between two iterations.
    counts = [progress.get(name, 0) for name in ("iter", "epoch", "validations", "tests")]
    return tuple(counts) if all(type(count) is int for count in counts) else ()


def read_counts(tree: Mapping[str, Any]) -> SavedCounts:
    """Return the counts in a checkpoint of any version."""
    try:
        return msgspec.convert(tree["progress"], SavedCounts)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"the checkpoint does not hold the state of a run: {error} in `progress`") from error


def read(tree: Mapping[str, Any], kind: type[_Saved]) -> _Saved:
    """Return a tree of the present version as its struct, which shares all values with it.

    Raises:
        CheckpointError: a value has another type.
    """
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        whose = "a run" if kind is SavedState else "a bus"
        way_out = "" if kind is SavedState else "; remove it from the checkpoint to resume without it"
        raise CheckpointError(f"the checkpoint does not hold the state of {whose}: {error}{way_out}") from error


def upgraded(tree: object, kind: type[SavedEntry]) -> Tree:
    """Return a saved tree of any version as one of the present version; the caller's stays as it is.

    Raises:
        CheckpointError: this is not the saved state of a run (or of a bus), or its format is too new.
    """
    if kind is SavedState and (missing := lacking(tree)):
        raise CheckpointError(f"this file is not a checkpoint of a run (it has no {', '.join(missing)}); load only its weights")
    new: Tree = dict(tree) if isinstance(tree, Mapping) else {}
    version = new.get("format")
    if type(version) is int and version > FORMAT:
        raise CheckpointError(f"the checkpoint has format {version}, but this trainbus reads up to {FORMAT}; upgrade trainbus")
    try:
        while version in UPGRADES:
            new = UPGRADES[version](new)
            new["format"] = version = version + 1
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint does not hold what format {version} has: {error!r}") from error
    read(new, kind)
    return new


# ------------------------------------------------------------------------------------------------------------ upgrades


def _from_1(tree: Tree) -> Tree:
    """Give the position in the training data a key of its own, and a value to what 0.1 and 0.2 did not save."""
    ranks = [{**rank, "data": _data_from_1(rank["data"])} for rank in tree.get("ranks", ())]
    return {**tree, "data": _data_from_1(tree.get("data")), "ranks": ranks}


def _data_from_1(data: Mapping[str, Any] | None) -> Tree | None:
    if data is None:
        return None
    position = {key: value for key, value in data.items() if key != "evaluated"}
    train = {"begun": False, "length": None, **position} if position else None
    return {"train": train, "evaluated": list(data.get("evaluated", ()))}


UPGRADES: Final[dict[int, Callable[[Tree], Tree]]] = {1: _from_1}
"""Functions from a tree of one version to one of the next, by the version that they take. They change nothing in place."""
