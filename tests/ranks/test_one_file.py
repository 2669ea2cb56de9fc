"""A checkpoint has the state of all processes, or none is made: nothing of one rank is lost without a word."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from trainbus.eventloop import Bus, ConfigurationError, GlobalBatchSampler, Run, TrainLoop
from trainbus.eventloop.checkpoint import load as load_file
from trainbus.eventloop.checkpoint import load_whole, verify_shards
from trainbus.hooks import CheckpointHook

from . import jobs, meshes


def raised(function: Callable[[], object]) -> str:
    """Return the error of a function, which all ranks raise."""
    with pytest.raises(ConfigurationError) as caught:
        function()
    return str(caught.value)


def saves(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *left_out: str) -> None:
    """Take one step with gradients of ones, and save."""
    with Run(Bus(), model=model, optimizer=optimizer, work_dir=folder) as run:
        for _ in run.epochs(1):
            for _ in run.train([0]):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                if optimizer is not None:
                    optimizer.step()
                run.checkpoints.save("one.safetensors", leave_out=left_out)


class OfOneRank(torch.optim.SGD):
    """Has a state only for the parameters that a rank updates, as Muon does with several processes."""

    def step(self, closure: Any = None) -> None:
        own = self.param_groups[0]["params"][distributed.get_rank()]
        self.state[own]["momentum_buffer"] = torch.zeros_like(own)


def stages(first: int, second: int) -> nn.Module:
    torch.manual_seed(distributed.get_rank())
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range((first, second)[distributed.get_rank()])))


def other_states(folder: str) -> dict[str, str]:
    """Save models that differ between ranks in each way that counts; return the errors."""
    sized = nn.BatchNorm1d(2)
    sized.register_buffer("queue", torch.zeros(1 + distributed.get_rank()))
    half = nn.Module()
    half.kept, half.own = DistributedDataParallel(nn.Linear(2, 2)), stages(1, 1)
    same = nn.Linear(2, 2)
    distributed.broadcast(same.weight.data, 0)
    distributed.broadcast(same.bias.data, 0)
    free = torch.optim.SGD([*same.parameters(), nn.Parameter(torch.full((2,), float(distributed.get_rank())))])
    cases: dict[str, tuple[nn.Module, Any]] = {
        "a stage has more": (stages(1, 2), None),
        "a stage has fewer": (stages(2, 1), None),
        "stages of equal names": (stages(1, 1), None),
        "a part without a wrapper": (half, None),
        "a buffer of another size": (sized, None),
        "an optimizer of parts": (same, OfOneRank(same.parameters())),
        "a parameter of no model": (same, free),
    }
    found = {case: raised(partial(saves, Path(folder, case), *one)) for case, one in cases.items()}
    saves(Path(folder, "without"), same, OfOneRank(same.parameters()), "optimizer")
    return found


def test_models_that_differ_between_ranks_are_an_error_at_the_first_save_that_names_the_tensor(ranks, tmp_path):
    first, second = ranks(other_states, str(tmp_path))
    assert first == second
    named = {
        "a stage has more": ("other values on rank 1 than on rank 0", "'0."),
        "a stage has fewer": ("other values on rank 1 than on rank 0", "'0."),
        "stages of equal names": ("other values on rank 1 than on rank 0", "'0."),
        "a part without a wrapper": ("other values on rank 1 than on rank 0", "'own.0."),
        "a buffer of another size": ("rank 1", "'queue'", "(1,)", "(2,)"),
        "an optimizer of parts": ("rank 1", "momentum_buffer of bias", "save_optimizer=False"),
        "a parameter of no model": ("other values on rank 1 than on rank 0", "'parameter 1 of no model"),
    }
    missing = {case: [text for text in texts if text not in first[case]] for case, texts in named.items()}
    assert missing == {case: [] for case in named}
    assert list(tmp_path.rglob("*.safetensors")) == [tmp_path / "without" / "one.safetensors"]


def legitimately_other_states(folder: str) -> list[float]:
    """Save a model whose parameters are equal, and whose buffers and random numbers are not."""
    torch.manual_seed(distributed.get_rank())
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    for parameter in model.parameters():
        distributed.broadcast(parameter.data, 0)
    model[0].running_mean.fill_(distributed.get_rank())
    saves(Path(folder), model, torch.optim.AdamW(model.parameters()))
    return model[0].running_mean.tolist()


def test_buffers_may_differ_and_those_of_rank_0_are_saved(ranks, tmp_path):
    own, _ = ranks(legitimately_other_states, str(tmp_path))
    assert load_file(tmp_path / "one.safetensors")["state_dict"]["0.running_mean"].tolist() == own


def on_own_meshes(folder: str) -> str:
    """Save tensors that live on meshes of one process each, under two names and under one; return the error of that."""
    rank = distributed.get_rank()
    mesh = [init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "shard"))["shard"], DeviceMesh("cpu", [rank])]
    models = [nn.Module(), nn.Module()]
    for model, one, name in zip(models, mesh, (f"stage_{rank}", "weight"), strict=True):
        model.register_parameter(name, nn.Parameter(distribute_tensor(torch.full((2, 2), float(rank)), one, [Shard(0)])))
    saves(Path(folder, "names"), models[0])
    return raised(partial(saves, Path(folder, "values"), models[1]))


def test_tensors_on_meshes_of_their_own_are_saved_by_their_names(ranks, tmp_path):
    values, other = ranks(on_own_meshes, str(tmp_path))
    assert other == values
    assert "'weight' has other values on rank 1" in values
    assert list(tmp_path.rglob("one.safetensors")) == [tmp_path / "names" / "one.safetensors"]
    saved = load_whole(tmp_path / "names" / "one.safetensors")["state_dict"]
    assert {name: value.tolist() for name, value in saved.items()} == {f"stage_{n}": [[n, n], [n, n]] for n in range(2)}


def appears_late(folder: str, kind: str) -> None:
    """Save twice; before the second save each rank gets a tensor that was not compared."""
    model, everyone, rank = nn.Module(), init_device_mesh("cpu", (2,)), distributed.get_rank()
    model.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), everyone, [Shard(0)]))
    late = {
        "parts of other tensors": lambda: DTensor.from_local(torch.ones(2 + rank, 2), everyone, [Shard(0)], run_check=False),
        "other values": lambda: distribute_tensor(torch.full((2, 2), float(rank)), DeviceMesh("cpu", [rank]), [Shard(0)]),
        "copies": lambda: distribute_tensor(torch.ones(2, 2), DeviceMesh("cpu", [rank]), [Shard(0)]),
    }
    with Run(Bus(), model=model, work_dir=folder) as run:
        for _ in run.epochs(1):
            for index in run.train([0, 1]):
                if index:
                    model.late = nn.Parameter(late[kind]())
                run.checkpoints.save(f"{index}.safetensors")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("parts of other tensors", "late do not make up the whole"),
        ("other values", "late has other values on rank 1"),
        ("copies", ""),
    ],
)
def test_a_save_that_its_reader_would_refuse_is_not_committed(outcomes, tmp_path, kind, told):
    ended = outcomes(appears_late, str(tmp_path / "run"), kind)
    assert [one.exitcode for one in ended] == [int(bool(told))] * 2
    assert any(told in one.error for one in ended)
    files = sorted(file.name for file in (tmp_path / "run").glob("*.safetensors"))
    assert files == (["0.safetensors"] if told else ["0.safetensors", "1.safetensors"])
    if not told:
        assert torch.equal(load_whole(tmp_path / "run/1.safetensors")["state_dict"]["late"], torch.ones(2, 2))


def replicas(kind: str) -> nn.Module:
    """Return a model of which both processes hold parts, or copies that are no replicas of the data."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    if "tensor" in kind:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if kind == "shards":
        return fully_shard(model, mesh=mesh["tp"])
    if kind == "copies and shards":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copy", "shard")))
    if kind == "groups":
        return DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    return fully_shard(model, mesh=mesh["dp"]) if "shards" in kind else model


