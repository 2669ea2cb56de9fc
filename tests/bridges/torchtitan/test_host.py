"""The bus in a torchtitan ``Trainer`` of a small language model: what the suite for all hosts does not have."""

import functools
import importlib
import re
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

pytest.importorskip("torchtitan.trainer")

from torchtitan.components.checkpointer import AsyncMode, BaseCheckpointManager

from trainbus import Bus, CheckpointHook, EMAHook, LoggerHook, ParamSchedulerHook, RuntimeInfoHook, attach
from trainbus.bridges.torchtitan import privates
from trainbus.bridges.torchtitan.host import TorchtitanBridge
from trainbus.eventloop import CheckpointError, ConfigurationError, TrainingError
from trainbus.eventloop.events.event import registry
from trainbus.hooks.writers import JSONLinesWriter
from trainbus.testing.host_job import Counting, assert_same, checkpoints, fails, heard, noted

from . import llama
from .job import WARNINGS, Job

pytestmark = WARNINGS


def staged():
    done = Future()
    done.set_result(None)
    return done


class Other(BaseCheckpointManager):
    """A checkpointer that is no ``CheckpointManager``."""

    def __init__(self, config, **_):
        self.enable = config.enable

    def _save(self, *_):
        raise NotImplementedError

    _load = _wait_for_saving = _maybe_wait_for_staging = _save

    def _close(self):
        pass


def full():
    return Bus(
        EMAHook(momentum=0.1), LoggerHook(1, writers=[JSONLinesWriter()]), RuntimeInfoHook(), CheckpointHook(2, by_epoch=False)
    )


def test_a_language_model_has_the_same_weights_with_a_bus(make):
    plain, bare, hooked = make("plain"), make("bare"), make("hooked")
    attach(Bus(), bare)
    attach(full(), hooked)
    for one in (plain, bare, hooked):
        one.train()
    assert_same(llama.weights(bare), llama.weights(plain))
    assert_same(llama.weights(hooked), llama.weights(plain))


@pytest.mark.parametrize("by", ["own", "hook"])
def test_a_killed_training_goes_on_with_the_same_command(make, tmp_path, by):
    """Weights, their averages and the state of hooks are those of a training that was never interrupted."""
    options = {"load_only": by == "hook"}

    def begin(name):
        bus = Bus(hook := Counting(), ema := EMAHook(momentum=0.1))
        if by == "hook":
            bus.add(CheckpointHook(2, by_epoch=False))
        trainer = make(name, steps=8, **options)
        attach(bus, trainer)
        return trainer, bus, hook, ema

    whole, _, counted, average = begin("whole")
    whole.train()
    cut, bus, *_ = begin("cut")
    bus.on("after_train_iter", fails(KeyboardInterrupt), when=lambda event: event.progress.iter == 4)
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    again, bus, hook, ema = begin("cut")
    loaded = noted(bus, "after_load_checkpoint", "path", "progress.iter")
    again.train()
    name = "checkpoint/step-4" if by == "own" else "iter_4"
    assert loaded == [(str(tmp_path / "cut" / name), 4)]
    assert hook.seen == counted.seen
    assert_same(llama.weights(again), llama.weights(whole))
    averages = [{key: one.full_tensor() for key, one in ema.average.tensors.items()} for ema in (ema, average)]
    assert_same(*averages)


def test_what_torchtitan_logs_of_a_step_is_an_output_of_its_last_iteration(make):
    """The mean of the losses of a step's iterations is the loss that torchtitan logs."""
    bus, seen = Bus(), []
    bus.on("after_train_iter", lambda event: seen.append((event.progress.update, dict(event.outputs))))
    trainer = make(steps=4, training={"global_batch_size": 4})
    attach(bus, trainer)
    trainer.train()
    logged = [outputs for _, outputs in seen if "grad_norm" in outputs]
    assert [update for update, _ in seen] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [outputs is seen[at][1] for outputs, at in zip(logged, (1, 3, 7), strict=True)] == [True] * 3
    assert logged[1].keys() == {"loss", "grad_norm", "global_avg_loss", "global_max_loss", "n_tokens_seen"}
    means = [(float(seen[at - 1][1]["loss"]) + float(seen[at][1]["loss"])) / 2 for at in (1, 3, 7)]
    assert means == pytest.approx([outputs["global_avg_loss"] for outputs in logged])


