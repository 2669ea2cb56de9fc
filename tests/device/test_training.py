"""Training on an accelerator gives the weights, logs, checkpoints and resumes of the CPU, and waits for the device once."""

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from trainbus.eventloop import Bus
from trainbus.eventloop import device as door

from ..training.conftest import assert_same, batches, model, step
from .conftest import KINDS, DeviceUnderTest
from .training_job import job, logged, on_cpu, saved

late = pytest.mark.parametrize("accelerator", KINDS[1:], indirect=True)
simulated = pytest.mark.parametrize("accelerator", KINDS[1:3], indirect=True)
"""With the arithmetic of the CPU."""
counted = pytest.mark.parametrize("accelerator", [*KINDS[1:3], KINDS[-1]], indirect=True)


@pytest.mark.long
@simulated
@pytest.mark.parametrize("staging", ["block", "overlap"])
@pytest.mark.parametrize("amp", [None, "fp16", "bf16"])
def test_weights_logs_and_checkpoints_are_those_of_the_cpu(
    accelerator: DeviceUnderTest, stream: str, tmp_path: Path, amp: Any, staging: Any
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
def test_a_resumed_training_continues_the_random_numbers_of_the_device(accelerator: DeviceUnderTest, tmp_path: Path):
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


@pytest.mark.long
@pytest.mark.anyio
@late
async def test_arun_trains_on_the_device_of_its_caller(accelerator: DeviceUnderTest, tmp_path: Path):
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


@pytest.mark.long
@counted
@pytest.mark.parametrize("staging", ["block", "overlap"])
def test_the_training_thread_waits_for_the_device_at_most_once(
    accelerator: DeviceUnderTest, stream: str, tmp_path: Path, staging: Any
):
    """Eight hooks, a capture and an asynchronous subscriber, over three epochs."""
    bus, seen = Bus(), list[Any]()
    bus.on("after_train_iter", seen.append, offload="thread", capture=lambda event: event.run.model[0].weight)

    @bus.on("after_train_iter")
    async def look(event: Any) -> None:
        seen.append(event.outputs["loss"])

    loop = job(accelerator.device, tmp_path, bus=bus, data=pinned(batches(4)), staging=staging)
    before = len(accelerator.waits)  # those of the model's way to the device
    with accelerator.no_waits() if accelerator.kind == "cuda" else nullcontext():  # it does not count them
        loop.run()
    mine = [what for thread, what in accelerator.waits[before:] if thread == threading.get_ident()]
    assert len(seen) == 24
    assert len(mine) <= 1, mine


def by_hand(device: Any, amp: Any) -> tuple[list[float], dict[str, Any]]:
    """Train as ``job(data=...)`` does, without trainbus; return the losses and the weights."""
    trained = model(dropout=0.5).to(device)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = torch.amp.GradScaler(device.type, growth_interval=2, enabled=amp == "fp16")
    dtype = {None: torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[amp]
    losses = []
    torch.manual_seed(5)
    for inputs, labels in batches(4) * 3:
        batch = inputs.to(device), labels.to(device)
        with torch.autocast(device.type, dtype, enabled=amp is not None):
            loss = step(trained, batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= scale:  # else the step was left out
            schedule.step()
        losses.append(loss.item())
    return losses, on_cpu(dict(trained.state_dict()))


@pytest.mark.long
@late
@pytest.mark.parametrize("amp", [None, "fp16", "bf16"])
def test_training_gives_the_losses_and_weights_of_a_loop_by_hand(accelerator: DeviceUnderTest, tmp_path: Path, amp: Any):
    losses, weights = by_hand(accelerator.device, amp)
    loop = job(accelerator.device, tmp_path, amp=amp, data=batches(4))
    loop.run()
    assert_same(on_cpu(dict(loop.model.state_dict())), weights)
    assert [line["train/loss"] for line in logged(tmp_path) if "train/loss" in line] == losses
