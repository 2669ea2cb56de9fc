"""An object's own ``load_state_dict`` gets exactly what its ``state_dict`` gave, and decides whether it fits."""

import copy
import gc
import io
import warnings
from collections import OrderedDict
from enum import IntEnum
from functools import partial
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from trainbus.eventloop import Bus, CheckpointError, Hook, Run, TrainLoop, load_weights
from trainbus.eventloop.checkpoint import load, save
from trainbus.eventloop.checkpoint.tree import FlatTree
from trainbus.hooks import CheckpointHook, EMAHook


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(parts, folder, make, optimizer=sgd, *, hooks=(), epochs=2, seed=0, **options):
    """Train a new model with a save after each epoch, or resume it; return the loop."""
    torch.manual_seed(seed)
    model = make()
    made, bus = optimizer(model), Bus(CheckpointHook(interval=1), *hooks)
    loop = TrainLoop(model, made, step=parts.step, train_data=parts.batches(3), bus=bus, max_epochs=epochs, work_dir=folder)
    loop.run(**options)
    return SimpleNamespace(model=model, optimizer=made, bus=bus, counters=loop.counters)


def assert_resumes_bitwise(parts, tmp_path, make, optimizer=sgd, hooks=tuple):
    whole = train(parts, tmp_path / "whole", make, optimizer, hooks=hooks())
    resumed = train(parts, tmp_path / "resumed", make, optimizer, hooks=hooks(), seed=1, resume=first(tmp_path / "whole"))
    parts.assert_same(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))
    parts.assert_same(resumed.optimizer.state_dict(), whole.optimizer.state_dict())
    return whole, resumed


def first(folder):
    return folder / "epoch_1.safetensors"


def by_torch(state):
    """Return a state as ``torch.save`` and ``torch.load`` give it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


# ------------------------------------------------------------------------------------------------------------ modules


class Versioned(nn.Linear):
    """Version 1 kept a tenth of the bias; a state without a version is taken for one of it."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, local_metadata, *rest):
        if local_metadata.get("version", 1) < 2:
            state[f"{prefix}bias"] = state[f"{prefix}bias"] * 10
        super()._load_from_state_dict(state, prefix, local_metadata, *rest)


class Growing(nn.Linear):
    """Extra state that becomes longer in training, as of TransformerEngine."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.seen = []

    def forward(self, inputs):
        if self.training:
            self.seen.append(float(inputs.detach().abs().max()))
        return super().forward(inputs) / (1 + 0.01 * sum(self.seen))

    def get_extra_state(self):
        return torch.tensor(self.seen, dtype=torch.float64)

    def set_extra_state(self, state):
        self.seen = state.tolist()


class Renamed(nn.Module):
    """Takes the names of a former version of it."""

    def __init__(self, name="head"):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_load_state_dict_pre_hook(self._take)
        self.register_state_dict_post_hook(partial(self._give, name=name))

    @staticmethod
    def _take(module, state, prefix, *rest):
        for key in [key for key in state if key.startswith(f"{prefix}fc.")]:
            state[f"{prefix}head.{key.removeprefix(f'{prefix}fc.')}"] = state.pop(key)

    @staticmethod
    def _give(module, state, prefix, *rest, name):
        for key in [key for key in state if key.startswith(f"{prefix}head.")]:
            state[f"{prefix}{name}.{key.removeprefix(f'{prefix}head.')}"] = state.pop(key)

    def forward(self, inputs):
        return self.head(inputs)


class Residual(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, inputs):
        return inputs + self.module(inputs)


class Observed(nn.Linear):
    """A buffer that is empty until the first batch, and is made to fit when a state is loaded, as torch's observers do."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("least", torch.empty(0))

    def forward(self, inputs):
        if self.training:
            low = inputs.detach().amin(0)
            self.least = low if self.least.numel() == 0 else torch.minimum(low, self.least)
        return super().forward(inputs - self.least)

    def _load_from_state_dict(self, state, prefix, *rest):
        self.least.resize_(state[f"{prefix}least"].shape)
        super()._load_from_state_dict(state, prefix, *rest)


def versioned():
    return nn.Sequential(Versioned(4, 8), nn.ReLU(), Versioned(8, 3))


def lazy():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lazy modules are under development, says torch
        return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))


