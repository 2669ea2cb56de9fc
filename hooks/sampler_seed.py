"""``DistSamplerSeedHook``: another order of the data in every epoch, the same on all ranks."""

from __future__ import annotations

from eventloop import Hook, Priority, register
from eventloop.events import BeforeTrainEpoch
from eventloop.training import set_sampler_epoch


@register
class DistSamplerSeedHook(Hook):
    """Calls ``set_epoch(epoch)`` on the sampler of the training data before each epoch.

    A ``DistributedSampler`` draws its order from its seed and this number: without the call, all epochs have the same order.
    The sampler is the loader's ``sampler``, else its ``batch_sampler``'s, else the ``batch_sampler`` itself: the first one
    that has a ``set_epoch``. A loader without any draws from the random state of the run and is left alone.

    In iteration-based training there is one long epoch; when the data begins anew in it, the run itself tells the sampler.
    """

    priority = Priority.NORMAL

    def before_train_epoch(self, event: BeforeTrainEpoch) -> None:
        set_sampler_epoch(event.run.train_data, event.progress.epoch)
