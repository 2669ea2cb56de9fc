"""Modules whose state is odd: it changes its size or its names, has types of its own, or is not what it seems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.ao import quantization
from torch.nn.functional import cross_entropy, linear
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel

from .jobs import classified, rows
from .kit import Parts

JOBS: list[Callable[[], Parts]] = []


def job(make: Callable[[], Any]) -> Callable[[], Parts]:
    """Add the job of training a model; ``make`` returns it, or all parts."""

    def parts() -> Parts:
        made = make()
        if isinstance(made, Parts):
            return made
        return Parts(made, torch.optim.AdamW(made.parameters(), lr=0.01), classified, rows(6))

    parts.__name__, parts.__doc__ = make.__name__, make.__doc__
    JOBS.append(parts)
    return parts


def mlp(middle: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh() if middle is None else middle, nn.Linear(8, 3))


def images(model: nn.Module, **options: Any) -> Parts:
    return Parts(model, torch.optim.AdamW(model.parameters(), lr=0.01, **options), classified, rows(3, 8, 8))


def convolutions() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 3))


@job
def batch_norm():
    return mlp(nn.BatchNorm1d(8))


@job
def batch_norm_of_all_batches():
    """momentum=None: a mean over all batches."""
    return mlp(nn.BatchNorm1d(8, momentum=None))


@job
def instance_norm_with_statistics():
    return images(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.Flatten(), nn.Linear(144, 3))
    )


@job
def channels_last():
    return images(convolutions().to(memory_format=torch.channels_last))


@job
def channels_last_fused():
    """The fused kernel reads memory in the order in which it lies."""
    return images(convolutions().to(memory_format=torch.channels_last), fused=True)


@job
def channels_last_foreach():
    return images(convolutions().to(memory_format=torch.channels_last), foreach=True, amsgrad=True)


@job
def transposed_weight():
    model = mlp()
    model[0].weight = nn.Parameter(model[0].weight.detach().T.contiguous().T)
    return Parts(model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), classified, rows(6))


@job
def weight_in_a_larger_tensor():
    """Two weights are parts of one tensor."""
    model = mlp()
    both = torch.randn(16, 6) / 4
    model[0].weight = nn.Parameter(both[:8])
    return model


@job
def tied():
    """Two names for one weight."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)
            self.head = nn.Linear(6, 3)
            self.outer.weight = self.inner.weight

        def forward(self, x):
            return self.head(self.outer(self.inner(x).tanh()))

    return Tied()


@job
def one_module_twice():
    shared = nn.Linear(6, 6)
    return nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(6, 3))


@job
def qat():
    """Observers that take their shape from the first batch."""
    model = nn.Sequential(quantization.QuantStub(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3), quantization.DeQuantStub())
    model.qconfig = quantization.get_default_qat_qconfig("x86")
    return quantization.prepare_qat(model.train())


@job
def qat_with_histograms():
    model = nn.Sequential(quantization.QuantStub(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3), quantization.DeQuantStub())
    model.qconfig = quantization.get_default_qconfig("x86")
    return quantization.prepare(model.train(), allow_list=None)


@job
def weight_norm():
    return mlp(parametrizations.weight_norm(nn.Linear(8, 8)))


@job
def old_weight_norm():
    return mlp(nn.utils.weight_norm(nn.Linear(8, 8)))


@job
def spectral_norm():
    return mlp(parametrizations.spectral_norm(nn.Linear(8, 8)))


@job
def old_spectral_norm():
    return mlp(nn.utils.spectral_norm(nn.Linear(8, 8)))


@job
def orthogonal():
    return mlp(parametrizations.orthogonal(nn.Linear(8, 8)))


@job
def own_parametrization():
    class Symmetric(nn.Module):
        def forward(self, x):
            return x.triu() + x.triu(1).T

    part = nn.Linear(8, 8)
    parametrize.register_parametrization(part, "weight", Symmetric())
    return mlp(part)


