"""Pairs of a model's tensors and their averages, which :mod:`trainbus.hooks.averages` blends and exchanges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import is_not
from typing import Any

import torch

from trainbus.eventloop.checkpoint import WrapperNames
from trainbus.eventloop.privates import parts_of

Tensors = list[torch.Tensor]

_END = object()
_LOOKS = 40  # tensors per update whose storage is checked: microseconds, however large the model


class Pairs:
    """Pair each tensor of a model with an averaged one, and check cheaply that the model still has these tensors.

    Of tensors that are sharded over processes (FSDP2's ``fully_shard``), each process pairs its own part. With ``buffers``,
    those in the model's ``state_dict`` are also paired. The averages continue with ``former`` ones, by checkpoint key.
    """

    def __init__(self, model: torch.nn.Module, buffers: bool, former: Mapping[str, torch.Tensor]) -> None:
        live = dict(_floating(model, buffers))
        twins: dict[int, torch.Tensor] = {}
        for key, tensor in live.items():
            if id(tensor) not in twins:
                saved = former.get(key)
                fits = saved if saved is not None and saved.shape == tensor.shape else tensor.detach().clone()
                twins[id(tensor)] = fits.to(tensor.device, tensor.dtype)
        self.held = {key: twins[id(tensor)] for key, tensor in live.items()}
        self._live = list({id(tensor): tensor for tensor in live.values()}.values())
        self._twins = list(twins.values())
        self.swapped = [False] * len(self._live)  # for each pair, True if the live tensor holds the average
        # An exchange under way: the pair, its new `swapped`, and what its live and its averaged tensor are to hold.
        self._unfinished: tuple[int, bool, torch.Tensor, torch.Tensor] | None = None
        self._sharded = [hasattr(tensor, "to_local") for tensor in self._live]
        # Detached, because the kernels read the autograd state of parameters: 4 % of an update.
        self.groups = list(_by_kind([_own(one) for one in self._twins], [_own(one) for one in self._live]))
        self._pointer = (lambda tensor: _own(tensor).data_ptr()) if any(self._sharded) else torch.Tensor.data_ptr
        self._pointers = list(map(self._pointer, self._live))
        self._next = 0
        views = [part.values() for one in model.modules() for part in (parts_of(one) if buffers else parts_of(one)[::2])]
        # The mark at the end makes sequences of different lengths differ.
        self._views = [*filter(len, views), (_END,)]
        self._expected = list(chain.from_iterable(self._views))

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("an average belongs to its model: make one of the other model, and load average.state_dict() into it")

    @property
    def replaced(self) -> bool:
        """True if a module, a parameter or an averaged buffer was replaced, added or removed.

        The check takes 20 µs for 300 modules with 600 parameters, 1 % of averaging them. It misses the first child or
        parameter of a module that had none.
        """
        return any(map(is_not, chain.from_iterable(self._views), self._expected))

    def moved(self) -> bool:
        """Return True if a tensor has new storage (``parameter.data = ...``, ``model.to(...)``).

        Each call checks some of the tensors, so in a large model it may take several updates to find a single new one.
        """
        if len(self._live) <= _LOOKS:
            return list(map(self._pointer, self._live)) != self._pointers
        part = slice(self._next, self._next + _LOOKS)
        self._next = part.stop if part.stop < len(self._live) else 0
        return list(map(self._pointer, self._live[part])) != self._pointers[part]

    def exchange(self, swapped: bool) -> None:
        """Exchange the contents of live and averaged tensors, so that ``swapped`` holds for every pair."""
        self.finish()
        for index, (live, twin) in enumerate(zip(self._live, self._twins, strict=True)):
            if self.swapped[index] == swapped:
                continue
            if self._sharded[index]:  # fully_shard keeps references to the storage
                self._unfinished = index, swapped, _own(twin).clone(), _own(live).clone()
            else:
                self._unfinished = index, swapped, twin.data, live.data
            self.finish()

    def finish(self) -> None:
        """Complete the exchange of a pair that Ctrl-C has interrupted. Repeating it from the start does no harm."""
        if self._unfinished is None:
            return
        index, swapped, for_live, for_twin = self._unfinished
        self.swapped[index] = swapped
        live, twin = self._live[index], self._twins[index]
        if self._sharded[index]:
            _own(live).copy_(for_live)
            _own(twin).copy_(for_twin)
        else:
            live.data, twin.data = for_live, for_twin
        self._unfinished = None


def _floating(model: torch.nn.Module, buffers: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield checkpoint key and tensor of all tensors to average; a tied tensor comes under each of its keys."""
    state = model.state_dict()  # first: that of a sharded model frees the gathered weights of a forward pass
    names = WrapperNames(model, state)
    named: Iterable[tuple[str, torch.Tensor]] = model.named_parameters(remove_duplicate=False)
    if buffers:
        buffers_too = model.named_buffers(remove_duplicate=False)
        saved = ((name, buffer) for name, buffer in buffers_too if names.without(name) in names.long)
        named = chain(named, saved)
    renamed: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in named:
        if not tensor.is_floating_point():
            continue
        key = names.without(name)
        if key not in names.long:  # a hook of the model has renamed it
            renamed = renamed or {_place(one): names.short[long] for long, one in state.items() if torch.is_tensor(one)}
            key = renamed.get(_place(tensor), key)
        yield key, tensor


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    """Return where a tensor is in memory and its shape, because a part of a fused weight may begin where the weight does."""
    own = _own(tensor)
    return own.data_ptr(), own.shape


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return the detached tensor; for a sharded one (``DTensor``) this process's part, which shares its storage."""
    if hasattr(tensor, "to_local"):
        with torch.no_grad():
            part: torch.Tensor = tensor.to_local()
            return part
    return tensor.detach()


def _by_kind(twins: Tensors, live: Tensors) -> Iterator[tuple[Tensors, Tensors]]:
    """Group by device and type: the fused kernels need lists of one kind."""
    groups: dict[tuple[torch.device, torch.dtype], tuple[Tensors, Tensors]] = {}
    for twin, tensor in zip(twins, live, strict=True):
        averages, weights = groups.setdefault((tensor.device, tensor.dtype), ([], []))
        averages.append(twin)
        weights.append(tensor)
    yield from groups.values()
