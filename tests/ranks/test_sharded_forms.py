"""The memory layout of tensors that two processes have parts of, after a resume."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from trainbus.eventloop import Bus, TrainLoop
from trainbus.eventloop.checkpoint import load_whole
from trainbus.hooks import CheckpointHook

from . import jobs


class Images(torch.nn.Module):
    """A convolution whose filters are divided over the processes; in the parts, the channels come last."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        rank, size = jobs.rank_and_size()
        torch.manual_seed(1)
        part = torch.randn(8, 4, 3, 3).chunk(size, dim)[rank].clone(memory_format=torch.channels_last)
        self.weight = torch.nn.Parameter(DTensor.from_local(part, init_device_mesh("cpu", (size,)), [Shard(dim)]))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to_local()
        return torch.nn.functional.conv2d(images[:, : weight.shape[1]], weight)


class Turned(torch.optim.SGD):
    """SGD with a momentum of its own, whose parts lie in memory in another order than those of the weight."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state, weight = self.state[parameter], parameter.to_local()
            if not state:
                turned = torch.zeros(weight.shape[::-1]).permute(3, 2, 1, 0)
                state["average"] = DTensor.from_local(turned, parameter.device_mesh, parameter.placements)
            average = state["average"].to_local().lerp_(parameter.grad.to_local(), 0.1)
            weight -= 0.1 * average


def strided(value: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the part of this process, a copy of it, and its strides."""
    part = value.to_local() if isinstance(value, DTensor) else value
    return part.detach().clone(), part.stride()


def train(work_dir: str, epochs: int, resume: str | None, kind: str, dim: int = 0) -> Any:
    model = Images(dim)
    optimizer = Turned(model.parameters()) if kind == "turned" else torch.optim.AdamW(model.parameters(), fused=True)
    loop = TrainLoop(
        model,
        optimizer,
        step=lambda model, images: model(images).square().mean(),
        train_data=list(torch.randn(5, 2, 4, 6, 6, generator=torch.Generator().manual_seed(2))),
        bus=Bus(CheckpointHook(interval=1)),
        max_epochs=epochs,
        work_dir=work_dir,
    )
    loop.run(resume=resume)
    (state,) = optimizer.state_dict()["state"].values()
    return {name: strided(value) for name, value in {"weight": model.weight, **state}.items()}


def on_another_mesh(work_dir: str, resume: str) -> Any:
    """Resume with another dimension divided; return the strides."""
    found = train(work_dir, 1, resume, "turned", 1)
    return {name: strides for name, (_, strides) in found.items()}


@pytest.mark.parametrize(
    ("kind", "dim"),
    [
        ("channels last", 0),
        pytest.param("channels last", 1, marks=pytest.mark.long),
        pytest.param("turned", 0, marks=pytest.mark.long),
    ],
)
def test_parts_come_back_with_their_strides(ranks, tmp_path, kind, dim):
    straight = ranks(train, str(tmp_path / "straight"), 2, None, kind, dim)
    ranks(train, str(tmp_path / "resumed"), 1, None, kind, dim)
    resumed = ranks(train, str(tmp_path / "resumed"), 2, "auto", kind, dim)
    for found, expected in zip(resumed, straight, strict=True):
        assert [strides for _, strides in found.values()] == [strides for _, strides in expected.values()]
        assert all(torch.equal(found[name][0], expected[name][0]) for name in expected)


def test_on_another_mesh_and_as_whole_tensors_dimensions_keep_their_order_in_memory(ranks, tmp_path):
    ranks(train, str(tmp_path), 1, None, "turned")
    (state,) = load_whole(tmp_path / "epoch_1.safetensors")["optimizer"]["optimizer"]["state"].values()
    assert state["average"].stride() == (1, 8, 32, 96)
    for found in ranks(on_another_mesh, str(tmp_path / "other"), str(tmp_path)):
        assert found == {"weight": (18, 1, 6, 2), "average": (1, 8, 16, 48)}