@job
def pruned():
    return mlp(prune.l1_unstructured(nn.Linear(8, 8), "weight", amount=0.5))


@job
def lazy():
    """Parameters take their shape in the first batch."""
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyBatchNorm1d(), nn.LazyLinear(3))
    return Parts(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), classified, rows(6))


@job
def extra_state():
    """``get_extra_state`` returns numbers, text and a tensor that grows."""

    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.seen = []

        def forward(self, x):
            self.seen.append(float(x.mean().detach()))
            return super().forward(x) * (1 + len(self.seen) / 100)

        def get_extra_state(self):
            return {"seen": torch.tensor(self.seen), "count": len(self.seen), "name": "counting", "pair": (1, "a")}

        def set_extra_state(self, state):
            self.seen = state["seen"].tolist()

    return mlp(Counting())


@job
def extra_state_tensor():
    """``get_extra_state`` returns bytes as a tensor, more of them with each step, as TransformerEngine does."""

    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.history = []

        def forward(self, x):
            self.history.append(x.detach().abs().max().item())
            return super().forward(x) / max(self.history)

        def get_extra_state(self):
            return torch.frombuffer(bytearray(repr(self.history).encode()), dtype=torch.uint8)

        def set_extra_state(self, state):
            self.history = eval(bytes(state.tolist()))  # noqa: S307 - what it has written itself

    return mlp(Scaled())


