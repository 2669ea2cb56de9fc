import json
import math
import re
from html.parser import HTMLParser

import msgspec
import numpy as np
import pytest

from trainbus.cli.runs import best_metric
from trainbus.observe import (
    Costs,
    Damage,
    LaneCosts,
    Part,
    RankCosts,
    RankTimes,
    RunManifest,
    Straggler,
    write_manifest,
)
from trainbus.observe.costs import Growth
from trainbus.observe.curves import BATCH, Curve, read_curves
from trainbus.observe.record import Checkpoint
from trainbus.observe.report import ReportedRun, build_report, verdict
from trainbus.observe.report.bars import cost_bars
from trainbus.observe.report.page import MOST_BYTES, _template, run_names

from .folders import BEGAN, costs_line, entry, loss_lines, session, some_costs, write_record, write_run, write_scalars

EVIL = "</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """What a browser finds in a page: its elements, texts, the rows of its tables, and the data of its charts."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.bytes, self.text = page, ""
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.rows: list[list[str]] = []
        self._hidden = self._in_cell = False
        self.feed(page.decode())
        self.data = json.loads(re.search(rb'<script[^>]* id="data"[^>]*>(.*?)</script', page, re.DOTALL)[1])

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.ids += [value for name, value in attributes if name == "id"]
        self._hidden = tag in ("script", "style")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag):
        self._hidden = False
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, text):
        self.text += "" if self._hidden else text
        if self._in_cell:
            self.rows[-1][-1] += text

    def row(self, first: str) -> list[str]:
        """The one row whose first cell begins with a text."""
        [row] = [[" ".join(cell.split()) for cell in row] for row in self.rows if row and row[0].strip().startswith(first)]
        return row


def page_of(*folders) -> Page:
    return Page(build_report([ReportedRun(folder) for folder in folders], best_metric))


def sentences(folder) -> list[str]:
    return verdict(ReportedRun(folder), best_metric)


def test_the_page_has_all_that_the_run_left(tmp_path):
    page = page_of(write_run(tmp_path, config={"loop": {"max_epochs": 10, "names": ["a", "b"]}, "amp": True}))
    headings = ("verdict", "curves", "costs", "steps", "lanes", "checkpoints", "validations", "tests", "sessions")
    assert set(headings) | {"environment", "configuration"} <= set(page.ids)
    assert page.row("forward") == ["forward", "50.0%", "5 s", "", "", ""]
    assert page.row("Histograms") == ["Histograms after_train_iter", "11.0%", "1.1 s", "100", "11 ms", "22 ms"]
    assert page.row("All") == ["All", "100.0%", "10 s", "", "", ""]
    assert page.row("LoggerHook.write") == [
        *("LoggerHook.write", "98", "0", "2", "0", "500 ms", "0 µs", "1.5", "7", "10 ms", "200 ms")
    ]
    assert page.row("epoch_5.safetensors")[1:6] == ["5", "50", "250 ms", "2 s", "1 kB"]
    assert page.row("iter_51.safetensors")[3] == "the disk is full"
    assert page.row("8")[:3] == ["8", "80", "0.8"]
    assert page.row("command") == ["command", "python train.py --lr=0.1"]
    assert page.row("git commit")[1].startswith("0123456789abcdef (main), with changes that were not committed")
    assert page.row("loop.max_epochs")[1] == "10"
    assert page.row("loop.names")[1] == "[a, b]"
    assert page.row("amp")[1] == "true"


def test_the_page_is_made_where_no_compiled_template_can_be_kept(tmp_path, monkeypatch):
    _template.cache_clear()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    assert "verdict" in page_of(write_run(tmp_path)).ids
    _template.cache_clear()


def test_the_page_has_the_times_of_all_ranks_and_names_the_slow_one(tmp_path):
    times = [RankTimes("", "iteration", 0.0461, 0.0463, 0.0464, 1, "node1")]
    slow = Straggler(2, "node7", "training", "waiting for data", 0.0352, 0.0011, 0.0337)
    folder = write_run(tmp_path)
    costs = msgspec.structs.replace(some_costs(), ranks=RankCosts(4, 100, 0.0463, times, slow, [3]))
    write_record(folder, costs_line(BEGAN + 100, costs))
    page = page_of(folder)
    assert page.row("iteration") == ["iteration", "46.1 ms", "46.3 ms", "46.4 ms", "rank 1 (node1)"]
    assert "Not measured: rank 3." in page.text
    assert any("The other ranks wait 73% of the time for rank 2 (node7)" in line for line in sentences(folder))
    assert "ranks" not in page_of(write_run(tmp_path / "alone")).ids


