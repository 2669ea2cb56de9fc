"""One script for one process and for several: ``python examples/ddp.py``, ``torchrun --nproc-per-node 2 examples/ddp.py``.

Several processes share each batch. The first one writes all files, and metrics cover all processes. Started again, the run
continues where it was, also with another number of processes.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trainbus import Bus, CheckpointHook, DistSamplerSeedHook, LoggerHook, PreemptionHook, TrainLoop

BATCH = 64  # rows of one step, shared by all processes


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the loss."""
    inputs, targets = batch
    return mse_loss(model(inputs), targets)


def make_loop(work_dir: Path, epochs: int = 5) -> TrainLoop:
    """Return a loop that fits y = sin(x)."""
    together = distributed.is_initialized()
    rank, size = (distributed.get_rank(), distributed.get_world_size()) if together else (0, 1)
    torch.manual_seed(0)
    x = torch.linspace(-3, 3, 640).unsqueeze(1)
    data = TensorDataset(x, torch.sin(x))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, num_replicas=size, rank=rank, seed=0)
    model: nn.Module = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    if together:
        model = DistributedDataParallel(model)
    bus = Bus()
    bus.add(DistSamplerSeedHook(), LoggerHook(), CheckpointHook(interval=1, max_keep_ckpts=2), PreemptionHook())
    return TrainLoop(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        step=step,
        train_data=DataLoader(data, batch_size=BATCH // size, sampler=sampler),
        val_data=DataLoader(data, batch_size=BATCH // size, sampler=DistributedSampler(data, size, rank, shuffle=False)),
        bus=bus,
        max_epochs=epochs,
        work_dir=work_dir,
        seed=0,
    )


if __name__ == "__main__":
    if distributed.is_torchelastic_launched():
        distributed.init_process_group("gloo", timeout=timedelta(minutes=2))
    torch.set_num_threads(1)  # the network is too small for more
    make_loop(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/ddp")).run(resume="auto")
    if distributed.is_initialized():
        distributed.destroy_process_group()
