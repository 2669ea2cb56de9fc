"""``RayTrainHook`` with a stand-in for Ray, which is another process: what it is told, in which order, and when it fails."""

import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainbus.bridges.ray import RayTrainHook
from trainbus.bridges.ray import hook as ray_hook
from trainbus.bridges.ray.reports import RayReports
from trainbus.bridges.ray.worker import RayWorker, ranked
from trainbus.eventloop import Bus, ConfigurationError, Hook, Run, TrainLoop
from trainbus.eventloop.checkpoint import load, save, scores_of
from trainbus.hooks import CheckpointHook


class Ray:
    """Takes reports as Ray does: with ``keeps``, it deletes the folders of all checkpoints but the newest ones."""

    rank, size = 0, 1

    def __init__(self, folder: Path, *, keeps: int | None = None, fails: bool = False, takes: float = 0.0) -> None:
        self.folder, self.keeps = folder, keeps
        self.told: list[tuple[dict, Path | None]] = []
        self.info = None
        self._fails, self._takes = fails, takes
        self.threads: set[threading.Thread] = set()

    def work_dir(self) -> Path:
        return self.folder

    def at(self, path: str) -> Path:
        return Path(path)

    def report(self, metrics: dict, name: str) -> None:
        folder = self.folder / name if name else None
        self.threads.add(threading.current_thread())
        time.sleep(self._takes)
        if self._fails:
            raise RuntimeError("the controller is gone")
        self.told.append((metrics, folder))
        known = [folder for _, folder in self.told if folder is not None and folder.exists()]
        for old in known[: -self.keeps] if self.keeps else ():
            for path in old.iterdir():
                path.unlink()
            old.rmdir()

    def notice(self) -> SimpleNamespace | None:
        self.threads.add(threading.current_thread())
        return self.info

    def reported(self, seconds: float) -> dict[str, int]:
        return {folder.name: metrics["iter"] for metrics, folder in self.told if folder is not None and folder.exists()}

    @property
    def checkpoints(self) -> list[tuple[str, int]]:
        return [(folder.name, metrics["iter"]) for metrics, folder in self.told if folder is not None]


@pytest.fixture
def train(tmp_path, change):
    """Train four epochs of two iterations, with a validation each, in a worker of a stand-in for Ray."""

    def train(ray: Ray, *more, epochs: int = 4, resume: str | None = "auto", **options) -> TrainLoop:
        change(ray_hook.WORKER, lambda: ray)
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        loop = TrainLoop(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            step=lambda model, batch: {"loss": model(batch).square().mean(), "text": "a", "vector": torch.ones(2)},
            train_data=[torch.ones(3, 2)] * 2,
            val_data=[torch.ones(3, 2)],
            bus=Bus(CheckpointHook(**({"interval": 1} | options)), RayTrainHook(0.1), *more),
            max_epochs=epochs,
        )
        loop.run(resume=resume)
        return loop

    return train


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix == ".safetensors" or path.name.startswith("checkpoint_")}


def test_each_durable_save_is_told_with_the_metrics_of_its_weights(train, tmp_path):
    ray = Ray(tmp_path)
    train(ray)
    assert ray.checkpoints == [(f"checkpoint_epoch_{n}", 2 * n) for n in (1, 2, 3, 4)]
    for metrics, folder in ray.told:
        if folder is not None:
            (file,) = folder.iterdir()
            assert file.samefile(tmp_path / file.name)  # without further space
            weights = load(file)["state_dict"]
            loss = (torch.ones(2) @ weights["weight"][0] + weights["bias"]).square().item()
            assert metrics["val_loss"] == pytest.approx(loss)  # of the validation after this epoch
            assert scores_of(tmp_path / file.name) == {"loss": metrics["val_loss"]}
            assert {type(value) for value in metrics.values()} <= {int, float}
    assert threading.current_thread() not in ray.threads
    assert len(ray.threads) == 1


def test_a_save_without_a_validation_has_no_metrics_of_an_earlier_one(train, tmp_path):
    """Ray would rank it by the score of other weights."""
    ray = Ray(tmp_path)
    train(ray, interval=1, by_epoch=False)
    of = {metrics["iter"]: "val_loss" in metrics for metrics, folder in ray.told if folder is not None}
    assert of == {done: done % 2 == 0 for done in range(1, 9)}


@pytest.mark.parametrize("metrics", [{}, {"score": float("nan")}, {"score": float("inf")}, {"score": float("-inf")}])
@pytest.mark.parametrize("greater_is_better", [True, False])
def test_a_save_that_ray_cannot_rank_has_the_worst_score(metrics, greater_is_better):
    """Ray's own choice is the best place (order "min"), or an error when it starts again (NaN)."""
    score = ranked(metrics, "score", greater_is_better)["score"]
    assert math.isfinite(score)
    assert score < -1e300 if greater_is_better else score > 1e300
    assert ranked(metrics, None, greater_is_better) == metrics
    assert ranked({"score": 1}, "score", greater_is_better) == {"score": 1}


