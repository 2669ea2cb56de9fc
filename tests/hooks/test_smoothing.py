import math
import random
import re
from pathlib import Path

import pytest

from trainbus import observe
from trainbus.hooks.smoothing import STATES, Smoother


def test_measurements_are_averaged_over_the_same_iterations_and_states_are_current():
    smoother = Smoother(window_size=2)
    for update, (value, lr) in enumerate([(1.0, 0.1), (2.0, 0.2), (4.0, 0.3)]):
        states = {"lr": lr, "gan/lr/group1": lr, "momentum": lr, "eta": lr}
        smoother.push({"loss": value, "accuracy": 2 * value, **states}, update)
    assert smoother.line(1) == {3: {"loss": 3.0, "accuracy": 6.0, **dict.fromkeys(states, 0.3)}}


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
    for update, one in enumerate((1.0, 2.0)):
        smoother.push(dict.fromkeys(names, one), update)
    assert smoother.line(1) == {2: dict.fromkeys(names, value)}


def test_the_pages_know_the_same_states():
    text = (Path(observe.__file__).parent / "assets/curves.js").read_text()
    [pattern] = re.findall(r"isState = .*? => /(.*)/\.test\(", text)
    assert pattern.replace("\\/", "/") == STATES


MMENGINES = {"window_size": 2, "mean_pattern": "loss|time|data_time|grad_norm"}
UNNAMED = {"custom_cfg": [{"data_src": "loss", "method_name": "max"}]}


@pytest.mark.parametrize(
    ("options", "pushed", "asked", "found"),
    [
        (MMENGINES, [{"loss": one, "accuracy": one / 4} for one in (1, 2, 4)], {}, {"loss": 3.0, "accuracy": 1.0}),  # no mean
        (UNNAMED, [{"loss": 9.0}, {"loss": 1.0}], {}, {"loss": 9.0}),  # it replaces its source
        ({}, [{"loss": 1.0}, {"loss": 2.0}], {"smooth": False}, {"loss": 2.0}),
        ({}, [{"loss": 1.0}, {"loss": math.nan}], {}, {"loss": pytest.approx(math.nan, nan_ok=True)}),
    ],
)
def test_what_a_line_reads(options, pushed, asked, found):
    smoother = Smoother(**options)
    for update, one in enumerate(pushed):
        smoother.push(one, update)
    assert smoother.line(1, **asked) == {len(pushed): found}


def lines_of(reported, interval, *, length=None, accumulate=1, learns_from=0, window=10):
    """Return what a writer gets of one epoch: a row for each line and each event, by iteration."""
    smoother, rows = Smoother(window), []
    smoother.reach = max(window, interval)
    smoother.begin_run()
    updates = 0
    for number in range(1, (length or max(reported)) + 1):
        smoother.push({"v": reported[number]} if number in reported else {}, updates)
        updates += number % accumulate == 0 and number >= learns_from
        begin = number - (number - 1) % interval
        rows += sorted((smoother.events(begin) if number % interval else smoother.line(begin)).items())
    if left := number % interval:
        rows += sorted(smoother.end(number - left + 1, line=number < interval).items())
    return [(number, row["v"]) for number, row in rows if row]


def each(*numbers):
    return {number: float(number) for number in numbers}


@pytest.mark.parametrize(
    ("reported", "options", "rows"),
    [
        (each(*range(1, 21)), {}, [(10, 5.5), (20, 15.5)]),
        (each(*range(3, 21)), {}, [(10, 6.5), (20, 15.5)]),  # begins late
        (each(*range(4, 41, 4)), {"accumulate": 4}, [(10, 6.0), (20, 16.0), (30, 26.0), (40, 36.0)]),  # a gradient's norm
        (each(1, 9, 17, 25), {}, [(1, 1.0), (9, 9.0), (17, 17.0), (25, 25.0)]),  # a validation's loss
        (each(20, 40), {}, [(20, 20.0), (40, 40.0)]),
        (each(23), {"length": 25}, [(23, 23.0)]),
        (each(25), {}, [(25, 25.0)]),
        (each(3), {"length": 5}, [(3, 3.0)]),
        (each(3, 6, 7, 8, 13, 14, 29), {"learns_from": 99}, [(number, float(number)) for number in (3, 6, 7, 8, 13, 14, 29)]),
        (each(3, 6, 7, 8, 13, 14, 29), {}, [(number, float(number)) for number in (3, 6, 7, 8, 13, 14, 29)]),
        (each(*range(1, 14)), {"length": 20}, [(10, 5.5), (11, 11.0), (12, 12.0), (13, 13.0)]),  # ends early
    ],
)
def test_a_value_of_each_update_is_averaged_and_any_other_is_written_where_it_was_reported(reported, options, rows):
    assert lines_of(reported, 10, **options) == rows


@pytest.mark.parametrize("interval", [2, 3, 7, 10, 25])
def test_no_value_that_skips_iterations_is_left_out_or_written_twice(interval):
    draw = random.Random(interval)
    for _ in range(100):
        numbers = sorted(draw.sample(range(1, 60), draw.randint(1, 9)))
        gapless = {number for one, number in zip([0, *numbers], numbers, strict=False) if number - one == 1}
        found = lines_of(each(*numbers), interval, length=60)
        assert [number for number, _ in found] == sorted({number for number, _ in found})
        assert set(numbers) - {one for number in gapless for one in (number, number - 1)} <= {number for number, _ in found}


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
            smoother.begin_epoch() if loss is None else smoother.push({"loss": loss}, smoother.count)
        assert smoother.line(1)[4]["mine"] == value