def test_a_training_without_epoch_steps_is_one_epoch(make):
    names = heard(bus := Bus())
    limits = noted(bus, "before_train_epoch", "progress.max_epochs", "progress.max_iters")
    trainer = make(steps=4)
    attach(bus, trainer)
    trainer.train()
    assert limits == [(None, 4)]
    assert (names.count("after_train_epoch"), names.count("after_train_iter")) == (1, 4)
    assert names.count("after_val") == 2  # torchtitan validates after the first step, too


def test_data_that_end_end_the_epoch_and_the_training(make):
    trainer = make(steps=1000, load_only=True, training={"local_batch_size": 32})
    trainer.dataloader.dataset.infinite = False
    names = heard(bus := Bus())
    ends = noted(bus, "after_run", "stopped")
    attach(bus, trainer)
    trainer.train()
    assert names.count("after_train_epoch") == 1
    assert names[-3:] == ["after_train_epoch", "after_train", "after_run"]
    assert ends == [True]  # before its 1000 steps


def test_a_rate_that_a_hook_sets_scales_the_rest_of_the_schedule_also_after_a_resume(make):
    def begin(name, at=None, **options):
        bus, rates = Bus(), []
        bus.on("before_optimizer_step", lambda event: rates.append(event.optimizer.param_groups[0]["lr"]))
        if at is not None:
            bus.on("after_train_iter", lambda event: event.run.set_lr(0.5), when=lambda event: event.progress.iter == at)
        trainer = make(name, steps=8, **options)
        attach(bus, trainer)
        return trainer, bus, rates

    plain, _, own = begin("plain")
    plain.train()
    whole, _, rates = begin("whole", at=2)
    whole.train()
    assert rates[:3] == own[:3]
    assert rates[3:] == pytest.approx([0.5 * rate / own[2] for rate in own[3:]])
    cut, bus, before = begin("cut", at=2)
    bus.on("after_train_iter", fails(KeyboardInterrupt), when=lambda event: event.progress.iter == 5)
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    again, _, after = begin("cut")
    again.train()
    assert before[:4] + after == rates


def test_a_validation_waits_for_copies_that_torchtitan_makes_beside_the_training(make):
    """Else averages that are lent to the model would be copied in the place of its weights."""
    trainer = make(steps=1, load_only=True)
    manager = trainer.checkpointer
    manager.async_mode = AsyncMode.ASYNC_WITH_PINNED_MEM
    bus, seen = Bus(EMAHook()), []
    bus.on("before_val", lambda event: seen.append(manager.staging_future))
    bus.on("after_optimizer_step", lambda event: setattr(manager, "staging_future", staged()))
    attach(bus, trainer)
    trainer.train()
    assert seen == [None]


@pytest.mark.parametrize(("end", "newest"), [(3, "iter_3"), (4, "checkpoint/step-4")])
def test_the_newest_checkpoint_is_taken_whoever_made_it(make, tmp_path, end, newest):
    bus = Bus()
    bus.on("after_train_iter", lambda event: event.run.checkpoints.save(), when=lambda event: event.progress.iter == 2)
    bus.on("before_train_iter", fails(KeyboardInterrupt), when=lambda event: event.progress.iter == end)
    attach(bus, trainer := make())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    loaded = noted(bus := Bus(), "after_load_checkpoint", "path")
    attach(bus, trainer := make())
    trainer.train()
    assert loaded == [str(tmp_path / "run" / newest)]


def test_the_last_save_of_the_model_alone_has_the_averages(make, tmp_path):
    trainer = make(steps=2, last_save_model_only=True, export_dtype="bfloat16")
    attach(Bus(ema := EMAHook(momentum=0.5)), trainer)
    trainer.train()
    path = tmp_path / "run" / "checkpoint" / "step-2"
    stored = {name: torch.empty(one.shape, dtype=torch.bfloat16) for name, one in llama.weights(trainer).items()}
    dcp.load(stored, checkpoint_id=str(path), no_dist=True)
    name = "tok_embeddings.weight"
    assert torch.equal(stored[name], ema.average.tensors[name].full_tensor().bfloat16())
    assert "trainbus.rank_0" not in dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata


