"""When CheckpointHook saves, what its files are called, which of them stay, and how a run goes on from them."""

import hashlib
import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainbus.eventloop import Bus, CheckpointError, ConfigurationError, Hook, Run
from trainbus.eventloop.checkpoint import TEMPORARY_PREFIX, load, save, scores_of
from trainbus.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, IterTimerHook, LoggerHook, RuntimeInfoHook
from trainbus.hooks.rules import find_rule

from .conftest import files, scored

# ---------------------------------------------------------------------------------------------- when, and names


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"interval": 2, "begin": 5, "save_last": False}, {5, 7, 9}),
        ({"interval": 2, "begin": 5}, {5, 7, 9, 10}),
        ({"interval": 3}, {3, 6, 9, 10}),
        ({"interval": 4, "max_keep_ckpts": 2}, {8, 10}),
        ({}, {10}),
        ({"save_last": False}, set()),
        ({"interval": 3, "by_epoch": False, "filename_tmpl": "model_{}.safetensors", "begin": 2}, {2, 5, 8, 10}),
    ],
)
@pytest.mark.parametrize("length", [{"max_epochs": 10}, {"max_iters": 10}], ids=["epochs", "iterations"])
def test_epochs_or_iterations_after_which_it_saves(job, tmp_path, options, expected, length):
    hook = CheckpointHook(**{"by_epoch": "max_epochs" in length} | options)
    job.loop(hook, work_dir=tmp_path, train_data=job.batches(1), **length).run()
    name = options.get("filename_tmpl", "epoch_{}.safetensors" if "max_epochs" in length else "iter_{}.safetensors")
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {name.format(n) for n in expected}
    assert [load(tmp_path / name.format(n))["progress"]["iter"] for n in expected] == [*expected]
    if expected:
        assert (tmp_path / "last_checkpoint").read_text() == name.format(max(expected))


def test_parts_of_the_state_can_be_omitted(job, tmp_path):
    from trainbus.hooks.schedule import ParamSchedulerHook

    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = ParamSchedulerHook(torch.optim.lr_scheduler.StepLR(optimizer, 2), by="iter")
    hook = CheckpointHook(save_optimizer=False, save_param_scheduler=False)
    job.loop(hook, schedule, model=model, optimizer=optimizer, work_dir=tmp_path).run()
    assert not {"optimizer", "param_schedulers"} & load(tmp_path / "epoch_2.safetensors").keys()


def test_runs_with_the_same_out_dir_have_separate_subfolders(job, tmp_path):
    """Neither overwrites or removes the other's files, nor goes on from them."""
    began: list[int] = []
    for name, epochs in (("one", 1), ("other", 2), ("one", 2)):
        hook = CheckpointHook(1, max_keep_ckpts=1, out_dir=tmp_path / "out")
        loop = job.loop(hook, work_dir=tmp_path / name, max_epochs=epochs)
        loop.bus.on("before_train", lambda event: began.append(event.progress.epoch))
        loop.run(resume="auto")
    assert began == [0, 0, 1]
    assert files(tmp_path / "out" / "one") == files(tmp_path / "out" / "other") == {"epoch_2"}


@pytest.mark.parametrize("work_dir", [None, "out", "out/run"])
def test_an_out_dir_of_one_run_is_used_unchanged(job, tmp_path, monkeypatch, work_dir):
    """Without a work dir, or where that is the same or in it."""
    monkeypatch.chdir(tmp_path)
    job.loop(CheckpointHook(1, out_dir="out"), work_dir=work_dir).run()
    assert files(tmp_path / (work_dir or "out")) == {"epoch_1", "epoch_2"}


