"""The best checkpoints: how many stay, what ``loop.best`` tells, and the best weights at the end of a training."""

from pathlib import Path

import pytest
import torch

from trainbus.eventloop import Bus, CheckpointError, ConfigurationError, Run
from trainbus.eventloop.checkpoint import load, scores_of
from trainbus.hooks import CheckpointHook, EarlyStoppingHook, EMAHook

from .conftest import files, loss_of, scored
from .test_checkpoint import break_for_a_save

# --------------------------------------------------------------------------------------------------- save_top_k


@pytest.mark.parametrize(
    ("options", "scores", "best"),
    [
        ({"save_top_k": 2}, [0.5, 0.4, 0.6, 0.3], {1, 3}),
        ({"save_top_k": 2, "rule": "less"}, [0.5, 0.4, 0.6, 0.3], {2, 4}),
        ({"save_top_k": 2}, [0.5, 0.4, 0.5, 0.5], {1, 3}),  # the third 0.5 is not better than the second
        ({"save_top_k": 3}, [0.5, 0.5], {1, 2}),
        ({"save_top_k": 2}, [float("nan"), None, 0.1, float("nan")], {3}),
        ({"save_top_k": 2}, [float("-inf"), 0.1, float("inf"), 0.2], {3, 4}),
        ({"save_top_k": -1}, [0.5, 0.4, float("nan"), 0.6], {1, 2, 4}),
    ],
)
def test_the_k_best_files_stay(tmp_path, options, scores, best):
    scored(tmp_path, CheckpointHook(save_best="acc", save_last=False, **options), *scores).run()
    assert files(tmp_path) == {f"best_acc_epoch_{n}" for n in best}


def test_the_best_and_the_newest_files_are_counted_apart(tmp_path):
    scored(tmp_path, CheckpointHook(1, max_keep_ckpts=1, save_best="acc", save_top_k=2), 0.5, 0.6, 0.1, 0.2).run()
    assert files(tmp_path) == {"epoch_4", "best_acc_epoch_1", "best_acc_epoch_2"}


def test_the_k_best_of_each_metric(job, tmp_path):
    hook = CheckpointHook(save_best=["acc", "fid"], rule=["greater", "less"], save_top_k=2, save_last=False)
    metrics = {"acc": job.Scores(0.1, 0.2, 0.3), "fid": job.Scores(1.0, 2.0, 3.0)}
    loop = scored(tmp_path, hook, max_epochs=3, metrics=metrics)
    loop.run()
    assert files(tmp_path) == {f"best_{name}" for name in ("acc_epoch_2", "acc_epoch_3", "fid_epoch_1", "fid_epoch_2")}
    assert loop.best == (tmp_path / "best_acc_epoch_3.safetensors", 0.3, "acc")


@pytest.mark.parametrize(
    ("then", "left"), [(2, {"epoch_4", "best_acc_epoch_1", "best_acc_epoch_4"}), (1, {"epoch_4", "best_acc_epoch_4"})]
)
def test_the_k_best_survive_a_resume_also_with_another_k(tmp_path, then, left):
    options = {"interval": 1, "max_keep_ckpts": 1, "save_best": "acc"}
    scored(tmp_path, CheckpointHook(**options, save_top_k=2), 0.5, 0.4, 0.3).run()
    loop = scored(tmp_path, CheckpointHook(**options, save_top_k=then), 0.3, 0.6, max_epochs=4)
    loop.run(resume="auto")
    assert files(tmp_path) == left
    assert loop.best == (tmp_path / "best_acc_epoch_4.safetensors", 0.6, "acc")


def test_no_best_file_is_removed_before_a_better_one_is_durable(tmp_path):
    loop = scored(tmp_path, CheckpointHook(save_best="acc", save_top_k=2, save_last=False), 0.1, 0.2, 0.3, 0.25)
    seen = []  # at each commit, before the hook removes
    loop.bus.on("checkpoint_committed", lambda event: seen.append(files(tmp_path)), priority=0)
    loop.run()
    assert [{int(name[-1]) for name in there} for there in seen] == [{1}, {1, 2}, {1, 2, 3}, {2, 3, 4}]
    assert files(tmp_path) == {"best_acc_epoch_3", "best_acc_epoch_4"}


