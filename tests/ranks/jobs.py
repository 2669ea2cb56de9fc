"""Small trainings that run on one process and on several, on the same global batches."""

from pathlib import Path
from typing import Any, Self

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trainbus.eventloop import Bus, Hook, TrainLoop
from trainbus.eventloop.privates import let_gloo_go
from trainbus.hooks import DistSamplerSeedHook

BATCH = 8


class Right:
    """An accuracy that others of its kind can be merged into."""

    def __init__(self) -> None:
        self.right = self.seen = 0

    def update(self, right: int, seen: int) -> None:
        self.right, self.seen = self.right + right, self.seen + seen

    def compute(self) -> float:
        return self.right / self.seen

    def reset(self) -> None:
        self.right = self.seen = 0

    def merge_state(self, others: list[Self]) -> Self:
        for other in others:
            self.update(other.right, other.seen)
        return self


def destroy_group() -> None:
    let_gloo_go()
    distributed.destroy_process_group()


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def val_step(model: nn.Module, batch: Any) -> dict[str, Any]:
    inputs, targets = batch
    right = (model(inputs) - targets).abs() < 0.5
    return {"loss": step(model, batch), "right": int(right.sum()), "seen": len(targets)}


def rank_and_size() -> tuple[int, int]:
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def loader(*, shuffle: bool, rows: int = 64) -> DataLoader[Any]:
    rank, size = rank_and_size()
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(rows, 4, generator=generator)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    sampler = DistributedSampler(data, size, rank, shuffle=shuffle, seed=3)
    return DataLoader(data, batch_size=BATCH // size, sampler=sampler)


def network(*, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))


def make_loop(
    work_dir: str | Path | None, *hooks: Hook, epochs: int = 2, dropout: float = 0.0, shard: bool = False, **options: Any
) -> TrainLoop:
    model = network(dropout=dropout)
    if shard:
        # Here, as it takes a second to import.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (rank_and_size()[1],)))
    elif rank_and_size()[1] > 1:
        model = DistributedDataParallel(model)
    bus = Bus()
    bus.add(DistSamplerSeedHook(), *hooks)
    defaults = {"step": step, "train_data": loader(shuffle=True), "val_data": loader(shuffle=False), "val_step": val_step}
    defaults |= {"metrics": {"accuracy": Right()}, "bus": bus, "max_epochs": epochs, "work_dir": work_dir, "seed": 5}
    return TrainLoop(model, torch.optim.AdamW(model.parameters(), lr=0.01), **{**defaults, **options})


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): value.clone() for name, value in model.state_dict().items()}
