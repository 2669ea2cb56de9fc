"""Checkpoints and resumes of the bus in a ``transformers.Trainer``."""

from functools import partial
from pathlib import Path

import pytest
import structlog
import torch

transformers = pytest.importorskip("transformers")

from transformers import GPT2LMHeadModel  # noqa: E402

from eventloop import Bus, CheckpointError  # noqa: E402
from hooks import CheckpointHook, EMAHook, IterTimerHook, LoggerHook, RuntimeInfoHook  # noqa: E402
from hooks.writers import JSONLinesWriter  # noqa: E402

from .jobs import Counting, assert_same, heard, weights_of  # noqa: E402
from .transformers_jobs import Plain, gpt2, make  # noqa: E402

# -------------------------------------------------------------------------------------------------------- checkpoints


def test_requested_checkpoints_are_folders_that_the_library_opens(tmp_path):
    bus, told = Bus(), []
    bus.add(CheckpointHook(interval=1, save_best="loss", max_keep_ckpts=1))
    bus.on("checkpoint_committed", lambda event: told.append([Path(name).name for name in event.names]))
    sizes = []
    bus.on("checkpoint_committed", lambda event: sizes.append(event.bytes))
    trainer = make(tmp_path, bus, model=gpt2, eval_strategy="epoch")
    trainer.train()
    best = "best_loss_epoch_{}"
    assert told == [["epoch_1", best.format(1)], ["epoch_2", best.format(2)]]
    assert sorted(path.name for path in tmp_path.iterdir()) == [best.format(2), "epoch_2"]
    assert min(sizes) > 1000
    for name in ("epoch_2", best.format(2)):
        assert_same(GPT2LMHeadModel.from_pretrained(tmp_path / name).state_dict(), trainer.model.state_dict())


def test_the_trainers_own_checkpoints_hold_the_bus_and_are_removed_by_the_trainer(tmp_path):
    bus, told = Bus(), []
    bus.on("checkpoint_committed", lambda event: told.append(Path(event.path).name))
    make(tmp_path, bus, save_strategy="steps", save_steps=3, save_total_limit=2).train()
    assert told == [f"checkpoint-{step}" for step in (3, 6, 9, 12, 15, 16)]
    entries = {path.parent.name: torch.load(path, weights_only=True) for path in tmp_path.glob("*/trainbus.pt")}
    counts = {name: entry["progress"]["update"] for name, entry in entries.items()}
    assert counts == {"checkpoint-15": 15, "checkpoint-16": 16}


def test_checkpoint_now_waits_for_the_window(tmp_path):
    bus, told = Bus(), []
    bus.on("after_train_iter", lambda event: event.progress.iter == 2 and event.run.checkpoint_now())
    bus.on("checkpoint_committed", lambda event: told.append(Path(event.path).name))
    make(tmp_path, bus, gradient_accumulation_steps=2).train()
    assert told == ["iter_4"]
    assert (tmp_path / "iter_4" / "optimizer.pt").is_file()


def test_a_checkpoint_that_fails_is_told_and_ends_the_training_unless_it_is_to_be_logged(tmp_path):
    (tmp_path / "file").write_text("")  # where a directory would have to be
    for on_error in ("log", "raise"):
        bus, told = Bus(), []
        bus.on("checkpoint_failed", lambda event, told=told: told.append(event.error))
        ask = partial(dict, directory=tmp_path / "file", on_error=on_error)
        bus.on("after_train_epoch", lambda event, ask=ask: event.run.request_save("x", **ask()))
        trainer = make(tmp_path / on_error, bus, num_train_epochs=1)
        if on_error == "log":
            trainer.train()
        else:
            with pytest.raises(OSError, match="file"):
                trainer.train()
        assert len(told) == 1


def test_a_folder_of_another_program_is_not_replaced(tmp_path):
    (tmp_path / "epoch_1").mkdir()
    (tmp_path / "epoch_1" / "mine").write_text("")
    bus = Bus()
    bus.add(CheckpointHook(interval=1))
    with pytest.raises(CheckpointError, match="not a checkpoint of this bus"):
        make(tmp_path, bus).train()
    assert [path.name for path in tmp_path.iterdir()] == ["epoch_1"]


