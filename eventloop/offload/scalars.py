"""The scalars of an event, taken on the training thread as they are now, without waiting for a device.

Numbers are taken as they are. Tensors of one element are copied into a row on their device (:mod:`.ring`), one row
for each dtype and device; a consumer turns rows into numbers later, many at a time. A name whose value had another number of
elements once does not count as a scalar with one element either, while it has dimensions: it is the smaller last batch.

What is a scalar among the outputs of an iteration is nearly always what was one before, so it is noted down in a plan, and an
iteration only checks that the plan still holds. A row has the dtype of its tensors: a conversion on the way costs little by
itself, but after a training step its code is not in the caches any more, and comes at 4 µs. Only where dtypes have changed
once, floating tensors on the CPU share rows of float64, which holds each of their values exactly (and integers that take
their place, up to 2**53), so that they need no checking.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Literal, cast, get_args

import numpy as np
import torch

from eventloop.offload.ring import Cell, CudaRing, Ring, make_ring

Kind = Literal["number", "tensor", "array", "other"]

Taken = tuple["Plan", tuple[Any, ...], tuple[Cell, ...]]
"""How to put them together again, the numbers, and where the tensors' values are."""

_MOST_PLANS = 64  # for outputs whose names never repeat; planning anew costs some 10 µs

_ANY_FLOAT = (torch.float64, torch.device("cpu"))

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_dtype = attrgetter("dtype")
_device = attrgetter("device")
_is_cpu = attrgetter("is_cpu")


class Scalars:
    """Takes the scalars of mappings that are mostly alike, such as the outputs of iterations."""

    def __init__(self) -> None:
        self._plans: dict[tuple[str, ...], Plan] = {}
        self._sized: set[str] = set()  # names whose values had another number of elements than one
        self._rings: dict[tuple[torch.dtype, torch.device, int], Ring | CudaRing] = {}

    def take(self, outputs: Mapping[str, Any]) -> Taken:
        """Take what is a scalar in ``outputs``; entries that are none (logits, batches, objects) are left out."""
        names = tuple(outputs)
        values = tuple(outputs.values())
        plan = self._plans.get(names)
        if plan is not None:
            try:
                taken = plan.take(values)
            except (RuntimeError, TypeError, AttributeError):  # what was a scalar tensor has another shape now, or is no tensor
                taken = None
            if taken is not None:
                return taken
        self._sized.update(name for name, value in outputs.items() if _elements(value) != 1)
        plan = Plan(names, values, self._ring, steady=plan is None, sized=self._sized)
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        self._plans[names] = plan
        return cast("Taken", plan.take(values))

    def _ring(self, dtype: torch.dtype, device: torch.device, width: int) -> Ring | CudaRing:
        key = (dtype, device, width)
        if key not in self._rings:
            self._rings[key] = make_ring(dtype, device, width)
        return self._rings[key]