MODULES = {
    "a version": versioned,
    "a version in a wrapper": lambda: nn.Sequential(nn.DataParallel(Versioned(4, 8)), nn.DataParallel(Versioned(8, 3))),
    "extra state that grows": lambda: nn.Sequential(Growing(4, 8), nn.ReLU(), Growing(8, 3)),
    "an observer": lambda: nn.Sequential(Observed(4, 8), nn.ReLU(), Observed(8, 3)),
    "lazy": lazy,
    "other names": lambda: nn.Sequential(Renamed("fc")),
    "other names in a wrapper": lambda: nn.DataParallel(nn.Sequential(Renamed("fc"))),
    "a part called module": lambda: nn.DataParallel(nn.Sequential(Residual(nn.Linear(4, 4)), nn.Linear(4, 3))),
    "parametrized": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 8)), nn.Linear(8, 3)),
}


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("kind", MODULES)
def test_a_module_with_a_state_of_its_own_resumes_bitwise(parts, tmp_path, kind, average):
    hooks = (lambda: [EMAHook(momentum=0.1)]) if average else tuple
    whole, resumed = assert_resumes_bitwise(parts, tmp_path, MODULES[kind], hooks=hooks)
    averages = [{**loop.bus.hooks[1].average.tensors} for loop in (whole, resumed)] if average else [{}, {}]
    parts.assert_same(*averages)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_weights_of_an_earlier_version_of_a_module_are_converted_by_it(parts, tmp_path, average):
    hooks = (lambda: [EMAHook(momentum=0.1)]) if average else tuple
    old = lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 8)), nn.Linear(8, 3))  # noqa: E731
    whole = train(parts, tmp_path / "old", old, hooks=hooks())
    new = train(parts, tmp_path / "new", MODULES["parametrized"], hooks=hooks(), resume=first(tmp_path / "old"))
    inputs = parts.batches(1)[0][0]
    assert torch.equal(new.model(inputs), whole.model(inputs))


@pytest.mark.parametrize("make", [MODULES["a version"], MODULES["a version in a wrapper"]])
def test_a_checkpoint_has_the_weights_as_state_dict_gave_them(parts, tmp_path, make):
    model = train(parts, tmp_path, make, epochs=1).model
    saved, other = load(first(tmp_path))["state_dict"], make()
    load_weights(other, saved)
    parts.assert_same(dict(other.state_dict()), dict(model.state_dict()))
    if make is versioned:
        control = by_torch(model.state_dict())
        assert (type(saved), [*saved], saved._metadata) == (OrderedDict, [*control], control._metadata)
        plain = versioned()
        plain.load_state_dict(saved)
        parts.assert_same(dict(plain.state_dict()), dict(model.state_dict()))


def test_load_weights_takes_the_path_of_a_checkpoint(parts, tmp_path):
    model, other = train(parts, tmp_path, net, epochs=1).model, net()
    assert load_weights(other, str(first(tmp_path)))
    parts.assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_exported_weights_of_a_part_called_module_load_without_trainbus(parts, tmp_path):
    make = MODULES["a part called module"]
    model = train(parts, tmp_path, make, epochs=1).model.module
    other = make().module
    other.load_state_dict(load(first(tmp_path))["state_dict"])
    parts.assert_same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("average", [False, True])
def test_a_checkpoint_that_lost_a_part_called_module_loads(parts, tmp_path, average):
    """trainbus 0.1 and 0.2 took it for the name of a wrapper."""
    make, hooks = MODULES["a part called module"], (lambda: [EMAHook(momentum=0.1)]) if average else tuple
    whole = train(parts, tmp_path / "whole", make, hooks=hooks())
    tree = load(first(tmp_path / "whole"))
    for key in {"state_dict", "ema_state_dict"} & tree.keys():
        tree[key] = {name.replace("module.", ""): value for name, value in tree[key].items()}
    tree["parameters"]["optimizer"] = tree["parameters"]["optimizer"].replace("module.", "")
    save(tree, tmp_path / "old.safetensors")
    resumed = train(parts, tmp_path / "new", make, hooks=hooks(), seed=1, resume=tmp_path / "old.safetensors")
    parts.assert_same(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))


