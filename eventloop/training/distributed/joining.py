"""The processes of a training get to know each other when a run begins."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.parallel import DistributedDataParallel

from eventloop.bus import Bus
from eventloop.checkpoint import is_sharded
from eventloop.log import get_logger
from eventloop.training.distributed.ranks import Agreement, Ranks, check_initialized, join, this_rank, world_size
from eventloop.training.state import Order

log = get_logger()


def join_ranks(bus: Bus, order: Order, models: Mapping[str, torch.nn.Module], *, trains: bool) -> Ranks | None:
    """Have the bus and the run go in step with the other processes; return all of them, or None where there is one.

    A collective.

    Args:
        bus: learns which process this is.
        order: of the run; from now on, all stop, save and end by what all agree on.
        models: of the run.
        trains: False if the run has no optimizer.

    Raises:
        ConfigurationError: ``torchrun`` started several processes, and they do not know of each other.
    """
    check_initialized()
    bus.place(this_rank(), world_size())
    if world_size() == 1:
        return None
    ranks = join()
    order.agreement = Agreement(ranks, lambda: (order.stop, order.save_now, order.cancelled), lambda: order.stop_reason)
    if trains:
        warn_if_apart(models)
    return ranks


def warn_if_apart(models: Mapping[str, torch.nn.Module]) -> None:
    """Warn of models that have weights to train and nothing that keeps them the same on all ranks."""
    for name, model in models.items():
        trained = any(parameter.requires_grad for parameter in model.parameters())
        if trained and not is_sharded(model) and not any(isinstance(one, DistributedDataParallel) for one in model.modules()):
            log.warning(
                "each process trains its own copy of this model, as it is neither in DistributedDataParallel nor sharded; wrap "
                "it, unless you average gradients yourself",
                model=name,
            )
