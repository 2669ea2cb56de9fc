"""The run that a bridge drives, here in the toy trainer of "Write a bridge"; see ``test_conformance.py`` for the rest."""

import signal
from operator import attrgetter

import pytest
import torch
from torch import nn

from trainbus import attach
from trainbus.eventloop import Bus, SubscribeError
from trainbus.eventloop.errors import CheckpointError
from trainbus.hooks import CheckpointHook, EMAHook
from trainbus.testing.host_job import Counting, assert_same

from .conformance.toy import Job


def test_two_names_at_one_moment_are_one_file(tmp_path):
    bus = Bus()

    @bus.on("after_train_epoch")
    def ask(event):
        event.run.checkpoints.save("one.pt")
        event.run.checkpoints.save("two.pt")

    Job(tmp_path, bus, epochs=1).fit()
    assert (tmp_path / "one.pt").samefile(tmp_path / "two.pt")


def test_a_file_has_each_tensor_once(tmp_path):
    bus = Bus(ema := EMAHook(momentum=0.1), CheckpointHook(interval=1))
    job = Job(tmp_path, bus, epochs=1)
    job.fit()
    saved = torch.load(tmp_path / "epoch_1.pt", weights_only=True)
    assert_same({name: saved["model"][name] for name in ema.average.tensors}, ema.average.tensors)
    raw = saved["trainbus"]["ema_state_dict"]
    assert_same(raw, {name: tensor for name, tensor in job.weights().items() if name in raw})
    assert "state_dict" not in saved["trainbus"]


@pytest.mark.parametrize(
    ("entry", "named"),
    [({"format": 1, "progress": {"epoch": "many"}, "bus": {}}, "bus"), ({"format": 99, "progress": {}, "bus": {}}, "99")],
)
def test_an_entry_of_another_program_is_refused(tmp_path, entry, named):
    Job(tmp_path).trainer.save(tmp_path / "theirs.pt")
    saved = torch.load(tmp_path / "theirs.pt", weights_only=True)
    torch.save(saved | {"trainbus": entry}, tmp_path / "theirs.pt")
    with pytest.raises(CheckpointError, match=named):
        Job(tmp_path, Bus()).fit(tmp_path / "theirs.pt")


def test_what_only_a_loop_of_ones_own_has_is_refused_and_the_host_continues(tmp_path):
    calls = ("epochs", "train", "validate", "test", "drive", "keep", "checkpoints.gather_state", "checkpoints.apply_state")
    bus = Bus(counting := Counting())

    @bus.on("after_train_iter")
    def ask(event):
        for call in calls:
            with pytest.raises(AttributeError, match=rf"run.{call}\(\) .* another trainer has the loop: "):
                attrgetter(call)(event.run)

    Job(tmp_path, bus).fit()
    assert len(counting.iters) == 8


@pytest.mark.parametrize("what", [object(), nn.Linear(1, 1), signal])
def test_an_unknown_trainer_is_an_error_that_names_the_known_ones(what):
    with pytest.raises(SubscribeError, match=r"lightning.Trainer, transformers.Trainer, ignite.*accelerator="):
        attach(Bus(), what)