def test_a_directory_with_a_non_utf_8_name_is_found_from_the_work_dir(job, tmp_path):
    elsewhere = tmp_path / os.fsdecode(b"caf\xe9")
    job.loop(CheckpointHook(out_dir=elsewhere), work_dir=tmp_path / "run").run()
    assert (tmp_path / "run" / "last_checkpoint").read_bytes() == b"../caf\xe9/run/epoch_2.safetensors"
    job.loop(CheckpointHook(out_dir=elsewhere), work_dir=tmp_path / "run", max_epochs=3).run(resume="auto")
    assert load(elsewhere / "run" / "epoch_3.safetensors")["progress"]["iter"] == 12


def test_without_a_place_for_files_training_does_not_begin(job, tmp_path):
    with pytest.raises(ConfigurationError, match="out_dir"):
        job.loop(CheckpointHook(interval=1)).run()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=str(tmp_path / "file")):
        job.loop(CheckpointHook(interval=1, out_dir=tmp_path / "file")).run()
    with pytest.raises(ConfigurationError, match="out_dir="):
        job.loop(CheckpointHook(1), work_dir="memory://bucket/run").run()


@pytest.mark.parametrize(
    ("options", "last"), [({"begin": 3}, "epoch 2"), ({"by_epoch": False, "begin": 9}, "iteration 8"), ({}, None)]
)
def test_a_begin_beyond_the_training_is_a_warning(job, tmp_path, options, last, logs):
    job.loop(CheckpointHook(1, **options), work_dir=tmp_path).run()
    told = [entry["event"] for entry in logs if "(begin=" in entry["event"]]
    assert [f"ends with {last}," in one for one in told] == ([True] if last else [])


# ------------------------------------------------------------------------------------------------- the best


@pytest.mark.parametrize(
    ("options", "scores", "best"),
    [
        ({"save_best": "acc"}, {"acc": [0.5, 0.4, 0.6, 0.6, None]}, {"acc_epoch_3"}),  # it replaces the one before
        ({"save_best": "acc", "rule": "less"}, {"acc": [0.5, 0.4, 0.6]}, {"acc_epoch_2"}),
        ({"save_best": "acc"}, {"acc": [float("nan"), 0.1, float("nan")]}, {"acc_epoch_2"}),
        ({"save_best": "auto", "rule": "greater"}, {"acc": [0.5]}, {"acc_epoch_1"}),  # not an output of the step
        (
            {"save_best": ["acc", "fid"], "rule": ["greater", "less"]},
            {"acc": [0.5, 0.6, 0.4], "fid": [3.0, 4.0, 2.0]},
            {"acc_epoch_2", "fid_epoch_3"},
        ),
        ({"save_best": ["acc", "fid"], "rule": ["less"]}, {"acc": [1, 2], "fid": [3, 4]}, {"acc_epoch_1", "fid_epoch_1"}),
        ({"save_best": "auto", "rule": ["less"]}, {"acc": [1, 2], "fid": [3, 4]}, {"acc_epoch_1"}),
        ({"save_best": "acc/AP@[.5:.95]"}, {"acc/AP@[.5:.95]": [1, 2]}, {"acc_AP@[.5_.95]_epoch_2"}),  # Windows lacks ":"
    ],
)
def test_the_best_file_of_each_metric(job, tmp_path, options, scores, best):
    data = {"val_data": job.batches(1), "val_step": lambda model, batch: {"loss": torch.tensor(1.0)}}
    metrics, epochs = {name: job.Scores(*some) for name, some in scores.items()}, len(next(iter(scores.values())))
    hook = CheckpointHook(**options, save_last=False)
    job.loop(hook, work_dir=tmp_path, metrics=metrics, max_epochs=epochs, train_data=job.batches(1), **data).run()
    assert files(tmp_path) == {f"best_{name}" for name in best}


def test_auto_is_the_first_metric(job, tmp_path):
    hook = CheckpointHook(save_best="auto", save_last=False)
    options = {"val_data": job.batches(1), "val_step": lambda model, batch: {"a/loss": torch.tensor(1.0), "b": 0.5}}
    job.loop(hook, work_dir=tmp_path, max_epochs=1, **options).run()
    assert files(tmp_path) == {"best_a_loss_epoch_1"}