def test_ten_faults_are_all_named_also_a_leak_and_a_slow_rank_that_a_last_short_session_does_not_measure(tmp_path):
    """The two with the smallest shares came after six others, and only the last session counted."""
    shares = {f"Slow{index}.after_train_iter": 0.2 - index / 100 for index in range(5)}
    hooks = [Part("hook", name, 100, share * 100, share, share, "after_train_iter") for name, share in shares.items()]
    data = Part("training", "waiting for data", 0, 15.0, 0.15)
    stall = Part("training", "waiting for checkpoints", 7, 14.0, 0.14)
    lane = LaneCosts("Uploader.write", ["after_train_iter"], 88, 0, 12, 0, 0.5, 0.0)
    growth = [Growth("process", 70_000_000, 60.0, 700), Growth("Keeper", 70_000_000, 60.0, 700)]
    slow = Straggler(2, "node7", "hook", "Slow0.after_train_iter", 0.0152, 0.0101, 0.0051)
    ranks = RankCosts(4, 100, 0.0463, [RankTimes("", "iteration", 0.0461, 0.0463, 0.0464, 1, "node1")], slow)
    costs = Costs(100.0, [*hooks, data, stall], lanes=[lane], memory=1_000_000_000, growth=growth, ranks=ranks)
    folder = tmp_path / "run"
    folder.mkdir()
    sessions = [session(), session(BEGAN + 1000, lasted=5.0)]
    write_manifest(folder, RunManifest(name="faults", sessions=sessions))
    write_record(folder, costs_line(BEGAN + 99, costs), costs_line(BEGAN + 1004, some_costs(4.0, 40)))
    told = " ".join(sentences(folder))
    named = [*(f"Slow{index} takes" for index in range(5)), "waiting for data", "Checkpoints hold training up"]
    named += ["The lane of Uploader dropped 12", "Keeper keeps 100 kB more each iteration"]
    assert [one for one in [*named, "The other ranks wait 11% of the time for rank 2 (node7)"] if one not in told] == []
    page = page_of(folder)
    assert "of the longest session" in page.text
    assert "1 GB of resident memory" in page.text


def test_the_page_needs_nothing_from_elsewhere_and_allows_no_other_script(tmp_path):
    page = page_of(write_run(tmp_path))
    text = page.bytes.decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src &#39;none&#39;")
    assert "unsafe" not in policy
    assert not re.findall(r'(?:src|href)="(?!#|data:,)', text)
    assert "uPlot" in page.text  # its licence
    assert page.tags[:2] == ["html", "head"]
    assert {"main", "header", "nav", "footer", "h1"} <= set(page.tags)
    assert len(page.ids) == len(set(page.ids))


def test_names_and_values_of_a_run_are_text_never_code(tmp_path):
    one = session(reason=EVIL, state="failed", resumed_from=EVIL)
    folder = write_run(tmp_path / EVIL.replace("/", ""), one, name=EVIL, config={EVIL: EVIL})
    write_scalars(folder, {"step": 1, EVIL: 1.0, "\ud800": 2.0, "\u2028]]>": 3.0})
    write_record(folder, entry(1, "validation", metrics={EVIL: 1.0}), entry(1, "checkpoint_failed", names=[EVIL], reason=EVIL))
    page = page_of(folder, write_run(tmp_path / "other"))
    assert "img" not in page.tags
    assert page.tags.count("script") == 2
    assert EVIL in page.text
    assert EVIL in [chart["title"] for chart in page.data["charts"]]


