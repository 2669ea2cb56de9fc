"""Checkpoints and resumes of the bus in a ``transformers.Trainer``, written by the trainer or beside its training."""

import json
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import structlog
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402
from transformers import GPT2LMHeadModel  # noqa: E402

from trainbus import attach  # noqa: E402
from trainbus.eventloop import Bus, CheckpointDamagedError, CheckpointError, ConfigurationError  # noqa: E402
from trainbus.hooks import CheckpointHook, EMAHook, RuntimeInfoHook  # noqa: E402
from trainbus.observe import RunRecordHook  # noqa: E402
from trainbus.observe.record import Validation  # noqa: E402
from trainbus.observe.report.reported_run import ReportedRun  # noqa: E402
from trainbus.testing.host_job import Counting, assert_same, checkpoints, noted  # noqa: E402

from ..failing import fails  # noqa: E402
from .conformance.transformers import Plain, gpt2, make, plain_data, tokens  # noqa: E402
from .jobs import weights_of  # noqa: E402

EVERY_FIVE = {"save_strategy": "steps", "save_steps": 5}
BEST = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "num_train_epochs": 4}


def saving(folder, bus=None, **options):
    """A trainer whose checkpoints are written beside the training."""
    trainer = make(folder, **options)
    attach(Bus() if bus is None else bus, trainer, checkpoints=True)
    return trainer


def folders(path):
    return sorted(folder.name for folder in path.iterdir())


def test_the_trainers_own_checkpoints_hold_the_bus_and_are_removed_by_the_trainer(tmp_path):
    told = checkpoints(bus := Bus())
    make(tmp_path, bus, save_strategy="steps", save_steps=3, save_total_limit=2).train()
    assert told == [tmp_path / f"checkpoint-{step}" for step in (3, 6, 9, 12, 15, 16)]
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


@pytest.mark.long
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
            bus.on("after_train_iter", lambda event: event.progress.iter + 1 == at and event.run.checkpoints.save())
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
    make(folder, Bus(), **EVERY_FIVE).train()
    return folder


def test_true_resumes_from_the_newest_folder_also_from_one_that_a_hook_has_named(tmp_path):
    bus = Bus(CheckpointHook(interval=1, max_keep_ckpts=1))
    make(tmp_path, bus, **EVERY_FIVE).train()
    (tmp_path / "checkpoint-99").mkdir()  # the process was killed before it was complete
    begun = noted(bus := Bus(), "after_load_checkpoint", "path", "progress.iter")
    make(tmp_path, bus, num_train_epochs=3).train(resume_from_checkpoint=True)
    assert begun == [(str(tmp_path / "epoch_2"), 16)]


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"global_step": "x"}'])
def test_a_folder_without_a_state_of_the_trainer_is_stepped_over_with_a_warning(tmp_path, trained, content):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    state = tmp_path / "checkpoint-16" / "trainer_state.json"
    state.unlink()
    if content is not None:
        state.write_text(content)
    begun = noted(bus := Bus(), "after_load_checkpoint", "path")
    with structlog.testing.capture_logs() as logs:
        make(tmp_path, bus, num_train_epochs=3).train(resume_from_checkpoint=True)
    assert begun == [str(tmp_path / "checkpoint-15")]
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


# Checkpoints beside the training: ``attach(bus, trainer, checkpoints=True)``.


@pytest.mark.parametrize("model", [Plain, gpt2])
def test_a_folder_holds_what_the_trainer_alone_would_have_written(tmp_path, model):
    make(tmp_path / "alone", model=model, **EVERY_FIVE).train()
    saving(tmp_path / "ours", model=model, **EVERY_FIVE).train()
    assert folders(tmp_path / "ours") == folders(tmp_path / "alone")
    alone, ours = (tmp_path / name / "checkpoint-10" for name in ("alone", "ours"))
    assert set(folders(ours)) - set(folders(alone)) == {"trainbus.pt", "trainbus-digests.json"}
    assert_same(load_file(ours / "model.safetensors"), load_file(alone / "model.safetensors"))
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        written = [torch.load(folder / name, weights_only=False) for folder in (ours, alone)]
        assert repr(written[0]) == repr(written[1])
    states = [json.loads((folder / "trainer_state.json").read_text()) for folder in (ours, alone)]
    assert states[0] == states[1]


