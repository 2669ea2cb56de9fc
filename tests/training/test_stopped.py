"""Real processes that are stopped, told to go, or killed: resumed, they end bitwise like a run that was never stopped."""

import functools
import itertools
import os
import random
import signal
from contextlib import suppress

import pytest
import torch

from ..scripts import Script


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs the job in a process of its own: ``runs(work_dir, **options)`` returns how it ended."""
    folder, numbers = tmp_path_factory.mktemp("runs"), itertools.count()

    def run(work_dir, **options):
        answer = folder / str(next(numbers))
        options |= {"work_dir": str(work_dir), "answer": str(answer)}
        with Script(f"from tests.training.stopped import run; run(**{options})", folder, name=f"{answer.name}") as script:
            done = script.wait()
        with suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)  # workers of a loader notice the end of their parent only after seconds
        assert done.returncode in (*STOPS.values(), -signal.SIGALRM), done.stderr
        return {"status": done.returncode} | (torch.load(answer, weights_only=False) if answer.exists() else {})

    return run


@pytest.fixture(scope="module")
def through(runs, tmp_path_factory):
    """What a run without a stop ends with; each kind is run once."""
    return functools.cache(lambda **options: runs(tmp_path_factory.mktemp("through"), **options))


PLACES = {
    "in the middle of an epoch and of a window": ("after_train_iter", 9),
    "before a validation": ("before_val", 2),
    "at the end of an epoch": ("after_train_epoch", 2),
    "during a validation": ("before_val_iter", 4),
}
MIDDLE, *_, VALIDATING = PLACES
STOPS = {"clean": 0, "SIGTERM": 75, "SIGKILL": -signal.SIGKILL}


@pytest.mark.long
@pytest.mark.parametrize("how", STOPS)
@pytest.mark.parametrize(
    ("place", "options"),
    [
        *((place, {"workers": 2}) for place in PLACES),
        *((place, {"by_iter": True}) for place in (MIDDLE, VALIDATING)),  # with validations inside windows
        (MIDDLE, {"patience": 1}),  # it stops at the same epoch
    ],
)
def test_a_run_that_ends_early_and_is_resumed_ends_bitwise_like_one_that_was_never_stopped(
    parts, runs, through, tmp_path, place, how, options
):
    """Shuffled, augmented data, dropout, averages, two schedules, accumulation, early stopping."""
    whole = through(**options)
    if "patience" in options:
        assert whole["ended"] < through()["ended"]
    saving = {"interval": 2 if how == "SIGKILL" else -1, "save_last": False}
    stopped = runs(tmp_path, end=[*PLACES[place], how], saving=saving, **options)
    assert stopped["status"] == STOPS[how]
    resumed = runs(tmp_path, resume=True, saving=saving, **options)
    assert 0 < resumed["began"] < whole["ended"]
    assert resumed["ended"] == whole["ended"]
    parts.assert_same(resumed["state"], whole["state"])


@pytest.mark.parametrize(("workers", "staging"), [(0, "block"), (0, "overlap"), (2, "block")])
def test_a_run_that_is_killed_at_random_moments_until_it_gets_through_ends_bitwise_the_same(
    parts, runs, through, tmp_path, workers, staging
):
    whole = through(workers=workers)
    rng = random.Random(workers)
    saving = {"interval": 1, "staging": staging}
    for _ in range(6):
        seconds = rng.uniform(0.02, 0.9) * whole["seconds"]
        killed = runs(tmp_path, resume=True, saving=saving, workers=workers, kill_after=seconds)
        assert killed["status"] in (-signal.SIGALRM, 0)  # it may have been through
    resumed = runs(tmp_path, resume=True, saving=saving, workers=workers)
    parts.assert_same(resumed["state"], whole["state"])