def test_a_validation_alone_writes_no_best_file(job, tmp_path):
    """Neither with weights that are not trained yet, nor after training; so `resume="auto"` finds what was trained."""
    loop = scored(tmp_path, CheckpointHook(save_best="acc", save_last=False), 0.4, 0.5, 0.9, max_epochs=1)
    loop.validate()
    assert not files(tmp_path)
    loop.run()
    newest = (tmp_path / "last_checkpoint").read_text()
    loop.validate()
    assert files(tmp_path) == {"best_acc_epoch_1"}
    assert (tmp_path / "last_checkpoint").read_text() == newest


def test_a_validation_alone_needs_no_place_for_files(job):
    loop = job.loop(CheckpointHook(1, save_best="loss"), val_data=job.batches(1), test_data=job.batches(1))
    assert loop.validate()
    assert loop.test()


def test_one_write_per_step_under_several_names(tmp_path):
    loop, names = scored(tmp_path, CheckpointHook(interval=1, save_best="acc"), 0.5, 0.6), []
    loop.bus.on("checkpoint_committed", lambda event: names.extend(Path(name).stem for name in event.names))
    loop.run()
    assert names == ["epoch_1", "best_acc_epoch_1", "epoch_2", "best_acc_epoch_2"]
    assert (tmp_path / "epoch_2.safetensors").samefile(tmp_path / "best_acc_epoch_2.safetensors")


def calibrates(mount_point):
    """A hook that changes a buffer by one at a mount point, in a way that torch does not notice."""
    return type("Calibrates", (Hook,), {mount_point: lambda self, event: event.run.model[1].running_mean.data.add_(1)})()


@pytest.mark.parametrize("by_epoch", [True, False])
@pytest.mark.parametrize("mount_point", ["after_train_epoch", "before_val", "after_val_iter", "after_val_epoch"])
def test_the_best_file_has_the_validated_weights(job, tmp_path, mount_point, by_epoch):
    loop = scored(tmp_path, CheckpointHook(interval=1, by_epoch=by_epoch, save_best="acc", save_last=False), 0.5)
    loop.bus.add(calibrates(mount_point))
    loop.run()
    (best,) = tmp_path.glob("best_*")
    assert job.same(load(best)["state_dict"], job.weights(loop.model))
    assert load(best)["progress"]["phase"] == ("val" if mount_point == "after_train_epoch" and by_epoch else "train")


@pytest.mark.parametrize("by_epoch", [True, False])
@pytest.mark.parametrize("mount_point", ["after_train_epoch", "after_val_epoch", "after_train"])
def test_the_last_file_has_what_hooks_changed_after_the_last_iteration(job, tmp_path, mount_point, by_epoch):
    hooks = CheckpointHook(interval=1, by_epoch=by_epoch), calibrates(mount_point)
    loop = job.loop(*hooks, work_dir=tmp_path, val_data=job.batches(1))
    loop.run()
    assert job.same(load(tmp_path / (tmp_path / "last_checkpoint").read_text())["state_dict"], job.weights(loop.model))
    assert files(tmp_path) == ({"epoch_1", "epoch_2"} if by_epoch else {f"iter_{n}" for n in range(1, 9)})


def test_changes_by_the_body_of_a_users_own_loop_are_in_the_files_of_its_epoch(job, tmp_path):
    """They are taken when the body has ended."""
    model, bus = job.model(), Bus()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bus.add(CheckpointHook(interval=1, save_best="loss", save_last=False))
    with Run(bus, model=model, optimizer=optimizer, work_dir=tmp_path) as run:
        for _ in run.epochs(1):
            for batch in run.train(job.batches(1)):
                job.loss(model, batch).backward()
                optimizer.step()
            with torch.no_grad():
                model[0].bias.add_(1)
            for batch in run.validate(job.batches(1)):
                run.report(loss=job.loss(model, batch))
    for name in ("best_loss_epoch_1", "epoch_1"):
        assert job.same(load(tmp_path / f"{name}.safetensors")["state_dict"], job.weights(model))


