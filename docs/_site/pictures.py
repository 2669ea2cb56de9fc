"""``python docs/_site/pictures.py [trace report dashboard runs]``: make pictures from trainings of the digits.

It needs Playwright, Pillow, Chromium and the extras ``demo`` and ``web``.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread

import torch
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from trainbus import (
    Bus,
    CheckpointHook,
    Dashboard,
    EMAHook,
    IterTimerHook,
    JSONLinesWriter,
    LoggerHook,
    OptimizerHook,
    RuntimeInfoHook,
    TraceHook,
    TrainLoop,
)
from trainbus.cli import main as trainbus
from trainbus.demo import Accuracy, loader, network, step
from trainbus.eventloop import TrainingError

sys.path.insert(0, str(Path(__file__).parent))

from trace_picture import draw  # type: ignore[import-not-found]  # beside this file

DOCS = Path(__file__).resolve().parents[1]
FRAMES, PERIOD = 16, 400
"""Pictures of the moving one, and milliseconds from each to the next."""


def loop_of(bus: Bus, epochs: int, folder: str, rate: float = 1e-2) -> TrainLoop:
    """Return a training of the digits."""
    model = network()
    return TrainLoop(
        model, torch.optim.AdamW(model.parameters(), lr=rate), step=step, metrics={"accuracy": Accuracy()}, bus=bus,
        train_data=loader("train", wrong=0.2), val_data=loader("val"), max_epochs=epochs, work_dir=folder, seed=0,
    )  # fmt: skip


def dashboard(browser: Browser) -> None:
    """Make the picture of the live page of a run, and the moving one of its first seconds."""
    page = Dashboard(port=0)
    hooks = OptimizerHook(grad_clip=5.0), EMAHook(momentum=0.01), RuntimeInfoHook(), IterTimerHook(), page
    bus = Bus(*hooks, LoggerHook(writers=[JSONLinesWriter()]), CheckpointHook(interval=1, max_keep_ckpts=2))
    loop = loop_of(bus, 200, "runs/digits")
    thread = Thread(target=loop.run)
    thread.start()
    try:
        while not page.url:
            thread.join(0.1)
        tab = browser.new_page(viewport={"width": 1280, "height": 820})
        tab.goto(page.url)
        frames = []
        for _ in range(FRAMES):
            tab.wait_for_timeout(PERIOD)
            frames.append(seen(tab).resize((860, 551)))
        first, *others = frames
        path = DOCS / "images" / "dashboard.webp"
        first.save(path, save_all=True, append_images=others, duration=PERIOD, loop=0, quality=40, method=6, minimize_size=True)
        keep(tab, "dashboard")
    finally:
        with suppress(TrainingError):  # it has ended
            loop.stop()
        thread.join()


def runs(browser: Browser) -> None:
    """Make the picture of the page of several runs: six trainings in one process."""
    page, rates = Dashboard(port=0), (1e-2, 5e-3, 2e-3, 1e-3, 5e-4, 2e-4)
    for number, rate in enumerate(rates):
        hooks = [OptimizerHook(grad_clip=5.0), page, *([EMAHook(momentum=0.01)] if number % 2 else [])]
        loop_of(Bus(*hooks), 6, f"runs/digits-{number}", rate).run()
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.goto(page.url)
    tab.wait_for_selector("figure canvas")
    tab.wait_for_timeout(PERIOD)
    keep(tab, "runs")


def report(browser: Browser) -> None:
    """Make the picture of the report on the run of ``trainbus demo``."""
    trainbus(["demo", "--out", "runs/demo"])
    trainbus(["report", "runs/demo", "--output", "report.html"])
    tab = browser.new_page(viewport={"width": 1280, "height": 960})
    tab.goto(Path("report.html").resolve().as_uri())
    keep(tab, "report")


def trace(_: Browser) -> None:
    """Draw four iterations, with a checkpoint after the second."""
    saves = CheckpointHook(interval=44, by_epoch=False, save_last=False)
    writes = LoggerHook(writers=[JSONLinesWriter(interval=1)])
    loop_of(
        Bus(OptimizerHook(), EMAHook(momentum=0.01), writes, saves, TraceHook(first=42, iterations=4)), 2, "runs/traced"
    ).run()
    events = json.loads(Path("runs/traced/trace.json").read_bytes())
    for form in ("", "-narrow"):
        (DOCS / "drawings" / f"trace{form}.svg").write_text(draw(events, narrow=bool(form)).svg(), encoding="utf-8")


def seen(tab: Page) -> Image.Image:
    """Return what a tab shows."""
    with Image.open(io.BytesIO(tab.screenshot())) as image:
        return image.convert("RGB")


def keep(tab: Page, name: str) -> None:
    """Write what a tab shows, in 128 colours."""
    seen(tab).quantize(128, dither=Image.Dither.NONE).save(DOCS / "images" / f"{name}.png", optimize=True)


PICTURES: dict[str, Callable[[Browser], None]] = {"trace": trace, "report": report, "dashboard": dashboard, "runs": runs}


def main() -> None:
    """Make the pictures in a folder of their own."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        os.chdir(folder)
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for picture in PICTURES if len(sys.argv) == 1 else sys.argv[1:]:
            PICTURES[picture](browser)
        os.chdir("/")


if __name__ == "__main__":
    main()
