"""Two processes with DistributedDataParallel: the same training, the same decisions, one who writes."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import distributed
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from trainbus.eventloop import Bus, Hook, Run, TrainingError, get_logger
from trainbus.eventloop.checkpoint import load_whole, unwrapped
from trainbus.eventloop.training.distributed import collectives
from trainbus.hooks import CheckpointHook, ConsoleWriter, EarlyStoppingHook, EMAHook, JSONLinesWriter, LoggerHook, ProgressBar

from ..waiting import until
from . import jobs


def train(work_dir: str) -> Any:
    """Each process has a work dir of its own here."""
    logger = LoggerHook(interval=1, writers=[ConsoleWriter(), JSONLinesWriter(interval=1)])
    place = f"{work_dir}/{jobs.rank_and_size()[0]}"
    loop = jobs.make_loop(place, logger, ProgressBar(), CheckpointHook(interval=1))
    metrics = loop.run()
    return jobs.weights(loop.model), metrics, str(loop.bus.describe())


def test_training_equals_the_single_process_on_the_same_global_batch_and_rank_0_alone_writes(ranks, outcomes, tmp_path):
    ((single, metrics, table),) = ranks(train, str(tmp_path / "one"), size=1)
    assert "rank0" not in table
    two = outcomes(train, str(tmp_path / "two"))
    for outcome in two:
        assert outcome.exitcode == 0, outcome.output
        values, reduced, described = outcome.value
        torch.testing.assert_close(values, single)
        assert reduced["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
        assert reduced["accuracy"] == metrics["accuracy"]
        assert "rank0" in described
    assert "epoch 2/2" in two[0].output
    assert two[1].output == ""
    folder = tmp_path / "two" / "0"
    one, other = ((place / "scalars.jsonl").read_text().splitlines() for place in (tmp_path / "one" / "0", folder))
    assert [json.loads(line)["step"] for line in one] == [json.loads(line)["step"] for line in other]
    assert "val/loss" in other[-1]
    assert {"epoch_1.safetensors", "epoch_2.safetensors"} <= {file.name for file in folder.iterdir()}
    assert not list((tmp_path / "two" / "1").glob("*"))


class StopsAt(Hook):
    """Asks on one rank only."""

    def __init__(self, iteration: int, rank: int = 1) -> None:
        self.at, self.rank = iteration, rank

    def after_train_iter(self, event: Any) -> None:
        if event.run.rank == self.rank and event.progress.iter == self.at:
            event.run.checkpoints.save()
            event.run.stop("enough", instead="give more")


def stop(work_dir: str, epochs: int, interval: float) -> Any:
    collectives.INTERVAL = interval  # of this process
    seen: list[Any] = []
    loop = jobs.make_loop(work_dir, StopsAt(3), epochs=epochs)
    loop.bus.on("after_train_iter", lambda event: seen.append(event.progress.iter))
    loop.bus.on("after_run", lambda event: seen.append((event.run.info["stop_reason"], event.run.state.agreed.instead)))
    loop.run()
    return seen


@pytest.mark.parametrize(("epochs", "interval"), [(2, 0.0), (50, collectives.INTERVAL)], ids=["each", "periodically"])
def test_all_ranks_stop_and_save_after_the_same_iteration(ranks, tmp_path, epochs, interval):
    """Those with short iterations agree periodically."""
    first, second = ranks(stop, str(tmp_path), epochs, interval)
    assert first == second
    *iterations, reason = first
    assert iterations == list(range(5 if not interval else len(iterations)))
    assert 4 <= len(iterations) < 400
    assert reason == ("enough", "give more")
    assert [file.name for file in tmp_path.glob("*.safetensors")] == [f"iter_{len(iterations)}.safetensors"]


def ask(work_dir: str) -> Any:
    """One rank pauses the run, which a thread of it resumes once it has a checkpoint, and sets a learning rate."""
    collectives.INTERVAL = 0.0
    rates: list[float] = []

    def note(event: Any) -> None:
        assert not isinstance(unwrapped(event.run.model), DistributedDataParallel)
        rates.append(event.run.optimizers["optimizer"].param_groups[0]["lr"])

    def pause(event: Any) -> None:
        if event.run.rank == 1 and event.progress.iter == 2:
            event.run.set_lr(0.25)
            event.run.pause()
            threading.Thread(target=resume, args=(event.run,)).start()

    def resume(run: Run) -> None:
        until(lambda: "the run is paused" in [entry["event"] for entry in logs])
        run.checkpoints.save()
        until(lambda: list(Path(work_dir).glob("iter_*.safetensors")))
        run.unpause()

    with capture_logs() as logs:
        loop = jobs.make_loop(work_dir)
        loop.bus.on("before_train_iter", note)
        loop.bus.on("after_train_iter", pause)
        loop.run()
    paused = [(entry["event"], entry["iter"]) for entry in logs if entry["event"].startswith("the run ")]
    return paused, rates.index(0.25), jobs.weights(loop.model)


def test_all_ranks_pause_save_and_set_the_learning_rate_after_the_same_iteration(ranks, tmp_path):
    first, second = ranks(ask, str(tmp_path))
    assert first[:2] == second[:2]
    paused, changed, weights = first
    assert paused == [("the run is paused", changed), ("the run continues", changed)]
    assert [file.name for file in tmp_path.glob("*.safetensors")] == [f"iter_{changed}.safetensors"]
    torch.testing.assert_close(second[2], weights)


def stop_in_validation() -> Any:
    collectives.INTERVAL = 0.0
    rank, found = jobs.rank_and_size()[0], []
    for uneven in (False, True):
        data = jobs.loader(shuffle=False, rows=64 if not uneven or rank else 80)
        loop = jobs.make_loop(None, val_data=data)
        seen: list[Any] = []
        loop.bus.on("after_val_iter", lambda e: e.run.stop() if e.run.rank == 1 and e.batch_idx == 2 else None)
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

    def update(self, loss: Any) -> None: ...
    def reset(self) -> None: ...
    def compute(self) -> float:
        return float(jobs.rank_and_size()[0])


class Syncing(Alone):
    """One that syncs by itself, as torchmetrics' do."""

    sync_on_compute = True

    def compute(self) -> float:
        distributed.all_reduce(total := torch.tensor(1.0))
        return float(total)