class Plan:
    """What is a scalar in a mapping with these names, and how it is taken."""

    def __init__(
        self,
        names: Sequence[str],
        values: Sequence[Any],
        ring: Callable[[torch.dtype, torch.device, int], Ring | CudaRing],
        *,
        steady: bool,
        sized: Container[str],
    ) -> None:
        kinds = [_kind(value, sized=name in sized) for name, value in zip(names, values, strict=True)]
        of_kind = {kind: [i for i, found in enumerate(kinds) if found == kind] for kind in get_args(Kind)}
        numbers = [*of_kind["number"], *of_kind["array"]]
        self._number = _getter(numbers)
        self._arrays = bool(of_kind["array"])
        self._generic = any(isinstance(values[i], np.generic) for i in numbers)
        # All but scalar tensors: those are known for what they are by copying them.
        rest = [i for i, kind in enumerate(kinds) if kind != "tensor"]
        self._rest = _getter(rest) if rest else None
        self._rest_types = [type(values[i]) for i in rest]
        # What has dimensions could have none the next time.
        others = [i for i in of_kind["other"] if hasattr(values[i], "ndim")]
        self._others = _getter(others) if others else None
        self._shaped = [i for i in of_kind["tensor"] if values[i].ndim]
        grouped = _grouped(of_kind["tensor"], values, steady=steady)
        self._groups = [_Group(key, positions, ring, len(values)) for key, positions in grouped.items()]
        self.waits = any(group.waits for group in self._groups)
        """Whether a consumer has to wait for the values."""
        taken = [*numbers, *(position for group in self._groups for position in group.positions)]
        self._names = [names[position] for position in sorted(taken)]
        self._order = None if taken == sorted(taken) else _getter([taken.index(position) for position in sorted(taken)])

    def take(self, values: tuple[Any, ...]) -> Taken | None:
        """Take what is planned; None if the values are of other kinds than planned.

        Raises:
            RuntimeError, TypeError, AttributeError: what was planned as a scalar tensor is none.
        """
        numbers: tuple[Any, ...] = ()
        if self._rest is not None:
            if [*map(type, self._rest(values))] != self._rest_types:
                return None
            if self._others is not None:
                for value in self._others(values):
                    if not value.ndim:
                        return None
            numbers = self._number(values)
            if self._arrays:
                if any(value.size != 1 for value in numbers if isinstance(value, np.ndarray)):
                    return None
                numbers = tuple([value.item() if isinstance(value, np.ndarray) else value for value in numbers])
        if self._shaped:
            values = self._reshaped(values)
        cells: tuple[Cell, ...] = ()
        for group in self._groups:
            tensors = group.pick(values) if group.pick is not None else values
            if group.checked and not group.fits(tensors):
                return None
            cells += (group.write(tensors),)
        return self, numbers, cells

    def _reshaped(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        reshaped = list(values)
        for i in self._shaped:
            reshaped[i] = values[i].detach().reshape(())
        return tuple(reshaped)

    def numbers(self, numbers: Iterable[Any], cells: Iterable[Cell]) -> dict[str, Any]:
        """Put together what :meth:`take` has taken, in the order of the outputs; on the consumer's thread, which may wait."""
        found = [value.item() if isinstance(value, np.generic) else value for value in numbers] if self._generic else [*numbers]
        for cell in cells:
            found += cell.numbers()
        return dict(zip(self._names, found if self._order is None else self._order(found), strict=True))


class _Group:
    """The scalars that share a row."""

    def __init__(
        self,
        key: tuple[torch.dtype, torch.device],
        positions: list[int],
        ring: Callable[[torch.dtype, torch.device, int], Ring | CudaRing],
        width: int,
    ) -> None:
        dtype, device = key
        self.positions = positions
        self.pick = None if positions == list(range(width)) else _getter(positions)
        self.write = ring(dtype, device, len(positions)).write
        self._dtypes = None if key == _ANY_FLOAT else [dtype] * len(positions)
        self._devices = [device] * len(positions)
        self._on_cpu = device.type == "cpu"
        self.waits = not self._on_cpu
        self._elsewhere = torch.accelerator.is_available()  # where there is none, tensors are nowhere else
        self.checked = self._dtypes is not None or self._elsewhere

    def fits(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Return True if copying keeps every value as it is and crosses no devices (which would wait)."""
        if self._dtypes is not None and [*map(_dtype, tensors)] != self._dtypes:
            return False
        if not self._elsewhere:
            return True
        return all(map(_is_cpu, tensors)) if self._on_cpu else [*map(_device, tensors)] == self._devices


def _grouped(
    positions: Iterable[int], values: Sequence[Any], *, steady: bool
) -> dict[tuple[torch.dtype, torch.device], list[int]]:
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for position in positions:
        value = values[position]
        wide = not steady and value.is_cpu and value.is_floating_point()
        groups.setdefault(_ANY_FLOAT if wide else (value.dtype, value.device), []).append(position)
    return groups


def _kind(value: Any, *, sized: bool) -> Kind:
    if isinstance(value, torch.Tensor):
        # One element of a sparse or a distributed tensor cannot be had without work.
        shaped = value.ndim and (sized or type(value) not in _PLAIN or value.layout is not torch.strided)
        return "other" if shaped else "tensor"
    if isinstance(value, np.ndarray):
        return "other" if value.ndim and sized else "array"
    return "number" if isinstance(value, int | float | str | np.generic) else "other"


def _elements(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    return value.size if isinstance(value, np.ndarray) else 1


def _getter(positions: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if not positions:
        return _nothing
    if len(positions) == 1:
        (position,) = positions
        return lambda values: (values[position],)
    return itemgetter(*positions)


def _nothing(values: Sequence[Any]) -> tuple[Any, ...]:
    return ()
