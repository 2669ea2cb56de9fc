"""The scalars of an event, taken on the training thread as they are now, without waiting for a device.

Numbers are taken as they are. 0-dim tensors of a kind are gathered into one tensor by one ``torch.stack``, which costs what
one ``torch._foreach_copy_`` into a ready-made row does (2.4 µs for six) and needs no such row; the consumer turns it into
numbers later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

Kind = Literal["number", "tensor", "numpy", "other"]

Gathered = list[tuple[list[str], torch.Tensor]]
"""Names and values of the tensors of one event, by dtype and device."""

_set_grad_enabled = torch._C._set_grad_enabled  # ten times cheaper than entering torch.no_grad()


def take_scalars(outputs: Mapping[str, Any]) -> tuple[dict[str, Any], Gathered]:
    """Return the scalar entries of ``outputs`` in their order, and what the consumer has to fill in.

    Entries that are no scalars (logits, batches, objects) are left out.
    """
    taken: dict[str, Any] = {}
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    for name, value in outputs.items():
        kind = type(value)
        if kind is float:
            taken[name] = value
            continue
        what = _kinds.get(kind) or _classify(kind)
        if what == "tensor":
            if value.dim() == 0:
                taken[name] = None  # keeps the order of the outputs
                names.append(name)
                tensors.append(value)
        elif what == "number":
            taken[name] = value
        elif what == "numpy" and value.ndim == 0:
            taken[name] = value.item()
    return taken, _gather(names, tensors) if tensors else []


def fill(taken: dict[str, Any], gathered: Gathered) -> None:
    """Put the numbers where :func:`take_scalars` left room for them; on the consumer's thread, which may wait for a device."""
    for names, values in gathered:
        taken.update(zip(names, values.tolist(), strict=True))


def _gather(names: list[str], tensors: list[torch.Tensor]) -> Gathered:
    dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype is not dtype:  # stacking would convert them
            return _gather_groups(names, tensors)
    enabled = torch.is_grad_enabled()
    _set_grad_enabled(False)
    try:
        return [(names, torch.stack(tensors))]
    except RuntimeError:  # on several devices
        if len({tensor.device for tensor in tensors}) == 1:
            raise
        return _gather_groups(names, tensors)
    finally:
        _set_grad_enabled(enabled)


def _gather_groups(names: list[str], tensors: list[torch.Tensor]) -> Gathered:
    groups: dict[tuple[torch.dtype, torch.device], tuple[list[str], list[torch.Tensor]]] = {}
    for name, tensor in zip(names, tensors, strict=True):
        group = groups.setdefault((tensor.dtype, tensor.device), ([], []))
        group[0].append(name)
        group[1].append(tensor)
    return [part for group in groups.values() for part in _gather(*group)]


def _classify(kind: type) -> Kind:
    what: Kind = "other"
    if issubclass(kind, torch.Tensor):
        what = "tensor"
    elif issubclass(kind, np.generic | np.ndarray):  # before numbers: np.float64 is a float
        what = "numpy"
    elif issubclass(kind, int | float | str):
        what = "number"
    _kinds[kind] = what
    return what


_kinds: dict[type, Kind] = {}