def divides(kind: str, *, own: bool) -> str:
    model, data = replicas(kind), TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    sampler = GlobalBatchSampler(data, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    if own:
        with Run(Bus(), model=model, optimizer=optimizer) as run:
            for _ in run.epochs(1):
                for _ in run.train(DataLoader(data, batch_sampler=sampler)):
                    pass
    else:
        loader = DataLoader(data, batch_size=4)
        loop = TrainLoop(model, optimizer, step=jobs.step, train_data=loader, bus=Bus(), max_epochs=1, global_batch=4)
        loop.run()
    return "trained"


def tries_to_divide(kinds: list[str]) -> dict[str, list[str]]:
    """Train with a global batch; return the errors of samplers that divide it among all processes."""
    return {
        kind: [divides(kind, own=False)] + [raised(partial(divides, kind, own=True)) for _ in range(kind in WITHIN)]
        for kind in kinds
    }


WITHIN = ["tensor", "tensor and shards", "groups"]


@meshes.AVERAGES
@pytest.mark.long
def test_a_global_batch_is_not_divided_within_a_replica(ranks):
    kinds = [*WITHIN, "shards", "copies and shards"]
    for found in ranks(tries_to_divide, kinds):
        assert all(one[0] == "trained" for one in found.values())
        assert all("num_replicas=" in found[kind][1] for kind in WITHIN)


def on_one_dimension(folder: str, resume: str | None) -> Any:
    """Train with tensor parallelism and FSDP2 on the other dimension; return the whole weights."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))  # the norm is on mesh["dp"] alone
    plan = {"0": ColwiseParallel(output_layouts=Replicate()), "2": RowwiseParallel(input_layouts=Replicate())}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    bus = Bus(CheckpointHook(interval=2, by_epoch=False))
    data = [torch.full((2, 4), float(number + mesh.get_local_rank("dp"))) for number in range(4)]
    with Run(bus, model=model, optimizer=optimizer, work_dir=folder, resume=resume) as run:
        for _ in run.epochs(1):
            for batch in run.train(data):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
    return [value.full_tensor().tolist() for value in model.state_dict().values()]


@pytest.mark.long
def test_fsdp_on_one_dimension_of_a_mesh_is_saved_once_and_resumes_bitwise(ranks, tmp_path):
    whole, *others = ranks(on_one_dimension, str(tmp_path), None, size=4)
    assert others == [whole] * 3
    for number in (2, 4):
        file = tmp_path / f"iter_{number}.safetensors"
        verify_shards(load_file(file), file)
    last = load_whole(tmp_path / "iter_4.safetensors")["state_dict"]
    assert [value.tolist() for value in last.values()] == whole
    resumed = ranks(on_one_dimension, str(tmp_path), str(tmp_path / "iter_2.safetensors"), size=4)
    assert resumed == [whole] * 4