def test_a_best_file_that_could_not_be_written_costs_no_other(tmp_path, logs):
    out = tmp_path / "out"
    hook = CheckpointHook(save_best="acc", save_top_k=2, out_dir=out, on_error="log", save_last=False)
    loop = scored(tmp_path, hook, 0.1, 0.2, 0.9, 0.3)
    lost = "best_acc_epoch_3.safetensors"
    break_for_a_save(loop.bus, out / tmp_path.name, lambda event: event.path.endswith(lost), "after_val")
    loop.run()
    assert files(out / tmp_path.name) == {"best_acc_epoch_2", "best_acc_epoch_4"}
    assert loop.best.score == 0.3


def test_the_k_best_files_in_a_store(tmp_path, there):
    hook = CheckpointHook(out_dir="memory://bucket", save_best="acc", save_top_k=2, save_last=False)
    loop = scored(tmp_path / "run", hook, 0.1, 0.3, 0.2)
    loop.run()
    assert there() == {"best_acc_epoch_2", "best_acc_epoch_3", "last_checkpoint"}
    assert str(loop.best.path) == "memory://bucket/run/best_acc_epoch_2.safetensors"
    assert scores_of(loop.best.path)["acc"] == loop.best.score == 0.3


def test_published_is_the_best_of_the_k(tmp_path):
    hook = CheckpointHook(save_best="acc", save_top_k=3, save_last=False, published_keys="state_dict")
    scored(tmp_path, hook, 0.1, 0.3, 0.2).run()
    assert [name.split("-")[0] for name in files(tmp_path) if "-" in name] == ["best_acc_epoch_2"]


@pytest.mark.parametrize(
    "options",
    [
        *({"save_best": "acc", "save_top_k": k} for k in (0, -2, 1.5, "2", None, True)),
        *({"save_top_k": 2}, {"load_best_model_at_end": True}, {"save_best": "acc", "load_best_model_at_end": 1}),
    ],
)
def test_wrong_options_of_the_best_are_refused_when_the_hook_is_made(options):
    with pytest.raises(ConfigurationError, match=[*options][-1]):
        CheckpointHook(**options)


# ---------------------------------------------------------------------------------------------------- loop.best


def test_the_best_is_none_before_the_first_and_the_durable_one_then(tmp_path):
    loop, seen = scored(tmp_path, CheckpointHook(1, save_best="acc"), 0.5, 0.4, 0.6), []

    def see(event):
        event.run.checkpoints.wait()
        seen.append(event.run.checkpoints.best)

    loop.bus.on("after_val", see, priority="LOWEST")
    assert loop.best is None
    loop.run()
    paths = [tmp_path / f"best_acc_epoch_{n}.safetensors" for n in (1, 1, 3)]
    assert seen == [*zip(paths, [0.5, 0.5, 0.6], ["acc"] * 3, strict=True)]
    assert loop.best == seen[-1]


def test_without_a_best_file_there_is_no_best(job, tmp_path):
    loop = job.loop(CheckpointHook(1), work_dir=tmp_path, val_data=job.batches(1))
    loop.run()
    assert loop.best is None
    loop = scored(tmp_path, CheckpointHook(save_best="acc"), float("nan"))
    loop.run()
    assert loop.best is None


@pytest.mark.parametrize("name", ["best_acc_epoch_2", "epoch_2", "epoch_3"])
def test_a_run_resumed_from_the_best_file_or_around_it_goes_on_with_its_score(tmp_path, name):
    """The best file was saved before its validation, which the resumed run repeats."""
    scores = {2: 0.9, 3: 0.3}
    scored(tmp_path, CheckpointHook(1, save_best="acc"), 0.1, 0.9, 0.3).run()
    begins = int(name[-1])
    again = [scores[n] for n in range(begins, 4)]
    loop = scored(tmp_path, CheckpointHook(1, save_best="acc"), *again, 0.5, max_epochs=4)
    loop.run(resume=tmp_path / f"{name}.safetensors")
    assert files(tmp_path) == {"epoch_1", "epoch_2", "epoch_3", "epoch_4", "best_acc_epoch_2"}
    assert loop.best == (tmp_path / "best_acc_epoch_2.safetensors", 0.9, "acc")
    assert load(tmp_path / "epoch_4.safetensors")["bus"]["hooks"]["CheckpointHook"]["best"]["acc"][-1]["score"] == 0.9


# -------------------------------------------------------------------------------------- load_best_model_at_end


