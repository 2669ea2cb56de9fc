"""What processes that hold one copy of a model together do with data, metrics and gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trainbus.bridges import TrainerHost
from trainbus.eventloop import Bus, ConfigurationError, Run, TrainLoop
from trainbus.eventloop.training import HostedRun
from trainbus.hooks import OptimizerHook

from . import meshes

ROWS = 32


class Seen:
    """Counts samples, and adds up what is in them."""

    def __init__(self) -> None:
        self.reset()

    def update(self, inputs: torch.Tensor) -> None:
        self.count += len(inputs)
        self.total += float(inputs.double().sum())

    def compute(self) -> dict[str, float]:
        return {"count": self.count, "total": self.total}

    def merge_state(self, others: list["Seen"]) -> None:
        self.count += sum(one.count for one in others)
        self.total += sum(one.total for one in others)

    def reset(self) -> None:
        self.count, self.total = 0, 0.0


def rows() -> TensorDataset:
    inputs = torch.randn(ROWS, 4, 4, generator=torch.Generator().manual_seed(7))
    return TensorDataset(inputs, inputs.sum(-1, keepdim=True).sin())


def plain_value(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def places(kind: str, given: bool) -> tuple[int, int]:
    """Return the number of this process among those with different data, and how many these are."""
    model, _ = meshes.build(kind)
    mesh = meshes.square("data", "other")["data"] if given else None
    with Run(Bus(), model=model, data_mesh=mesh) as run:
        return run.data.rank, run.data.num_replicas


def validated(kind: str) -> dict[str, Any]:
    """Return the metrics of a validation; of a pipeline, only the last stage has outputs."""
    model, step = meshes.build(kind)
    with Run(Bus(), model=model) as run:
        sampler = DistributedSampler(rows(), run.data.num_replicas, run.data.rank, shuffle=False)
        batches = run.validate(DataLoader(rows(), 4, sampler=sampler), metrics={"seen": Seen()})
        for inputs, targets in batches:
            with torch.enable_grad():  # a schedule goes backward, too
                loss = step(model, inputs, targets)
            if hasattr(model, "head"):
                run.report(loss=plain_value(loss), inputs=inputs)
        return dict(batches.metrics)


def clipped(kind: str, norm_type: float, nan_on: int | None = None) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the norm of the gradients, and the gradients after clipping. A rank may have NaN in one of its parts."""
    model, step = meshes.build(kind)
    found: dict[str, torch.Tensor] = {}
    with Run(Bus(), model=model, optimizer=meshes.make_optimizer(model)) as run:
        for _ in run.epochs(1):
            for _ in run.train([0]):
                step(model, *rows()[:8])
                if nan_on is not None and distributed.get_rank() == nan_on:
                    parts = [one.grad.to_local() if isinstance(one.grad, DTensor) else one.grad for one in model.parameters()]
                    next(one for one in parts if one is not None and one.numel()).fill_(torch.nan)
                norm = run.steps.clip_grad_norm(0.1, norm_type)
                found = {name: meshes.whole(one.grad) for name, one in model.named_parameters() if one.grad is not None}
    return float(norm), found


def refused(kind: str, make: Callable[[], Any], *, given: bool) -> str:
    """Return why a loader is refused; with all processes ``given`` as such with different data, or not."""
    model, _ = meshes.build(kind)
    mesh = meshes.line() if given else None
    try:
        with Run(Bus(), model=model, optimizer=meshes.make_optimizer(model), data_mesh=mesh) as run:
            for _ in run.epochs(1):
                for _ in run.train(make()):
                    return "trained"
    except ConfigurationError as error:
        return str(error)
    return ""


def all_ranks_divide() -> DataLoader[Any]:
    return DataLoader(rows(), 4, sampler=DistributedSampler(rows()))