def test_what_ray_deletes_goes_unless_the_retention_of_the_run_keeps_it(train, tmp_path):
    train(Ray(tmp_path / "all", keeps=2))
    names = {"epoch_3.safetensors", "epoch_4.safetensors", "checkpoint_epoch_3", "checkpoint_epoch_4"}
    assert files(tmp_path / "all") == names
    train(Ray(tmp_path / "three", keeps=1), max_keep_ckpts=3)
    assert files(tmp_path / "three") == {"checkpoint_epoch_4", *(f"epoch_{n}.safetensors" for n in (2, 3, 4))}


def test_ray_keeps_what_the_retention_of_the_run_removes(train, tmp_path):
    """It does not start again if a checkpoint that it knows is gone."""
    train(Ray(tmp_path), max_keep_ckpts=1)
    assert files(tmp_path) == {"epoch_4.safetensors", *(f"checkpoint_epoch_{n}" for n in (1, 2, 3, 4))}


def test_a_resumed_run_tells_ray_what_it_forgot(train, tmp_path):
    first, second = Ray(tmp_path), Ray(tmp_path)
    train(first, epochs=3)
    second.told = first.told[:-1] if first.told[-1][1] else first.told[:-2]  # the last one was lost
    before = len(second.checkpoints)
    assert before == 2
    train(second)
    assert second.checkpoints[before:] == [("checkpoint_epoch_3", 6), ("checkpoint_epoch_4", 8)]
    lost, told = (
        [metrics for metrics, _ in one.told if metrics["iter"] == 6 and "val_loss" in metrics] for one in (first, second)
    )
    assert told[0] == lost[0]


def test_a_best_checkpoint_is_a_second_name_that_ray_is_not_told(train, tmp_path):
    ray = Ray(tmp_path, keeps=1)
    train(ray, save_best="loss", rule="less")
    assert [name for name, _ in ray.checkpoints] == [f"checkpoint_epoch_{n}" for n in (1, 2, 3, 4)]
    assert files(tmp_path) == {"checkpoint_epoch_4", "epoch_4.safetensors", "best_loss_epoch_4.safetensors"}


def test_a_failing_report_is_logged_once_and_ends_no_training(train, tmp_path, logs):
    loop = train(Ray(tmp_path, fails=True))
    assert loop.counters.epoch == 4
    (line,) = [one for one in logs if one.get("id") == "ray-reports-ended"]
    assert "the controller is gone" in line["error"]


def test_the_end_of_a_run_waits_for_ray_only_so_long(train, tmp_path, change, logs):
    change(ray_hook.END, 0.3)
    loop = train(Ray(tmp_path, takes=5.0))
    assert loop.counters.epoch == 4
    assert any(one.get("id") == "ray-report-late" for one in logs)


@pytest.mark.long
def test_a_notice_saves_and_training_goes_on(train, tmp_path):
    ray = Ray(tmp_path)

    class Notice(Hook):
        def after_train_iter(self, event):
            if event.progress.iter == 1:
                ray.info = SimpleNamespace(preempted_ranks=[0], deadline_ms=None)
                deadline = time.monotonic() + 20
                while not event.run.state.own.save and time.monotonic() < deadline:
                    time.sleep(0.01)

    loop = train(ray, Notice(), save_last=False, interval=-1)
    assert loop.counters.epoch == 4
    assert [name for name, _ in ray.checkpoints] == ["checkpoint_iter_2"]


def test_ray_is_told_the_newest_of_many_saves_that_wait(tmp_path):
    ray, gone = Ray(tmp_path, keeps=2), []
    reports = RayReports(ray, every=60.0, noticed=print, pruned=gone.append)
    for done in range(1, 13):
        save({"x": torch.ones(1)}, path := tmp_path / f"iter_{done}.safetensors")
        reports.staged(str(path))
        reports.measured({"loss": 1.0 / done})
        reports.moved()
        reports.keep(str(path), done)
        reports.committed([str(path)], done)
    reports.start(tmp_path, 0)
    reports.end(20.0)
    assert [done for _, done in ray.checkpoints] == list(range(5, 13))
    assert [metrics["loss"] for metrics, folder in ray.told if folder] == [1.0 / done for done in range(5, 13)]
    assert {path.name for path in gone} == {f"iter_{done}.safetensors" for done in range(1, 11)}


@pytest.mark.parametrize("when", ["before_run", "before_train", "before_train_iter"])
def test_a_hook_that_is_added_during_a_run_is_an_error(when):
    bus = Bus()
    bus.on(when, lambda event: bus.add(RayTrainHook()), once=1)
    with pytest.raises(ConfigurationError, match="RayTrainHook"), Run(bus, model=torch.nn.Linear(1, 1)) as run:
        for _ in run.epochs(1):
            list(run.train([1, 2]))


def test_two_of_them_are_an_error(train, tmp_path):
    with pytest.raises(ConfigurationError, match="two RayTrainHooks"):
        train(Ray(tmp_path), RayTrainHook())


def test_outside_of_a_worker_the_hook_is_an_error():
    with pytest.raises(ConfigurationError, match=r"RayTrainHook"):
        Run(Bus(RayTrainHook()), model=torch.nn.Linear(1, 1))
    with pytest.raises(ConfigurationError):
        RayWorker()