@job
def growing_buffer():
    """A queue of features, longer after each step."""

    class Queue(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("queue", torch.zeros(0, 8))

        def forward(self, x):
            self.queue = torch.cat([self.queue, x.detach()])
            return x + self.queue.mean(0)

        def _load_from_state_dict(self, state, prefix, *args):
            self.queue = self.queue.new_empty(state[f"{prefix}queue"].shape)
            super()._load_from_state_dict(state, prefix, *args)

    return mlp(Queue())


@job
def versioned():
    """A module that changes old states when it loads them, and knows them by their version."""

    class Versioned(nn.Linear):
        _version = 3

        def _load_from_state_dict(self, state, prefix, local_metadata, *args):
            if local_metadata.get("version", 1) < 3:
                state[f"{prefix}bias"] = state[f"{prefix}bias"] * 10
            super()._load_from_state_dict(state, prefix, local_metadata, *args)

    return mlp(Versioned(8, 8))


@job
def load_pre_hook():
    """A module that saves under other names than its own."""

    class Renamed(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.register_state_dict_post_hook(Renamed.rename)
            self.register_load_state_dict_pre_hook(Renamed.back)

        @staticmethod
        def rename(module, state, prefix, _):
            state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")

        @staticmethod
        def back(module, state, prefix, *_):
            if f"{prefix}kernel" in state:
                state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")

    return mlp(Renamed())


@job
def part_called_module():
    """Of a name that wrappers use, too."""

    class Residual(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return x + self.module(x)

    return mlp(Residual(nn.Sequential(nn.Linear(8, 8), nn.Tanh())))


@job
def averaged_model():
    """AveragedModel beside the model it averages."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = mlp()
            self.average = AveragedModel(self.model)
            for each in self.average.parameters():
                each.requires_grad_(False)

        def forward(self, x):
            self.average.update_parameters(self.model)
            with torch.no_grad():
                target = self.average(x)
            return self.model(x) + target

    return Both()


@job
def data_parallel():
    return nn.DataParallel(mlp())


@job
def compiled():
    return torch.compile(mlp(), backend="eager")


@job
def compiled_part():
    return mlp(torch.compile(nn.Linear(8, 8), backend="eager"))


@job
def compiled_in_place():
    model = mlp()
    model.compile(backend="eager")
    return model


@job
def not_persistent_buffer():
    """Made anew by the constructor, so no state is lost."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.linspace(0.5, 1.5, 8), persistent=False)

        def forward(self, x):
            return x * self.scale

    return mlp(Scaled())


@job
def not_persistent_buffer_that_changes():
    class Drifting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(8), persistent=False)

        def forward(self, x):
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
            return x - self.mean

    return mlp(Drifting())


@job
def none_buffer():
    class Later(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", None)
            self.register_parameter("bias", None)

        def forward(self, x):
            return x

    return mlp(Later())


@job
def frozen():
    model = mlp()
    model[0].requires_grad_(False)
    return model


@job
def unfrozen_later():
    """A layer that is trained from the second epoch on; it has no state in the optimizer until then."""

    class Thawing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.calls += 1
            first = self.layers[0](x)
            return self.layers[2](first.detach() if self.calls < 4 else first)

    return Thawing()


@job
def frozen_by_gradients_of_none():
    model = nn.ModuleDict({"used": mlp(), "unused": nn.Linear(3, 3)})
    step = lambda model, batch: cross_entropy(model["used"](batch[0]), batch[1])  # noqa: E731
    return Parts(model, torch.optim.AdamW(model.parameters()), step, rows(6))


@job
def parameter_groups():
    """Several groups with options of their own, in another order than the model's."""
    model = mlp()
    groups = [
        {"params": [model[2].bias, model[0].weight], "lr": 0.1, "name": "odd"},
        {"params": [model[0].bias, model[2].weight]},
    ]
    return Parts(model, torch.optim.SGD(groups, lr=0.01, momentum=0.9), classified, rows(6))


@job
def named_parameters_in_the_optimizer():
    model = mlp()
    return Parts(model, torch.optim.Adam(model.named_parameters(), lr=0.01), classified, rows(6))


@job
def rate_as_a_tensor():
    model = mlp()
    return Parts(model, torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01)), classified, rows(6))


def in_type(dtype: torch.dtype, optimizer: Callable[[Any], Any]) -> Parts:
    """A model with weights of a dtype."""
    model = mlp().to(dtype)
    return Parts(model, optimizer(model.parameters()), lambda m, b: cross_entropy(m(b[0].to(dtype)).float(), b[1]), rows(6))


@job
def double():
    return in_type(torch.float64, torch.optim.Adam)


@job
def bfloat16():
    """Weights and moments of two bytes."""
    return in_type(torch.bfloat16, torch.optim.Adam)


@job
def half():
    return in_type(torch.float16, lambda weights: torch.optim.SGD(weights, lr=0.01, momentum=0.9))


@job
def mixed_types():
    model = mlp()
    model[0].bfloat16()
    step = lambda m, b: cross_entropy(m[2](m[1](m[0](b[0].bfloat16())).float()), b[1])  # noqa: E731
    return Parts(model, torch.optim.AdamW(model.parameters()), step, rows(6))


class Moments(torch.optim.Optimizer):
    """Keeps state of another float type than its weight's, and copies of the weights, as many optimizers do."""

    def __init__(self, params, lr=0.05, kind=torch.float32):
        self.kind = kind
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["mean"] = torch.zeros_like(weight, dtype=self.kind)
                    state["master"] = weight.float()
                    state["steps"] = 0
                    state["all"] = []
                state["steps"] += 1
                state["all"] = [*state["all"][-2:], weight.grad.norm().to(torch.float64)]
                state["mean"].mul_(0.9).add_(weight.grad)
                state["master"].add_(state["mean"].float(), alpha=-group["lr"])
                weight.copy_(state["master"])


@job
def small_moments():
    """Moments of two bytes for weights of four."""
    model = mlp()
    return Parts(model, Moments(model.parameters(), kind=torch.bfloat16), classified, rows(6))


@job
def master_weights():
    """Weights of two bytes, whose masters in the optimizer have four."""
    model = mlp().bfloat16()
    step = lambda m, b: cross_entropy(m(b[0].bfloat16()).float(), b[1])  # noqa: E731
    return Parts(model, Moments(model.parameters()), step, rows(6))


@job
def complex_weights():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))

        def forward(self, x):
            return (x.to(torch.complex64) @ self.weight).abs()

    model = Complex()
    return Parts(model, torch.optim.Adam(model.parameters(), lr=0.01), classified, rows(6))


