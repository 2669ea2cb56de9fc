"""Copies of trainers that have a bus: with ``copy``, ``pickle``, and what stands on them."""

import copy
import logging
import pickle
import sys
from typing import ClassVar

import pytest
import structlog
import torch
from torch import nn

from eventloop import Bus, Run, TrainbusCheckpointIO
from hooks import CheckpointHook, EMAHook, LoggerHook
from hooks.writers import JSONLinesWriter

from .jobs import Counting, batches, network

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*treespec", "ignore:Checkpoint directory .* exists and is not empty"
)

STEPS = 2  # per training


class LightningJob:
    """A training of two steps in Lightning."""

    options: ClassVar = {}

    def __init__(self, folder):
        pl = pytest.importorskip("lightning.pytorch")
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        plugins = [TrainbusCheckpointIO()]
        self.trainer = pl.Trainer(accelerator="cpu", default_root_dir=folder, max_epochs=0, plugins=plugins, **quiet)

    def train(self, trainer):
        from lightning.pytorch.demos.boring_classes import BoringModel

        trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        trainer.limit_train_batches, trainer.limit_val_batches = STEPS, 1
        trainer.fit(BoringModel())
        return trainer.global_step


class TransformersJob:
    """A training of two steps in Transformers."""

    options: ClassVar = {"checkpoints": True}

    def __init__(self, folder):
        jobs = pytest.importorskip("tests.bridges.conformance.transformers")
        self.trainer = jobs.make(folder, data=jobs.plain_data(4), num_train_epochs=1, save_strategy="epoch")

    def train(self, trainer):
        trainer.train()
        return trainer.state.global_step


MODEL = network()
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


def step(engine, batch):
    """Take a step; pickle takes no function inside another."""
    OPTIMIZER.zero_grad()
    loss = nn.functional.cross_entropy(MODEL(batch[0]), batch[1])
    loss.backward()
    OPTIMIZER.step()
    return loss.item()


class IgniteJob:
    """A training of two steps in Ignite."""

    def __init__(self, folder):
        engine = pytest.importorskip("ignite.engine")
        logging.getLogger("ignite").setLevel(logging.CRITICAL)
        self.trainer = engine.Engine(step)
        self.options = {"work_dir": folder}

    def train(self, trainer):
        trainer.run(batches(STEPS), max_epochs=1)
        return trainer.state.iteration


WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda one: pickle.loads(pickle.dumps(one))}  # noqa: S301 - our own
WAYS["cloudpickle"] = lambda one: pickle.loads(pytest.importorskip("cloudpickle").dumps(one))  # noqa: S301 - our own
# Without a bus, a shallow copy of Lightning's trainer has the first one's loops, and Transformers' cannot be pickled after a
# training, because Accelerate keeps weak references.
COPIES = [
    (LightningJob, "deepcopy", True),
    (LightningJob, "pickle", False),
    (TransformersJob, "copy", True),
    (TransformersJob, "deepcopy", True),
    (TransformersJob, "pickle", False),
    (IgniteJob, "copy", True),
    (IgniteJob, "deepcopy", True),
    (IgniteJob, "pickle", False),
    (LightningJob, "cloudpickle", False),
    (TransformersJob, "cloudpickle", False),
    (IgniteJob, "cloudpickle", False),
]


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """No files elsewhere, and no weak references that trainings of other tests have left in Accelerate."""
    monkeypatch.chdir(tmp_path)
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.GradientState._reset_state()


@pytest.mark.parametrize(("kind", "way", "trained"), COPIES)
def test_a_copy_of_a_trainer_trains_without_the_bus_and_says_so_once(kind, way, trained, tmp_path):
    job, counting = kind(tmp_path), Counting()
    bus = Bus(counting, EMAHook(momentum=0.1), LoggerHook(writers=[JSONLinesWriter()]), CheckpointHook())
    bus.attach(job.trainer, **job.options)
    if trained:
        job.train(job.trainer)
    made, heard = WAYS[way](job.trainer), len(counting.iters)
    with structlog.testing.capture_logs() as logs:
        assert job.train(made)
        job.train(made)
    assert len(counting.iters) == heard
    assert [entry["log_level"] for entry in logs if "is a copy" in entry["event"]] == ["warning"]
    job.train(job.trainer)
    assert len(counting.iters) == heard + STEPS


@pytest.mark.parametrize("kind", [LightningJob, TransformersJob])
def test_a_copy_that_is_made_within_a_training_has_no_bus(kind, tmp_path):
    job, counting, bus, made = kind(tmp_path), Counting(), Bus(), []
    bus.add(counting)
    bus.on("after_train_iter", lambda event: made.append(copy.deepcopy(job.trainer)), once=1)
    bus.attach(job.trainer, **job.options)
    job.train(job.trainer)
    heard = len(counting.iters)
    with structlog.testing.capture_logs() as logs:
        assert job.train(made[0])
    assert (heard, len(counting.iters)) == (STEPS, STEPS)
    assert [entry["log_level"] for entry in logs if "is a copy" in entry["event"]] == ["warning"]


@pytest.mark.parametrize("kind", [LightningJob, TransformersJob, IgniteJob])
def test_a_copy_gets_a_bus_of_its_own(kind, tmp_path):
    job, first, second = kind(tmp_path), Counting(), Counting()
    Bus(first).attach(job.trainer, **job.options)
    made = copy.deepcopy(copy.deepcopy(job.trainer))  # a copy of a copy, too
    bridge = Bus(second).attach(made, **job.options)
    with structlog.testing.capture_logs() as logs:
        job.train(made)
    assert not any("is a copy" in entry["event"] for entry in logs)
    assert (len(first.iters), len(second.iters)) == (0, STEPS)
    bridge.detach()
    job.train(made)
    assert (len(first.iters), len(second.iters)) == (0, STEPS)


def test_the_copy_of_an_ignite_saver_writes_in_the_training_of_the_copied_engine(tmp_path):
    job = IgniteJob(tmp_path)
    from ignite.engine import Events
    from ignite.handlers import Checkpoint

    from eventloop.bridges.ignite.saver import TrainbusSaver

    saver = TrainbusSaver(tmp_path / "files", job.trainer)
    bridge = Bus().attach(job.trainer, **job.options)
    job.trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint({"model": MODEL, "bus": bridge}, saver))
    made = copy.deepcopy(job.trainer)
    handler = made._event_handlers[Events.EPOCH_COMPLETED][0][0]
    assert handler.save_handler is not saver
    job.train(made)
    assert list((tmp_path / "files").glob("*.pt")) == [handler.last_checkpoint]


@pytest.mark.parametrize("way", ["copy", "pickle"])
def test_a_copy_of_an_accelerator_takes_a_run_of_its_own(way, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    first = accelerate.Accelerator(cpu=True)

    def train(accelerator):
        model = nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with Run(Bus(), model=model, optimizer=optimizer, accelerator=accelerator) as run:
            for _ in run.epochs(1):
                for batch in run.train([torch.ones(1, 2)]):
                    accelerator.backward(model(batch).sum())
                    optimizer.step()
                accelerator.save_state(tmp_path)
        assert len(list(tmp_path.glob("custom_checkpoint_*"))) == 1

    made = WAYS[way](first)
    train(first)
    train(made)
    if way == "pickle":  # without a run, too
        made = WAYS[way](made)
        made.save_state(tmp_path / "alone")
        made.load_state(tmp_path / "alone")
