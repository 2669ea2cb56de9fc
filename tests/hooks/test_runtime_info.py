from functools import partial
from types import SimpleNamespace

import pytest
import torch

from trainbus.eventloop import Bus, Run
from trainbus.hooks import RuntimeInfoHook

from . import conftest

DATA = conftest.batches(3)


def step(model, batch):
    return {"loss": conftest.loss_of(model, batch), "share": 0.5, "logits": batch[0]}


make_loop = partial(conftest.make_loop, train_data=DATA, step=step)


@pytest.fixture
def bus():
    return Bus(RuntimeInfoHook())


def test_facts_of_the_run_and_the_training_are_set_where_they_begin(bus, tmp_path):
    found = []
    for name in ("before_run", "before_train"):
        bus.on(name, lambda event: found.append(dict(event.run.info)))
    make_loop(bus=bus, work_dir=tmp_path / "digits", seed=7, config={"width": 64}).run()
    assert found[0] == {"experiment": "digits", "seed": 7, "config": {"width": 64}}
    assert found[1].items() >= {"max_epochs": 2, "max_iters": None, "epoch": 0, "iter": 0, "stage": "train"}.items()


def test_iteration_epoch_and_learning_rate_follow_the_run_and_only_scalars_are_kept_unchanged(bus):
    found = []

    @bus.on("after_train_iter", priority=20)
    def look(event):
        info = event.run.info
        assert isinstance(info["train/loss"], torch.Tensor)
        assert not info["train/loss"].requires_grad
        assert info["train/loss"] == event.outputs["loss"]
        assert "train/logits" not in info

    @bus.on("after_train_iter", priority=90)
    def change(event):
        info = event.run.info
        found.append((info["epoch"], info["iter"], info["train/share"], info["train/lr"], event.outputs["lr"]))
        event.run.optimizers["optimizer"].param_groups[0]["lr"] /= 2

    make_loop(bus=bus).run()
    rates = [0.1 / 2**i for i in range(6)]
    assert found == [(i // 3, i, 0.5, rate, rate) for i, rate in enumerate(rates)]


def rates_of(bus):
    found = []
    bus.on("after_train_iter", lambda event: found.append({k: v for k, v in event.outputs.items() if "lr" in k}), priority=90)
    return found


def test_parameter_groups_have_separate_learning_rates(bus):
    model = torch.nn.Linear(3, 2)
    one, other = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.01}, {"params": [one]}]
    groups.append({"params": [other], "lr": 0.02, "name": "head"})
    found = rates_of(bus)
    make_loop(bus=bus, model=model, optimizer=torch.optim.SGD(groups, lr=0.1), max_iters=1).run()
    assert found == [{"lr": 0.1, "lr/group1": 0.01, "lr/head": 0.02}]


def test_several_optimizers_give_the_rates_their_names(bus):
    models = {"net": torch.nn.Linear(3, 1), "critic": torch.nn.Linear(3, 1)}
    rates = {"net": 0.1, "critic": 0.2}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=rates[name]) for name, model in models.items()}
    found = rates_of(bus)
    with Run(bus, model=models, optimizer=optimizers) as run:
        for _ in run.epochs(max_iters=1):
            for _ in run.train(DATA, endless=True):
                run.report(loss=1.0)
    assert found == [{"net/lr": 0.1, "critic/lr": 0.2}]


def test_metrics_are_kept_scalar_or_not_with_their_stage_which_is_that_of_the_moment(bus):
    stages, infos = [], []
    for name in ("after_train_iter", "after_val_iter", "after_train", "after_test_iter"):
        bus.on(name, lambda event: stages.append(event.run.info["stage"]))
    bus.on("after_run", lambda event: infos.append(dict(event.run.info)))
    data = {"train_data": DATA[:1], "val_data": DATA[:1], "test_data": DATA[:1]}
    values = {"accuracy": 0.75, "matrix": torch.eye(2)}  # a scalar and something else
    metric = SimpleNamespace(reset=lambda: None, update=lambda logits: None, compute=lambda: values)
    loop = make_loop(bus=bus, metrics={"m": metric}, **data)
    loop.run()
    loop.test()
    assert stages == ["train", "val", "train", "val", "train", "test"]
    assert infos[0]["val/m/accuracy"] == 0.75
    assert torch.equal(infos[0]["val/m/matrix"], torch.eye(2))
    assert infos[1]["test/m/accuracy"] == 0.75