def test_a_page_of_a_long_run_has_at_most_a_megabyte_and_the_extremes(tmp_path):
    folder, number = write_run(tmp_path), 6_000
    lines = [
        {"step": i, "epoch": 1 + i // 100, "iter": i, "time": BEGAN + i / 7}
        | {f"train/metric_{j}": math.sin(i * j / 7) for j in range(20)}
        for i in range(1, number + 1)
    ]
    lines[2_345]["train/metric_3"] = 77.0
    lines[4_567]["train/metric_3"] = -88.0
    write_scalars(folder, *lines)
    write_record(folder, *(entry(i, "validation", 5, i, metrics={"accuracy": i / 1e6}) for i in range(1000)))
    page = page_of(folder)
    assert len(page.bytes) <= MOST_BYTES
    [chart] = [one for one in page.data["charts"] if one["title"] == "train/metric_3"]
    [line] = chart["series"]
    assert {77, -88} <= set(line["values"])
    axis = page.data["axes"][line["axis"]]
    assert axis["iter"][line["values"].index(77)] == 2_346
    assert (axis["iter"][0], axis["iter"][-1]) == (1, number)
    assert "thinned to about" in page.text
    assert re.search(r"The last \d+ of 1,00[0-9] validations", page.text)


def test_a_page_with_thousands_of_scalars_and_large_values_or_of_many_runs_has_at_most_a_megabyte(tmp_path):
    folder = write_run(tmp_path, config={f"key{i}": "x" * 5000 for i in range(500)})
    write_scalars(folder, *({"step": i, **{f"train/grad_norm/{j}": j / i for j in range(1200)}} for i in range(101, 111)))
    page = page_of(folder)
    assert len(page.bytes) <= MOST_BYTES
    assert "would make this page too long" in page.text
    page = page_of(*(write_run(tmp_path / str(i), name=f"run {i}") for i in range(20)))
    assert len(page.bytes) <= MOST_BYTES
    assert "20 runs compared" in page.text


@pytest.mark.parametrize("name", ["run.json", "record.jsonl", "scalars.jsonl"])
def test_a_run_without_one_of_its_files_has_a_report(tmp_path, name):
    folder = write_run(tmp_path)
    (folder / name).unlink()
    page = page_of(folder)
    assert ("Resumes and stops" in page.text) == (name != "run.json")
    assert ("were not measured" in page.text) == (name == "record.jsonl")
    assert ("There are no scalars" in page.text) == (name == "scalars.jsonl")
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "scalars.jsonl").touch()
    assert "There are no scalars" in page_of(tmp_path / "only").text


def test_values_that_are_not_finite_are_gaps_and_are_told(tmp_path):
    write_scalars(tmp_path, *({"step": i, "loss": value} for i, value in enumerate([1.0, math.nan, 3.0, -math.inf], 1)))
    page = page_of(tmp_path)
    assert page.data["charts"][0]["series"][0]["values"] == [1, None, 3, None]
    assert "loss is NaN or infinite in 2 of 4 values, first at iteration 2." in page.text
    write_scalars(tmp_path, {"step": 1, "other": math.nan})
    assert "no finite value" in page_of(tmp_path).text


def test_lines_of_other_kinds_are_left_out_and_such_with_wrong_fields_are_damaged(tmp_path):
    folder = write_run(tmp_path)
    write_record(folder, entry(0, "of a newer trainbus"), entry(0, "checkpoint", stall="long"))
    write_record(folder, {"time": BEGAN, "kind": "costs"}, {"kind": "validation"})
    history = ReportedRun(folder)
    assert len(history.story.of(Checkpoint)) == len(ReportedRun(write_run(tmp_path / "other")).story.of(Checkpoint))
    assert history.damaged == {"record.jsonl": Damage(lines=3, first=12)}
    assert "record.jsonl is damaged: 3 lines could not be read, the first one is line 12." in sentences(folder)


def test_several_runs_have_their_curves_in_one_chart_costs_side_by_side_and_differences(tmp_path):
    one = write_run(tmp_path / "a", name="first", config={"lr": 0.1, "same": 1, "only": {"here": 2}})
    two = write_run(tmp_path / "b", name="second", config={"lr": 0.2, "same": 1})
    page = page_of(one, two)
    [chart] = [one for one in page.data["charts"] if one["title"] == "train/loss"]
    assert [(line["name"], line["run"]) for line in chart["series"]] == [("first", 0), ("second", 1)]
    assert page.row("forward") == ["forward", "50.0% 5 s", "50.0% 5 s"]
    differing = [row for row in page.rows if len(row) == 3 and row[0] in ("lr", "same", "only.here", "command")]
    assert differing == [["lr", "0.1", "0.2"], ["only.here", "2", "not set"]]


