"""Checkpoints and resumes of the bus in a ``transformers.Trainer``."""

import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import structlog
import torch

transformers = pytest.importorskip("transformers")


from eventloop import Bus, CheckpointError  # noqa: E402
from eventloop.observe.record import Validation  # noqa: E402
from eventloop.observe.report.reported_run import ReportedRun  # noqa: E402
from hooks import CheckpointHook, EMAHook, RunRecordHook, RuntimeInfoHook  # noqa: E402

from ..failing import fails  # noqa: E402
from .conformance.transformers import Plain, gpt2, make, plain_data  # noqa: E402
from .jobs import Counting, assert_same, noted  # noqa: E402


def test_the_trainers_own_checkpoints_hold_the_bus_and_are_removed_by_the_trainer(tmp_path):
    bus, told = Bus(), []
    bus.on("checkpoint_committed", lambda event: told.append(Path(event.path).name))
    make(tmp_path, bus, save_strategy="steps", save_steps=3, save_total_limit=2).train()
    assert told == [f"checkpoint-{step}" for step in (3, 6, 9, 12, 15, 16)]
    entries = {path.parent.name: torch.load(path, weights_only=True) for path in tmp_path.glob("*/trainbus.pt")}
    counts = {name: entry["progress"]["update"] for name, entry in entries.items()}
    assert counts == {"checkpoint-15": 15, "checkpoint-16": 16}


def test_a_folder_of_another_program_is_not_replaced(tmp_path):
    (tmp_path / "epoch_1").mkdir()
    (tmp_path / "epoch_1" / "mine").write_text("")
    bus = Bus(CheckpointHook(interval=1))
    with pytest.raises(CheckpointError, match="epoch_1"):
        make(tmp_path, bus).train()
    assert [path.name for path in tmp_path.iterdir()] == ["epoch_1"]


def test_the_best_model_of_the_trainer_is_the_averaged_one_and_the_last_checkpoint_is_not_the_best(tmp_path):
    worst, bus = [], Bus(ema := EMAHook(momentum=0.5), CheckpointHook(save_last=True))
    bus.on("after_train_iter", lambda event: worst.append({k: v.clone() for k, v in ema.average.tensors.items()}))
    best = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    best |= {"metric_for_best_model": "count", "greater_is_better": False}
    counted = iter(range(9))
    trainer = make(tmp_path, bus, **best, options={"compute_metrics": lambda _: {"count": next(counted)}})
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-8")
    assert_same(trainer.model.state_dict(), worst[7])
    last = Plain()
    last.load_state_dict(transformers.modeling_utils.load_state_dict(str(tmp_path / "epoch_2" / "model.safetensors")))
    assert_same(last.state_dict(), worst[15])