def test_with_observing_hooks_the_best_is_another_name_of_the_previous_file(job, tmp_path):
    """Loggers, timers, averages that are lent for a validation: those that are in default_hooks, and a user's own."""

    class Mine(Hook):
        observes = True

        def after_val_epoch(self, event): ...

    hooks = (EarlyStoppingHook("acc"), EMAHook(momentum=0.1), IterTimerHook(), LoggerHook(), Mine(), RuntimeInfoHook())
    loop = scored(tmp_path, CheckpointHook(interval=1, save_best="acc"), 0.5, 0.6)
    loop.bus.add(*hooks)
    loop.run()
    assert (tmp_path / "epoch_2.safetensors").samefile(tmp_path / "best_acc_epoch_2.safetensors")


@pytest.mark.parametrize("by_epoch", [True, False])
@pytest.mark.parametrize("interval", [1, -1])
def test_each_file_has_the_scores_of_its_own_validation(tmp_path, by_epoch, interval):
    """The best one too, whether it is another name of a file that was saved before the validation or a file of its own."""
    hook = CheckpointHook(interval, by_epoch=by_epoch, save_best="acc", save_last=False)
    length = {} if by_epoch else {"max_epochs": None, "max_iters": 5, "val_interval": 1}
    loop = scored(tmp_path, hook, 0.1, 0.2, 0.9, float("nan"), 0.4, **length)
    loop.bus.add(RuntimeInfoHook())
    loop.run()
    kind, scores = "epoch" if by_epoch else "iter", [0.1, 0.2, 0.9, "nan", 0.4]
    expected = {f"{kind}_{n}": score for n, score in enumerate(scores, 1)} if interval == 1 else {}
    told = {path.stem: scores_of(path)["acc"] for path in tmp_path.glob("*.safetensors")}
    assert told == expected | {f"best_acc_{kind}_3": 0.9}
    for path in tmp_path.glob("*.safetensors"):
        assert load(path)["info"].get("val/acc", told[path.stem]) == told[path.stem]


def test_a_file_without_a_validation_of_its_own_has_no_score(job, tmp_path):
    """Nor does a file that has taken the name of one with a score."""
    loop = scored(tmp_path, CheckpointHook(1, by_epoch=False), 0.5, 0.6)
    loop.bus.add(RuntimeInfoHook())
    loop.run()
    files = {n: tmp_path / f"iter_{n}.safetensors" for n in range(1, 9)}
    assert {n: scores_of(path).get("acc") for n, path in files.items()} == dict.fromkeys(range(1, 9)) | {4: 0.5, 8: 0.6}
    assert [load(path)["info"].get("val/acc") for path in files.values()] == [None] * 8  # saved before the validation
    job.loop(CheckpointHook(1, by_epoch=False), work_dir=tmp_path).run(resume=files[3])
    assert scores_of(files[4]) == scores_of(files[8]) == {}


def test_a_resumed_run_has_the_metrics_of_the_validation_before(tmp_path):
    seen = []
    loop = scored(tmp_path, CheckpointHook(1, by_epoch=False), 0.5, 0.6)
    loop.bus.add(RuntimeInfoHook())
    loop.run()
    loop = scored(tmp_path, CheckpointHook(), 0.7, max_epochs=2)
    loop.bus.add(RuntimeInfoHook())
    loop.bus.on("before_train", lambda event: seen.append(event.run.info["val/acc"]))
    loop.run(resume=tmp_path / "iter_6.safetensors")
    assert seen == [0.5]


