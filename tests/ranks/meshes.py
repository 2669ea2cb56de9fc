"""Layouts of one small model over four, two or one processes, all of which get the same data."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from trainbus.eventloop import Bus, Run
from trainbus.hooks import CheckpointHook, EMAHook

from .jobs import rank_and_size

Step = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
EXPERTS, WIDTH = 4, 16
AVERAGES = pytest.mark.skipif(
    torch.__version__ < "2.11", reason="Gloo of torch 2.7 adds up, or refuses, gradients of which fully_shard wants the mean"
)


class Add(torch.autograd.Function):
    """Adds up what the processes of a group have; gradients of one are those of all."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        distributed.all_reduce(whole := part.clone(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Copy(torch.autograd.Function):
    """Gives all processes of a group the same; gradients are added up."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        distributed.all_reduce(whole := grad.clone(), group=ctx.group)
        return whole, None


class Experts(nn.Module):
    """Adds up experts, each of which has its own name; a process may have some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.every = nn.ModuleDict({str(number): nn.Linear(WIDTH, WIDTH) for number in range(EXPERTS)})
        self.group: Any = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return torch.stack([self._expert(one, inputs) for one in self.every.values()]).sum(0)
        inputs = Copy.apply(inputs, self.group)
        own = torch.stack([self._expert(one, inputs) for one in self.every.values()]).sum(0)
        return Add.apply(own, self.group)

    @staticmethod
    def _expert(one: Any, inputs: torch.Tensor) -> torch.Tensor:
        spread = isinstance(one.weight, DTensor)
        weight, bias = (
            value.full_tensor(grad_placements=[Replicate()]) if spread else value for value in (one.weight, one.bias)
        )
        return nn.functional.linear(inputs.tanh(), weight, bias)


class GroupedExperts(nn.Module):
    """Adds up experts whose weights are one parameter, as torchtitan has them: on a mesh each process has some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.stacked = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        stacked: Any = self.stacked
        if isinstance(stacked, DTensor):
            stacked = stacked.full_tensor(grad_placements=[Replicate()] * stacked.device_mesh.ndim)
        return torch.einsum("...i,eij->...j", inputs.tanh(), stacked)


class Network(nn.Module):
    """Layers of which a pipeline stage has some."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.experts = nn.Linear(4, WIDTH), nn.LayerNorm(WIDTH), Experts()
        self.count = nn.Module()
        self.count.register_buffer("seen", torch.zeros(()))
        self.second, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for name, layer in self.named_children():
            if name != "count":
                inputs = layer(inputs).tanh() if name == "second" else layer(inputs)
        return inputs


