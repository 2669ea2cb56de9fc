"""Checkpoints of tensors on an accelerator hold the values of one moment, from any stream, and the training does not wait."""

from pathlib import Path
from typing import Any

import pytest
import torch

from trainbus.eventloop.checkpoint import Overlap, StageBuffer, load, stage, write

from .conftest import CUDA, DeviceUnderTest

SIZE = 3000 if not CUDA else 1 << 24
"""Elements of a tensor: on a card enough for copies that take a while; the simulated device is as late with few."""


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write_and_load(staged: Any) -> Any:
        return load(write(staged, tmp_path / "checkpoint").path)

    return write_and_load


def all_equal(tensor: torch.Tensor, value: float) -> bool:
    return tensor.device.type == "cpu" and bool((tensor == value).all())


def test_a_staged_tree_holds_the_values_of_its_moment(accelerator: DeviceUnderTest, stream: str, written: Any):
    buffer, weight, number = StageBuffer(), torch.zeros(SIZE, device=accelerator.device), torch.zeros(4)
    for n in range(3):
        staged = stage({"weight": weight, "strided": weight.view(2, -1).t(), "number": number}, buffer)
        weight += 1
        number += 1
        loaded = written(staged)
        assert all(all_equal(loaded[name], n) for name in ("weight", "strided", "number"))


def test_staging_does_not_wait_for_the_device(accelerator: DeviceUnderTest, stream: str, written: Any):
    buffer, weight = StageBuffer(), torch.ones(SIZE, device=accelerator.device)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    overlap = Overlap([optimizer])
    written(stage({"weight": weight}, buffer))
    for how in (None, overlap):
        with accelerator.no_waits():
            staged = stage({"weight": weight}, buffer, overlap=how)
        assert all_equal(written(staged)["weight"], 1)
    overlap.close()


def test_a_temporary_tensor_is_staged_before_its_memory_has_another_owner(
    accelerator: DeviceUnderTest, stream: str, written: Any
):
    weight = torch.ones(SIZE, device=accelerator.device)
    staged = stage({"twice": weight * 2})
    others = [torch.zeros(SIZE, device=accelerator.device) for _ in range(3)]
    assert all_equal(written(staged)["twice"], 2)
    del others


def test_memory_of_a_tree_that_was_not_written_is_used_again_behind_its_copies(accelerator: DeviceUnderTest, written: Any):
    buffer = StageBuffer()
    with accelerator.side() as first:
        stage({"weight": torch.full((SIZE,), 1.0, device=accelerator.device)}, buffer).release()
    with accelerator.side() as second:
        staged = stage({"weight": torch.full((SIZE,), 2.0, device=accelerator.device)}, buffer)
    second.synchronize()
    first.synchronize()
    assert all_equal(written(staged)["weight"], 2)


def test_tensors_of_two_devices_and_the_cpu_are_staged_together(accelerator: DeviceUnderTest, written: Any):
    devices = [torch.device(accelerator.kind, index) for index in range(accelerator.module.device_count())]
    tensors = {str(device): torch.full((SIZE,), 5.0, device=device) for device in [*devices, torch.device("cpu")]}
    staged = stage(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    loaded = written(staged)
    assert loaded.keys() == tensors.keys()
    assert all(all_equal(tensor, 5) for tensor in loaded.values())


@pytest.mark.parametrize("size", [3, SIZE], ids=["small", "large"])
def test_an_overlapped_copy_holds_the_weights_before_the_next_step(
    accelerator: DeviceUnderTest, stream: str, written: Any, size: int
):
    weight = torch.nn.Parameter(torch.zeros(size, device=accelerator.device))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    overlap, buffer = Overlap([optimizer]), StageBuffer()
    for _ in range(4):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        expected = {
            "weight": weight.detach().clone(),
            "optimizer": optimizer.state_dict()["state"][0]["momentum_buffer"].clone(),
        }
        staged = stage({"weight": weight.detach(), "optimizer": optimizer.state_dict()}, buffer, overlap=overlap)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        loaded = written(staged)
        assert torch.equal(loaded["weight"], expected["weight"].cpu())
        assert torch.equal(loaded["optimizer"]["state"][0]["momentum_buffer"], expected["optimizer"].cpu())
    overlap.close()
