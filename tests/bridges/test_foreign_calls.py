"""Costs of a run in another library's trainer: its own callbacks have names, and its saves count."""

import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Bus
from eventloop.observe import expensive
from hooks import CheckpointHook

from .jobs import network

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec"),
    pytest.mark.filterwarnings("ignore:.*`logger=False`"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]

SLOW = 0.02


def slow(*_, **__):
    time.sleep(SLOW)


def parts(bus: Bus) -> dict[tuple[str, str], float]:
    return {(part.group, part.name): part.seconds for part in bus.costs().parts}


def in_lightning(bus: Bus, folder: Path, **options) -> None:
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = network()

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Slow(pl.Callback):
        on_train_batch_end = slow

    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[Slow()], default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, **options,
    )  # fmt: skip
    bus.attach(trainer)
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(24, 4), torch.randint(3, (24,))), batch_size=6))


def in_transformers(bus: Bus, folder: Path, **options) -> None:
    transformers = pytest.importorskip("transformers")
    from .conformance.transformers import make

    class Slow(transformers.TrainerCallback):
        on_step_end = slow

    trainer = make(folder, options={"callbacks": [Slow()]})
    bus.attach(trainer, **options)
    trainer.train()


def in_ignite(bus: Bus, folder: Path) -> None:
    engine = pytest.importorskip("ignite.engine")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = engine.create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())
    trainer.add_event_handler(engine.Events.ITERATION_COMPLETED, slow)
    bus.attach(trainer, work_dir=folder)
    trainer.run(DataLoader(TensorDataset(torch.randn(24, 4), torch.randint(3, (24,))), batch_size=6), max_epochs=1)


TRAINERS = [
    (in_lightning, "Slow.on_train_batch_end"),
    (in_transformers, "Slow.on_step_end"),
    (in_ignite, "slow.ITERATION_COMPLETED"),
]


@pytest.mark.parametrize(("train", "name"), TRAINERS)
def test_a_slow_callback_of_the_trainer_has_its_name_in_the_costs(tmp_path, monkeypatch, train, name):
    monkeypatch.chdir(tmp_path)
    bus = Bus(timing=True)
    train(bus, tmp_path)
    assert parts(bus)["hook", name] >= 4 * SLOW  # sleep() never ends early
    assert any(sentence.startswith(name.partition(".")[0]) for sentence in expensive(bus.costs()))


@pytest.mark.parametrize("train", [train for train, _ in TRAINERS])
def test_a_checkpoint_in_another_trainer_tells_how_long_it_held_training_up(tmp_path, monkeypatch, train):
    monkeypatch.chdir(tmp_path)
    bus, stalls = Bus(CheckpointHook(interval=1), timing=True), []
    bus.on("checkpoint_committed", lambda event: stalls.append(event.stall))
    train(bus, tmp_path)
    assert stalls and all(stall > 0 for stall in stalls)
    assert {("training", "writing checkpoints"), ("training", "copying for checkpoints")} & set(parts(bus))


def test_callbacks_are_as_they_were_after_a_timed_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("transformers")
    from .conformance.transformers import make

    trainer = make(tmp_path)
    before = [dict(vars(callback)) for callback in trainer.callback_handler.callbacks]
    Bus(timing=True).attach(trainer)
    trainer.train()
    after = [set(vars(callback)) for callback in trainer.callback_handler.callbacks]
    assert [{name for name in found if name.startswith("on_")} for found in after] == [set() for _ in before]