def plain(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    return loss.detach()


def square(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (rank_and_size()[1] // 2, 2), mesh_dim_names=names)


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (rank_and_size()[1],))


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {"first": ColwiseParallel(output_layouts=Replicate()), "second": ColwiseParallel(), "head": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def sequence_parallel(model: Any) -> nn.Module:
    first = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    parallelize_module(model, line(), {"first": first, "norm": SequenceParallel(), "second": ColwiseParallel()})
    model.norm.register_forward_hook(lambda module, inputs, output: output.full_tensor())
    return parallelize_module(model, line(), {"head": RowwiseParallel()})


def pipeline(model: Any, *, shard: bool) -> tuple[nn.Module, Step]:
    """Return one of two stages, with the names of the whole model, and its step."""
    mesh = init_device_mesh("cpu", (2, rank_and_size()[1] // 2), mesh_dim_names=("stage", "data"))
    number = mesh.get_local_rank("stage")
    for name in ("second", "head", "count") if number == 0 else ("first", "norm", "experts"):
        delattr(model, name)
    if shard:
        fully_shard(model, mesh=mesh["data"])
    stage = PipelineStage(model, number, 2, torch.device("cpu"), group=mesh.get_group("stage"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)  # torch 2.7 refuses fewer parts than stages

    def step(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        _ = schedule.step(inputs) if number == 0 else schedule.step(target=targets, losses=losses)
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return model, step


def local_experts(model: Any, *, spread: bool) -> nn.Module:
    """Return the model with the experts of this process; ``spread`` puts each on the mesh of the processes that have it."""
    mesh = square("data", "expert")
    experts, place = model.experts, mesh.get_local_rank("expert")
    experts.group = mesh.get_group("expert")
    for number in range(EXPERTS):
        if number // (EXPERTS // 2) != place:
            del experts.every[str(number)]
    for one in experts.every.values() if spread else ():
        for name, value in [*one.named_parameters()]:
            setattr(one, name, nn.Parameter(distribute_tensor(value.detach(), mesh["data"], [Shard(0)])))
    return model


def build(kind: str) -> tuple[nn.Module, Step]:
    """Return this process's part of the model, and what takes a step's gradients."""
    torch.manual_seed(1)
    model: nn.Module = Network()
    if "grouped" in kind:
        model.experts = GroupedExperts()
    if rank_and_size()[1] == 1:
        return model, plain
    if kind == "grouped experts x FSDP2":
        mesh = square("data", "expert")
        model.experts.stacked = nn.Parameter(distribute_tensor(model.experts.stacked.detach(), mesh["expert"], [Shard(0)]))
        fully_shard(model.experts, mesh=mesh["data"])
        return fully_shard(model, mesh=line()), plain
    if kind in ("PP", "PP x FSDP2"):
        return pipeline(model, shard="FSDP2" in kind)
    if kind == "HSDP x TP":
        cube = init_device_mesh("cpu", (rank_and_size()[1] // 4, 2, 2), mesh_dim_names=("copy", "shard", "tensor"))
        return fully_shard(tensor_parallel(model, cube["tensor"]), mesh=cube["copy", "shard"]), plain
    if kind == "TP, copied":
        return tensor_parallel(model, square("data", "tensor")["tensor"]), plain
    if kind in ("TP", "TP x FSDP2"):
        mesh = square("data", "tensor") if "FSDP2" in kind else None
        tensor_parallel(model, line() if mesh is None else mesh["tensor"])
        return (model if mesh is None else fully_shard(model, mesh=mesh["data"])), plain
    make: dict[str, Callable[[], Any]] = {
        "FSDP2": lambda: fully_shard(model, mesh=line()),
        "HSDP": lambda: fully_shard(model, mesh=square("copy", "shard")),
        "SP": lambda: sequence_parallel(model),
        "CP x FSDP2": lambda: fully_shard(model, mesh=square("data", "context")["data"]),
        "experts": lambda: local_experts(model, spread=False),
        "experts on meshes": lambda: local_experts(model, spread=True),
    }
    return make[kind](), plain


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    options = {"head": {"lr": 0.02}, "bias": {"weight_decay": 0.0}, "": {}}  # of which a stage may lack some
    groups: dict[str, list[Any]] = {part: [] for part in options}
    for name, parameter in model.named_parameters():
        groups[next(part for part in options if part in name)].append(parameter)
    return torch.optim.AdamW([{"params": some, **options[part]} for part, some in groups.items() if some], lr=0.01)


def whole(value: Any) -> Any:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def facts(model: nn.Module, optimizer: torch.optim.Optimizer, ema: EMAHook | None = None) -> dict[str, torch.Tensor]:
    """Return the weights, the optimizer's state and the averages that this process has a part of, whole, by name."""
    names = {id(value): name for name, value in model.named_parameters()}
    found = {name: whole(value) for name, value in model.state_dict().items()}
    for parameter, state in optimizer.state.items():
        found |= {f"{names[id(parameter)]}: {key}": whole(value) for key, value in state.items()}
    for group in optimizer.param_groups:
        found |= {f"{names[id(one)]}: lr": torch.tensor(group["lr"]) for one in group["params"]}
    averages = {} if ema is None or ema.average is None else ema.average.tensors
    return found | {f"average of {name}": whole(value) for name, value in averages.items()}


def engine_reads(folder: str) -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer's state that torch's own functions load from a folder."""
    model, _ = build("")
    optimizer = make_optimizer(model)
    weights, state = get_state_dict(model, optimizer)
    tree = {"model": weights, "optimizer": state}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process has no group
        dcp.load(tree, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optimizer"])
    return facts(model, optimizer)


def train(kind: str, folder: str, epochs: int, resume: str | None, staging: str = "block") -> tuple[Any, ...]:
    """Return what was resumed with, what is at the end, and the losses by iteration."""
    model, step = build(kind)
    optimizer = make_optimizer(model)
    ema, losses = EMAHook(momentum=0.1), {}
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(32, 4, 4, generator=generator)
    data = [(part, part.sum(-1, keepdim=True).sin()) for part in inputs.split(8)]
    bus = Bus(ema, CheckpointHook(interval=1, staging=staging))
    with Run(bus, model=model, optimizer=optimizer, work_dir=folder, seed=5, resume=resume) as run:
        begun = facts(model, optimizer, ema)
        for _ in run.epochs(epochs):
            for batch in run.train(data):
                optimizer.zero_grad()
                losses[run.progress.iter] = float(step(model, *batch))
                optimizer.step()
                for buffer in model.buffers():
                    buffer += 1
        return begun, facts(model, optimizer, ema), losses
