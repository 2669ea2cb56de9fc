"""``--costs``, and the last lines of ``trainbus run`` and of the demo: a curve, and what was most expensive."""

import json
import os
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from trainbus import eventloop
from trainbus.eventloop import Bus, Hook
from trainbus.observe import Sparkline, last_lines, main_curve
from trainbus.observe.curves import read_curves

from ..hooks.conftest import make_loop

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning:sklearn")

DIGITS = str(Path(eventloop.__file__).resolve().parent.parent / "examples" / "digits.toml")


class Histograms(Hook):
    """Slow."""

    def after_train_iter(self, event):
        time.sleep(0.01)


def shown(renderable, **options):
    console = Console(**{"width": 80, "color_system": None, **options})
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def run(trainbus, *changes):
    return trainbus("run", DIGITS, "loop.max_epochs=2", "default_hooks.run_record=false", *changes).out


def test_costs_prints_the_table_at_the_end_of_a_run_also_with_the_record_disabled(here, trainbus, monkeypatch):
    for name in ("COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    table = run(trainbus, "--costs").partition("\nWhere ")[2]
    assert "waiting for data" in table
    assert "OptimizerHook" in table
    assert "\x1b" not in table
    assert max(map(len, table.splitlines())) <= 80


def test_a_run_without_measurement_ends_with_the_curve_and_without_words_on_costs(here, trainbus):
    out = run(trainbus)
    assert "Where " not in out
    *_, curve, end = [line for line in out.splitlines() if line]
    assert re.fullmatch(r"train/loss \S+ [▁-█]+ \S+", curve)
    assert len(curve) == 80
    assert end == "next: trainbus report runs/digits"


def test_a_slow_hook_is_named_at_the_end(tmp_path):
    bus = Bus(timing=True)
    make_loop(Histograms(), bus=bus).run()
    assert "Histograms takes" in shown(last_lines(tmp_path, bus))


def test_a_run_that_fails_ends_with_the_same_lines(here, trainbus):
    failing = 'custom_hooks=[{type="EarlyStoppingHook", monitor="missing", rule="less", strict=true}]'
    out, error = trainbus("run", DIGITS, "loop.max_epochs=2", "loop.sanity=0", "--costs", failing, status=2)
    assert "missing" in error
    assert "Where " in out
    assert "train/loss " in out


# ----------------------------------------------------------------------------------------------------------- sparkline


def test_a_sparkline_is_one_line_of_at_most_80_columns_with_both_ends_also_without_block_characters():
    assert shown(Sparkline("loss", [2.0, 1.0, 0.5]), width=200) == "loss 2 █▃▁ 0.5\n"
    for width in (200, 80, 40, 12, 5):
        [line] = shown(Sparkline("train/loss", [1 / (1 + n) for n in range(1000)]), width=width).splitlines()
        assert len(line) <= min(80, width)
    with Path(os.devnull).open("w", encoding="ascii") as file:
        assert shown(Sparkline("loss", [2.0, 1.0, 0.5]), file=file) == "loss 2 #-_ 0.5\n"


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([1.0], "loss 1 ▁ 1"),
        ([1.0, 1.0], "loss 1 ▁▁ 1"),
        ([0.0, float("nan"), 1.0], "loss 0 ▁ █ 1"),
        ([float("nan")], "loss nan   nan"),
        ([0.0, float("inf")], "loss 0 ▁  inf"),
        ([-1.7e308, 1.7e308], "loss -1.7e+308 ▁█ 1.7e+308"),
    ],
)
def test_values_that_are_equal_or_not_finite(values, line):
    assert shown(Sparkline("loss", values)) == f"{line}\n"


@pytest.mark.parametrize(
    ("scalars", "name"),
    [
        ({"train/lr": 0.1, "train/loss_cls": 1.0, "train/loss": 2.0}, "train/loss"),
        ({"val/accuracy": 0.5, "train/lr": 0.1, "train/loss_cls": 1.0}, "train/loss_cls"),
        ({"train/lr": 0.1, "val/accuracy": 0.5}, "val/accuracy"),
        ({"epoch": 1, "iter": 1, "train/lr": 0.1}, None),
    ],
)
def test_the_main_scalar_is_the_loss_or_the_first_metric(scalars, name):
    curve = main_curve(read_curves([{"step": 1, **scalars}]))
    assert (curve and curve.name) == name


def test_a_damaged_file_of_scalars_does_not_fail_the_end_of_a_run(tmp_path):
    lines = [json.dumps({"step": step, "train/loss": loss}) for step, loss in enumerate([2.5, 1.5, 0.5])]
    (tmp_path / "scalars.jsonl").write_text("\n".join([*lines[:2], "broken", *lines[2:]]) + "\n")
    curve = shown(last_lines(tmp_path, Bus()), width=400)
    assert "train/loss 2.5" in curve
    assert "0.5" in curve
