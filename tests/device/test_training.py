"""Training on an accelerator gives the weights, logs, checkpoints and resumes of the CPU, and waits for the device once."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop import Bus, TrainLoop
from eventloop import device as door
from eventloop.checkpoint import load
from hooks import (
    CheckpointHook,
    EMAHook,
    IterTimerHook,
    JSONLinesWriter,
    LoggerHook,
    OptimizerHook,
    ParamSchedulerHook,
    RuntimeInfoHook,
)

from ..training.conftest import assert_same, batches, model, step
from .conftest import KINDS, Accelerator

KEYS = ("progress", "state_dict", "optimizer", "ema_state_dict", "param_schedulers")
late = pytest.mark.parametrize("accelerator", KINDS[1:], indirect=True)
simulated = pytest.mark.parametrize("accelerator", KINDS[1:3], indirect=True)
"""With the arithmetic of the CPU, and a count of waits."""


def hooks(optimizer: torch.optim.Optimizer, *, amp: Any = None, **options: Any) -> list[Any]:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return [
        OptimizerHook(amp=amp, grad_clip=1.0, scaler={"growth_interval": 2} if amp == "fp16" else None),
        EMAHook(momentum=0.1),
        ParamSchedulerHook(schedule, by="iter"),
        RuntimeInfoHook(),
        IterTimerHook(),
        LoggerHook(interval=1, writers=[JSONLinesWriter()]),
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
    return TrainLoop(trained, optimizer, step=step, bus=bus, work_dir=work_dir, seed=5, **plan)


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
    return {name: {key: tree[key] for key in KEYS} for name, tree in trees.items()}


def on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    return {key: on_cpu(one) for key, one in value.items()} if isinstance(value, dict) else value


@simulated
@pytest.mark.parametrize("staging", ["block", "overlap"])
@pytest.mark.parametrize("amp", [None, "fp16", "bf16"])
def test_weights_logs_and_checkpoints_are_those_of_the_cpu(
    accelerator: Accelerator, stream: str, tmp_path: Path, amp: Any, staging: Any
):
    found = []
    for device in ("cpu", accelerator.device):
        work_dir = tmp_path / torch.device(device).type
        loop = job(device, work_dir, amp=amp, staging=staging)
        metrics = loop.run()
        found.append((metrics, on_cpu(dict(loop.model.state_dict())), logged(work_dir), saved(work_dir)))
    assert len(found[0][2]) >= 7
    assert len(found[0][3]) >= 4
    for ours, expected in zip(found[1], found[0], strict=True):
        assert_same(ours, expected)


@late
def test_a_resumed_training_continues_the_random_numbers_of_the_device(accelerator: Accelerator, stream: str, tmp_path: Path):
    whole = job(accelerator.device, tmp_path / "whole")
    whole.run()
    first, bus = tmp_path / "first", Bus()
    stopped = job(accelerator.device, first, bus=bus)
    bus.on("after_train_iter", lambda event: event.run.stop() if event.progress.iter == 3 else None)
    stopped.run()
    torch.manual_seed(99)  # another process has other generators
    resumed = job(accelerator.device, first)
    resumed.run(resume="auto")
    assert_same(on_cpu(dict(resumed.model.state_dict())), on_cpu(dict(whole.model.state_dict())))
    assert [line["train/loss"] for line in logged(first) if "train/loss" in line] == [
        line["train/loss"] for line in logged(tmp_path / "whole") if "train/loss" in line
    ]


@pytest.mark.anyio
@late
async def test_arun_trains_on_the_device_of_its_caller(accelerator: Accelerator, tmp_path: Path):
    accelerator.module.set_device(accelerator.device)
    devices, threads, bus = set[int](), set[int](), Bus()

    @bus.on("after_forward")
    def note(event: Any) -> None:
        devices.add(accelerator.module.current_device())
        threads.add(threading.get_ident())

    await job(accelerator.device, tmp_path, bus=bus).arun()
    assert devices == {accelerator.device.index}
    assert threading.get_ident() not in threads


def pinned(data: list[Any]) -> list[Any]:
    return [tuple(door.empty_pinned(part.shape, part.dtype).copy_(part) for part in batch) for batch in data]


@simulated
@pytest.mark.parametrize("staging", ["block", "overlap"])
def test_the_training_thread_waits_for_the_device_at_most_once(
    accelerator: Accelerator, stream: str, tmp_path: Path, staging: Any
):
    """Seven hooks, a capture and an asynchronous subscriber, over three epochs."""
    bus, seen = Bus(), list[Any]()
    bus.on("after_train_iter", seen.append, offload="thread", capture=lambda event: event.run.model[0].weight)

    @bus.on("after_train_iter")
    async def look(event: Any) -> None:
        seen.append(event.outputs["loss"])

    loop = job(accelerator.device, tmp_path, bus=bus, data=pinned(batches(4)), staging=staging)
    before = len(accelerator.waits)  # those of the model's way to the device
    loop.run()
    mine = [what for thread, what in accelerator.waits[before:] if thread == threading.get_ident()]
    assert len(seen) == 24
    assert len(mine) <= 1, mine
