"""DistributedDataParallel on two simulated devices gives the weights, logs and checkpoints of the CPU."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from trainbus.eventloop import Bus, TrainLoop
from trainbus.eventloop import device as door
from trainbus.hooks import CheckpointHook, DistSamplerSeedHook, JSONLinesWriter, LoggerHook

from ..ranks import jobs
from ..ranks.conftest import ranks as ranks  # the fixture
from ..training.conftest import assert_same
from .conftest import TAKEN
from .training_job import logged, on_cpu, saved

pytestmark = TAKEN


def train(folder: str) -> list[list[Any]]:
    """Train on the CPU and on the device of this rank, in both ways of staging; return what each has given."""
    from trainbus.testing import sim

    from .group import Group

    rank, size = jobs.rank_and_size()
    sim.module.available = True
    door.NEW_PINNED.value, door.IS_PINNED.value = sim.pinned, sim.is_pinned  # of this process
    sim.reset("rivals")
    store = distributed.PrefixStore("simulated", distributed.FileStore(f"{folder}/store", size))
    group = Group(store, rank, size, timedelta(seconds=60))
    devices = torch.device("cpu"), torch.device(sim.NAME, rank)
    return [[_train(one, group, f"{folder}/{staging}", staging) for one in devices] for staging in ("block", "overlap")]


def _train(device: torch.device, group: Any, folder: str, staging: Any) -> Any:
    work_dir = Path(folder, device.type)
    network = torch.nn.Sequential(torch.nn.BatchNorm1d(4), jobs.network()).to(device)
    model = DistributedDataParallel(network, process_group=None if device.type == "cpu" else group)
    bus, optimizer = Bus(), torch.optim.AdamW(model.parameters(), lr=0.01)
    logger = LoggerHook(interval=1, writers=[JSONLinesWriter()])
    bus.add(DistSamplerSeedHook(), logger, CheckpointHook(interval=1, staging=staging))
    data = {"train_data": jobs.loader(shuffle=True), "val_data": jobs.loader(shuffle=False)}
    loop = TrainLoop(model, optimizer, step=jobs.step, bus=bus, max_epochs=2, work_dir=work_dir, seed=5, **data)
    metrics = loop.run()
    files = (logged(work_dir), saved(work_dir)) if jobs.rank_and_size()[0] == 0 else ()  # which rank 0 has written by now
    return metrics, on_cpu(jobs.weights(network)), files


def test_two_ranks_train_as_on_the_cpu(ranks: Any, tmp_path: Path):
    """With ``staging="block"`` and with ``"overlap"``."""
    first, second = ranks(train, str(tmp_path))
    for expected, ours in (*first, *second):
        assert_same(ours, expected)
    for one, other in zip(first, second, strict=True):
        assert [len(files) for files in one[0][2]] == [18, 2]
        assert_same(one[1][1], other[1][1])
