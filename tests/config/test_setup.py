"""A loop from a configuration, made of this module's parts."""

import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainbus.config import Setup
from trainbus.eventloop import ConfigurationError, Hook, SubscribeError
from trainbus.eventloop.registry import register
from trainbus.hooks import CheckpointHook, EMAHook, LoggerHook, OptimizerHook

from ..failing import said

PARTS = "parts_of_setup_tests"
DEFAULTS = {
    "optimizer": {"type": "OptimizerHook"},
    "logger": {"type": "LoggerHook", "interval": 7},
    "checkpoint": {"type": "CheckpointHook", "interval": 1},
}


class Net(torch.nn.Module):
    def __init__(self, width: int = 2, activation: type[torch.nn.Module] = torch.nn.ReLU):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(2, width), activation(), torch.nn.Linear(width, 1))

    def forward(self, x):
        return self.body(x)


def loader(batches: int = 2) -> DataLoader:
    return DataLoader(TensorDataset(torch.ones(2 * batches, 2)), batch_size=2)


def step(model, batch, scale: float = 1.0):
    return {"loss": scale * model(batch[0]).square().mean(), "n": torch.tensor(1.0)}


class Mean:
    def __init__(self, offset: float = 0.0):
        self.offset = offset
        self.reset()

    def reset(self):
        self.values = []

    def update(self, n):
        self.values.append(n)

    def compute(self):
        return float(sum(self.values) / len(self.values)) + self.offset


def pair_of_models(kind):
    return Net()


@register(name="HookOfSetupTests")
class Mine(Hook):
    def __init__(self, model: torch.nn.Module, every: int = 1):
        self.model = model

    def after_run(self, event):
        pass


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """This module under a name that a configuration can import."""
    monkeypatch.setitem(sys.modules, PARTS, sys.modules[__name__])


def config(**parts):
    return {
        "imports": [PARTS, "torch.optim"],
        "model": f"{PARTS}:Net",
        "optimizer": {"type": "torch.optim:SGD", "lr": 0.1},
        "data": {"train": f"{PARTS}:loader"},
        "step": f"{PARTS}:step",
        "loop": {"max_epochs": 1},
        **parts,
    }


def make(**parts):
    return Setup(config(**parts)).make()


def test_a_described_loop_trains():
    loop = make(
        model={"type": f"{PARTS}:Net", "width": 5},
        data={"train": {"type": f"{PARTS}:loader", "batches": 3}, "val": f"{PARTS}:loader"},
        step={"type": f"{PARTS}:step", "scale": 2},
        metrics={"mean": f"{PARTS}:Mean", "more": {"type": f"{PARTS}:Mean", "offset": 1}},
    )
    metrics = loop.run()
    assert loop.counters.iter == 3
    assert loop.model.body[0].out_features == 5
    assert (metrics["mean"], metrics["more"]) == (1.0, 2.0)


def test_the_seed_holds_for_the_weights_too():
    one, same, other = (make(loop={"max_epochs": 1, "seed": seed}).model.body[0].weight for seed in (3, 3, 4))
    assert one.equal(same)
    assert not one.equal(other)


def test_the_loops_own_arguments_are_its_options(tmp_path):
    loop = make(loop={"max_iters": 3, "val_interval": 2, "work_dir": str(tmp_path), "name": "x", "device": "cpu"})
    assert (loop.max_iters, loop.val_interval) == (3, 2)
    assert loop._options["name"] == "x"
    assert loop._options["config"]["loop"]["max_iters"] == 3


def test_models_and_optimizers_by_name_belong_together():
    names = ("one", "other")
    optimizer = {name: {"type": "torch.optim:SGD", "lr": 0.1} for name in names}
    loop = make(model=dict.fromkeys(names, f"{PARTS}:Net"), optimizer=optimizer)
    for name in names:
        owned = loop._optimizer[name].param_groups[0]["params"]
        assert [id(one) for one in owned] == [id(one) for one in loop.model[name].parameters()]


def test_hooks_of_the_users_get_the_model():
    loop = make(custom_hooks=[{"type": "HookOfSetupTests", "every": 2}])
    assert loop.bus.hooks[0].model is loop.model


# ------------------------------------------------------------------------------------------------------- default hooks


def hooks_with(changes):
    return Setup(config(default_hooks=changes), default_hooks=DEFAULTS).make().bus.hooks


def test_default_hooks_are_added_first_in_order():
    hooks = Setup(config(custom_hooks=["EMAHook"]), default_hooks=DEFAULTS).make().bus.hooks
    assert [type(hook) for hook in hooks] == [OptimizerHook, LoggerHook, CheckpointHook, EMAHook]


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"logger": "EMAHook"}, [OptimizerHook, EMAHook, CheckpointHook]),  # with a type it is another hook
        ({"logger": False}, [OptimizerHook, CheckpointHook]),
        ({"logger": None}, [OptimizerHook, CheckpointHook]),
        ({"ema": {"type": "EMAHook"}}, [OptimizerHook, LoggerHook, CheckpointHook, EMAHook]),
    ],
)
def test_default_hooks_are_replaced_switched_off_and_added(changes, kinds):
    assert [type(hook) for hook in hooks_with(changes)] == kinds