@pytest.mark.parametrize("text", [b"", b"{", b'{"crc32:0": 7}', b"\xff"])
def test_damaged_scores_cost_no_training_and_are_written_anew(tmp_path, text, logs):
    (tmp_path / "scores.json").write_bytes(text)
    scored(tmp_path, CheckpointHook(1), 0.5).run(resume="auto")
    assert scores_of(tmp_path / "epoch_1.safetensors")["acc"] == 0.5
    assert sum("scores of these" in entry["event"] for entry in logs) == 1


def test_scores_with_odd_names_and_values_are_recorded(job, tmp_path):
    odd = {"caf\udce9": 0.1, "big": 2**70, "flag": True, "inf": float("inf"), "list": [1], "tensor": torch.tensor([0.5])}
    metrics = {name: job.Scores(value, value) for name, value in odd.items()}
    scored(tmp_path, CheckpointHook(1, save_best="caf\udce9", rule="less"), metrics=metrics, max_epochs=2).run()
    expected = {"caf\\udce9": 0.1, "big": str(2**70), "flag": True, "inf": "inf", "tensor": 0.5}
    for name in ("epoch_1", "best_caf\udce9_epoch_1", "epoch_2"):
        assert expected.items() <= scores_of(tmp_path / f"{name}.safetensors").items()


def test_the_scores_of_removed_files_are_forgotten(tmp_path):
    scored(tmp_path, CheckpointHook(1, max_keep_ckpts=1, save_best="acc"), 0.5, 0.1, 0.2, 0.3).run()
    names = [name for one in json.loads((tmp_path / "scores.json").read_text()).values() for name in one["names"]]
    assert {"best_acc_epoch_1.safetensors", "epoch_4.safetensors"} <= set(names)
    assert not {"epoch_1.safetensors", "epoch_2.safetensors"} & set(names)


@pytest.mark.parametrize(
    ("metric", "keys", "rule"),
    [
        ("accuracy/top1", (), "greater"),
        ("LOSS", (), "less"),
        ("val_loss", (), "less"),
        ("coco/bbox_mAP", (), "greater"),
        ("top_loss", (["acc", "top"], ["Top_Loss"]), "less"),  # a key that is the whole name decides
        ("top_loss", (["TOP_LOSS"], ["loss"]), "greater"),
        ("speed", (["Speed"], ["time"]), "greater"),  # own keys replace the built-in ones
        ("score", (["score"], ["Score"]), None),
        ("acc", (["speed"], ["time"]), None),
    ],
)
def test_rules_are_inferred_from_names(metric, keys, rule):
    with pytest.raises(ConfigurationError, match=f"{metric}.*rule=") if rule is None else nullcontext():
        assert find_rule(metric, *keys) == rule


# ------------------------------------------------------------------------------------------- nothing gets lost


def test_nothing_is_deleted_before_its_successor_is_durable(tmp_path):
    loop = scored(tmp_path, CheckpointHook(interval=1, max_keep_ckpts=1, save_best="acc"), 0.1, 0.2, 0.3)
    seen = []  # at each commit, before the hook deletes
    loop.bus.on("checkpoint_committed", lambda event: seen.append((event.names, files(tmp_path))), priority=0)
    loop.run()
    assert all({Path(name).stem for name in names} <= there for names, there in seen)
    assert {"epoch_1", "epoch_2", "best_acc_epoch_1"} <= seen[2][1]
    assert files(tmp_path) == {"epoch_3", "best_acc_epoch_3"}


def break_directory(directory):
    """Have a directory refuse new files, also those of root."""
    directory.rename(directory.with_name("away"))
    directory.touch()


def break_for_a_save(bus, directory, of_this, waits):
    """Take the directory away from where a save is staged to where it fails; the run waits for it at a mount point."""
    bus.on("checkpoint_staged", lambda event: of_this(event) and break_directory(directory))
    bus.on(waits, lambda event: event.run.checkpoints.wait())
    bus.on("checkpoint_failed", lambda event: (directory.unlink(), directory.with_name("away").rename(directory)))


