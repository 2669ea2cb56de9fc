"""Train a job to its end, and once more killed and resumed by new objects; compare both bit for bit.

The control is the same training without trainbus: a loop that uses ``torch.save`` and the objects' own ``load_state_dict``, or
the trainer's own checkpoints. It decides what "resumes exactly" can mean for the parts of a job.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from trainbus import Bus, Run, TrainLoop
from trainbus.eventloop import ConfigurationError
from trainbus.eventloop.errors import CheckpointValueError
from trainbus.hooks import CheckpointHook, ParamSchedulerHook

EPOCHS, BATCHES = 3, 4
SAVE, DIE = 5, 8
"""Iterations: the checkpoint is in the middle of the second epoch, and the training is killed behind it."""
MOST = 4
"""Differences that are told."""


class Killed(BaseException):
    """Ends a training as if its process were killed."""


@dataclass
class Parts:
    """What a user brings: ``step(model, batch)`` returns the loss of one of the batches in ``data``."""

    model: nn.Module
    optimizer: Any
    step: Callable[[Any, Any], torch.Tensor]
    data: Any
    closure: bool = False
    """Whether the optimizer's ``step`` calls the model itself."""
    schedule: Any = None
    by: str = "iter"
    stateful: dict[str, Any] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """Return everything that a training changes."""
        kinds = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, **self.stateful}
        return {name: thing.state_dict() for name, thing in kinds.items() if thing is not None}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state` returned, as the documentation of torch does."""
        for name, thing in {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            **self.stateful,
        }.items():
            if thing is not None:
                thing.load_state_dict(state[name])

    def update(self, batch: Any) -> torch.Tensor:
        """Make one step of the optimizer."""

        @torch.enable_grad()
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.step(self.model, batch)
            loss.backward()
            return loss

        if self.closure:
            return self.optimizer.step(closure)
        loss = closure()
        self.optimizer.step()
        return loss.detach()

    def metric(self) -> torch.Tensor:
        """Return the loss of a validation."""
        with torch.no_grad():
            return self.step(self.model, self.data[0])


Make = Callable[[], Parts]
Fit = Callable[..., Parts]
"""``fit(make, folder, die=False, resume=False)`` trains, or dies in iteration ``DIE``, or goes on from the checkpoint there."""


class Way(NamedTuple):
    """A loop or trainer: how it trains with trainbus, and how without."""

    name: str
    ours: Fit
    control: Fit


def made(make: Make, *, resume: bool) -> Parts:
    """Make the objects of a job; in a new process they begin with other random numbers."""
    seed_all(99 if resume else 0)
    parts = make()
    seed_all(1)
    return parts


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_states() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def set_random_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


# ----------------------------------------------------------------------------------------------------------- loops


def by_torch(make: Make, folder: Path, *, die: bool = False, resume: bool = False) -> Parts:
    """Train in a loop without trainbus, which saves with ``torch.save``."""
    parts, first, file = made(make, resume=resume), 0, folder / "control.pt"
    if resume:
        saved = torch.load(file, weights_only=False)
        parts.load(saved)
        first = SAVE
        set_random_states(saved["random"])
    for iteration in range(first, EPOCHS * BATCHES):
        if die and iteration == DIE:
            raise Killed
        parts.update(parts.data[iteration % BATCHES])
        if parts.schedule is not None and parts.by == "iter":
            parts.schedule.step()
        if parts.schedule is not None and (iteration + 1) % BATCHES == 0 and parts.by != "iter":
            parts.schedule.step(*([parts.metric()] if parts.by == "metric" else []))
        if iteration + 1 == SAVE and not resume:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save({**parts.state(), "random": random_states()}, file)
    return parts


def _bus(parts: Parts) -> Bus:
    monitor = {"monitor": "loss"} if parts.by == "metric" else {}
    hooks = [] if parts.schedule is None else [ParamSchedulerHook(parts.schedule, by=parts.by, **monitor)]
    return Bus(CheckpointHook(interval=SAVE, by_epoch=False), *hooks)


def own_loop(make: Make, folder: Path, *, die: bool = False, resume: bool = False) -> Parts:
    """Train in a loop of the user's, in a ``Run``."""
    parts = made(make, resume=resume)
    common: dict[str, Any] = {"model": parts.model, "optimizer": parts.optimizer, "stateful": parts.stateful}
    with Run(_bus(parts), work_dir=folder, resume="auto" if resume else None, **common) as run:
        for _ in run.epochs(EPOCHS):
            for batch in run.train(parts.data):
                if die and run.counters.iter == DIE:
                    raise Killed
                run.report(loss=parts.update(batch))
            if parts.by == "metric":
                for _ in run.validate([0]):
                    run.report(loss=parts.metric())
    return parts


def train_loop(make: Make, folder: Path, *, die: bool = False, resume: bool = False) -> Parts:
    """Train in a ``TrainLoop``."""
    parts = made(make, resume=resume)
    loop: TrainLoop

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        if die and loop.counters.iter == DIE:
            raise Killed
        return parts.step(model, batch)

    validation: dict[str, Any] = {}
    if parts.by == "metric":
        validation = {"val_data": parts.data[:1], "val_step": lambda model, batch: {"loss": parts.step(model, batch)}}
    loop = TrainLoop(
        parts.model, parts.optimizer, step=step, train_data=parts.data, bus=_bus(parts), max_epochs=EPOCHS, work_dir=folder,
        stateful=parts.stateful, **validation,
    )  # fmt: skip
    loop.run(resume="auto" if resume else None)
    return parts


OWN = Way("own loop", own_loop, by_torch)
LOOP = Way("`TrainLoop`", train_loop, by_torch)


# ------------------------------------------------------------------------------------------------------- comparison


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return how two states differ: in types, order, dtypes, shapes, strides, attributes or bits."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [f"{path}: {text}" for text in _of_tensors(one.detach(), other.detach())]
    if type(one) is not type(other):
        return [f"{path}: {type(one).__name__}, then {type(other).__name__}"]
    if isinstance(one, Mapping):
        if list(one) != list(other):
            return [f"{path}: keys {list(one)[:9]}, then {list(other)[:9]}"]
        parts = [differences(one[key], other[key], f"{path}.{key}") for key in one]
        metadata = [
            differences(getattr(one, name, None), getattr(other, name, None), f"{path}.{name}") for name in ("_metadata",)
        ]
        return [*chain(*parts, *metadata)]
    if isinstance(one, Sequence) and not isinstance(one, str | bytes):
        if len(one) != len(other):
            return [f"{path}: {len(one)} items, then {len(other)}"]
        pairs = enumerate(zip(one, other, strict=True))
        return [*chain(*(differences(a, b, f"{path}.{index}") for index, (a, b) in pairs))]
    if isinstance(one, np.ndarray):
        return [] if one.dtype == other.dtype and one.tobytes() == other.tobytes() else [f"{path}: another array"]
    if hasattr(one, "__dict__") and not callable(one) and not isinstance(one, torch.dtype | torch.device):
        return differences(vars(one), vars(other), path)
    same = one is other or one == other or (one != one and other != other)
    return [] if same or callable(one) else [f"{path}: {one!r}, then {other!r}"]


def _of_tensors(one: torch.Tensor, other: torch.Tensor) -> list[str]:
    for name in ("dtype", "shape", "layout", "device", "requires_grad"):
        if (a := getattr(one, name)) != (b := getattr(other, name)):
            return [f"{name} {a}, then {b}"]
    if one.layout is not torch.strided:
        return differences(_parts_of(one.detach()), _parts_of(other.detach()))
    # The stride of a dimension of size 1 is without meaning, and torch itself changes it.
    strides = [[stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1] for t in (one, other)]
    if strides[0] != strides[1] and one.numel():
        return [f"strides {one.stride()}, then {other.stride()}"]
    if one.is_quantized:
        one, other = one.dequantize(), other.dequantize()
    if one.dtype.itemsize and _bits(one) != _bits(other):
        try:
            return [f"differs by {(one.double() - other.double()).abs().max().item():.3g}"]
        except (RuntimeError, NotImplementedError):
            return ["other bits"]
    return []


def _parts_of(sparse: torch.Tensor) -> dict[str, Any]:
    if sparse.layout is torch.sparse_coo:
        return {"coalesced": sparse.is_coalesced(), "indices": sparse._indices(), "values": sparse._values()}
    rows = sparse.layout in (torch.sparse_csr, torch.sparse_bsr)
    names = ("crow_indices", "col_indices", "values") if rows else ("ccol_indices", "row_indices", "values")
    return {name: getattr(sparse, name)() for name in names}


def _bits(tensor: torch.Tensor) -> bytes:
    return (
        bytes(tensor.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy()) if tensor.numel() else b""
    )


# ------------------------------------------------------------------------------------------------------------ trials


class Trial(NamedTuple):
    """What a training did: its differences from the whole training without trainbus, or the error that it raised."""

    differences: list[str]
    error: Exception | None
    state: Any

    @property
    def exact(self) -> bool:
        return self.error is None and not self.differences

    @property
    def outcome(self) -> str:
        """Return what the table says of it."""
        if self.error is not None:
            return f"fails ({type(self.error).__name__})"
        return "other bits" if self.differences else "bitwise"

    def __str__(self) -> str:
        if self.error is not None:
            return f"{type(self.error).__name__}: {self.error}"
        return "; ".join(self.differences[:MOST]) or "bitwise"


def resumed(fit: Fit, make: Make, folder: Path, whole: Any) -> Trial:
    """Kill a training, resume it with new objects, and compare it with the whole one."""
    try:
        fit(make, folder, die=True)
    except Killed:
        pass
    except Exception as error:  # noqa: BLE001 - told by the caller
        return Trial([], error, None)
    else:
        raise AssertionError("the training was not killed")
    try:
        state = fit(make, folder, resume=True).state()
    except Exception as error:  # noqa: BLE001 - told by the caller
        return Trial([], error, None)
    return Trial(differences(whole, state), None, state)


class Outcome(NamedTuple):
    """A row of the table."""

    ours: str
    control: str


def tried(way: Way, make: Make, folder: Path, *, taken: bool = True) -> Outcome:
    """Try one job in one way; AssertionError if it is not as exact as its control.

    Whole trainings with and without trainbus are equal. The resumed one is equal to them; or the control is not either, and
    then ours is equal to the control, or an error. Unless ``taken``, the control or trainbus may refuse the parts.
    """
    try:
        whole = way.control(make, folder / "plain").state()
    except Exception as error:
        if taken:
            raise
        return _refused(way, make, folder, error)
    again = way.control(make, folder / "again").state()
    if differences(whole, again):
        return Outcome("not trained: two trainings differ", "")
    control = resumed(way.control, make, folder / "control", whole)
    try:
        with_bus = differences(whole, way.ours(make, folder / "whole").state())
    except ConfigurationError:
        if taken:
            raise
        return Outcome("refused early", control.outcome)
    except CheckpointValueError:
        if not needs_pickle(folder / "control" / "control.pt"):
            raise
        return Outcome("refused early: an object that only a pickle holds", control.outcome)
    assert not with_bus, f"trainbus changes the training: {with_bus[:MOST]}"
    ours = resumed(way.ours, make, folder / "ours", whole)
    if ours.exact:
        return Outcome("bitwise", control.outcome)
    assert not control.exact, f"torch.save resumes exactly; trainbus: {ours}"
    if ours.error is not None:
        assert control.error is not None, f"torch.save resumes with differences ({control}); trainbus: {ours}"
        return Outcome(f"refused: {type(ours.error).__name__}", control.outcome)
    apart = differences(control.state, ours.state)
    assert control.error is None, f"torch.save fails ({control}); trainbus goes on with differences: {ours}"
    assert not apart, f"torch.save: {control}; trainbus, apart from that: {apart[:MOST]}"
    return Outcome("as torch.save", control.outcome)


def needs_pickle(file: Path) -> bool:
    """Return whether torch reads a file by running code in it only; trainbus never does."""
    try:
        torch.load(file, weights_only=True)
    except UnpicklingError:
        return True
    return False


def _refused(way: Way, make: Make, folder: Path, error: Exception) -> Outcome:
    """Parts that a trainer does not take, or cannot save, are an error with trainbus, too, or its saves resume bitwise."""
    theirs = f"not taken: {type(error).__name__}"
    try:
        whole = way.ours(make, folder / "ours").state()
    except Exception as refusal:  # noqa: BLE001 - the trainer's, or ours
        return Outcome(f"not taken: {type(refusal).__name__}", theirs)
    ours = resumed(way.ours, make, folder / "resumed", whole)
    assert ours.exact, f"{theirs}; trainbus: {ours}"
    return Outcome("bitwise", theirs)
