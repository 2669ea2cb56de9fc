"""Two processes with DistributedDataParallel: the same training, the same decisions, one who writes."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import distributed
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from eventloop import Bus, Hook, Run, TrainingError, get_logger
from eventloop.training import agree as agreements
from hooks import CheckpointHook, ConsoleWriter, EarlyStoppingHook, JSONLinesWriter, LoggerHook, ProgressBar

from . import jobs


def train(work_dir: str) -> Any:
    loop = jobs.make_loop(work_dir, LoggerHook(interval=1, writers=[JSONLinesWriter(interval=1)]))
    metrics = loop.run()
    return jobs.weights(loop.model), metrics, str(loop.bus.describe())


def test_training_equals_the_single_process_on_the_same_global_batch(ranks, tmp_path):
    ((single, metrics, table),) = ranks(train, str(tmp_path / "one"), size=1)
    assert "rank0" not in table
    for values, reduced, described in ranks(train, str(tmp_path / "two")):
        for name, value in single.items():
            torch.testing.assert_close(values[name], value)
        assert reduced["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
        assert reduced["accuracy"] == metrics["accuracy"]
        assert "rank0" in described
    one, two = ((tmp_path / name / "scalars.jsonl").read_text().splitlines() for name in ("one", "two"))
    assert len(one) == len(two)  # rank 0's lines, once
    assert [json.loads(line)["step"] for line in one] == [json.loads(line)["step"] for line in two]


def write_everything(work_dir: str) -> None:
    place = f"{work_dir}/{jobs.rank_and_size()[0]}"
    hooks = [LoggerHook(interval=1, writers=[ConsoleWriter(), JSONLinesWriter()]), ProgressBar(), CheckpointHook(interval=1)]
    jobs.make_loop(place, *hooks).run()


def test_scalars_progress_and_replicated_checkpoints_are_written_by_rank_0_alone(outcomes, tmp_path):
    """Each process has a work dir of its own here."""
    first, second = outcomes(write_everything, str(tmp_path))
    assert "val/loss" in (tmp_path / "0" / "scalars.jsonl").read_text()
    assert {"epoch_1.safetensors", "epoch_2.safetensors"} <= {file.name for file in (tmp_path / "0").iterdir()}
    assert "epoch 2/2" in first.output
    assert (first.exitcode, second.exitcode) == (0, 0)
    assert second.output == ""
    assert not list((tmp_path / "1").glob("*"))


class StopsAt(Hook):
    """Asks on one rank only."""

    def __init__(self, iteration: int, rank: int = 1) -> None:
        self.at, self.rank = iteration, rank

    def after_train_iter(self, event: Any) -> None:
        if event.run.rank == self.rank and event.progress.iter == self.at:
            event.run.checkpoint_now()
            event.run.stop("enough")


def stop(work_dir: str) -> Any:
    agreements.INTERVAL = 0.0  # of this process
    seen: list[int] = []
    loop = jobs.make_loop(work_dir, StopsAt(3))
    loop.bus.on("after_train_iter", lambda event: seen.append(event.progress.iter))
    loop.bus.on("after_run", lambda event: seen.append(event.run.info["stop_reason"]))
    loop.run()
    return seen


def test_all_ranks_stop_and_save_after_the_same_iteration(ranks, tmp_path):
    first, second = ranks(stop, str(tmp_path))
    assert first == second == [0, 1, 2, 3, 4, "enough"]
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["iter_5.safetensors"]


def stop_sometime(work_dir: str) -> Any:
    loop = jobs.make_loop(work_dir, StopsAt(3), epochs=50)
    loop.run()
    return loop.counters.iter


def test_ranks_with_short_iterations_agree_periodically(ranks, tmp_path):
    first, second = ranks(stop_sometime, str(tmp_path))
    assert first == second
    assert 4 <= first < 400
    assert [file.name for file in tmp_path.glob("*.safetensors")] == [f"iter_{first}.safetensors"]


class Asks(Hook):
    """On one rank only: pauses the run, which a thread of that rank resumes once it has a checkpoint; sets a learning rate."""

    def __init__(self, logs: list[Any], work_dir: str) -> None:
        self.logs = logs
        self.work_dir = Path(work_dir)

    def after_train_iter(self, event: Any) -> None:
        run = event.run
        if run.rank == 1 and event.progress.iter == 2:
            run.set_lr(0.25)
            run.pause()
            threading.Thread(target=self.resume, args=(run,)).start()

    def resume(self, run: Any) -> None:
        while "the run is paused" not in [entry["event"] for entry in self.logs]:
            time.sleep(0.01)
        run.checkpoint_now()
        deadline = time.monotonic() + 30
        while not list(self.work_dir.glob("iter_*.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.01)
        run.resume()


def ask(work_dir: str) -> Any:
    agreements.INTERVAL = 0.0
    rates: list[float] = []

    def note(event: Any) -> None:
        assert not isinstance(event.run.unwrapped_model, DistributedDataParallel)
        rates.append(event.run.optimizers["optimizer"].param_groups[0]["lr"])

    with capture_logs() as logs:
        loop = jobs.make_loop(work_dir, Asks(logs, work_dir))
        loop.bus.on("before_train_iter", note)
        loop.run()
    paused = [(entry["event"], entry["iter"]) for entry in logs if entry["event"].startswith("the run ")]
    return paused, rates.index(0.25), jobs.weights(loop.model)


def test_all_ranks_pause_save_and_set_the_learning_rate_after_the_same_iteration(ranks, tmp_path):
    first, second = ranks(ask, str(tmp_path))
    assert first[:2] == second[:2]
    paused, changed, weights = first
    assert paused == [("the run is paused", changed), ("the run continues", changed)]
    assert [file.name for file in tmp_path.glob("*.safetensors")] == [f"iter_{changed}.safetensors"]
    for name, value in weights.items():
        torch.testing.assert_close(value, second[2][name])


class StopsInValidation(Hook):
    def after_val_iter(self, event: Any) -> None:
        if event.run.rank == 1 and event.batch_idx == 2:
            event.run.stop()


def stop_in_validation() -> Any:
    agreements.INTERVAL = 0.0
    rank, found = jobs.rank_and_size()[0], []
    for uneven in (False, True):
        data = jobs.loader(shuffle=False, rows=64 if not uneven or rank else 80)
        loop = jobs.make_loop(None, StopsInValidation(), val_data=data)
        seen: list[Any] = []
        loop.bus.on("after_val_iter", lambda event, seen=seen: seen.append(event.batch_idx))
        loop.bus.on("after_val_epoch", lambda event, seen=seen: seen.append("over"))
        loop.run()
        found.append(seen)
    return found


def test_a_stop_ends_a_validation_on_all_ranks_only_if_they_are_in_step(ranks):
    (even, longer), (even_too, shorter) = ranks(stop_in_validation)
    assert even == even_too == [0, 1, 2, 3]
    assert (longer, shorter) == ([*range(10), "over"], [*range(8), "over"])


class Alone:
    """A metric that cannot be merged."""

    def update(self, loss: Any) -> None:
        pass

    def reset(self) -> None:
        pass

    def compute(self) -> float:
        return float(jobs.rank_and_size()[0])


class Syncing(Alone):
    """One that syncs by itself, as torchmetrics' do."""

    sync_on_compute = True

    def compute(self) -> float:
        total = torch.tensor(1.0)
        torch.distributed.all_reduce(total)
        return float(total)


