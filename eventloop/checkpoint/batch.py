"""Batches of tensors that are copied by one call, and the check that they are still those that the layout describes.

The check runs at every save, for 20,000 tensors perhaps, so it looks at each one as rarely as it can and makes nothing that the
garbage collector tracks. Of tensors that are joined it leaves to the copy what that refuses by itself: other shapes, and in
grad mode tensors that require a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch

from eventloop.checkpoint.forms import needs_grad
from eventloop.privates import foreach_copy_

_dtype: Final = attrgetter("dtype")
Tensors = Sequence[torch.Tensor]
Join = Callable[..., torch.Tensor]


class Changed(Exception):  # noqa: N818 - not an error: it asks for a new layout
    """The tensors differ from the layout."""


class Batch(NamedTuple):
    """Tensors that lie side by side in the file and are copied by one call."""

    start: int
    """Position of the first one in the order of the file."""
    stop: int
    pick: Callable[[Tensors], tuple[torch.Tensor, ...]]
    """Picks them from all tensors of a tree."""
    join: Join | None
    """``torch.stack``, ``torch.cat`` or None: how to copy them by one call; by themselves without one."""
    shape: tuple[int, ...]
    """Of what ``join`` makes."""
    exact: bool
    """Strides and ``requires_grad`` are compared one by one. Else all are contiguous, and none needs a gradient."""
    form: list[Any]
    pointers: list[int]

    def check(self, sources: Tensors, *, joins: bool = True) -> None:
        """Raise Changed if tensors differ from the layout; with ``joins``, in a way that ``copy`` will not report."""
        if form_of(sources, self.join, exact=self.exact) != self.form:
            raise Changed
        if self.exact:
            return
        if sources[0].dim() > 1 and not all(map(torch.Tensor.is_contiguous, sources)):
            raise Changed
        if not (joins and not torch.is_inference_mode_enabled()) and any(map(needs_grad, sources)):
            raise Changed

    def copy(self, sources: Tensors, target: Any) -> None:
        """Copy tensors into their views, or joined into one."""
        if self.join is None:
            foreach_copy_(target, sources)  # type: ignore[arg-type]  # a picker makes tuples
            return
        with torch.set_grad_enabled(not self.exact):  # an ``out=`` that would need a gradient is a RuntimeError
            self.join(sources, out=target)

    def moved(self, sources: Tensors) -> bool:
        """Return whether tensors are at other addresses. Ask after the copy: it fetches from memory what this reads."""
        return pointers_of(sources) != self.pointers


def form_of(tensors: Tensors, join: Join | None, *, exact: bool) -> list[Any]:
    """Return the facts of all tensors, one after the other, without running Python for each tensor."""
    further = [*map(torch.Tensor.stride, tensors), *map(needs_grad, tensors)] if exact else []
    if join is None:
        return [*map(_dtype, tensors), *map(torch.Tensor.numel, tensors), *map(torch.Tensor.dim, tensors), *further]
    first = tuple(tensors[0].shape)
    if join is torch.stack:  # which wants all of them to have that shape
        return [first, *map(_dtype, tensors), *further]
    return [first[1:], *map(_dtype, tensors), *map(torch.Tensor.numel, tensors), *further]


def pointers_of(tensors: Tensors) -> list[int]:
    """Return the addresses of all tensors."""
    return list(map(torch.Tensor.data_ptr, tensors))
