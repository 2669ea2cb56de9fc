"""The example of a search with Ray Tune: ``examples/ray_tune_digits.py``."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trainbus.eventloop.checkpoint import load

pytest.importorskip("ray.tune")
pytest.importorskip("sklearn")

from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining

from ...waiting import until
from . import jobs

pytestmark = pytest.mark.filterwarnings("default")  # Ray has many of its own

PER_EPOCH = 44


def search(folder: Path, epochs: int, tune_config: Any = None, **space: Any) -> list[Any]:
    """Return the results of all trials, in the order of the grid."""
    found = tune.Tuner(
        jobs.train_in_tune,
        param_space={"lr": 1e-2, "width": 16, "epochs": epochs, "folder": str(folder), "fails_at": 0} | space,
        tune_config=tune_config,
        run_config=tune.RunConfig(
            storage_path=str(folder.parent), name=folder.name, failure_config=tune.FailureConfig(max_failures=1), verbose=0
        ),
    ).fit()
    assert not found.errors
    return list(found)


def state(result: Any) -> dict[str, Any]:
    with result.checkpoint.as_directory() as folder:
        return load(Path(folder, "checkpoint.safetensors"))


def began(result: Any, folder: Path) -> list[int]:
    return [*map(int, (folder / f"began-{name(result)}").read_text().split())]


def name(result: Any) -> str:
    return "_".join(Path(result.path).name.split("_")[:5])  # train_in_tune_ID_00000_...


def test_a_trial_that_fails_goes_on_from_its_last_report_and_ends_with_the_same_weights(cluster: Any, tmp_path: Path):
    folder = tmp_path / "search"
    whole, failed = search(folder, epochs=4, fails_at=tune.grid_search([0, 2 * PER_EPOCH + 10]))
    assert (began(whole, folder), began(failed, folder)) == ([0], [0, 2 * PER_EPOCH])
    assert whole.metrics["accuracy"] == failed.metrics["accuracy"] > 0.5
    for result in (whole, failed):
        assert (result.metrics["epoch"], result.metrics["training_iteration"]) == (4, 4)
        assert list(result.metrics_dataframe["epoch"]) == [1, 2, 3, 4]
    ours, theirs = state(whole), state(failed)
    assert all(torch.equal(ours["state_dict"][key], theirs["state_dict"][key]) for key in ours["state_dict"])
    assert str(ours["optimizer"]) == str(theirs["optimizer"])


def test_a_trial_that_is_behind_is_ended_and_the_record_says_that_it_was_stopped(cluster: Any, tmp_path: Path):
    folder = tmp_path / "search"
    asha = ASHAScheduler(metric="accuracy", mode="max", time_attr="epoch", max_t=9, grace_period=1, reduction_factor=2)
    one_by_one = tune.TuneConfig(scheduler=asha, max_concurrent_trials=1)
    good, bad = search(folder, 3, one_by_one, lr=tune.grid_search([1e-2, 1e-5]))
    assert (good.metrics["epoch"], bad.metrics["epoch"]) == (3, 1)
    assert state_of(good, folder) == "finished"
    until(lambda: state_of(bad, folder) == "stopped")  # Tune does not wait for the end of its actor


def test_a_trial_of_a_population_trains_on_from_a_better_one_with_its_own_rate(cluster: Any, tmp_path: Path):
    population = PopulationBasedTraining(
        metric="accuracy",
        mode="max",
        time_attr="epoch",
        perturbation_interval=1,
        hyperparam_mutations={"lr": [5e-3]},
        resample_probability=1.0,
        quantile_fraction=0.5,
        synch=True,  # both pause after an epoch
    )
    good, bad = search(tmp_path / "search", 2, tune.TuneConfig(scheduler=population), lr=tune.grid_search([1e-2, 1e-6]))
    assert began(bad, tmp_path / "search")[:2] == [0, PER_EPOCH]
    assert abs(bad.metrics["accuracy"] - good.metrics["accuracy"]) < 0.2  # alone it learns nothing
    files = sorted(Path(bad.path).glob("checkpoint_*/checkpoint.safetensors"))
    rates = [load(file)["optimizer"]["optimizer"]["param_groups"][0]["lr"] for file in files]
    assert 5e-3 in rates


def state_of(result: Any, folder: Path) -> str:
    return str(json.loads((folder / name(result) / "run.json").read_text())["sessions"][-1]["state"])


def test_the_hook_for_ray_train_is_an_error_in_a_function_of_tune(cluster: Any, tmp_path: Path):
    run_config = tune.RunConfig(storage_path=str(tmp_path), verbose=0)
    [error] = tune.Tuner(jobs.train_in_tune_with_the_hook_of_train, run_config=run_config).fit().errors
    assert "ConfigurationError" in str(error)
    assert "tune.report()" in str(error)
