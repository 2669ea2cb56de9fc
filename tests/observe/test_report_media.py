"""Images, histograms and texts in a report."""

import math
import re

import numpy as np
import pytest
import torch

from trainbus.cli.runs import best_metric
from trainbus.eventloop import Bus, Run
from trainbus.hooks import JSONLinesWriter, LoggerHook
from trainbus.media import Histogram, Image, Text
from trainbus.observe import Damage
from trainbus.observe.report import ReportedRun, build_report
from trainbus.observe.report.overview import FEW
from trainbus.observe.report.page import MOST_BYTES

from .folders import BEGAN, entry, loss_lines, write_record, write_run, write_scalars

EVIL = "</pre><script>alert(1)</script>"


def reported(folder, report, iterations=5):
    """A run in ``folder`` whose body calls ``report(run, iteration)``, from 1."""
    with Run(Bus(LoggerHook(writers=[JSONLinesWriter()])), model=torch.nn.Linear(1, 1), work_dir=folder) as run:
        for _ in run.epochs(1):
            for i in run.train(range(iterations)):
                run.report(loss=1.0)
                report(run, i + 1)
    return folder


def page_of(*folders) -> str:
    return build_report([ReportedRun(folder) for folder in folders], best_metric).decode()


def write_media(folder, *lines):
    with (folder / "media.jsonl").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def text_line(text, iteration, after=0.0):
    at = f'"step": {iteration}, "epoch": 1, "iter": {iteration}, "time": {BEGAN + after}'
    return f'{{"kind": "text", "name": "train/answer", {at}, "text": "{text}"}}'


def test_the_page_shows_images_histograms_and_texts_with_their_place(tmp_path):
    def report(run, iteration):
        run.report(noise=Image(torch.rand(3, 4, 5)))
        run.report(weights=Histogram(torch.arange(10.0) * iteration))
        run.report(answer=Text(f"{iteration} {EVIL}"))

    page = page_of(reported(tmp_path, report))
    assert 'id="media"' in page
    assert re.findall(r'alt="train/noise at iteration (\d)"', page) == ["1", "2", "3", "5"]
    assert page.count('src="data:image/png;base64,') == 4
    assert "10 values from 0 to 45, mean 22.5" in page
    assert "10 values from 0 to 9, mean 4.5" in page
    assert "<span>0</span><span>45</span>" in page
    assert "5 &lt;/pre&gt;&lt;script&gt;alert(1)" in page
    assert EVIL not in page


def test_a_page_without_them_has_no_section(tmp_path):
    assert 'id="media"' not in page_of(write_run(tmp_path))


def test_values_that_are_not_finite_are_counted_on_the_page(tmp_path):
    def report(run, iteration):
        run.report(broken=Histogram(torch.tensor([math.nan, math.inf, 1.0, 2.0])))
        run.report(gone=Histogram(torch.tensor([math.nan])))

    page = page_of(reported(tmp_path, report, iterations=1))
    assert page.count("left out: 1 NaN, 1 infinite") == 1
    assert "no finite value; <span" in page


def test_what_was_abandoned_or_reported_again_is_left_out(tmp_path):
    folder = write_run(tmp_path / "resumed")
    write_scalars(folder, *loss_lines(10))
    write_media(folder, text_line("first", 50, 10), text_line("beyond it", 90, 20))
    write_record(folder, entry(30, "resume", iteration=60, path="iter_60.safetensors"))
    assert "beyond it" not in (page := page_of(folder))
    assert "first" in page
    write_media(folder, text_line("again", 70, 40), text_line("and again", 70, 50))
    page = page_of(folder)
    assert "and again" in page
    assert ">again" not in page


def test_damaged_lines_and_missing_files_are_no_error(tmp_path):
    folder = reported(tmp_path, lambda run, iteration: run.report(noise=Image(torch.rand(4, 4))))
    for path in sorted((folder / "media").iterdir())[:2]:
        path.unlink()
    write_media(folder, "{", '{"kind": "image", "name": "a"}', '{"kind": "video", "name": "a"}', text_line("kept", 5))
    run = ReportedRun(folder)
    assert run.damaged["media.jsonl"] == Damage(2, 6)
    page = build_report([run], best_metric).decode()
    assert page.count("data:image/png") == 2
    assert "kept" in page


@pytest.mark.parametrize("runs", [1, 2, 9])
def test_a_page_stays_below_its_limit_and_says_what_is_left_out(tmp_path, runs):
    noise = np.random.default_rng(1)

    def report(run, iteration):
        for name in range(40):
            run.report(**{f"image {name}": Image(noise.integers(0, 256, (90, 90, 3), np.uint8))})
            run.report(**{f"weights {name}": Histogram(torch.randn(100))})
            run.report(**{f"text {name}": Text("word " * 5_000)})

    folder = reported(tmp_path, report, iterations=2)
    page = page_of(*[folder] * runs)
    assert len(page.encode()) <= MOST_BYTES
    assert page.count("more names would make this page too long") == (runs if runs <= FEW else 0)
    assert (page.count("data:image/png") > 5) == (runs <= 8)


def test_a_million_histograms_need_the_memory_of_two(tmp_path):
    folder = reported(tmp_path, lambda run, iteration: run.report(weights=Histogram(torch.ones(3))), iterations=30)
    ((_, kept),) = ReportedRun(folder).media.items()
    assert [line.iter for line in kept] == [1, 30]