def test_the_average_is_evaluated_and_is_what_from_pretrained_opens(tmp_path):
    bus, ema, evaluated = Bus(), EMAHook(momentum=0.1), []
    bus.add(ema, CheckpointHook(interval=1))
    bus.on("after_val_iter", lambda event: evaluated.append(event.run.model.transformer.wte.weight.clone()))
    own = {"save_strategy": "steps", "save_steps": 16}
    trainer = make(tmp_path, bus, model=gpt2, eval_strategy="epoch", **own)
    trainer.train()
    average, raw = ema.average.tensors, trainer.model.state_dict()
    assert torch.equal(evaluated[-1], average["transformer.wte.weight"])
    assert not torch.equal(evaluated[-1], raw["transformer.wte.weight"])
    for name in ("epoch_2", "checkpoint-16"):
        loaded = GPT2LMHeadModel.from_pretrained(tmp_path / name).state_dict()
        assert all(torch.equal(loaded[key], average[key]) for key in average)


def test_the_best_model_of_the_trainer_is_the_averaged_one_and_the_last_checkpoint_is_not_the_best(tmp_path):
    bus, ema, worst = Bus(), EMAHook(momentum=0.5), []
    bus.add(ema, CheckpointHook(save_last=True))
    bus.on("after_train_iter", lambda event: worst.append({k: v.clone() for k, v in ema.average.tensors.items()}))
    best = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    best |= {"metric_for_best_model": "count", "greater_is_better": False}
    counted = iter(range(9))
    trainer = make(tmp_path, bus, **best, options={"compute_metrics": lambda _: {"count": next(counted)}})
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-8")
    assert_same(trainer.model.state_dict(), worst[7])
    last = Plain()
    last.load_state_dict(transformers.modeling_utils.load_state_dict(tmp_path / "epoch_2" / "model.safetensors"))
    assert_same(last.state_dict(), worst[15])


# ------------------------------------------------------------------------------------------------------------- resume


def hooks():
    return [Counting(), EMAHook(momentum=0.1), RuntimeInfoHook()]