def drifting(loop):
    """Move a weight in each iteration, so that no two states are alike."""
    loop.bus.on("after_train_iter", lambda event: event.run.model[0].weight.data.add_(1.0), priority=40)
    return loop


@pytest.mark.parametrize("hooks", [[], [EMAHook(momentum=0.5)]], ids=["raw", "averaged"])
def test_the_best_weights_are_loaded_when_the_last_ones_are_saved(job, tmp_path, hooks, logs):
    """With averages, the model and the average are as they were at the best validation: a validation gives its score again."""
    hook = CheckpointHook(1, save_best="loss", rule="less", load_best_model_at_end=True)
    loop = drifting(job.loop(*hooks, hook, work_dir=tmp_path, max_epochs=4, val_data=job.batches(2)))
    loop.run()
    best, last = load(loop.best.path), load(tmp_path / "epoch_4.safetensors")
    raw = "ema_state_dict" if hooks else "state_dict"
    assert job.same(job.weights(loop.model), best[raw])
    assert not job.same(best[raw], last[raw])
    assert loop.validate()["loss"] == loop.best.score == min(row["loss"] for row in loop.history if row["stage"] == "val")
    assert job.same(job.weights(loop.model), best[raw])
    (told,) = [entry for entry in logs if "best weights" in entry["event"]]
    assert (told["path"], told["metric"], told["score"]) == (str(loop.best.path), "loss", loop.best.score)


def test_the_best_weights_come_after_an_early_stop_and_in_a_loop_of_ones_own_before_its_test(job, tmp_path):
    hook = CheckpointHook(save_best="acc", load_best_model_at_end=True)
    loop = drifting(scored(tmp_path / "stopped", hook, 0.5, 0.4, 0.3, 0.9))
    loop.bus.add(EarlyStoppingHook("acc", patience=2))
    loop.run()
    assert loop.counters.epoch == 3
    assert job.same(job.weights(loop.model), load(tmp_path / "stopped" / "best_acc_epoch_1.safetensors")["state_dict"])
    model, scores = job.model(), iter([0.5, 0.4])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bus = Bus(CheckpointHook(save_best="acc", load_best_model_at_end=True))
    with Run(bus, model=model, optimizer=optimizer, work_dir=tmp_path / "own") as run:
        for _ in run.epochs(2):
            for batch in run.train(job.batches(1)):
                loss_of(model, batch).backward()
                optimizer.step()
            for _ in run.validate(job.batches(1)):
                run.report(acc=next(scores))
        for _ in run.test(job.batches(1)):
            tested = job.weights(model)
    assert job.same(tested, load(tmp_path / "own" / "best_acc_epoch_1.safetensors")["state_dict"])


@pytest.mark.parametrize("how", ["an exception", "another process goes on"])
def test_the_best_weights_are_not_loaded_into_a_training_that_is_not_over(job, tmp_path, how):
    loop = drifting(scored(tmp_path, CheckpointHook(save_best="acc", load_best_model_at_end=True), 0.5, 0.4, 0.3))

    def ends(event):
        if event.progress.epoch == 2:
            event.run.stop("preempted", exit_code=75) if how != "an exception" else 1 / 0

    loop.bus.on("after_val_epoch", ends)
    with pytest.raises(ZeroDivisionError if how == "an exception" else SystemExit):
        loop.run()
    assert not job.same(job.weights(loop.model), load(tmp_path / "best_acc_epoch_1.safetensors")["state_dict"])


def test_a_best_file_that_is_gone_is_an_error_with_the_way_out(tmp_path):
    loop = scored(tmp_path, CheckpointHook(save_best="acc", load_best_model_at_end=True), 0.5, 0.4)
    loop.bus.on("after_train", lambda event: Path(event.run.checkpoints.best.path).unlink())
    with pytest.raises(CheckpointError, match=r"best_acc_epoch_1.safetensors is gone.*load_weights"):
        loop.run()
    assert files(tmp_path) == {"epoch_2"}


def test_without_a_best_file_the_last_weights_stay_and_the_log_tells(job, tmp_path, logs):
    loop = scored(tmp_path, CheckpointHook(save_best="acc", load_best_model_at_end=True), float("nan"))
    loop.run()
    assert job.same(job.weights(loop.model), load(tmp_path / "epoch_1.safetensors")["state_dict"])
    assert any("no best checkpoint" in entry["event"] for entry in logs)