@pytest.mark.long
@pytest.mark.parametrize("size", ["10KB", "1GB"])
def test_the_library_opens_a_folder_and_goes_on_from_it_also_from_shards(tmp_path, size):
    trainer = saving(tmp_path, model=gpt2, **EVERY_FIVE)
    trainer.model.save_pretrained = partial(trainer.model.save_pretrained, max_shard_size=size)
    trainer.train()
    last = tmp_path / "checkpoint-16"
    assert (len(list(last.glob("model*.safetensors"))) > 1) == (size == "10KB")
    opened = GPT2LMHeadModel.from_pretrained(str(last))
    assert_same(opened.state_dict(), trainer.model.state_dict())
    assert opened.lm_head.weight is opened.transformer.wte.weight
    rest = make(tmp_path, model=gpt2)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert_same(weights_of(rest.model), weights_of(trainer.model))


@pytest.mark.parametrize("limit", [1, 2])
def test_the_best_folder_is_that_of_the_trainer_alone_and_named_when_it_is_durable(tmp_path, limit):
    def durable(best):
        return best is None or Path(best, "model.safetensors").is_file()

    def trained(folder, bus=None):
        scores, seen = iter([3.0, 1.0, 2.0, 4.0]), []
        best = {"metric_for_best_model": "score", "greater_is_better": False, "save_total_limit": limit}
        trainer = make(folder, options={"compute_metrics": lambda _: {"score": next(scores)}}, **BEST, **best)
        if bus is not None:
            attach(bus, trainer, checkpoints=True)
            bus.on("after_train_iter", lambda event: seen.append(durable(trainer.state.best_model_checkpoint)))
        trainer.train()
        assert all(seen)
        state = json.loads((folder / folders(folder)[-1] / "trainer_state.json").read_text())
        return trainer, Path(trainer.state.best_model_checkpoint).name, Path(state["best_model_checkpoint"]), folders(folder)

    alone, name, said, kept = trained(tmp_path / "alone")
    ours, *rest = trained(tmp_path / "ours", Bus())
    assert rest == [name, tmp_path / "ours" / said.name, kept]
    assert name == "checkpoint-16"
    assert_same(weights_of(ours.model), weights_of(alone.model))


def test_folders_of_the_trainer_and_of_hooks_are_committed_in_their_order_and_have_the_averages(tmp_path):
    bus = Bus(ema := EMAHook(momentum=0.1), CheckpointHook(interval=1, save_best="loss", max_keep_ckpts=1))
    committed = noted(bus, "checkpoint_committed", "names")
    saving(tmp_path, bus, model=gpt2, **BEST | {"num_train_epochs": 2}).train()
    names = [name for epoch in (1, 2) for name in ([f"checkpoint-{epoch * 8}"], [f"epoch_{epoch}", f"best_loss_epoch_{epoch}"])]
    assert [[Path(path).name for path in paths] for paths in committed] == names
    assert folders(tmp_path) == ["best_loss_epoch_2", "checkpoint-16", "checkpoint-8", "epoch_2"]
    for name in ("epoch_2", "checkpoint-16"):
        loaded = GPT2LMHeadModel.from_pretrained(str(tmp_path / name)).state_dict()
        assert all(torch.equal(loaded[key], tensor) for key, tensor in ema.average.tensors.items())


def test_a_damaged_folder_is_refused_and_true_takes_the_one_before(tmp_path):
    saving(tmp_path, **EVERY_FIVE).train()
    weights = tmp_path / "checkpoint-16" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CheckpointDamagedError, match=r"model\.safetensors.*trainbus-digests\.json"):
        make(tmp_path, Bus()).train(resume_from_checkpoint=str(weights.parent))
    begun = noted(bus := Bus(), "after_load_checkpoint", "path")
    with structlog.testing.capture_logs() as logs:
        make(tmp_path, bus, num_train_epochs=3).train(resume_from_checkpoint=True)
    assert begun == [str(tmp_path / "checkpoint-15")]
    assert any("damaged" in one["event"] and "model.safetensors" in one["error"] for one in logs)
    (weights.parent / "trainbus-digests.json").unlink()  # the way out that the error names
    make(tmp_path, bus, num_train_epochs=3).train(resume_from_checkpoint=True)
    assert begun[1:] == [str(weights.parent)]