def killed(bus, at):
    @bus.on("before_train_iter", priority="LOWEST")
    def kill(event):
        if event.progress.iter == at:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("saved", "at", "arguments"),
    [
        ("hook", 6, {}),  # within the first epoch
        ("hook", 12, {"gradient_accumulation_steps": 4}),
        ("trainer", 5, {}),
        # Between the last step of an epoch and its end: the trainer itself does not repeat an evaluation there.
        ("trainer", 8, {"eval_strategy": "no"}),
        ("trainer", 12, {"gradient_accumulation_steps": 2}),
        ("epoch", 8, {}),
        ("stop", 11, {}),
        ("hook", 8, {"max_steps": 13}),
    ],
)
def test_a_resumed_training_goes_on_exactly(tmp_path, saved, at, arguments):
    """Weights, averages, hooks and counts are those of a training that was never killed."""
    arguments = {"eval_strategy": "epoch", "model": gpt2, "lr_scheduler_type": "cosine", **arguments}
    window = arguments.get("gradient_accumulation_steps", 1)

    def trained(folder, resume=None, kill=None):
        bus, mine = Bus(), hooks()
        bus.add(*mine)
        seen, counts = [], []
        bus.on("before_train_iter", lambda event: seen.append((event.progress.epoch, event.batch_idx, event.progress.iter)))
        bus.on("after_run", lambda event: counts.append(event.run.counters.saved()))
        strategy = {"trainer": {"save_strategy": "steps", "save_steps": at // window}, "epoch": {"save_strategy": "epoch"}}
        trainer = make(folder, bus, **arguments, **strategy.get(saved, {}))
        if saved in ("hook", "stop"):
            bus.on("after_train_iter", lambda event: event.progress.iter + 1 == at and event.run.checkpoint_now())
        if kill == "stop":
            bus.on("after_train_iter", lambda event: event.progress.iter + 1 == at and event.run.stop())
        elif kill is not None:
            killed(bus, kill)
        if kill in (None, "stop"):
            trainer.train(resume_from_checkpoint=resume)
        else:
            with pytest.raises(KeyboardInterrupt):
                trainer.train()
        return trainer, mine, seen, counts

    whole, (count, ema, _), seen, counts = trained(tmp_path / "whole")
    trained(tmp_path / "parts", kill="stop" if saved == "stop" else at + 1)
    second, (counted, average, _), rest, others = trained(tmp_path / "parts", resume=True)
    assert seen[:at] + rest == seen
    assert_same(whole.model.state_dict(), second.model.state_dict())
    assert_same(ema.average.tensors, average.average.tensors)
    assert counted.seen == count.seen
    assert others == counts


def test_true_resumes_from_the_newest_folder_also_from_one_that_a_hook_has_named(tmp_path):
    bus = Bus()
    bus.add(CheckpointHook(interval=1, max_keep_ckpts=1))
    make(tmp_path, bus, save_strategy="steps", save_steps=5).train()
    (tmp_path / "checkpoint-99").mkdir()  # the process was killed before it was complete
    bus, begun = Bus(), []
    bus.on("after_load_checkpoint", lambda event: begun.append((Path(event.path).name, event.progress.iter)))
    make(tmp_path, bus, num_train_epochs=3).train(resume_from_checkpoint=True)
    assert begun == [("epoch_2", 16)]


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"global_step": "x"}'])
def test_a_folder_without_a_state_of_the_trainer_is_stepped_over_with_a_warning(tmp_path, content):
    make(tmp_path, Bus(), save_strategy="steps", save_steps=5).train()
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


def test_a_checkpoint_that_was_saved_without_the_bus_gives_the_counts_and_a_warning(tmp_path):
    make(tmp_path, save_strategy="steps", save_steps=5).train()
    bus, hook, begun = Bus(), Counting(), []
    bus.add(hook)
    bus.on("before_train_epoch", lambda event: begun.append((event.progress, event.progress.update)))
    trainer = make(tmp_path, bus)
    with structlog.testing.capture_logs() as logs:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    progress, updates = begun[0]
    assert (progress.epoch, progress.batch_idx, progress.iter, updates) == (1, 2, 10, 10)
    assert any("saved without this bus" in one["event"] for one in logs)
    assert len(hook.iters) == 6


def test_a_damaged_state_of_the_bus_is_an_error_that_names_the_file(tmp_path):
    make(tmp_path, Bus(), save_strategy="steps", save_steps=5).train()
    (tmp_path / "checkpoint-10" / "trainbus.pt").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"trainbus\.pt cannot be read"):
        make(tmp_path, Bus()).train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))


def test_a_resume_that_repeats_the_epochs_data_counts_its_batches_from_zero(tmp_path):
    make(tmp_path, Bus(), save_strategy="steps", save_steps=5).train()
    bus, begun = Bus(), []
    bus.on("before_train_iter", lambda event: begun.append((event.progress.epoch, event.batch_idx, event.progress.iter)))
    trainer = make(tmp_path, bus, ignore_data_skip=True)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert begun[0] == (1, 0, 10)


@pytest.mark.parametrize("model", [Plain, gpt2])
def test_not_one_bit_of_the_weights_changes(tmp_path, model):
    def trained(folder, bus=None):
        trainer = make(folder, bus, model=model, max_steps=200, eval_strategy="steps", eval_steps=50)
        trainer.train()
        return weights_of(trainer.model)

    bus = Bus()
    bus.add(LoggerHook(interval=5, writers=[JSONLinesWriter()]), IterTimerHook(), RuntimeInfoHook(), EMAHook(momentum=0.1))
    names = heard(bus)
    alone = trained(tmp_path / "alone")
    assert_same(trained(tmp_path / "bus", bus), alone)
    assert_same(trained(tmp_path / "empty", Bus()), alone)
    assert names.count("after_train_iter") == 200
