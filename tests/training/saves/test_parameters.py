"""A checkpoint has the names of an optimizer's parameters; by them a run finds their state in another order."""

from typing import Any

import pytest
import torch
from torch import nn

from trainbus.eventloop import Bus, CheckpointError, TrainLoop
from trainbus.eventloop.checkpoint import load
from trainbus.hooks import CheckpointHook


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def in_order(model: nn.Module) -> Any:
    return model.parameters()


def reversed_order(model: nn.Module) -> Any:
    return [*model.parameters()][::-1]


def two_groups(model: nn.Module) -> Any:
    named = [*model.named_parameters()]
    return [{"params": [one for name, one in named if ("weight" in name) is weight]} for weight in (True, False)]


def other_options(model: nn.Module) -> Any:
    first, second = two_groups(model)
    return [first, {**second, "weight_decay": 0.5}]


def loop(order: Any, tmp_path: Any, epochs: int = 1, **options: Any) -> TrainLoop:
    model = options.pop("model", None) or net()
    batches = [torch.linspace(-1, 1, 16).view(4, 4) * scale for scale in (1, 2, 3)]
    optimizer = torch.optim.AdamW(order(model), lr=0.01)
    step = lambda model, batch: (model(batch) * torch.arange(4.0)).sum()  # noqa: E731
    given = {"step": step, "train_data": batches, "max_epochs": epochs, "work_dir": tmp_path}
    return TrainLoop(model, optimizer, bus=Bus(CheckpointHook(interval=1)), **given, **options)


def test_names_are_saved_without_those_of_wrappers_and_in_the_order_of_the_optimizer(tmp_path):
    loop(reversed_order, tmp_path, model=nn.DataParallel(net())).run()
    names = load(tmp_path / "epoch_1.safetensors")["parameters"]["optimizer"].split("\n")
    assert names == [name for name, _ in net().named_parameters()][::-1]


@pytest.mark.parametrize("before", [in_order, two_groups])
@pytest.mark.parametrize("after", [in_order, reversed_order, two_groups])
def test_a_run_with_another_order_or_other_groups_ends_as_if_it_had_the_same(tmp_path, before, after):
    whole = loop(before, tmp_path / "whole", epochs=2)
    whole.run()
    loop(before, tmp_path / "parts").run()
    resumed = loop(after, tmp_path / "parts", epochs=2)
    resumed.run(resume="auto")
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


def test_groups_whose_options_differ_are_not_merged(tmp_path):
    loop(other_options, tmp_path).run()
    with pytest.raises(CheckpointError, match="belongs to another optimizer"):
        loop(in_order, tmp_path, epochs=2).run(resume="auto")


def test_of_several_models_the_name_stands_before_and_a_parameter_of_none_has_no_name(tmp_path):
    models, free = {"one": net(), "two": net()}, nn.Parameter(torch.ones(2))
    optimizers = {name: torch.optim.SGD([*model.parameters(), free], lr=0.1) for name, model in models.items()}
    step = lambda models, batch: models["two"](models["one"](batch)).sum()  # noqa: E731
    data = [torch.linspace(-1, 1, 16).view(4, 4)]
    bus = Bus(CheckpointHook(interval=1))
    TrainLoop(models, optimizers, step=step, train_data=data, max_epochs=1, bus=bus, work_dir=tmp_path).run()
    names = load(tmp_path / "epoch_1.safetensors")["parameters"]
    assert names["two"].split("\n") == [*(f"two.{name}" for name, _ in net().named_parameters()), ""]