def test_an_activation_checkpoint_leaves_no_trace_in_names_and_its_average_is_saved(parts, tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    make = lambda: nn.Sequential(checkpoint_wrapper(nn.Linear(4, 8)), nn.Linear(8, 3))  # noqa: E731
    loop = train(parts, tmp_path, make, hooks=[EMAHook(momentum=0.1)])
    tree = load(tmp_path / "epoch_2.safetensors")
    assert tree["parameters"]["optimizer"].split("\n") == ["0.weight", "0.bias", "1.weight", "1.bias"] == [*tree["state_dict"]]
    parts.assert_same(dict(tree["state_dict"]), dict(loop.bus.hooks[1].average.tensors))


def test_a_module_that_refuses_its_state_is_an_error_with_its_own_as_the_cause(parts, tmp_path):
    class Refusing(nn.Linear):
        def get_extra_state(self):
            return {"kind": "old"}

        def set_extra_state(self, state):
            raise KeyError("window")

    make = lambda: nn.Sequential(Refusing(4, 3))  # noqa: E731
    train(parts, tmp_path, make, epochs=1)
    with pytest.raises(CheckpointError, match=r"Sequential.*'window'") as caught:
        train(parts, tmp_path, make, resume=first(tmp_path))
    assert isinstance(caught.value.__cause__, KeyError)


# --------------------------------------------------------------------------------------------------------- optimizers


class Signed(torch.optim.Optimizer):
    """The least that an optimizer of a user has."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(self.direction(parameter), alpha=group["lr"])

    def direction(self, parameter):
        return parameter.grad.sign()


class OtherTypes(Signed):
    """State of other types than its weight: those of torch's loading, and containers and text."""

    def direction(self, parameter):
        own = self.state[parameter]
        if not own:
            own["short"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            own["parts"] = (torch.zeros_like(parameter, dtype=torch.float64), {"count": torch.tensor(0)})
            own["kind"], own["named"] = "sign", OrderedDict(mean=torch.zeros((), dtype=torch.float64))
        own["short"].mul_(0.9).add_(parameter.grad.to(torch.bfloat16))
        own["parts"][0].add_(parameter.grad.double() ** 2)
        own["named"]["mean"].add_(parameter.grad.double().mean())
        assert own["kind"] == "sign"
        return own["short"].float() / (own["parts"][0].sqrt().float() + 1e-3)


class Norm(IntEnum):
    SPECTRAL = 1


class Grouped(Signed):
    """Its groups have a member of an enum, as scion's of pytorch_optimizer."""

    def __init__(self, params):
        super().__init__(params)
        for group in self.param_groups:
            group["norm"] = Norm.SPECTRAL

    def direction(self, parameter):
        assert all(group["norm"] is Norm.SPECTRAL for group in self.param_groups)
        return self.state[parameter].setdefault("first", parameter.grad.clone()) + parameter.grad


class Slow(torch.optim.Optimizer):
    """Slow weights around another optimizer, with a state laid out in its own way."""

    def __init__(self, base):
        self.base, self.slow, self.steps = base, [], 0
        super().__init__(base.param_groups, {"every": 2})
        self.param_groups = base.param_groups
        self.slow = [one.detach().clone() for group in base.param_groups for one in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.steps += 1
        if self.steps % 2 == 0:
            fast = [one for group in self.param_groups for one in group["params"]]
            for slow, parameter in zip(self.slow, fast, strict=True):
                parameter.copy_(slow.lerp_(parameter, 0.5))

    def state_dict(self):
        return {"base": self.base.state_dict(), "slow": self.slow, "steps": self.steps}

    def load_state_dict(self, state):
        self.base.load_state_dict(state["base"])
        self.param_groups, self.steps = self.base.param_groups, state["steps"]
        for own, saved in zip(self.slow, state["slow"], strict=True):
            own.copy_(saved)


class Both(torch.optim.Optimizer):
    """Two optimizers in one: a list of their states."""

    def __init__(self, model):
        matrices = [one for one in model.parameters() if one.dim() == 2]
        self.parts = [
            torch.optim.Muon(matrices, lr=0.01),
            OtherTypes([one for one in model.parameters() if one.dim() != 2]),
        ]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure=None):
        for part in self.parts:
            part.step()

    def state_dict(self):
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, state):
        for part, saved in zip(self.parts, state, strict=True):
            part.load_state_dict(saved)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


OPTIMIZERS = {
    "of a user": lambda model: Signed(model.parameters()),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "Muon": lambda model: torch.optim.Muon([one for one in model.parameters() if one.dim() == 2], lr=0.01),
    "of other types": lambda model: OtherTypes(model.parameters()),
    "of an enum": lambda model: Grouped(model.parameters()),
    "around another": lambda model: Slow(torch.optim.AdamW(model.parameters(), lr=0.01)),
    "around one of other types": lambda model: Slow(OtherTypes(model.parameters())),
    "two in one": Both,
}
if not hasattr(torch.optim, "Muon"):  # torch 2.7
    del OPTIMIZERS["Muon"], OPTIMIZERS["two in one"]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_with_a_state_of_its_own_resumes_bitwise(parts, tmp_path, kind):
    assert_resumes_bitwise(parts, tmp_path, net, OPTIMIZERS[kind])


def test_weights_of_another_type_take_the_state_in_theirs_as_torch_does(parts, tmp_path):
    train(parts, tmp_path, net, epochs=1)
    model = net().bfloat16()
    optimizer = sgd(model)
    with Run(Bus(CheckpointHook()), model=model, optimizer=optimizer, resume=first(tmp_path)):
        assert {one["momentum_buffer"].dtype for one in optimizer.state.values()} == {torch.bfloat16}


@pytest.mark.parametrize("known", [True, False])
def test_the_state_of_another_class_is_refused_where_its_options_are_missing(parts, tmp_path, known):
    train(parts, tmp_path, net, OPTIMIZERS["of a user"], epochs=1)
    tree = load(first(tmp_path))
    if not known:  # of another program
        tree["options"] = {}
    save(tree, tmp_path / "one.safetensors")
    with pytest.raises(CheckpointError, match=("Signed.*" if known else "") + "momentum"):
        train(parts, tmp_path, net, resume=tmp_path / "one.safetensors")


def test_an_option_that_a_newer_version_of_a_class_has_does_not_refuse_its_state(parts, tmp_path):
    newer = type("Signed", (Signed,), {})

    def make(model):
        optimizer = newer(model.parameters())
        optimizer.defaults["decay"] = 0.1
        for group in optimizer.param_groups:
            group["decay"] = 0.1
        return optimizer

    train(parts, tmp_path, net, OPTIMIZERS["of a user"], epochs=1)
    assert train(parts, tmp_path, net, make, resume=first(tmp_path)).counters.iter == 6


@pytest.mark.parametrize("strict", [True, False])
def test_an_optimizer_that_refuses_its_state_is_an_error_or_starts_fresh(parts, tmp_path, strict):
    def refusing(model):
        optimizer = Slow(sgd(model))
        fresh = copy.deepcopy(optimizer.state_dict())

        def load_state_dict(state):
            if state["steps"] == 3:
                optimizer.slow[0].zero_()
                raise LookupError("the old layout")
            Slow.load_state_dict(optimizer, state)

        optimizer.load_state_dict = load_state_dict
        optimizer.fresh = fresh
        return optimizer

    train(parts, tmp_path, net, refusing, epochs=1)
    if strict:
        with pytest.raises(CheckpointError, match="the old layout") as caught:
            train(parts, tmp_path, net, refusing, resume=first(tmp_path))
        assert isinstance(caught.value.__cause__, LookupError)
        return
    loop = train(parts, tmp_path, net, refusing, epochs=1, resume=first(tmp_path), strict=False)
    parts.assert_same(loop.optimizer.state_dict(), loop.optimizer.fresh)


@pytest.mark.long
def test_what_a_resume_has_loaded_is_freed_without_the_garbage_collector(parts, tmp_path):
    """All but the optimizer's state, whose tensors become its own."""
    make = lambda model: torch.optim.AdamW(model.parameters())  # noqa: E731
    train(parts, tmp_path, net, make, epochs=1, hooks=[EMAHook()])
    loaded, left = {}, []

    class Watch(Hook):
        def after_load_checkpoint(self, event):
            for key in ("state_dict", "ema_state_dict", "optimizer"):
                flat = FlatTree(event.checkpoint[key])
                loaded.update((f"{key} {flat.path(number)}", ref(one)) for number, one in enumerate(flat.tensors))

        def before_train_iter(self, event):
            left.append({name for name, one in loaded.items() if one() is not None})

    gc.disable()
    try:
        train(parts, tmp_path, net, make, hooks=[EMAHook(), Watch()], resume=first(tmp_path))
    finally:
        gc.enable()
    assert len(loaded) > 12
    assert {name for name in left[0] if not name.startswith("optimizer ")} == set()
    gc.collect()  # with Python 3.13, torch's optimizer is in a cycle of references when the run has ended
    assert {name for name, one in loaded.items() if one() is not None} == set()