def odd_metrics() -> Any:
    loop = jobs.make_loop(None, EarlyStoppingHook("alone", rule="greater"), metrics={"alone": Alone(), "synced": Syncing()})
    return loop.validate()


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


@pytest.mark.long
@pytest.mark.parametrize("stops", [(None, None), (9, 19)])
def test_resuming_on_2_1_and_2_processes_gives_the_weights_of_one_run(ranks, tmp_path, stops):
    straight = ranks(save, str(tmp_path / "straight"), 4, None, None, size=1)[0][0]
    place = str(tmp_path / "resumed")
    ranks(save, place, 1 if stops[0] is None else 4, None, stops[0])
    ranks(save, place, 3 if stops[1] is None else 4, "auto", stops[1], size=1)
    for resumed, iterations in ranks(save, place, 4, "auto", None):
        assert iterations == 32
        torch.testing.assert_close(resumed, straight)
    assert Path(place, "last_checkpoint").read_text() == "epoch_4.safetensors"


def with_dropout(work_dir: str, epochs: int, resume: str | None) -> Any:
    torch.manual_seed(jobs.rank_and_size()[0])
    loop = jobs.make_loop(work_dir, CheckpointHook(interval=1), epochs=epochs, dropout=0.5, seed=None)
    torch.manual_seed(10 + jobs.rank_and_size()[0])  # other masks on each rank
    loop.run(resume=resume)
    return jobs.weights(loop.model)


@pytest.mark.long
def test_every_rank_resumes_its_own_random_state(ranks, tmp_path):
    straight = ranks(with_dropout, str(tmp_path / "straight"), 2, None)
    ranks(with_dropout, str(tmp_path / "resumed"), 1, None)
    resumed = ranks(with_dropout, str(tmp_path / "resumed"), 2, "auto")
    for one in resumed:
        torch.testing.assert_close(one, straight[0], rtol=0, atol=0)


def end_with_the_best(work_dir: str, shard: bool) -> Any:
    """Spoil the weights after the first epoch. Without shards each process has a disk of its own."""
    place = work_dir if shard else f"{work_dir}/{jobs.rank_and_size()[0]}"
    hook = CheckpointHook(1, max_keep_ckpts=1, save_best="loss", load_best_model_at_end=True)
    loop = jobs.make_loop(place, EMAHook(momentum=0.5), hook, epochs=3, shard=shard)

    def spoil(event: Any) -> None:
        for parameter in event.run.model.parameters() if event.progress.epoch else ():
            parameter.data.add_(1.0)

    loop.bus.on("after_train_iter", spoil, priority=40)
    loop.run()
    assert loop.best is not None
    whole = {name: one.full_tensor() if shard else one for name, one in jobs.weights(loop.model).items()}
    return loop.best.path.name, loop.best.score, loop.validate()["loss"], whole


@pytest.mark.long
@pytest.mark.parametrize("shard", [False, True])
def test_all_ranks_end_with_the_best_weights_and_averages(ranks, tmp_path, shard):
    """Rank 0 sends the file to ranks that do not see it; of a sharded one, each reads its part."""
    for name, score, again, weights in ranks(end_with_the_best, str(tmp_path), shard):
        assert name == "best_loss_epoch_1.safetensors"
        assert again == pytest.approx(score)
        saved = load_whole(tmp_path / name if shard else tmp_path / "0" / name)
        torch.testing.assert_close(weights, saved["ema_state_dict"])
