"""A training with eight hooks, and what it leaves behind."""

import json
from pathlib import Path
from typing import Any

import torch

from trainbus.eventloop import Bus, TrainLoop
from trainbus.eventloop.checkpoint import load
from trainbus.hooks import (
    CheckInvalidLossHook,
    CheckpointHook,
    EMAHook,
    IterTimerHook,
    JSONLinesWriter,
    LoggerHook,
    OptimizerHook,
    ParamSchedulerHook,
    RuntimeInfoHook,
)

from ..training.conftest import batches, model, step

KEYS = ("progress", "state_dict", "optimizer", "ema_state_dict", "param_schedulers")


def outputs(model: Any, batch: Any) -> dict[str, Any]:
    """Return the loss, scalars of several dtypes, and a tensor that is none."""
    loss = step(model, batch)
    numbers = {"positive": (batch[0] > 0).sum(), "mean": batch[0].mean(dtype=torch.float64), "again": loss.reshape(1)}
    return {"loss": loss, "inputs": batch[0]} | numbers


def hooks(optimizer: torch.optim.Optimizer, *, amp: Any = None, **options: Any) -> list[Any]:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return [
        OptimizerHook(amp=amp, grad_clip=1.0, scaler={"growth_interval": 2} if amp == "fp16" else None),
        EMAHook(momentum=0.1),
        ParamSchedulerHook(schedule, by="iter"),
        RuntimeInfoHook(),
        IterTimerHook(),
        LoggerHook(interval=1, writers=[JSONLinesWriter()]),
        CheckInvalidLossHook(interval=1),
        CheckpointHook(interval=2, by_epoch=False, **options),
    ]


def job(device: Any, work_dir: Path, *, bus: Bus | None = None, data: Any = None, **options: Any) -> TrainLoop:
    """A training with dropout, which makes a checkpoint every second iteration.

    It validates within its epoch, or trains on ``data`` for three epochs.
    """
    trained = model(dropout=0.5).to(device)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.05)
    bus = bus or Bus()
    validated: dict[str, Any] = {"train_data": batches(4), "val_data": batches(2, seed=2), "max_iters": 7, "val_interval": 3}
    plan = {"train_data": data, "max_epochs": 3} if data else validated
    bus.add(*hooks(optimizer, save_best=None if data else "loss", **options))
    return TrainLoop(trained, optimizer, step=outputs, val_step=step, bus=bus, work_dir=work_dir, seed=5, **plan)


def logged(work_dir: Path) -> list[dict[str, Any]]:
    """Return what was logged, without times; NaN as text, which is equal to itself."""
    lines = [
        json.loads(line, parse_constant=str)
        for file in sorted(work_dir.rglob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    return [{key: value for key, value in line.items() if not key.endswith(("time", "eta"))} for line in lines]


def saved(work_dir: Path) -> dict[str, Any]:
    """What the checkpoints hold, without times and random states."""
    trees = {file.name: load(file) for file in sorted(work_dir.glob("*.safetensors"))}
    return {name: {key: tree[key] for key in KEYS if key in tree} for name, tree in trees.items()}


def on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    return {key: on_cpu(one) for key, one in value.items()} if isinstance(value, dict) else value
