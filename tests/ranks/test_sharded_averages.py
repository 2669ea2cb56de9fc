"""EMAHook on weights that are sharded (FSDP2): each process averages its own part of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from eventloop import Hook
from eventloop.checkpoint import load_whole
from hooks import CheckpointHook, EMAHook, ExponentialMovingAverage

from . import jobs
from .test_sharded import same, whole


def made_whole(tensors: Any) -> dict[str, torch.Tensor]:
    return {key: value.full_tensor() if hasattr(value, "full_tensor") else value.clone() for key, value in tensors.items()}


class Validated(Hook):
    """What the model and the average have in validations, and after them."""

    priority = 100
    observes = True

    def __init__(self, ema: EMAHook) -> None:
        self.ema = ema
        self.losses: list[float] = []
        self.seen: dict[str, torch.Tensor] = {}
        self.kept: dict[str, torch.Tensor] = {}

    def before_val_iter(self, event: Any) -> None:
        self.seen = whole(event.run.model)  # also of a model that a forward pass has made whole
        self.kept = made_whole(self.ema.average.tensors)

    def after_val_epoch(self, event: Any) -> None:
        self.losses.append(event.metrics["loss"])


def train(work_dir: str, epochs: int, resume: str | None, shard: bool) -> Any:
    ema = EMAHook(momentum=0.1)
    watch = Validated(ema)
    loop = jobs.make_loop(work_dir, ema, watch, CheckpointHook(interval=1), epochs=epochs, shard=shard)
    loop.run(resume=resume)
    return watch.losses, whole(loop.model), made_whole(ema.average.tensors), watch.seen, watch.kept


@pytest.fixture
def single(ranks: Any, tmp_path: Any) -> Any:
    ((losses, raw, averaged, _, _),) = ranks(train, str(tmp_path / "single"), 4, None, False, size=1)
    assert not torch.equal(raw["0.weight"], averaged["0.weight"])
    return losses, raw, averaged


def test_sharded_averages_equal_those_of_one_process_in_validation_and_after_resuming(ranks, tmp_path, single):
    losses, raw, averaged = single
    place = tmp_path / "sharded"
    begun = ranks(train, str(place), 2, None, True)
    file = load_whole(place / "epoch_2.safetensors")
    for told, weights, average, validated, kept in begun:
        assert told == pytest.approx(losses[:2], rel=1e-5)
        same(average, validated)
        same(weights, kept)  # and given back
        same(average, file["state_dict"])
        same(weights, file["ema_state_dict"])
    (alone,) = ranks(train, str(place), 3, "auto", False, size=1)
    assert alone[0] == pytest.approx(losses[1:3], rel=1e-5)  # the checkpoint was made before the second validation
    for told, weights, average, _, _ in ranks(train, str(place), 4, "auto", True):
        assert told == pytest.approx(losses[2:], rel=1e-5)
        same(raw, weights)
        same(averaged, average)


@pytest.fixture
def sharded(tmp_path: Any) -> Any:
    """A model with a weight that is sharded, over one process."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = torch.nn.Linear(3, 2)
    mesh = init_device_mesh("cpu", (1,))
    model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    yield model
    distributed.destroy_process_group()


@pytest.mark.parametrize("copies", [0, 1, 2, 3])
def test_ctrl_c_during_an_exchange_restores_sharded_weights(sharded, monkeypatch, copies):
    average = ExponentialMovingAverage(sharded, momentum=0.5)
    average.update_parameters(sharded)
    raw = sharded.weight.full_tensor().clone()
    with torch.no_grad():
        sharded.weight.mul_(3)
        average.update_parameters(sharded)
    held = average.tensors["weight"].full_tensor().clone()
    torch.testing.assert_close(held, 2 * raw)
    made, copy = [], torch.Tensor.copy_

    def struck(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        made.append(copy(self, other))
        if len(made) == copies + 1:
            raise KeyboardInterrupt
        return made[-1]

    monkeypatch.setattr(torch.Tensor, "copy_", struck)
    with pytest.raises(KeyboardInterrupt):
        average.swap(sharded)
        torch.testing.assert_close(sharded.weight.full_tensor(), held)
        average.restore(sharded)
    monkeypatch.undo()
    average.restore(sharded)
    assert isinstance(sharded.weight, DTensor)
    torch.testing.assert_close(sharded.weight.full_tensor(), 3 * raw)
    torch.testing.assert_close(average.tensors["weight"].full_tensor(), held)
    assert not average.swapped