def test_without_a_bus_torchtitan_goes_on_from_a_checkpoint_with_the_state_of_one(make):
    trainer = make(steps=2)
    attach(Bus(Counting(), EMAHook()), trainer)
    trainer.train()
    again = make(steps=3)
    again.train()
    assert again.step == 3


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("by", ["own", "hook"])
def test_an_error_of_dcp_is_told_and_ends_the_training(make, tmp_path, monkeypatch, by, mode):
    """DCP's error is no ``Exception``."""
    bus = Bus(*[CheckpointHook(2, by_epoch=False)] * (by == "hook"))
    told = noted(bus, "checkpoint_failed", "path")
    trainer = make(steps=2, load_only=by == "hook", async_mode=mode)
    attach(bus, trainer)
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", fails(OSError("the disk is full")))
    with pytest.raises(CheckpointError, match="the disk is full"):
        trainer.train()
    assert told == [str(tmp_path / "run" / ("checkpoint/step-2" if by == "own" else "iter_2"))]
    assert not (tmp_path / "run/iter_2").exists()


def test_hooks_cannot_save_where_torchtitan_saves_nothing(make):
    trainer = make(enable=False)
    attach(Bus(CheckpointHook(2, by_epoch=False)), trainer)
    with pytest.raises(ConfigurationError, match=r"checkpoint\.enable=False"):
        trainer.train()


def test_a_training_without_checkpoints_has_hooks(make):
    paths, names = checkpoints(bus := Bus(Counting())), heard(bus)
    trainer = make(enable=False)
    attach(bus, trainer)
    trainer.train()
    assert paths == []
    assert names.count("after_train_iter") == 6


def test_a_second_training_of_a_trainer_goes_on_with_the_counts(make):
    seen = noted(bus := Bus(), "before_train_iter", "progress.iter")
    trainer = make(steps=2, enable=False)
    attach(bus, trainer)
    trainer.train()
    trainer.config.training.steps = 4
    trainer.train()
    assert seen == [0, 1, 2, 3]


def test_a_train_step_without_passes_is_an_error(make):
    trainer = make()
    trainer.train_step = lambda data: next(data)
    attach(Bus(), trainer)
    with pytest.raises(TrainingError, match="forward_backward_step"):
        trainer.train()


@pytest.mark.parametrize(("name", "value"), [("pp", 2), ("spmd_backend", "full_dtensor")])
def test_parallelism_without_a_loss_on_each_rank_is_refused(make, name, value):
    trainer = make()
    setattr(trainer.parallel_dims, name, value)
    with pytest.raises(ConfigurationError, match=f"={value!r}:"):
        attach(Bus(), trainer)


def test_a_schedule_of_ours_beside_that_of_torchtitan_is_refused(make):
    trainer = make()
    schedule = torch.optim.lr_scheduler.StepLR(trainer.optimizers.optimizers[0], 1)
    attach(Bus(ParamSchedulerHook(schedule, by="iter")), trainer)
    with pytest.raises(ConfigurationError, match="ParamSchedulerHook"):
        trainer.train()


def test_another_checkpointer_is_refused(make):
    trainer = make()
    trainer.checkpointer = Other(BaseCheckpointManager.Config(enable=True))
    with pytest.raises(ConfigurationError, match="Other"):
        attach(Bus(), trainer)


def test_an_option_of_other_bridges_names_the_way_out(make):
    with pytest.raises(ConfigurationError, match="dump_folder"):
        attach(Bus(), make(), work_dir="elsewhere")


def test_the_table_of_the_page_agrees_with_missing():
    page = (Path(__file__).parents[3] / "docs" / "engines" / "torchtitan.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    given = {name: not where.startswith("no:") for names, where in rows for name in re.findall(r"`(\w+)`", names)}
    assert {name for name, comes in given.items() if not comes} == set(TorchtitanBridge.missing)
    assert {name for name in given if "iter" in name or "epoch" in name} == {
        name for name in registry if ("iter" in name or "epoch" in name) and name.count("_") == 2
    }


@pytest.mark.parametrize("path", [*privates.NAMES, *privates.SAVING_NAMES])
def test_attaching_to_a_version_without_a_name_is_an_error(tmp_path, monkeypatch, path):
    trainer = Job(tmp_path, every=1).trainer
    root, *parts, name = path.split(".")
    if root == "storage":
        owner = importlib.import_module("torch.distributed.checkpoint._storage_utils")
        monkeypatch.delattr(owner, name)
    else:
        owner = functools.reduce(getattr, parts, trainer if root == "trainer" else trainer.checkpointer)

        def gone(self):
            raise AttributeError(name)

        monkeypatch.setattr(type(owner), name, property(gone, lambda self, value: None), raising=False)
    with pytest.raises(ConfigurationError, match="pip install") as error:
        attach(Bus(), trainer)
    assert repr(name) in str(error.value)