@pytest.mark.parametrize("on_error", ["log", "raise"])
def test_a_failed_save_costs_no_file_and_ends_the_run_by_default(job, tmp_path, on_error, logs):
    out = tmp_path / "out"
    hook = CheckpointHook(interval=1, max_keep_ckpts=1, out_dir=out, on_error=on_error, save_last=False)
    loop = job.loop(hook, max_epochs=2, train_data=job.batches(1))
    break_for_a_save(loop.bus, out, lambda event: event.progress.epoch == 1, "before_train_epoch")
    with pytest.raises(CheckpointError) if on_error == "raise" else nullcontext():
        loop.run()
    assert any(entry["event"] == "checkpoint not written" for entry in logs)
    assert files(out) == {"epoch_1"}


def test_a_lower_score_is_the_best_where_the_higher_one_could_not_be_saved(job, tmp_path, logs):
    out = tmp_path / "out"
    loop = scored(tmp_path, CheckpointHook(save_best="acc", out_dir=out, on_error="log", save_last=False), 0.1, 0.9, 0.5)
    higher = "best_acc_epoch_2.safetensors"
    break_for_a_save(loop.bus, out / tmp_path.name, lambda event: event.path.endswith(higher), "after_val")
    loop.run()
    assert files(out / tmp_path.name) == {"best_acc_epoch_3"}


def test_leftovers_of_a_killed_process_are_removed_but_not_files_being_written(job, tmp_path):
    old, new = tmp_path / f"{TEMPORARY_PREFIX}old.tmp", tmp_path / f"{TEMPORARY_PREFIX}new.tmp"
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    job.loop(CheckpointHook(interval=1), work_dir=tmp_path).run()
    assert not old.exists()
    assert new.exists()


# ------------------------------------------------------------------------------------------------------ resume


def test_the_best_score_survives_a_resume(tmp_path):
    def train(*scores, **options):
        hook = CheckpointHook(save_best="acc", interval=1, max_keep_ckpts=1)
        scored(tmp_path, hook, *scores, **options).run(resume="auto")
        return files(tmp_path)

    train(0.5, 0.6)
    # Resumed before the second validation, as the file of that epoch was made; it is made again.
    assert train(0.6, 0.55, 0.58, max_epochs=4) == {"epoch_4", "best_acc_epoch_2"}
    assert train(0.58, 0.7, max_epochs=5) == {"epoch_5", "best_acc_epoch_5"}


def test_a_missing_best_file_is_forgotten(job, tmp_path):
    scored(tmp_path, CheckpointHook(save_best="acc", save_last=False), 0.9, max_epochs=1).run()
    (tmp_path / "best_acc_epoch_1.safetensors").rename(tmp_path / "mine.safetensors")
    hook = CheckpointHook(save_best="acc", save_last=False)
    scored(tmp_path, hook, 0.3, 0.2, max_epochs=3).run(resume=tmp_path / "mine.safetensors")
    assert files(tmp_path) == {"mine", "best_acc_epoch_2"}


def test_removals_missed_by_a_killed_process_are_made_later(job, tmp_path):
    class Killed(CheckpointHook):
        def checkpoint_committed(self, event): ...

    options = {"save_best": "acc", "max_keep_ckpts": 1, "interval": 1, "name": "checkpoints"}
    scored(tmp_path, Killed(**options), 0.1, 0.2).run()
    assert files(tmp_path) == {"epoch_1", "epoch_2", "best_acc_epoch_1", "best_acc_epoch_2"}
    scored(tmp_path, CheckpointHook(**options), 0.2, 0.1, max_epochs=3).run(resume="auto")
    assert files(tmp_path) == {"epoch_3", "best_acc_epoch_2"}