OTHER = '{"model_type": "gpt2", "n_layer": 2}'


def split_anew(folder):
    model = GPT2LMHeadModel.from_pretrained(str(folder))
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="10KB")


@pytest.mark.long
@pytest.mark.parametrize(
    ("edit", "named", "which"),
    [
        (lambda folder: (folder / "optimizer.pt").unlink(), "optimizer.pt", "checkpoint-2"),
        (lambda folder: (folder / "config.json").write_text(OTHER), "config.json", "checkpoint-2"),
        (lambda folder: (folder / "training_args.bin").write_bytes(b""), "training_args.bin", "checkpoint-2"),
        (split_anew, "model.safetensors", "checkpoint-2"),
        (split_anew, "model.safetensors", True),
    ],
)
def test_a_folder_that_a_person_edited_resumes_as_in_the_trainer_and_says_what_changed(tmp_path, which, edit, named):
    options = {"model": gpt2, "data": tokens(4), "num_train_epochs": 1}
    saving(tmp_path, save_strategy="steps", save_steps=1, **options).train()
    edit(tmp_path / "checkpoint-2")
    begun = noted(bus := Bus(), "after_load_checkpoint", "path")
    resumed = make(tmp_path, bus, **options | {"num_train_epochs": 2})
    with structlog.testing.capture_logs() as logs:
        resumed.train(resume_from_checkpoint=which if which is True else str(tmp_path / which))
    assert (begun, resumed.state.global_step) == ([str(tmp_path / "checkpoint-2")], 4)
    assert [named] in [entry["files"] for entry in logs if "files" in entry]


def test_without_a_good_folder_true_is_an_error_that_names_the_files(tmp_path):
    saving(tmp_path, data=plain_data(4), num_train_epochs=1, save_strategy="epoch").train()
    (tmp_path / "checkpoint-2" / "optimizer.pt").write_bytes(b"")
    with pytest.raises(CheckpointDamagedError, match=r"-2 .*optimizer\.pt.*trainbus-digests"):
        make(tmp_path, Bus()).train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-2" / "optimizer.pt").unlink()
    (tmp_path / "checkpoint-2" / "model.safetensors").unlink()
    with pytest.raises(CheckpointDamagedError, match=r"model\.safetensors"):
        make(tmp_path, Bus()).train(resume_from_checkpoint=True)


def test_callbacks_that_handle_on_save_find_the_folder(tmp_path):
    found = []

    class Uploads(transformers.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            found.append(Path(args.output_dir, f"checkpoint-{state.global_step}", "model.safetensors").is_file())

    trainer = saving(tmp_path, options={"callbacks": [Uploads()]}, **EVERY_FIVE)
    with structlog.testing.capture_logs() as logs:
        trainer.train()
    assert found == [True] * 4
    assert [one["callbacks"] for one in logs if one.get("id") == "transformers-callbacks-wait"] == [["Uploads"]]


def test_an_older_folder_of_the_same_step_is_replaced_and_outside_of_a_training_the_trainer_writes_at_once(tmp_path):
    make(tmp_path, **EVERY_FIVE).train()
    trainer = saving(tmp_path, learning_rate=0.1, **EVERY_FIVE)
    trainer.train()
    assert len(folders(tmp_path)) == 4
    trainer.save_model(str(tmp_path / "model"))
    for name in ("checkpoint-16", "model"):
        assert_same(load_file(tmp_path / name / "model.safetensors"), weights_of(trainer.model))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda trainer: setattr(trainer.args, "push_to_hub", True), r"push_to_hub=True: .* uploads"),
        (lambda trainer: setattr(trainer.args, "enable_jit_checkpoint", True), "enable_jit_checkpoint=True: .* PreemptionHook"),
        (lambda trainer: setattr(trainer, "is_deepspeed_enabled", True), "DeepSpeed writes its own shards"),
        (lambda trainer: setattr(trainer, "is_fsdp_enabled", True), "FSDP writes its own shards"),
    ],
)
def test_what_cannot_be_written_beside_the_training_is_refused(tmp_path, change, message):
    trainer = make(tmp_path)
    change(trainer)
    with pytest.raises(ConfigurationError, match=message):
        attach(Bus(), trainer, checkpoints=True)
    attach(Bus(), trainer).detach()
