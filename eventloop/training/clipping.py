"""Clip gradients by their norm over the whole model, of which this process may hold a part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from trainbus.eventloop.checkpoint import is_dtensor
from trainbus.eventloop.training.optimizers import parameters_of
from trainbus.eventloop.training.saved_run import SavedRun
from trainbus.eventloop.training.saves.contents import parameter_names


def clip_gradients(run: SavedRun, optimizers: Mapping[str, torch.optim.Optimizer], **options: Any) -> torch.Tensor:
    """Clip the gradients of optimizers together, in place; return their norm before, as a plain tensor.

    The norm is that of the whole model: of sharded gradients over all parts, on each of their meshes, and over pipeline stages
    and local experts, which only some ranks hold. Then it is a collective. ``options`` are those of ``clip_grad_norm_``.
    """
    parameters = [one for optimizer in optimizers.values() for one in parameters_of(optimizer) if one.grad is not None]
    apart, in_parts = run.coordinator.layout.apart, run.coordinator.layout.in_parts
    meshes = {_mesh(one.grad) for one in parameters} if in_parts else set()
    order, foreach = float(options.get("norm_type", 2.0)), options.get("foreach")
    largest = order == torch.inf and in_parts
    if len(meshes) < 2 and not apart and not largest:
        return _whole(clip_grad_norm_(parameters, **options))
    if largest:  # torch's kernel fails for a rank whose part of a gradient is empty
        largest_of_each = [_largest_here(one).to(run.device) for one in parameters]
        here = torch.stack([torch.zeros((), device=run.device), *largest_of_each]).max()
        found = torch.stack([here.nan_to_num(nan=0.0, posinf=torch.inf), here.isnan()])  # Gloo's maximum may leave a NaN out
        distributed.all_reduce(found, op=distributed.ReduceOp.MAX)
        total = torch.where(found[1] > 0, torch.nan, found[0])
    else:
        norms = _norms(run, optimizers, order, foreach)
        # The norm of the norms is that of all gradients.
        total = get_total_norm(norms, order) if norms else torch.zeros((), device=run.device)
        if apart:
            distributed.all_reduce(total := total**order)
            total = total ** (1 / order)
    if options.get("error_if_nonfinite") and not bool(total.isfinite()):
        raise RuntimeError(f"the norm of order {order:g} of all gradients is {total.item()}, so they cannot be clipped")
    for mesh in meshes:  # the kernels take tensors of one mesh
        some = [one for one in parameters if _mesh(one.grad) == mesh]
        clip_grads_with_norm_(some, options["max_norm"], total, foreach)
    return total


def _norms(
    run: SavedRun, optimizers: Mapping[str, torch.optim.Optimizer], order: float, foreach: bool | None
) -> list[torch.Tensor]:
    """Return the norms of the gradients by mesh, of those that this rank counts: each gradient counts on one of its ranks.

    All ranks of a mesh take part in its norms.
    """
    layout, rank = run.coordinator.layout, run.coordinator.rank
    groups: dict[tuple[Any, int], list[torch.Tensor]] = {}
    names = parameter_names(run.models, optimizers)
    for name, optimizer in optimizers.items():
        for parameter, key in zip(some := parameters_of(optimizer), names[name].split("\n")[: len(some)], strict=True):
            if parameter.grad is not None:
                counts = layout.holders.get(key, 0) if layout.apart else rank
                groups.setdefault((_mesh(parameter.grad), counts), []).append(parameter.grad)
    norms = {key: _whole(get_total_norm(some, order, foreach=foreach)) for key, some in groups.items()}
    # float32, as ranks may have others, and as half precision overflows where norms are raised to a power.
    return [norm.to(run.device, torch.float32) for (_, counts), norm in norms.items() if counts == rank]


def _largest_here(parameter: torch.nn.Parameter) -> torch.Tensor:
    gradient: Any = parameter.grad
    here: torch.Tensor = gradient.to_local() if is_dtensor(gradient) else gradient
    return here.abs().max().float() if here.numel() else torch.zeros((), device=here.device)


def _mesh(gradient: Any) -> Any:
    return gradient.device_mesh if is_dtensor(gradient) else None


def _whole(norm: torch.Tensor) -> torch.Tensor:
    """Return a norm as a plain tensor; that of sharded gradients is a ``DTensor`` whose parts are not added up yet."""
    whole: Any = getattr(norm, "full_tensor", None)
    return norm if whole is None else whole()
