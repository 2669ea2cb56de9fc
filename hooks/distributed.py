"""Hooks for training in several processes: seed the sampler, and keep buffers equal on all ranks."""

from __future__ import annotations

import torch
from torch import distributed

from trainbus.eventloop import Hook
from trainbus.eventloop.events import AfterTrainEpoch, BeforeTrainEpoch, BeforeTrainIter, BeforeVal, RunView
from trainbus.eventloop.registry import register
from trainbus.eventloop.training import set_sampler_epoch


@register
class DistSamplerSeedHook(Hook):
    """Call ``set_epoch(epoch)`` on the sampler of the training data before each epoch.

    A ``DistributedSampler`` draws its order from its seed and the epoch; without the call all epochs have the same order. The
    hook uses the first ``set_epoch`` among the loader's ``sampler``, its ``batch_sampler``'s sampler and the ``batch_sampler``.
    It ignores a loader without one, which draws from the random state of the run.

    Iteration-based training has one long epoch; there the run calls ``set_epoch`` each time the data starts again.
    """

    def before_train_epoch(self, event: BeforeTrainEpoch) -> None:
        set_sampler_epoch(event.run.data.train, event.progress.epoch)


@register
class SyncBuffersHook(Hook):
    """Replace the buffers of the models by their mean over all ranks, after each training epoch.

    The hook also does so before a validation within an epoch, as in iteration-based training. Each rank sees other batches, so
    the running statistics of batch norms differ between ranks; validations and checkpoints after this hook see the mean.
    Integer buffers (counts) are rounded down; boolean buffers stay. In a single process the hook does nothing. Every rank
    needs the hook, and models with the same buffers.
    """

    def __init__(self) -> None:
        self._synced = True  # since the last batch; all ranks begin with the same buffers

    def before_train_iter(self, event: BeforeTrainIter) -> None:
        self._synced = False

    def after_train_epoch(self, event: AfterTrainEpoch) -> None:
        self._sync(event.run)

    def before_val(self, event: BeforeVal) -> None:
        if not self._synced and event.run.training:
            self._sync(event.run)

    def _sync(self, run: RunView) -> None:
        self._synced = True
        if run.world_size == 1:
            return
        for buffer in (buffer.detach() for model in run.models.values() for buffer in model.buffers()):
            if buffer.dtype is not torch.bool and buffer.numel():
                total = buffer.clone(memory_format=torch.contiguous_format)
                distributed.all_reduce(total)
                exact = total.is_floating_point() or total.is_complex()
                buffer.copy_(total.div_(run.world_size, rounding_mode=None if exact else "floor"))
