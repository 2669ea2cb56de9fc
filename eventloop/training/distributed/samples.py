"""``GlobalBatchSampler``: the batches of all processes from one order of the samples, for any number of processes."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Annotated

import torch
from msgspec import Meta
from torch.utils.data import DataLoader, Sampler

from trainbus.eventloop.checks import check_options
from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.world import this_rank, world_size

log = get_logger()


class GlobalBatchSampler(Sampler[list[int]]):
    """Yield this process's share of each global batch, as the ``batch_sampler`` of a DataLoader.

    The order of the samples depends on seed and epoch alone, and the position of a run is the number of samples that all
    processes have used. So a run that goes on with another number of processes, or another global batch, takes exactly the
    rest: each sample comes once per epoch. The one exception is logged: fewer samples than processes may be left out, if a run
    goes on with more processes at the very end of an epoch.

    A global batch is divided into equal parts, one for each process and micro-batch of at most ``batch_size`` samples. The last
    one of an epoch has the samples that are left; if there are fewer than processes, they are added to the batch before.

    Args:
        dataset: a map-style dataset, or anything with a length.
        global_batch: samples per optimizer step, of all processes together.
        batch_size: most samples of a micro-batch; by default one micro-batch per step.
        shuffle: whether each epoch has an order of its own.
        seed: determines the orders; it must be equal on all processes and in all starts.
        drop_last: leave out the last samples of an epoch if they make no whole global batch.
        num_replicas: how many processes get different samples; all by default. Of a model that several processes hold
            together, these need the same samples: ``mesh["dp"].size()``.
        rank: the number of this process among them: ``mesh["dp"].get_local_rank()``.

    Raises:
        ConfigurationError: an option has the wrong type or range; or there are fewer samples, or a smaller global batch, than
            processes; or no whole batch with ``drop_last``.
    """

    @check_options
    def __init__(
        self,
        dataset: Sized,
        global_batch: Annotated[int, Meta(ge=1)],
        *,
        batch_size: Annotated[int, Meta(ge=1)] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        num_replicas: Annotated[int, Meta(ge=1)] | None = None,
        rank: Annotated[int, Meta(ge=0)] | None = None,
    ) -> None:
        if (num_replicas is None) != (rank is None) or (rank is not None and rank >= (num_replicas or 0)):
            raise ConfigurationError(f"num_replicas={num_replicas}, rank={rank}: give both, and rank less than num_replicas")
        self._size, self._most = len(dataset), batch_size
        self.global_batch = global_batch
        """Samples per optimizer step, of all processes together."""
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self.rank = this_rank() if rank is None else rank
        """The number of this process among those that get different samples."""
        self.num_replicas = num_replicas or world_size()
        """How many processes get different samples."""
        if min(self._size, global_batch) < self.num_replicas:
            raise ConfigurationError(
                f"global_batch={global_batch} of {self._size} samples leaves a process without any: they are divided among "
                f"{self.num_replicas}"
            )
        if drop_last and self._size < global_batch:
            raise ConfigurationError(f"global_batch={global_batch} with drop_last=True: there are only {self._size} samples")
        self._epoch = self._start = self._before = self._skipped = 0

    @property
    def accumulate(self) -> int:
        """Micro-batches per optimizer step."""
        return self._micro_batches(self.global_batch)

    def set_epoch(self, epoch: int) -> None:
        """Take the order of an epoch, from its first sample on."""
        self._epoch = epoch
        self._start = self._before = self._skipped = 0

    def begin_at(self, samples: int) -> int:
        """Begin the next pass behind the first ``samples`` of the epoch; return the number of batches that these made up."""
        self.set_epoch(self._epoch)
        for size in self._sizes():  # go on with the same batches, if this start would have come there
            count = self._micro_batches(size)
            for self._skipped in range(count):
                if self._start + self._skipped * size // count == samples:
                    return self._before + self._skipped
            self._start, self._before = self._start + size, self._before + count
        self._start, self._skipped = samples, 0
        if samples < self._size:
            self._before = -(-samples // self.global_batch) * self.accumulate
        if 0 < (left := self._size - samples) < self.num_replicas:
            log.warning(
                "the last samples of this epoch are left out: there are fewer than processes",
                id="last-samples-left-out",
                samples=left,
            )
        return self._before

    def samples_before(self, batches: int) -> int:
        """Return how many samples of the epoch all processes have used after this number of batches of this process."""
        samples, left = self._start, batches - self._before
        for size in self._sizes():
            count = self._micro_batches(size)
            if left < count:
                return samples + left * size // count
            samples, left = samples + size, left - count
        return samples

    def __len__(self) -> int:
        """Return the number of batches in the present pass, those before its start included."""
        return self._before + sum(map(self._micro_batches, self._sizes()))

    def __iter__(self) -> Iterator[list[int]]:
        if self._shuffle:
            generator = torch.Generator().manual_seed((self._seed * 1_000_003 + self._epoch) % 2**63)
            order = torch.randperm(self._size, generator=generator).tolist()
        else:
            order = list(range(self._size))
        at, skipped = self._start, self._skipped
        for size in self._sizes():
            parts = self.num_replicas * self._micro_batches(size)
            # In this order, so that all processes together have used the first samples after each micro-batch, too.
            for part in range(self.rank + skipped * self.num_replicas, parts, self.num_replicas):
                yield order[at + part * size // parts : at + (part + 1) * size // parts]
            at, skipped = at + size, 0

    def _sizes(self) -> list[int]:
        """Return the sizes of the global batches from the start on."""
        whole, left = divmod(self._size - self._start, self.global_batch)
        sizes = [self.global_batch] * whole
        if left and not self._drop_last:
            if left >= self.num_replicas:
                sizes.append(left)
            elif sizes:
                sizes[-1] += left
            # Else they are left out: see begin_at.
        return sizes

    def _micro_batches(self, size: int) -> int:
        size = min(size, self.global_batch)  # also of one that the rest was added to
        most = size if self._most is None else self._most * self.num_replicas
        return max(1, min(-(-size // most), size // self.num_replicas))  # each part has a sample


def global_sampler(loader: object) -> GlobalBatchSampler | None:
    """Return the :class:`GlobalBatchSampler` of a DataLoader, if it has one."""
    sampler = getattr(loader, "batch_sampler", None) if isinstance(loader, DataLoader) else None
    return sampler if isinstance(sampler, GlobalBatchSampler) else None