def odd_metrics() -> Any:
    loop = jobs.make_loop(None, EarlyStoppingHook("alone", rule="greater"), metrics={"alone": Alone(), "synced": Syncing()})
    return loop.val()


def test_an_unmergeable_metric_is_taken_from_rank_0_with_a_warning(outcomes):
    first, second = outcomes(odd_metrics)
    assert first.value == second.value
    assert first.value["alone"] == 0.0
    assert first.value["synced"] == 2.0
    assert "merge_state" in first.output
    assert "synced" not in first.output


def uneven() -> Any:
    rank = distributed.get_rank()
    model = jobs.make_loop(None).model
    loaders = [DataLoader(torch.randn(count, 4)) for count in (3, 3 + 2 * (rank == 0))]

    def train(run: Run, loader: Any) -> int:
        for _ in run.epochs(1):
            for index, inputs in enumerate(run.train(loader), 1):
                model(inputs).mean().backward()
                if index == 3:
                    break
        return run.progress.iter

    trained = []
    for loader in loaders:
        with capture_logs() as logs, Run(Bus(), model=model) as run:
            trained.append(train(run, loader))
    warned = [one["batches"] for one in logs if one["log_level"] == "warning" and "batches" in one]
    with Join([model]), Run(Bus(), model=model) as run:
        trained.append(train(run, loaders[0]))
    with pytest.raises(TrainingError) as caught, Join([model]), Run(Bus(), model=model) as run:
        train(run, loaders[1])
    return trained, warned, str(caught.value)