@pytest.mark.parametrize(
    "name",
    [
        *("../mine.safetensors", "/{}/mine.safetensors", "sub/mine.safetensors", "..", "", ".hidden.safetensors", "notes.txt"),
        *("last_checkpoint", "link.safetensors", "fifo.safetensors", "x\0.safetensors", 7, None, ["epoch_1.safetensors"]),
    ],
)
def test_foreign_names_in_a_checkpoint_are_reported_and_not_removed(tmp_path, name, logs):
    place = tmp_path / "run"
    scored(place, CheckpointHook(1, save_best="acc", name="saver"), 0.9, max_epochs=1).run()
    (place / "sub").mkdir()
    mine = [place / one for one in ("../mine.safetensors", "sub/mine.safetensors", "notes.txt", ".hidden.safetensors")]
    for file in mine:
        file.touch()
    (place / "link.safetensors").symlink_to(tmp_path / "mine.safetensors")
    os.mkfifo(place / "fifo.safetensors")
    tree = load(place / "epoch_1.safetensors")
    forged = {"name": name.format(tmp_path) if isinstance(name, str) else name, "score": 0.1}
    state = tree["bus"]["hooks"]["saver"]
    state["files"].append(forged)
    state["best"] = {"acc": [forged]}
    save(tree, tmp_path / "forged.safetensors")
    hook = CheckpointHook(1, save_best="acc", max_keep_ckpts=1, name="saver")
    scored(place, hook, 0.2, 0.3, 0.4, max_epochs=3).run(resume=tmp_path / "forged.safetensors")
    assert all(file.exists() for file in [*mine, place / "link.safetensors", place / "fifo.safetensors"])
    assert files(place) >= {"epoch_3", "best_acc_epoch_3"}
    assert sum("did not write" in entry["event"] for entry in logs) == 2


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"save_last": False}, {"by_epoch": False}, {"out_dir": "elsewhere"}], ids=str)
@pytest.mark.parametrize("every", [3, 4], ids=["within epochs", "at their ends"])
def test_files_of_saves_without_a_name_do_not_pile_up_beside_a_limit(job, tmp_path, monkeypatch, options, every):
    """A job that is preempted again and again; each time it continues from what was saved."""
    monkeypatch.chdir(tmp_path)
    for iteration in range(every, 6 * every, every):
        loop = scored(tmp_path / "run", CheckpointHook(1, max_keep_ckpts=1, **options), *[0.5] * 9, max_epochs=9)

        def preempt(event, at=iteration):
            if event.progress.iter + 1 == at:
                event.run.checkpoints.save()
                event.run.stop("signal")

        loop.bus.on("after_train_iter", preempt)
        loop.run(resume="auto")
        assert loop.counters.iter == iteration
    (left,) = files(tmp_path / "run")
    assert left in (f"iter_{iteration}", f"epoch_{iteration // 4}")
    if "out_dir" in options:
        assert len(files(tmp_path / "elsewhere" / "run")) == 1


def test_files_of_saves_without_a_name_stay_where_all_files_do(job, tmp_path):
    loop = scored(tmp_path, CheckpointHook(1, save_last=False), 0.5, 0.5)
    loop.bus.on("after_train_iter", lambda event: event.run.checkpoints.save(), every=3)
    loop.run()
    assert files(tmp_path) >= {"iter_3", "iter_6", "epoch_1", "epoch_2"}


# -------------------------------------------------------------------------------------------------- publishing


def test_published_copies_are_named_by_their_content(job, tmp_path):
    hook = CheckpointHook(interval=1, save_best="acc", published_keys=["state_dict", "info"])
    scored(tmp_path, hook, 0.9, 0.1).run()
    published = [path for path in tmp_path.glob("*.safetensors") if "-" in path.name]
    assert sorted(path.name.split("-")[0] for path in published) == ["best_acc_epoch_1", "epoch_2"]
    for path in published:
        assert path.stem.split("-")[1] == hashlib.sha256(path.read_bytes()).hexdigest()[:8]
        assert load(path).keys() == {"state_dict", "info"}
        assert scores_of(path)["acc"] == (0.9 if path.name.startswith("best") else 0.1)
        whole = load(tmp_path / f"{path.name.split('-')[0]}.safetensors")
        assert job.same(load(path)["state_dict"], whole["state_dict"])
    assert not list(tmp_path.glob(".*"))