@job
def float8_buffers():
    class Stored(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
                self.register_buffer(name, torch.linspace(0, 1, 8).to(getattr(torch, name)))

        def forward(self, x):
            self.float8_e4m3fn = x.detach().mean(0).to(torch.float8_e4m3fn)
            return x * self.float8_e4m3fn.float() + self.float8_e5m2.float()

    return mlp(Stored())


@job
def integers_and_booleans():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            for kind in (
                torch.int8,
                torch.int16,
                torch.int32,
                torch.int64,
                torch.uint8,
                torch.uint16,
                torch.uint32,
                torch.bool,
            ):
                self.register_buffer(str(kind).removeprefix("torch."), torch.ones((), dtype=kind))

        def forward(self, x):
            self.int64 += 1
            self.bool.logical_not_()
            return x * (2 if self.bool else 1) / self.int64

    return mlp(Counting())


@job
def scalars_and_empty_weights():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.none = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 4))

        def forward(self, x):
            return x * self.scale + self.none.sum()

    return mlp(Odd())


@job
def lists_and_dicts_of_parameters():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ParameterList([torch.ones(8), torch.zeros(8)])
            self.named = nn.ParameterDict({"a": torch.ones(8)})
            self.by_name = nn.ModuleDict({"weight": nn.Linear(8, 8), "module": nn.Linear(8, 8)})

        def forward(self, x):
            return self.by_name["module"](self.by_name["weight"](x * self.parts[0] + self.parts[1] * self.named["a"]))

    return mlp(Many())


@job
def recurrent():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells, self.head = nn.LSTM(3, 5, 2, dropout=0.2, bidirectional=True), nn.Linear(10, 3)

        def forward(self, x):
            return self.head(self.cells(x.view(2, -1, 3))[0].mean(0))

    return Recurrent()


@job
def dropout():
    """Random numbers in the forward pass."""
    return mlp(nn.Sequential(nn.Dropout(0.4), nn.AlphaDropout(0.1)))


@job
def sparse_embedding():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(10, 3, sparse=True, mode="sum")

        def forward(self, x):
            return self.bag(x.abs().mul(3).long().clamp(max=9))

    model = Bag()
    return Parts(model, torch.optim.SparseAdam(model.parameters(), lr=0.1), classified, rows(6))


@job
def embedding_with_a_largest_norm():
    """Its weights change in the forward pass."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 3, max_norm=0.5, padding_idx=0)

        def forward(self, x):
            return self.table(x.abs().mul(3).long().clamp(max=9)).sum(1)

    return Normed()


@job
def weights_as_a_mapping_of_its_own():
    """A model that saves more than tensors, and loads it itself."""

    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.steps = mlp(), 0

        def forward(self, x):
            self.steps += 1
            return self.layers(x) * (1 + self.steps / 10)

        def state_dict(self, *args, **kwargs):
            state = super().state_dict(*args, **kwargs)
            state["steps"] = self.steps
            return state

        def load_state_dict(self, state, strict=True, assign=False):
            state = dict(state)
            self.steps = state.pop("steps")
            return super().load_state_dict(state, strict=strict, assign=assign)

    return Saving()


@job
def adapters():
    """Low-rank weights beside frozen ones."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(8, 8).requires_grad_(False)
            self.down, self.up = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(8, 2))

        def forward(self, x):
            return self.base(x) + linear(linear(x, self.down), self.up)

    return mlp(Adapted())


@job
def meta_then_real():
    """Made on the device ``meta``, then given memory."""
    with torch.device("meta"):
        model = mlp()
    model = model.to_empty(device="cpu")
    for each in model.parameters():
        nn.init.normal_(each, std=0.2)
    return model