def test_uneven_batches_are_warned_of_at_once_and_refused_inside_torchs_join(outcomes):
    for outcome in outcomes(uneven, group_timeout=30):
        assert outcome.exitcode == 0, outcome.output
        trained, warned, error = outcome.value
        assert trained == [3, 3, 3]
        assert warned == ["rank 0: 5, rank 1: 3"]
        assert "rank 0: 5, rank 1: 3" in error


def plain_model() -> None:
    loop = jobs.make_loop(None)
    loop.model = loop.model.module
    loop.run()
    get_logger().info("told once")


def test_a_model_that_is_not_synchronised_is_warned_of(outcomes):
    first, second = outcomes(plain_model)
    for outcome in (first, second):
        assert outcome.exitcode == 0, outcome.output
        assert "DistributedDataParallel" in outcome.output
    assert "rank=1" in second.output
    assert "told once" in first.output
    assert "told once" not in second.output


def save(work_dir: str, epochs: int, resume: str | None, stop_at: int | None) -> Any:
    hooks: list[Hook] = [CheckpointHook(interval=1, save_best="loss")]
    if stop_at is not None:
        hooks.append(StopsAt(stop_at, rank=0))
    loop = jobs.make_loop(work_dir, *hooks, epochs=epochs)
    loop.run(resume=resume)
    return jobs.weights(loop.model), loop.counters.iter


@pytest.mark.parametrize("stops", [(None, None), (9, 19)])
def test_resuming_on_2_1_and_2_processes_gives_the_weights_of_one_run(ranks, tmp_path, stops):
    straight = ranks(save, str(tmp_path / "straight"), 4, None, None, size=1)[0][0]
    place = str(tmp_path / "resumed")
    ranks(save, place, 1 if stops[0] is None else 4, None, stops[0])
    ranks(save, place, 3 if stops[1] is None else 4, "auto", stops[1], size=1)
    for resumed, iterations in ranks(save, place, 4, "auto", None):
        assert iterations == 32
        for name, value in straight.items():
            torch.testing.assert_close(resumed[name], value)
    assert Path(place, "last_checkpoint").read_text() == "epoch_4.safetensors"


def with_dropout(work_dir: str, epochs: int, resume: str | None) -> Any:
    torch.manual_seed(jobs.rank_and_size()[0])
    loop = jobs.make_loop(work_dir, CheckpointHook(interval=1), epochs=epochs, dropout=0.5, seed=None)
    torch.manual_seed(10 + jobs.rank_and_size()[0])  # other masks on each rank
    loop.run(resume=resume)
    return jobs.weights(loop.model)


def test_every_rank_resumes_its_own_random_state(ranks, tmp_path):
    straight = ranks(with_dropout, str(tmp_path / "straight"), 2, None)
    ranks(with_dropout, str(tmp_path / "resumed"), 1, None)
    resumed = ranks(with_dropout, str(tmp_path / "resumed"), 2, "auto")
    for name, value in straight[0].items():
        assert torch.equal(value, resumed[0][name])
        assert torch.equal(value, resumed[1][name])
