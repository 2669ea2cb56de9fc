import math
import re
from pathlib import Path

import pytest

from eventloop import observe
from hooks.smoothing import STATES, Smoother


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


MMENGINES = {"window_size": 2, "mean_pattern": "loss|time|data_time|grad_norm"}
UNNAMED = {"custom_cfg": [{"data_src": "loss", "method_name": "max"}]}
GRADIENTS = [{"loss": 1.0, "grad_norm": 3.0}, {"loss": 2.0}]


@pytest.mark.parametrize(
    ("options", "pushed", "asked", "found"),
    [
        (MMENGINES, [{"loss": one, "accuracy": one / 4} for one in (1, 2, 4)], {}, {"loss": 3.0, "accuracy": 1.0}),  # no mean
        (UNNAMED, [{"loss": 9.0}, {"loss": 1.0}], {}, {"loss": 9.0}),  # it replaces its source
        ({}, [{"loss": 1.0}, {"loss": 2.0}], {"smooth": False}, {"loss": 2.0}),
        ({}, [{"loss": 1.0}, {"loss": math.nan}], {}, {"loss": pytest.approx(math.nan, nan_ok=True)}),
        ({}, GRADIENTS, {"since": 0}, {"loss": 1.5, "grad_norm": 3.0}),
        ({}, GRADIENTS, {"since": 1}, {"loss": 1.5}),  # only what was reported since the last line
    ],
)
def test_what_a_line_reads(options, pushed, asked, found):
    smoother = Smoother(**options)
    for one in pushed:
        smoother.push(one)
    assert smoother.read(**asked) == found


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
        for loss in (9.0, 1.0, None, 4.0, 2.0):
            smoother.begin_epoch() if loss is None else smoother.push({"loss": loss})
        assert smoother.read()["mine"] == value
