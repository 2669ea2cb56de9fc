"""Real processes that are stopped, told to go, or killed: resumed, they end bitwise like a run that was never stopped."""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
from pathlib import Path

import pytest

from .stopped import serve


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs the script's job in a process of its own: ``runs(work_dir, **options)`` returns how it ended."""
    context = multiprocessing.get_context("forkserver")
    orders, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,))
    server.start()
    theirs.close()

    def run(work_dir: Path, **options):
        orders.send({"work_dir": str(work_dir), **options})
        answer = orders.recv()
        assert "error" not in answer, answer["error"]
        return answer

    yield run
    orders.close()
    server.join()


@pytest.fixture(scope="module")
def through(runs, tmp_path_factory):
    """What a run without a stop ends with; each kind is run once."""
    known = {}

    def find(**options):
        key = json.dumps(options, sort_keys=True)
        if key not in known:
            known[key] = runs(tmp_path_factory.mktemp("through"), **options)
        return known[key]

    return find


PLACES = {
    "in the middle of an epoch and of a window": ("after_train_iter", 9),
    "before a validation": ("before_val", 2),
    "at the end of an epoch": ("after_train_epoch", 2),
    "during a validation": ("before_val_iter", 4),
}
STOPS = {"clean": 0, "SIGTERM": 0, "SIGKILL": -signal.SIGKILL}


def stop_and_resume(runs, through, work_dir, place, how, **options):
    whole = through(**options)
    saving = {"interval": 2 if how == "SIGKILL" else -1, "save_last": False}
    stopped = runs(work_dir, end=[*PLACES[place], how], saving=saving, **options)
    assert stopped["status"] == STOPS[how]
    resumed = runs(work_dir, resume=True, saving=saving, **options)
    assert 0 < resumed["began"] < whole["ended"]
    assert resumed["ended"] == whole["ended"]
    return resumed["digest"], whole["digest"]


@pytest.mark.parametrize("how", STOPS)
@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_ends_early_and_is_resumed_ends_bitwise_like_one_that_was_never_stopped(runs, through, tmp_path, place, how):
    """Shuffled, augmented data from two workers, dropout, averages, two schedules, accumulation, early stopping."""
    resumed, whole = stop_and_resume(runs, through, tmp_path, place, how, workers=2)
    assert resumed == whole


@pytest.mark.parametrize("how", STOPS)
@pytest.mark.parametrize("place", ["in the middle of an epoch and of a window", "during a validation"])
def test_the_same_for_a_run_by_iterations_with_validations_inside_windows(runs, through, tmp_path, place, how):
    resumed, whole = stop_and_resume(runs, through, tmp_path, place, how, by_iter=True)
    assert resumed == whole


@pytest.mark.parametrize(("workers", "staging"), [(0, "block"), (0, "overlap"), (2, "block")])
def test_a_run_that_is_killed_at_random_moments_until_it_gets_through_ends_bitwise_the_same(
    runs, through, tmp_path, workers, staging
):
    whole = through(workers=workers)
    rng = random.Random(workers)
    saving = {"interval": 1, "staging": staging}
    for _ in range(6):
        seconds = rng.uniform(0.02, 0.9) * whole["seconds"]
        killed = runs(tmp_path, resume=True, saving=saving, workers=workers, kill_after=seconds)
        assert killed["status"] in (-signal.SIGKILL, 0)  # it may have been through
    resumed = runs(tmp_path, resume=True, saving=saving, workers=workers)
    assert resumed["digest"] == whole["digest"]


@pytest.mark.parametrize("how", STOPS)
def test_early_stopping_of_a_resumed_run_stops_at_the_same_epoch(runs, through, tmp_path, how):
    whole = through(patience=1)
    assert whole["ended"] < through()["ended"]
    stop_and_resume(runs, through, tmp_path, "in the middle of an epoch and of a window", how, patience=1)