@pytest.mark.parametrize(
    ("at", "arguments"),
    [
        (12, {"gradient_accumulation_steps": 4}),
        (8, {"max_steps": 13}),
        (8, {"save_strategy": "epoch"}),
        # Between the last step of an epoch and its end: the trainer itself does not repeat an evaluation there.
        (8, {"save_strategy": "steps", "save_steps": 8, "eval_strategy": "no"}),
    ],
)
def test_a_resumed_training_goes_on_exactly(tmp_path, at, arguments):
    """Weights, averages, hooks and counts are those of a training that was never killed."""
    arguments = {"eval_strategy": "epoch", "model": gpt2, "lr_scheduler_type": "cosine", **arguments}

    def trained(folder, resume=None, kill=None):
        bus, counts = Bus(*(mine := [Counting(), EMAHook(momentum=0.1), RuntimeInfoHook()])), []
        seen = noted(bus, "before_train_iter", "progress.epoch", "batch_idx", "progress.iter")
        bus.on("after_run", lambda event: counts.append(event.run.counters.saved()))
        trainer = make(folder, bus, **arguments)
        if "save_strategy" not in arguments:
            bus.on("after_train_iter", lambda event: event.progress.iter + 1 == at and event.run.checkpoint_now())
        if kill is not None:
            bus.on("before_train_iter", fails(KeyboardInterrupt), once=kill + 1, priority="LOWEST")
        with nullcontext() if kill is None else pytest.raises(KeyboardInterrupt):
            trainer.train(resume_from_checkpoint=resume)
        return trainer, mine, seen, counts

    whole, (count, ema, _), seen, counts = trained(tmp_path / "whole")
    trained(tmp_path / "parts", kill=at + 1)
    second, (counted, average, _), rest, others = trained(tmp_path / "parts", resume=True)
    assert seen[:at] + rest == seen
    assert_same(whole.model.state_dict(), second.model.state_dict())
    assert_same(ema.average.tensors, average.average.tensors)
    assert counted.seen == count.seen
    assert others == counts


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a training that has saved after steps 5, 10, 15 and 16."""
    folder = tmp_path_factory.mktemp("trained")
    make(folder, Bus(), save_strategy="steps", save_steps=5).train()
    return folder


def test_true_resumes_from_the_newest_folder_also_from_one_that_a_hook_has_named(tmp_path):
    bus = Bus(CheckpointHook(interval=1, max_keep_ckpts=1))
    make(tmp_path, bus, save_strategy="steps", save_steps=5).train()
    (tmp_path / "checkpoint-99").mkdir()  # the process was killed before it was complete
    bus, begun = Bus(), []
    bus.on("after_load_checkpoint", lambda event: begun.append((Path(event.path).name, event.progress.iter)))
    make(tmp_path, bus, num_train_epochs=3).train(resume_from_checkpoint=True)
    assert begun == [("epoch_2", 16)]


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"global_step": "x"}'])
def test_a_folder_without_a_state_of_the_trainer_is_stepped_over_with_a_warning(tmp_path, trained, content):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    state = tmp_path / "checkpoint-16" / "trainer_state.json"
    state.unlink()
    if content is not None:
        state.write_text(content)
    bus, begun = Bus(), []
    bus.on("after_load_checkpoint", lambda event: begun.append(Path(event.path).name))
    with structlog.testing.capture_logs() as logs:
        make(tmp_path, bus, num_train_epochs=3).train(resume_from_checkpoint=True)
    assert begun == ["checkpoint-15"]
    (warning,) = [one for one in logs if one.get("path") == str(state.parent)]
    assert warning["log_level"] == "warning"
    assert "trainer_state.json" in warning["event"]
    assert warning["error"]


def test_a_damaged_state_of_the_bus_is_an_error_that_names_the_file(tmp_path, trained):
    shutil.copytree(trained / "checkpoint-10", tmp_path / "checkpoint-10")
    (tmp_path / "checkpoint-10" / "trainbus.pt").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"trainbus\.pt"):
        make(tmp_path, Bus()).train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))


def test_a_resume_that_repeats_the_epochs_data_counts_its_batches_from_zero(tmp_path, trained):
    begun = noted(bus := Bus(), "before_train_iter", "progress.epoch", "batch_idx", "progress.iter")
    trainer = make(tmp_path, bus, ignore_data_skip=True)
    trainer.train(resume_from_checkpoint=str(trained / "checkpoint-10"))
    assert begun[0] == (1, 0, 10)


def test_evaluations_beyond_a_resume_are_abandoned_and_no_others(tmp_path):
    for resume in (None, str(tmp_path / "checkpoint-4")):
        bus = Bus(RunRecordHook())
        trainer = make(tmp_path, bus, data=plain_data(8), save_strategy="epoch", eval_strategy="epoch")
        trainer.train(resume_from_checkpoint=resume)
        trainer.evaluate()
    now = ReportedRun(tmp_path)
    assert [one.iter for one in now.story.abandoned if isinstance(one, Validation)] == [8, 8]
    assert [one.iter for one in now.story.of(Validation)] == [4, 8, 8]
