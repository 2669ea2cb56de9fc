import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from trainbus import attach
from trainbus.bridges.ray import privates
from trainbus.eventloop import ConfigurationError
from trainbus.eventloop.checkpoint import load, verify

pytest.importorskip("ray")

from ray.train import CheckpointConfig

from . import jobs

pytestmark = pytest.mark.filterwarnings("default")  # Ray has many of its own

Fit = Callable[..., Any]
EPOCHS = 3
ITERATIONS = EPOCHS * jobs.BATCHES


def lines(tmp_path: Path, key: str, rank: int = 0) -> list[Any]:
    """Return what the workers of a rank have logged under a key."""
    log = tmp_path / "log.jsonl"
    found = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [line[key] for line in found if key in line and line["rank"] == rank]


def wait(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.1)


def weights(checkpoint: Any) -> list[torch.Tensor]:
    """Return the weights in a checkpoint of Ray, as its users find them: in the one file of its folder."""
    with checkpoint.as_directory() as folder:
        (file,) = Path(folder).iterdir()
        verify(file)
        return list(load(file)["state_dict"].values())


def names(folder: Path) -> set[str]:
    return {
        path.name for path in folder.iterdir() if path.name.endswith(".safetensors") or path.name.startswith("checkpoint_iter")
    }


@pytest.fixture(scope="module")
def undisturbed(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """The weights after all iterations of ``jobs.train`` with two workers, without Ray's help."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    place = tmp_path_factory.mktemp("undisturbed")
    TorchTrainer(
        jobs.train,
        train_loop_config={"log": str(place / "log.jsonl")},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(place), name="x"),
    ).fit()
    return list(load(place / "x" / f"iter_{ITERATIONS}.safetensors")["state_dict"].values())


def test_the_result_has_the_last_metrics_and_the_last_checkpoint(fit: Fit, tmp_path: Path, undisturbed: list[torch.Tensor]):
    """The metrics of a checkpoint are plain numbers: of the training, and of the validation of its weights."""
    result = fit()
    assert result.error is None
    assert result.metrics["iter"] == ITERATIONS
    assert result.metrics["error"] == pytest.approx(lines(tmp_path, "validated")[-1])
    assert set(result.metrics) == {"iter", "epoch", "loss", "error"}
    assert all(torch.equal(*pair) for pair in zip(weights(result.checkpoint), undisturbed, strict=True))
    assert [metrics["iter"] for _, metrics in result.best_checkpoints] == lines(tmp_path, "committed")


def test_num_to_keep_and_the_score_decide_which_files_stay(fit: Fit, tmp_path: Path):
    keep = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="error", checkpoint_score_order="max")
    result = fit(keep=keep, seconds=0.1)
    errors = dict(zip(lines(tmp_path, "iterations"), lines(tmp_path, "validated"), strict=True))
    best, score = result.best_checkpoints[-1]
    assert score["error"] == pytest.approx(max(errors.values()))  # of the validation after its iterations
    assert errors[score["iter"]] == pytest.approx(score["error"])
    kept = {Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints} | {f"checkpoint_iter_{ITERATIONS}"}
    folder = Path(best.path).parent
    assert names(folder) == kept | {f"{name.removeprefix('checkpoint_')}.safetensors" for name in kept}


@pytest.mark.parametrize("order", ["max", "min"])
def test_a_save_without_a_validation_is_never_the_best(fit: Fit, order: str):
    """Half of the saves are made between two validations."""
    keep = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="error", checkpoint_score_order=order)
    result = fit(epochs=2, keep=keep)
    assert {metrics["iter"] for _, metrics in result.best_checkpoints} == {10, 20}


def test_a_run_whose_worker_was_killed_goes_on_and_ends_with_the_same_weights(
    fit: Fit, tmp_path: Path, undisturbed: list[torch.Tensor]
):
    result = fit(kill_at=[1, 17])
    assert lines(tmp_path, "begins") == [0, 15]
    assert result.metrics["iter"] == ITERATIONS
    assert all(torch.equal(*pair) for pair in zip(weights(result.checkpoint), undisturbed, strict=True))
    assert [metrics["iter"] for _, metrics in result.best_checkpoints] == [5, 10, 15, 20, 25, 30]


def test_a_run_goes_on_from_a_save_that_ray_forgot_and_tells_it_again(fit: Fit, tmp_path: Path):
    fit(epochs=1)
    store = tmp_path / "store" / "x"
    (store / "checkpoint_manager_snapshot.json").unlink()
    result = fit(epochs=2)
    assert lines(tmp_path, "begins") == [0, 10]
    assert lines(tmp_path, "known") == [None, None]
    told = [metrics["iter"] for _, metrics in result.best_checkpoints]
    assert told == [5, 10, 15, 20]
    assert names(store) == {f"iter_{done}.safetensors" for done in told} | {f"checkpoint_iter_{done}" for done in told}


def test_ray_starts_again_although_checkpoints_were_pruned_here_and_there(fit: Fit, tmp_path: Path):
    """Ray refuses to start if a checkpoint that it knows is gone; the pointer and the retention survive what Ray deletes."""
    keep = CheckpointConfig(num_to_keep=1)
    fit(epochs=1, keep=keep, saves={"max_keep_ckpts": 2})
    result = fit(epochs=2, keep=keep, saves={"max_keep_ckpts": 2})
    store = tmp_path / "store" / "x"
    assert lines(tmp_path, "known") == [None, str(store / "checkpoint_iter_10")]
    assert lines(tmp_path, "begins") == [0, 10]
    assert result.metrics["iter"] == 20
    assert names(store) == {"checkpoint_iter_20", "iter_15.safetensors", "iter_20.safetensors"}


def test_a_report_that_fails_ends_no_training(fit: Fit, tmp_path: Path):
    result = fit(flawed=True)
    assert result.error is None
    assert lines(tmp_path, "finished") == [ITERATIONS]
    assert lines(tmp_path, "begins") == [0]
    assert lines(tmp_path, "committed")[-1] == ITERATIONS


def test_a_folder_that_cannot_be_made_costs_one_report(fit: Fit, tmp_path: Path):
    store = tmp_path / "store" / "x"
    store.mkdir(parents=True)
    (store / ".trainbus-checkpoint_iter_20").touch()
    result = fit()
    assert [metrics["iter"] for _, metrics in result.best_checkpoints] == [5, 10, 15, 25, 30]
    assert lines(tmp_path, "committed") == [5, 10, 15, 20, 25, 30]


def test_a_training_that_does_not_resume_moves_the_files_of_the_earlier_one_aside(fit: Fit, tmp_path: Path):
    fit(epochs=1)
    result = fit(epochs=1, resume=None)
    store = tmp_path / "store" / "x"
    assert lines(tmp_path, "begins") == [0, 0]
    assert {path.name for path in (store / "earlier-1").iterdir()} >= {"iter_5.safetensors", "iter_10.safetensors"}
    assert Path(result.checkpoint.path).name == "checkpoint_iter_10-2"  # Ray knows the first one, too


@pytest.mark.parametrize("workers", [2, (1, 2)])
def test_a_notice_that_a_machine_goes_saves_and_the_training_goes_on(fit: Fit, cluster: Any, tmp_path: Path, workers: Any):
    """The machine is taken away after the save: no iteration before the notice is lost. Ray may go on with fewer workers."""
    import ray
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    with ThreadPoolExecutor() as pool:
        training = pool.submit(fit, workers=workers, epochs=20, saves={"interval": -1}, seconds=0.05)
        wait(lambda: bool(lines(tmp_path, "done")))
        node = next(one for one in cluster.worker_nodes)
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline = int((time.time() + 8) * 1000)
        done = lines(tmp_path, "done")[-1]
        GcsClient(address=ray.get_runtime_context().gcs_address).drain_node(node.node_id, reason, "a spot machine", deadline)
        wait(lambda: bool(lines(tmp_path, "committed")))
        saved = lines(tmp_path, "committed")[0]
        wait(lambda: lines(tmp_path, "done")[-1] > saved)  # it goes on
        cluster.remove_node(node, allow_graceful=False)
        if workers != 2:
            wait(lambda: len(lines(tmp_path, "begins")) > 1, 120)
        cluster.add_node(num_cpus=1)
        result = training.result(120)
    assert saved >= done
    assert lines(tmp_path, "begins")[1] >= saved
    assert result.metrics["iter"] == 20 * jobs.BATCHES


@pytest.mark.parametrize(
    ("library", "name", "inside"),
    [("lightning", "epoch_{}", "epoch_{}.ckpt"), ("transformers", "checkpoint-{}", "checkpoint-{}")],
)
def test_another_trainer_in_a_worker_goes_on_from_what_ray_knows(
    fit: Fit, tmp_path: Path, library: str, name: str, inside: str
):
    pytest.importorskip(library)
    fit(f"train_with_{library}", epochs=1)
    result = fit(f"train_with_{library}", epochs=3)
    steps = lines(tmp_path, "committed")[0]
    assert lines(tmp_path, "begins") == [0, steps]
    assert [metrics["iter"] for _, metrics in result.best_checkpoints] == [steps, 2 * steps, 3 * steps]
    assert {"error", "val_loss"} & set(result.metrics)
    with result.checkpoint.as_directory() as folder:
        number = 3 if library == "lightning" else 3 * steps
        assert Path(folder).name == f"checkpoint_{name.format(number)}"
        assert [path.name for path in Path(folder).iterdir()] == [inside.format(number)]


def python(*arguments: object, cwd: Path) -> str:
    """Run Python in a process that knows nothing of the cluster; return what it prints."""
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=300)  # noqa: S603
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(320)
def test_the_example_trains_on_after_its_worker_was_killed(tmp_path: Path):
    pytest.importorskip("sklearn")
    printed = python(jobs.ROOT / "examples" / "ray_digits.py", cwd=tmp_path)
    assert "after 8 epochs: accuracy 9" in printed
    assert "checkpoint_epoch_8" in printed


def test_ray_is_not_imported_with_trainbus(tmp_path: Path):
    assert python("-c", "import sys, trainbus; trainbus.RayTrainHook(); print('ray' in sys.modules)", cwd=tmp_path) == "False\n"


def test_ray_without_a_name_that_is_not_documented_is_an_error():
    with pytest.raises(ConfigurationError, match="get_storage"):
        privates.check(object())


def test_in_the_local_mode_of_ray_the_hook_is_an_error(cluster: Any, tmp_path: Path):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    trainer = TorchTrainer(
        jobs.train_alone, scaling_config=ScalingConfig(num_workers=0), run_config=RunConfig(storage_path=str(tmp_path))
    )
    with pytest.raises((ConfigurationError, TrainingFailedError), match="local mode"):
        trainer.fit()


def test_a_run_on_ray_data_takes_each_sample_once_although_a_worker_was_killed(fit: Fit, cluster: Any, tmp_path: Path):
    """The loader cannot skip: the batches of the resumed epoch that were used are read again, and dropped."""
    import ray.data

    reader = cluster.add_node(num_cpus=1)
    try:
        fit("train_on_ray_data", datasets={"train": ray.data.range(80)}, kill_at=[1, 8], seconds=0.2)
    finally:
        cluster.remove_node(reader)
    assert lines(tmp_path, "begins") == [0, 5]
    taken = {(rank, epoch, step): ids for rank in (0, 1) for epoch, step, ids in lines(tmp_path, "took", rank)}
    for epoch in (0, 1):
        used = [one for (_, at, _), ids in taken.items() if at == epoch for one in ids]
        assert sorted(used) == list(range(80))


def test_ray_tune_searches_with_copies_of_a_trainer_that_has_a_bus(cluster: Any, tmp_path: Path):
    """A bus has threads and locks, which no pickle holds: the copies train without it."""
    pytest.importorskip("transformers")
    from ray import tune

    from trainbus.eventloop import Bus, Hook

    class Counter(Hook):
        trainings = 0

        def before_train(self, event: Any) -> None:
            self.trainings += 1

    counter, trainer = Counter(), jobs.make_transformers_trainer(tmp_path / "out", 1, save_strategy="no")
    attach(Bus(counter), trainer)
    best = trainer.hyperparameter_search(
        direction="minimize",
        backend="ray",
        n_trials=2,
        hp_space=lambda _: {"learning_rate": tune.uniform(1e-4, 1e-2)},
        resources_per_trial={"cpu": 1},
        storage_path=str(tmp_path / "tune"),
    )
    assert best.objective > 0
    assert counter.trainings == 0
    trainer.train()
    assert counter.trainings == 1