def trained(kind: str, clip: float | Callable[..., Any] | None) -> tuple[list[list[float]], list[float], list[float]]:
    """Train by a global batch of 8; return the batches that this process had, the losses, and the norms of gradients."""
    batches: list[list[float]] = []
    model, _ = meshes.build(kind)

    def step(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        batches.append(batch[0][:, 0, 0].tolist())
        return plain_value(nn.functional.mse_loss(plain_value(model(batch[0])), batch[1]))

    bus = Bus(OptimizerHook(grad_clip=clip))
    norms: list[float] = []
    bus.on("after_train_iter", lambda event: norms.append(float(event.outputs.get("grad_norm", -1))), priority=60)
    optimizer = meshes.make_optimizer(model)
    loader = DataLoader(rows(), 8, shuffle=True)
    loop = TrainLoop(model, optimizer, step=step, train_data=loader, bus=bus, max_epochs=1, global_batch=8, seed=1)
    losses: list[float] = []
    bus.on("after_train_iter", lambda event: losses.append(float(event.outputs["loss"])))
    loop.run()
    return batches, losses, norms


def halve(parameters: list[nn.Parameter]) -> None:
    for one in parameters:
        if one.grad is not None:
            one.grad /= 2


def trained_from(kind: str, folder: str, resume: str | None, *, stops: bool) -> list[list[float]]:
    """Return the batches that this process had, up to the second one, at which it saves, if it ``stops``."""
    batches: list[list[float]] = []
    model, step = meshes.build(kind)
    optimizer = meshes.make_optimizer(model)
    with Run(Bus(), model=model, optimizer=optimizer, work_dir=folder, resume=resume, seed=3) as run:
        sampler = DistributedSampler(rows(), run.data.num_replicas, run.data.rank)
        for _ in run.epochs(2):
            for inputs, targets in run.train(DataLoader(rows(), 4, sampler=sampler)):
                batches.append(inputs[:, 0, 0].tolist())
                step(model, inputs, targets)
                optimizer.step()
                optimizer.zero_grad()
                if stops and len(batches) == 2:
                    run.checkpoints.save("second.safetensors")
                    run.stop()
    return batches


def reports(kind: str) -> None:
    """Report the loss where it is, in two iterations."""
    model, step = meshes.build(kind)
    bus = Bus()
    bus.on("after_train_iter", lambda event: None)
    with Run(bus, model=model, optimizer=meshes.make_optimizer(model)) as run:
        for _ in run.epochs(1):
            for _ in run.train([0, 1]):
                loss = step(model, *rows()[:8])
                if hasattr(model, "head"):
                    run.report(loss=plain_value(loss))


def trained_with_seeds(seeds: list[int | None]) -> None:
    """Train with a sampler whose seed is that of this rank."""
    model, _ = meshes.build("FSDP2")
    with Run(Bus(), model=model, optimizer=meshes.make_optimizer(model)) as run:
        seed = seeds[run.rank]
        sampler = DistributedSampler(rows(), shuffle=seed is not None, seed=seed or 0)
        for _ in run.epochs(2):
            for _ in run.train(DataLoader(rows(), 4, sampler=sampler)):
                pass


def places_after_a_save(kind: str, folder: str) -> tuple[int, int]:
    """Return the place of this process that the user has given, after the first save has compared the ranks."""
    model, step = meshes.build(kind)
    with Run(
        Bus(),
        model=model,
        optimizer=meshes.make_optimizer(model),
        work_dir=folder,
        data_mesh=meshes.square("data", "other")["data"],
    ) as run:
        for _ in run.epochs(1):
            for _ in run.train([0, 1]):
                step(model, *rows()[:8])
                run.checkpoints.save("a.safetensors")
        return run.data.rank, run.data.num_replicas


def half_precision() -> tuple[float, float]:
    """Return the norm of the gradients of two stages in half precision, whose square it cannot hold, and a clipped one."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).half()
    delattr(model, str(1 - meshes.rank_and_size()[0]))
    with Run(Bus(), model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)) as run:
        for _ in run.epochs(1):
            for _ in run.train([0]):
                for one in model.parameters():
                    one.grad = torch.full_like(one, 40.0)
                norm = run.steps.clip_grad_norm(1.0)
                return float(norm), float(next(model.parameters()).grad.flatten()[0])
    return 0.0, 0.0


def wrapped_in_part() -> tuple[tuple[int, int], Any]:
    """Return what is told, and the mean of a validation, of a frozen stage and one in DistributedDataParallel."""
    mesh = meshes.square("stage", "data")
    stage = mesh.get_local_rank("stage")
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    delattr(model, str(1 - stage))
    if stage:
        model = DistributedDataParallel(model, process_group=mesh.get_group("data"))
    else:
        model.requires_grad_(False)
    with Run(Bus(), model=model) as run:
        batches = run.validate([0, 1])
        for _ in batches:
            if stage:
                run.report(loss=torch.tensor(1.0))
        return (run.data.rank, run.data.num_replicas), batches.metrics.get("loss")


def hosted() -> tuple[int, int]:
    """Return the place of this process in a run inside another trainer."""
    host = TrainerHost(".pt")
    run = HostedRun(Bus(), model=nn.Linear(1, 1), host=host)
    host.drive.begin_run()
    place = run.data.rank, run.data.num_replicas
    host.drive.end_run()
    return place
