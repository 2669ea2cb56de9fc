import math
import re
from pathlib import Path

import pytest

from eventloop import observe
from hooks.smoothing import STATES, Smoother


def push(smoother, *losses, **others):
    for loss in losses:
        smoother.push({"loss": loss, **others})


def test_measurements_are_averaged_over_the_same_iterations_and_states_are_current():
    smoother = Smoother(window_size=2)
    for value, lr in ((1.0, 0.1), (2.0, 0.2), (4.0, 0.3)):
        states = {"lr": lr, "gan/lr/group1": lr, "momentum": lr, "eta": lr}
        smoother.push({"loss": value, "accuracy": 2 * value, **states} | ({"rare": value} if value != 4.0 else {}))
    assert smoother.read() == {"loss": 3.0, "accuracy": 6.0, "rare": 2.0, **dict.fromkeys(states, 0.3)}


RATES = ("lr", "gan/lr/group1", "learning_rate", "lr-SGD", "lr-AdamW/pg1", "base_lr", "lr_backbone", "optim/lr-Adam-momentum")


@pytest.mark.parametrize(
    ("names", "value"),
    [
        ([*RATES, "momentum", "d/weight_decay", "loss_scale", "eta"], 2.0),  # a state is never averaged
        (["loss", "lrmse", "learning", "beta", "colr/loss", "val/theta", "time"], 1.5),
    ],
)
def test_measurements_are_averaged_and_states_are_not(names, value):
    smoother = Smoother(window_size=2)
    for one in (1.0, 2.0):
        smoother.push(dict.fromkeys(names, one))
    assert smoother.read() == dict.fromkeys(names, value)


def test_the_pages_know_the_same_states():
    text = (Path(observe.__file__).parent / "assets/curves.js").read_text()
    [pattern] = re.findall(r"isState = .*? => /(.*)/\.test\(", text)
    assert pattern.replace("\\/", "/") == STATES


def test_mmengines_pattern_averages_matching_keys_only():
    smoother = Smoother(window_size=2, mean_pattern="loss|time|data_time|grad_norm")
    push(smoother, 1.0, 2.0, accuracy=0.5)
    push(smoother, 4.0, accuracy=0.75)
    assert smoother.read() == {"loss": 3.0, "accuracy": 0.75}


def test_unsmoothed_values_are_the_latest_and_a_nan_shows_in_the_mean():
    smoother = Smoother()
    push(smoother, math.nan, 2.0)
    assert smoother.read(smooth=False) == {"loss": 2.0}
    assert math.isnan(smoother.read()["loss"])


def test_only_keys_reported_since_the_last_line_are_returned():
    smoother = Smoother()
    push(smoother, 1.0, grad_norm=3.0)
    push(smoother, 2.0)
    assert set(smoother.read(since=0)) == {"loss", "grad_norm"}
    assert set(smoother.read(since=1)) == {"loss"}


@pytest.mark.parametrize(
    ("window", "values"),
    [
        (2, {"mean": 3.0, "min": 2.0, "max": 4.0, "current": 2.0}),  # iterations
        ("global", {"mean": 4.0, "min": 1.0, "max": 9.0, "current": 2.0}),  # of the whole run
        (None, {"max": 9.0}),  # the same, as MMEngine's
        ("epoch", {"mean": 3.0, "max": 4.0}),  # cleared with it
    ],
)
def test_custom_windows(window, values):
    for method, value in values.items():
        size = {} if window is None else {"window_size": window}
        smoother = Smoother(custom_cfg=[{"data_src": "loss", "log_name": "mine", "method_name": method, **size}])
        push(smoother, 9.0, 1.0)
        smoother.begin_epoch()
        push(smoother, 4.0, 2.0)
        assert smoother.read()["mine"] == value


def test_a_custom_window_without_a_name_replaces_its_source():
    smoother = Smoother(custom_cfg=[{"data_src": "loss", "method_name": "max"}])
    push(smoother, 9.0, 1.0)
    assert smoother.read() == {"loss": 9.0}