def test_runs_of_the_same_name_are_told_apart_by_their_folders(tmp_path):
    runs = [ReportedRun(write_run(tmp_path / name)) for name in "ab"]
    assert run_names(runs) == [f"digits ({tmp_path / name})" for name in "ab"]


def test_the_verdict_has_the_figures(tmp_path):
    assert sentences(write_run(tmp_path)) == [
        "The run finished after 10 epochs and 100 iterations in 100 s.",
        "Best accuracy 0.9, at epoch 5, iteration 50; 2 validations.",
        "30% of the time is waiting for data: 30 ms an iteration.",
        "Histograms takes 11% of the time: 11 ms an iteration.",
        "The lane of LoggerHook dropped 2 of 100 events: its handler takes 5.1 ms an event.",
        "1 checkpoint held training up for 250 ms in all; writing one took at most 2 s.",
        "1 checkpoint could not be written, the last one at iteration 50.",
        "1 checkpoint had to be skipped, the last one at iteration 50.",
        "2 of 100 offloaded events were lost.",
    ]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"state": "failed", "reason": "ValueError: bad"}, ["failed", "10 epochs and 100 iterations", "ValueError: bad."]),
        ({"state": "stopped", "reason": "enough."}, ["stopped", "10 epochs and 100 iterations", " enough."]),
        ({"state": "interrupted"}, ["interrupted"]),
        ({"lasted": None}, ["another machine (elsewhere)"]),
    ],
)
def test_the_verdict_begins_with_the_state_of_the_run(tmp_path, fields, named):
    first = sentences(write_run(tmp_path, session(**fields)))[0]
    assert all(one in first for one in named)


def curves(*lines):
    return {name: (curve.iterations.tolist(), curve.values.tolist()) for name, curve in read_curves(list(lines)).items()}


def test_curves_are_read_from_the_lines_of_scalars():
    repeated = [{"step": step, "iter": step, "a": value} for step, value in ((1, 1), (2, 2), (3, 3), (4, 4), (2, 20), (3, 30))]
    assert curves(*repeated) == {"a": ([1, 2, 3], [1, 20, 30])}  # the later ones count
    back = curves({"step": 5, "iter": 5, "a": 1}, {"step": 1, "iter": 3, "b": 1}, {"step": 6, "iter": 6, "a": 2})
    assert back == {"a": ([5, 6], [1, 2]), "b": ([3], [1])}  # iterations that go back in other scalars do not matter
    odd = [{"a": 1, "b": "x"}, {"a": None, "b": "y"}, {"a": 10**400, "b": [1]}, {"a": True}]
    assert curves(*({"step": step} | one for step, one in enumerate(odd, 1))) == {"a": ([1, 3, 4], [1, math.inf, 1])}
    assert curves({"a": 5}, {"a": 6}, {"a": 7, "step": None}) == {"a": ([1, 2, 3], [5, 6, 7])}  # without a step


def test_more_lines_than_are_read_at_once_keep_their_order(change):
    change(BATCH, 7)
    lines = [{"step": i, "a": i} | ({"b": -i} if i % 3 == 0 else {}) for i in range(1, 101)]
    curves = read_curves(lines)
    assert curves["a"].values.tolist() == list(range(1, 101))
    assert curves["b"].values.tolist() == [-i for i in range(3, 101, 3)]