def test_a_table_without_type_changes_options_and_keeps_the_others():
    hooks = hooks_with({"checkpoint": {"begin": 2}})
    assert (hooks[2].interval, hooks[2].begin) == (1, 2)
    assert hooks_with({"checkpoint": {"type": "CheckpointHook"}})[2].interval == -1


@pytest.mark.parametrize("change", [{"interval": 3}, False])
def test_an_unknown_default_hook_names_the_nearest(change):
    with pytest.raises(ConfigurationError, match=r"default_hooks\.loger: .*'logger'"):
        hooks_with({"loger": change})


# ------------------------------------------------------------------------------------------------------ what is wrong


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modle": 1}, "modle: a configuration has no option 'modle' (did you mean 'model'"),
        ({"max_epochs": 3}, "max_epochs: a configuration has no option 'max_epochs' (did you mean 'loop.max_epochs'?)"),
        ({"default_hooks": {1: {}}}, "default_hooks.1: "),
        ({"default_hooks": ["EMAHook"]}, "default_hooks: expected a table of hooks by name, got a list"),
        ({"default_hooks": {"ema": 3}}, "default_hooks.ema: expected a table of options, or false to remove it, got int 3"),
        ({"wrap": 3}, "wrap: expected a function or class, as module:attribute, or false, got int 3"),
        ({"wrap": f"{PARTS}:nothing"}, f"wrap: the module '{__name__}' has no 'nothing'"),
        ({"metrics": {"m": f"{PARTS}:Net"}}, "loop: metric 'm' (Net) has no update"),
        ({"metrics": {"m": f"{PARTS}:step"}}, "metrics.m.model: is missing: step needs it"),
        ({"metrics": [1]}, "metrics: expected a table, got a list"),
        ({"model": None}, "model: is missing: "),
        ({"model": f"{PARTS}:Mean"}, "model: expected a Module, got <"),
        ({"model": {"type": f"{PARTS}:Net", "width": "x"}}, "model.width: expected int, got str 'x'"),
        ({"model": f"{PARTS}:pair_of_models"}, "model.kind: is missing: pair_of_models needs it"),
        ({"step": None}, "step: is missing: "),
        ({"step": f"{PARTS}:Net"}, "step: Net is a class: name a function"),
        ({"step": 3}, "step: expected a function, as module:attribute, got int 3"),
        ({"data": {}}, "data.train: is missing: "),
        ({"data": {"train": "x:y", "vall": 1}}, "data.vall: data has no option 'vall' (did you mean 'val'?)"),
        ({"data": 3}, "data: expected a table, got int 3"),
        ({"data": {"train": f"{PARTS}:Mean"}}, "data.train: expected an iterable of batches, such as a DataLoader, got <"),
        ({"optimizer": f"{PARTS}:Mean"}, "optimizer: expected an Optimizer, got <"),
        ({"loop": {"max_epoch": 1}}, "loop.max_epoch: loop has no option 'max_epoch' (did you mean 'max_epochs'?)"),
        ({"loop": {"max_epochs": 0}}, "loop: max_epochs=0: "),
        ({"loop": {}}, "loop: the training has no length: "),
        ({"loop": {"max_epochs": 1, "device": "cdua"}}, "loop: torch cannot use device='cdua' here"),
        ({"loop": {"model": 1}}, "loop.model: loop has no option 'model'"),
        ({"custom_hooks": [{"type": "EMAHook", "begin": "x"}]}, "custom_hooks[0].begin: expected int, got str 'x'"),
        ({"custom_hooks": {"type": "EMAHook"}}, "custom_hooks: expected a list of hooks, got a table"),
        (
            {"default_hooks": {"ema": "EMAHook"}, "custom_hooks": ["EMAHook"]},
            "custom_hooks: two hooks with state are named 'EMAHook', and a checkpoint keeps state by name; give one of them "
            "another `name`; or change the default hook default_hooks.ema instead",
        ),
        ({"imports": "torch"}, "imports: expected a list of modules, such as [\"my_module\"], got 'torch'"),
    ],
)
def test_a_mistake_is_named_with_its_position(change, message):
    told = said(make, error=(ConfigurationError, SubscribeError), **change)
    assert told.startswith(message), told


def test_a_part_with_a_number_as_name_is_an_error():
    with pytest.raises(ConfigurationError, match=r"1: .*imports, model"):
        Setup({1: 2})
