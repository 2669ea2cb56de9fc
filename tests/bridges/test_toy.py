"""The bridge of the page "Write a bridge": a toy trainer, whose class ``register_host`` makes known."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from eventloop import Bus, Event, SubscribeError
from hooks import CheckpointHook, EMAHook

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
EPOCHS, BATCHES = 3, 4


@pytest.fixture
def toy(monkeypatch):
    """The module of the trainer, after that of its bridge was imported."""
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), str(EXAMPLES / "plain"), *sys.path])
    importlib.import_module("toy_bridge")
    return importlib.import_module("toy_trainer")


def trainer_of(toy, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return toy.Trainer(model, optimizer, lambda model, batch: model(batch).square().mean(), epochs=EPOCHS, **options)


def data():
    return list(torch.randn(BATCHES, 8, 4, generator=torch.Generator().manual_seed(1)))


def weights(trainer):
    return [parameter.tolist() for parameter in trainer.model.parameters()]


def plain(toy):
    trainer = trainer_of(toy)
    trainer.fit(data())
    return weights(trainer)


def test_the_page_keeps_its_promise_of_150_lines():
    assert len((EXAMPLES / "toy_bridge.py").read_text().splitlines()) <= 150


def test_weights_are_those_of_a_training_without_a_bus(toy, tmp_path):
    trainer, bus = trainer_of(toy), Bus(EMAHook(momentum=0.5), CheckpointHook(interval=1))
    bus.attach(trainer, work_dir=tmp_path)
    trainer.fit(data())
    assert weights(trainer) == plain(toy)
    assert torch.load(tmp_path / f"epoch_{EPOCHS}.pt")["model"]["0.bias"].tolist() != trainer.model[0].bias.tolist()  # averages


def test_mount_points_come_in_the_order_of_a_run(toy):
    trainer, bus, names = trainer_of(toy), Bus(), []
    bus.on(Event, lambda event: names.append(event.mount_point))
    bus.attach(trainer)
    trainer.fit(data())
    iteration = ["before_train_iter", "before_optimizer_step", "after_optimizer_step", "after_train_iter"]
    epoch = ["before_train_epoch", *iteration * BATCHES, "after_train_epoch"]
    assert names == ["before_run", "before_train", *epoch * EPOCHS, "after_train", "after_run"]


def test_a_training_that_was_stopped_and_resumed_equals_one_that_was_not(toy, tmp_path):
    class Stops(CheckpointHook):
        def after_train_iter(self, event):
            if event.progress.iter == 5:
                event.run.request_save(tmp_path / "stopped.pt")
                event.run.stop("enough")

    first, seen = trainer_of(toy), []
    Bus(Stops()).attach(first, work_dir=tmp_path)
    first.fit(data())
    assert first.step == 6
    second, bus = trainer_of(toy), Bus(CheckpointHook())
    bus.on("after_train_iter", lambda event: seen.append((event.progress.epoch, event.progress.iter, event.progress.batch_idx)))
    bus.attach(second, work_dir=tmp_path)
    second.fit(data(), resume=tmp_path / "stopped.pt")
    assert seen[0] == (1, 6, 2)
    assert seen[-1] == (EPOCHS - 1, EPOCHS * BATCHES - 1, BATCHES - 1)
    assert weights(second) == plain(toy)


def test_an_exception_is_published_and_ends_the_run(toy):
    trainer, bus, told = trainer_of(toy), Bus(), []
    bus.on("on_exception", lambda event: told.append(event.error))
    bus.on("after_train_iter", lambda event: 1 / 0, once=2)
    bus.attach(trainer)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(data())
    assert told == ["ZeroDivisionError: division by zero"]
    assert bus.state == "idle"


def test_a_detached_trainer_is_as_it_was(toy):
    trainer, bus, heard = trainer_of(toy), Bus(), []
    bus.on("before_run", heard.append)
    with bus.attach(trainer):
        with pytest.raises(SubscribeError, match="another bus"):
            Bus().attach(trainer)
    trainer.fit(data())
    assert heard == []
    assert (trainer.callbacks, "fit" in vars(trainer), weights(trainer)) == ([], False, plain(toy))