@pytest.mark.parametrize("number", [1, 2, 99, 100, 101, 1000, 12_345])
@pytest.mark.parametrize("bad", [False, True])
def test_a_thinned_curve_keeps_its_ends_extremes_and_gaps(number, bad):
    values = np.random.default_rng(number).normal(size=number)
    least, greatest = values.min(), values.max()
    if bad and number > 10:
        values[number // 2] = math.nan
        least, greatest = np.nanmin(values), np.nanmax(values)
    places = np.arange(number, dtype=np.float64)
    thinned = Curve(places, places, places, values).thinned(100)
    assert len(thinned.values) <= max(100, 1)
    assert (np.diff(thinned.iterations) > 0).all()
    assert (thinned.iterations[0], thinned.iterations[-1]) == (0, number - 1)
    assert (np.nanmin(thinned.values), np.nanmax(thinned.values)) == (least, greatest)
    assert np.isnan(thinned.values).any() == np.isnan(values).any()


def test_the_time_of_a_curve_has_no_pauses_and_epochs_have_fractions(tmp_path):
    (tmp_path / "cut").mkdir()
    folder = write_run(tmp_path, session(lasted=50), session(BEGAN + 1050, lasted=50))
    (folder / "scalars.jsonl").unlink()
    write_scalars(folder, *loss_lines(50), *loss_lines(50, begin=51, began=BEGAN + 1000))
    run = ReportedRun(folder)
    curve = run.curves["train/loss"]
    assert run.elapsed(curve.times).tolist() == list(range(1, 101))
    assert run.epochs_at(curve)[[4, 9, 24]].tolist() == [0.5, 1.0, 2.5]
    write_scalars(tmp_path / "cut", *loss_lines(25))  # the last epoch may be incomplete
    cut = ReportedRun(tmp_path / "cut")
    assert cut.epochs_at(cut.curves["train/loss"])[-1] == 2.5
    assert (cut.costs, cut.step_times()) == (None, [])


def test_the_costs_of_all_sessions_are_added(tmp_path):
    folder = write_run(tmp_path, session(), session(BEGAN + 1000))
    write_record(folder, costs_line(BEGAN + 1050, some_costs(30.0, 50)), costs_line(BEGAN + 1060, some_costs(40.0, 60)))
    costs = ReportedRun(folder).costs
    assert (costs.wall, costs.steps.total, costs.lanes[0].delivered) == (50, 160, 156)
    assert {part.name: round(part.share, 6) for part in costs.parts} == {part.name: part.share for part in some_costs().parts}
    assert sum(part.seconds for part in costs.parts) == pytest.approx(50)
    write_record(folder, costs_line(BEGAN + 1070, some_costs(2.0, 10)))  # they begin anew in the same session
    assert ReportedRun(folder).costs.wall == 52


def test_step_times_are_those_between_two_measurements(tmp_path):
    times = ReportedRun(write_run(tmp_path)).step_times()
    assert [(one.iter, one.steps.counts) for one in times] == [(50, {212: 40, 220: 10}), (100, {212: 50})]


def test_the_bar_of_costs_adds_up_to_100_percent():
    bars = cost_bars([some_costs(), None])
    assert sum(one.width for one in bars.segments[0]) == pytest.approx(100)
    assert [one.name for one in bars.segments[0]] == ["forward", "waiting for data", "Histograms", "rest"]
    assert bars.segments[1] == []


def test_what_checkpoints_took_has_one_figure(tmp_path):
    """The costs have the waits for files, too; the lines of checkpoints have only the copies."""
    waits = Part("training", "waiting for checkpoints", 1, 2.0, 0.2)
    costs = msgspec.structs.replace(some_costs(), parts=[*some_costs().parts, waits])
    run = write_run(tmp_path)
    write_record(run, costs_line(BEGAN + 101, costs, 10, 100))
    told = [line for line in sentences(run) if "held training up" in line or "hold training up" in line]
    assert len(told) == 2
    assert all("2 s" in line for line in told)
    assert "1 checkpoint held training up for 2 s in all" in told[1]


def test_further_names_of_a_file_are_one_checkpoint(tmp_path):
    run = write_run(tmp_path / "run")
    before = len(ReportedRun(run).story.checkpoints())
    written = {"names": ["epoch_4.safetensors"], "bytes": 1000, "stall": 0.1, "seconds": 0.2}
    write_record(run, entry(1e9, "checkpoint", 4, 127, **written))
    write_record(run, entry(1e9, "checkpoint", 4, 128, names=["best_accuracy_epoch_4.safetensors"], bytes=0))
    [one] = ReportedRun(run).story.checkpoints()[before:]
    assert one.names == ["epoch_4.safetensors", "best_accuracy_epoch_4.safetensors"]
    assert "2 checkpoints held training up for 350 ms in all; writing one took at most 2 s." in sentences(run)
