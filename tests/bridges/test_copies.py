"""Copies of trainers that have a bus: with ``copy``, ``pickle``, and what stands on them."""

import copy
import importlib
import pickle
import sys

import pytest
import structlog
import torch
from torch import nn

from trainbus.eventloop import Bus, Run
from trainbus.hooks import CheckpointHook, EMAHook, LoggerHook
from trainbus.hooks.writers import JSONLinesWriter
from trainbus.testing.host_job import Counting, Net

from .conformance import WARNINGS

pytestmark = WARNINGS
STEPS = 2  # per training
MODEL = Net()
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


def step(engine, batch):
    """Take a step; pickle takes no function inside another."""
    OPTIMIZER.zero_grad()
    loss = MODEL.loss(batch)
    loss.backward()
    OPTIMIZER.step()
    return loss.item()


def job_in(host, folder):
    """A training of two steps, whose files are written beside it."""
    every = 0 if host == "ignite" else STEPS
    kind = importlib.import_module(f"tests.bridges.conformance.{host}").Job
    job = kind(folder, epochs=1, batches=STEPS, every=every, beside=host == "lightning")
    job.beside = True  # not earlier: it is the bus that a test attaches to Transformers' trainer
    if host == "ignite":
        from ignite.engine import Engine

        job.trainer = Engine(step)
    return job


def train(job, trainer):
    job.trainer = trainer
    job.again()


DONE = {
    "lightning": lambda trainer: trainer.global_step,
    "transformers": lambda trainer: trainer.state.global_step,
    "ignite": lambda trainer: trainer.state.iteration,
}


WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda one: pickle.loads(pickle.dumps(one))}  # noqa: S301 - our own
WAYS["cloudpickle"] = lambda one: pickle.loads(pytest.importorskip("cloudpickle").dumps(one))  # noqa: S301 - our own
# Without a bus, a shallow copy of Lightning's trainer has the first one's loops, and Transformers' cannot be pickled after a
# training, because Accelerate keeps weak references.
COPIES = [
    *(("transformers", "copy", True), ("ignite", "copy", True)),
    *((host, way, way == "deepcopy") for host in DONE for way in ("deepcopy", "pickle", "cloudpickle")),
]


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """No files elsewhere, and no weak references that trainings of other tests have left in Accelerate."""
    monkeypatch.chdir(tmp_path)
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.GradientState._reset_state()


def warned(logs):
    return [entry["log_level"] for entry in logs if "is a copy" in entry["event"]]


@pytest.mark.parametrize(("host", "way", "trained"), COPIES)
def test_a_copy_of_a_trainer_trains_without_the_bus_and_says_so_once(host, way, trained, tmp_path):
    job, counting = job_in(host, tmp_path), Counting()
    job.attach(Bus(counting, EMAHook(momentum=0.1), LoggerHook(writers=[JSONLinesWriter()]), CheckpointHook()))
    trainer = job.trainer
    if trained:
        train(job, trainer)
    made, heard = WAYS[way](trainer), len(counting.iters)
    with structlog.testing.capture_logs() as logs:
        train(job, made)
        assert DONE[host](made)
        train(job, made)
    assert len(counting.iters) == heard
    assert warned(logs) == ["warning"]
    train(job, trainer)
    assert len(counting.iters) == heard + STEPS


@pytest.mark.parametrize("host", ["lightning", "transformers"])
def test_a_copy_that_is_made_within_a_training_has_no_bus(host, tmp_path):
    job, bus, made = job_in(host, tmp_path), Bus(counting := Counting()), []
    bus.on("after_train_iter", lambda event: made.append(copy.deepcopy(job.trainer)), once=1)
    job.attach(bus)
    train(job, job.trainer)
    heard = len(counting.iters)
    with structlog.testing.capture_logs() as logs:
        train(job, made[0])
    assert DONE[host](made[0])
    assert (heard, len(counting.iters)) == (STEPS, STEPS)
    assert warned(logs) == ["warning"]


@pytest.mark.parametrize("host", DONE)
def test_a_copy_gets_a_bus_of_its_own(host, tmp_path):
    job, first, second = job_in(host, tmp_path), Counting(), Counting()
    job.attach(Bus(first))
    job.trainer = made = copy.deepcopy(copy.deepcopy(job.trainer))  # a copy of a copy, too
    job.attach(Bus(second))
    with structlog.testing.capture_logs() as logs:
        train(job, made)
    assert warned(logs) == []
    assert (len(first.iters), len(second.iters)) == (0, STEPS)
    job.bridge.detach()
    train(job, made)
    assert (len(first.iters), len(second.iters)) == (0, STEPS)


def test_the_copy_of_an_ignite_saver_writes_in_the_training_of_the_copied_engine(tmp_path):
    job = job_in("ignite", tmp_path)
    from ignite.engine import Events
    from ignite.handlers import Checkpoint

    from trainbus.bridges.ignite.saver import TrainbusSaver

    saver = TrainbusSaver(tmp_path / "files", job.trainer)
    bridge = job.attach(Bus())
    job.trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint({"model": MODEL, "bus": bridge}, saver))
    made = copy.deepcopy(job.trainer)
    handler = made._event_handlers[Events.EPOCH_COMPLETED][0][0]
    assert handler.save_handler is not saver
    train(job, made)
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