def test_the_published_copy_of_a_removed_file_goes_when_the_next_one_is_there(job, tmp_path):
    def train(epochs):
        hook = CheckpointHook(1, max_keep_ckpts=1, published_keys="state_dict")
        scored(tmp_path, hook, *[0.5] * epochs, max_epochs=epochs).run(resume="auto")
        return [path.name.split("-")[0] for path in tmp_path.glob("*-*.safetensors")]

    assert train(1) == ["epoch_1"]
    save({"mine": 1}, tmp_path / "mine-0123abcd.safetensors")
    assert sorted(train(2)) == ["epoch_2", "mine"]


@pytest.mark.parametrize("on_error", ["log", "raise"])
def test_a_failed_publication_is_an_error_unless_it_is_to_be_logged(job, tmp_path, on_error, logs):
    """The directory is taken away once training is over."""
    out, ended = tmp_path / "out", []
    loop = job.loop(CheckpointHook(out_dir=out, published_keys="state_dict", on_error=on_error), work_dir=tmp_path)
    loop.bus.on("before_run", lambda event: event.run.defer(lambda: ended.append("run")))
    loop.bus.on("after_train", lambda event: ended.append("train"))
    loop.bus.on("after_run", lambda event: (event.run.checkpoints.wait(), break_directory(out)), priority=0)
    loop.bus.on("after_run", lambda event: ended.append("last"), priority=100)
    with pytest.raises((CheckpointError, OSError)) if on_error == "raise" else nullcontext():
        loop.run()
    if on_error == "log":
        assert ended == ["train", "last", "run"]
        assert [entry["hook"] for entry in logs if entry["event"] == "cannot publish a checkpoint"] == ["CheckpointHook"]


@pytest.mark.parametrize("on_error", ["raise", "log"])
def test_unknown_published_keys_are_reported_at_the_first_update(job, tmp_path, on_error, logs):
    hook = CheckpointHook(published_keys=["optimizer", "ema"], save_optimizer=False, on_error=on_error)
    loop = job.loop(hook, job.StopAfter(1), work_dir=tmp_path)
    told = "CheckpointHook .*optimizer, ema.*state_dict"
    with pytest.raises(CheckpointError, match=told) if on_error == "raise" else nullcontext():
        loop.run()
    assert loop.counters.iter == (on_error == "log")
    assert on_error == "raise" or any(entry["event"] == "cannot publish checkpoints" for entry in logs)


def test_the_best_files_have_names_of_the_template(job, tmp_path):
    hook = CheckpointHook(save_best="acc", filename_tmpl="model_{}.safetensors", save_last=False)
    scored(tmp_path / "epochs", hook, 0.5, 0.6).run()
    assert files(tmp_path / "epochs") == {"best_acc_model_2"}
    scored(tmp_path / "iters", hook, 0.5, 0.6, max_epochs=None, max_iters=4, val_interval=2).run()
    assert files(tmp_path / "iters") == {"best_acc_model_4"}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_file_of_another_program_with_the_name_of_a_checkpoint_is_kept(job, tmp_path, metadata, logs):
    names = ("epoch_1.safetensors", "best_acc_epoch_1.safetensors")
    for name in names:
        save_file({"w": torch.ones(3)}, tmp_path / name, metadata)
    mine = (tmp_path / names[0]).read_bytes()
    scored(tmp_path, CheckpointHook(interval=1, save_best="acc"), 0.5).run()
    kept = [tmp_path / f"{name}.old" for name in names]
    assert [path.read_bytes() for path in kept] == [mine, mine]
    assert {one["to"] for one in logs if "to" in one} == set(map(str, kept))
    assert all(load(tmp_path / name)["progress"]["epoch"] == 1 for name in names)
