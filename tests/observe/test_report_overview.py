"""A report on many runs: the table of what differs and what came out, and parallel coordinates."""

import math
from pathlib import Path
from typing import Any

import pytest

from trainbus.cli.runs import best_metric, rules_of
from trainbus.observe.report import ReportedRun, build_report
from trainbus.observe.report.overview import overview
from trainbus.observe.report.page import MOST_BYTES

from .folders import BEGAN, entry, session, write_record, write_run, write_scalars
from .test_report import Page


def search(folder: Path, number: int, points: int = 0) -> list[ReportedRun]:
    """Runs with a rate of 10^-4 to 1, every second one with a hook; the accuracy of run i is 0.9 + i/1000."""
    runs = []
    for i in range(number):
        settings: dict[str, Any] = {"lr": 10 ** (-4 + 4 * i / max(number - 1, 1)), "batch_size": 8}
        settings["optimizer"] = ("SGD", "AdamW")[i % 2]
        settings |= {"hooks.EMAHook": True, "hooks.EMAHook.momentum": 0.1} if i % 2 else {}
        path = write_run(folder / f"{i:03}", session(settings=settings, epoch=10, iter=100), name=f"search {i}")
        write_record(path, entry(80, "validation", 9, 90, metrics={"accuracy": 0.9 + i / 1000}))
        places = ({"step": j, "epoch": 10, "iter": j, "time": BEGAN + j / 7} for j in range(101, 101 + points))
        metrics = ({"train/accuracy": math.sin(i * j), "val/accuracy": 1 / j} for j in range(101, 101 + points))
        write_scalars(path, *(place | own for place, own in zip(places, metrics, strict=True)))
        runs.append(ReportedRun(path))
    return runs


@pytest.mark.long
def test_the_page_of_a_hundred_runs_has_at_most_a_megabyte_and_a_row_for_each(tmp_path):
    page = Page(build_report(search(tmp_path, 100, points=1_000), best_metric, rules_of))
    assert len(page.bytes) <= MOST_BYTES
    assert "thinned to about" in page.text
    head = next(row for row in page.rows if row[0] == "Run")
    assert head[:7] == ["Run", "State", "accuracy", "test/accuracy", "train/accuracy", "lr", "optimizer"]
    assert "batch_size" not in head
    assert [row[0] for row in page.rows if row[0].startswith("search")] == [f"search {i}" for i in range(100)]
    assert page.row("search 99")[2] == "0.999"
    assert "100 runs: 100 finished." in page.text
    assert "Best accuracy: 0.999, search 99 (lr 1, optimizer AdamW, EMAHook true)." in page.text
    assert "Worst accuracy: 0.9, search 0 (lr 0.0001, optimizer SGD)." in page.text
    [chart] = [one for one in page.data["charts"] if one["title"] == "accuracy"]
    assert len(chart["series"]) == 200


def test_train_and_validation_of_a_metric_share_a_chart(tmp_path):
    lines = (
        {"step": i, "accuracy": 0.5, "val_accuracy": 0.4, "train/loss": 2.0, "val/loss": 3.0, "lr": 0.1} for i in range(1, 9)
    )
    write_scalars(tmp_path, *lines)
    page = Page(build_report([ReportedRun(tmp_path)], best_metric))
    charts = {
        chart["title"]: [(one["name"], one.get("dashed", False)) for one in chart["series"]] for chart in page.data["charts"]
    }
    assert charts == {
        "accuracy": [("accuracy", False), ("val_accuracy", True)],
        "loss": [("train/loss", False), ("val/loss", True)],
        "lr": [(tmp_path.name, False)],
    }


def test_the_axes_are_logarithmic_over_decades_and_runs_without_the_value_are_below_them(tmp_path):
    found = overview(search(tmp_path, 9), rules_of)
    axes = {axis.column.name: axis for axis in found.axes}
    assert [*axes][:3] == ["lr", "optimizer", "hooks.EMAHook"]
    assert [*axes][-1] == "accuracy"
    rate = axes["lr"]
    steps = [before - after for before, after in zip(rate.heights, rate.heights[1:], strict=False)]
    assert steps == pytest.approx([steps[0]] * 8)  # equal ratios
    assert [text for _, text in rate.marks] == ["0.0001", "1"]
    assert len(set(axes["optimizer"].heights)) == 2
    without, having = axes["hooks.EMAHook"].heights[:2]
    assert without > max(height for height, text in axes["hooks.EMAHook"].marks if text == "true") == having
    assert len(found.lines()) == 9


def test_few_runs_have_a_colour_each_and_many_that_of_their_fifth(tmp_path):
    runs = search(tmp_path, 10)
    assert overview(runs[:2], rules_of).colours == ["c1", "c2"]
    assert overview(runs[:5], rules_of).axes == []
    assert overview(runs, rules_of).colours == ["r5", "r5", "r4", "r4", "r3", "r3", "r2", "r2", "r1", "r1"]
    assert set(overview(runs, lambda names: {}).colours) == {"c8"}


def test_a_metric_that_is_never_finite_or_only_in_some_runs_ranks_those_that_have_it(tmp_path):
    runs = search(tmp_path, 9)
    write_record(runs[0].path, entry(90, "validation", 9, 95, metrics={"f1": math.nan}))
    write_record(runs[1].path, entry(90, "validation", 9, 95, metrics={"f1": 0.5}))
    found = overview([ReportedRun(run.path) for run in runs], rules_of)
    [column] = [one for one in found.metrics if one.name == "f1"]
    assert column.texts == ["", "0.5", *[""] * 7]
    assert found.order == [8, 7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("number", [2, 9])
def test_a_comparison_begins_with_the_best_run_in_words_and_the_table(tmp_path, number):
    page = Page(build_report(search(tmp_path, number), best_metric, rules_of))
    best, last = f"Best accuracy: {0.9 + (number - 1) / 1000:.4g}, search {number - 1} (lr 1", f"search {number - 1}"
    assert page.text.index(f"{number} runs: {number} finished.") < page.text.index(best) < page.text.rindex("accuracy")
    sections = [one for one in page.ids if one in ("runs", "table", "verdict", "curves")]
    assert sections[:2] == ["runs", "table"]
    assert [row[0] for row in page.rows[: number + 1]][-1] == last


def test_where_a_run_is_saved_is_neither_a_column_nor_an_axis(tmp_path):
    runs = []
    for i in range(9):
        own = session(settings={"lr": i / 10, "loop.work_dir": f"runs/{i}"}, epoch=10, iter=100)
        config = {"work_dir": f"out/{i}", "data": {"work_dir": f"data/{i}"}}
        runs.append(ReportedRun(write_run(tmp_path / f"{i}", own, config=config)))
    found = overview(runs, rules_of)
    assert [one.name for one in found.settings] == ["lr"]
    assert not [axis for axis in found.axes if "work_dir" in axis.column.name]
