"""The pages of the dashboard in a browser."""

from __future__ import annotations

import math
import re

import msgspec
import numpy as np
import pytest

from trainbus.eventloop import Bus
from trainbus.hooks import CheckpointHook
from trainbus.observe.costs import Growth
from trainbus.observe.curves import extremes
from trainbus.observe.dashboard import FolderWatcher, Watcher
from trainbus.observe.dashboard.watcher import shortened

from ..waiting import until
from .dashboards import Job, failing, watched
from .folders import session, write_run

pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


LOSS = "document.querySelector('figure .plot').getAttribute('aria-label')"
BUTTONS = ("pause", "checkpoint", "stop", "set")


@pytest.fixture
def tab(browser):
    """A tab of a visitor; what its console says is an error of the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(60_000)
    said = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    yield page
    context.close()
    assert [text for text in said if "ERR_" not in text and "status of 4" not in text] == []


def wait(tab, name, wanted):
    tab.wait_for_function("([name, wanted]) => document.getElementById(name)?.textContent.includes(wanted)", arg=[name, wanted])


@pytest.mark.long
def test_the_token_leaves_the_address_bar_and_the_only_run_is_shown(server, tab):
    with watched(server, slow=True, name="mine"):
        tab.goto(server.url)
        tab.wait_for_url(f"http://127.0.0.1:{server.port}/runs/1/")
        wait(tab, "name", "mine")
        wait(tab, "state", "running")
        tab.wait_for_selector("#pause:enabled")
        assert server.token not in tab.url
        tab.reload()
        tab.wait_for_selector("#pause:enabled")


@pytest.mark.long
def test_training_and_validation_of_one_metric_share_a_chart_however_they_are_named(server, tab):
    bus = Bus()
    bus.on("after_backward", lambda event: event.run.report(train_accuracy=0.5, eval_accuracy=0.25))
    with watched(server, slow=True, bus=bus):
        tab.goto(server.url)
        tab.wait_for_function(
            "() => [...document.querySelectorAll('.plot')].some(one => /of accuracy .*: 0.5, val 0.25/.test(one.ariaLabel))"
        )
        assert tab.locator("figcaption b").all_text_contents().count("accuracy") == 1


@pytest.mark.long
def test_curves_grow_and_costs_are_shown_and_memory_that_was_freed_shrank(server, tab):
    with watched(server, slow=True) as job:
        tab.goto(server.url)
        tab.wait_for_selector("figure canvas")
        before = tab.evaluate(LOSS)
        assert before.startswith("Curve of loss up to iteration ")
        tab.wait_for_function(f"before => {LOSS} !== before", arg=before)
        tab.wait_for_selector("#parts tr")
        width = tab.evaluate(
            "[...document.querySelectorAll('#bar span')].reduce((sum, one) => sum + parseFloat(one.style.width), 0)"
        )
        assert width == pytest.approx(100, abs=2)
        wait(tab, "lane-rows", "Watcher.post")
        growth = [Growth("process", -537_000, 60.0, 100)]
        server.board.get(1).costs(shortened(msgspec.structs.replace(job.bus.costs(), growth=growth)))
        wait(tab, "steps", "process shrank by 537 kB")


@pytest.mark.long
def test_a_long_curve_has_its_spikes_and_one_rule_thins_it_here_and_there(server, tab):
    losses = [1.0 + at * 7919 % 101 / 1000 for at in range(20_000)]
    losses[4_321], losses[15_000] = 900.0, -5.0
    page = server.board.begin(None)
    for begin in range(0, 20_000, 500):
        page.messages.add((at + 1, 1, 0.0, {"loss": losses[at]}) for at in range(begin, begin + 500))
    tab.goto(f"{server.url.partition('?')[0]}runs/1/")
    tab.wait_for_selector("figure canvas")
    tab.wait_for_function(f"() => /up to iteration 20,000: .*, from -5(.0*)? to 900(.0*)?$/.test({LOSS})")
    places, values = np.arange(1, 20_001), np.array(losses)
    values[[700, 702]] = np.nan
    chosen = extremes(places // 64, values)
    assert {0, 4_321, 15_000, 700, 19_999} <= set(chosen.tolist())
    drawn = tab.evaluate("y => thin(y.map((_, index) => index + 1), y, 64)", as_null(values))
    assert drawn == [places[chosen].tolist(), as_null(values[chosen])]


def as_null(values):
    return [None if math.isnan(value) else value for value in values.tolist()]


def under_cursor(tab, name):
    """What a chart tells below the pointer."""
    figure = tab.locator("figure", has=tab.locator("b", has_text=re.compile(f"^{name}$")))
    figure.locator(".u-over").hover()
    return figure.locator(".at", has_text="train").text_content()


@pytest.mark.long
def test_a_learning_rate_is_not_smoothed_and_the_slider_smooths_the_loss(server, tab):
    job = Job(Bus(Watcher(server.board)), epochs=8)
    job.bus.on("before_train_iter", lambda event: event.run.report(**{"lr-SGD": 0.5 ** (event.progress.iter // 10)}))
    job.loop.run()
    tab.goto(server.url)
    wait(tab, "state", "finished")
    assert tab.input_value("#smoothing") == "0.6"
    assert re.fullmatch(r"at \d+: train [^,]+", under_cursor(tab, "lr-SGD"))
    values = {}
    for weight in ("0", "0.99"):
        tab.fill("#smoothing", weight)
        tab.mouse.move(0, 0)
        values[weight] = re.match(r"at \d+: train ([^,]+), smoothed ([^,]+)", under_cursor(tab, "loss")).groups()
    raw, smoothed = values["0"]
    assert raw == smoothed
    raw, smoothed = values["0.99"]
    assert raw != smoothed


@pytest.mark.long
def test_a_late_visitor_sees_the_whole_run_and_how_it_ended(server, tab, tmp_path):
    hook = CheckpointHook(interval=1, save_best="loss", rule="less")
    Job(Bus(hook, Watcher(server.board)), epochs=1, work_dir=tmp_path).loop.run()
    tab.goto(server.url)
    wait(tab, "state", "finished")
    assert tab.text_content("#iter") == "5"
    assert tab.text_content("#epoch") == "1 / 1"
    assert tab.evaluate(LOSS).startswith("Curve of loss up to iteration 5")
    tab.wait_for_selector("#parts tr")
    wait(tab, "files", "best_loss_epoch_1")
    assert tab.locator("#files tr").count() == 1  # a second name of a file is in its row
    assert "epoch_1.safetensors, best_loss_epoch_1.safetensors" in tab.text_content("#files")
    assert "0 B" not in tab.text_content("#files").split()


@pytest.mark.long
def test_removed_files_leave_the_list_of_checkpoints(server, tab, tmp_path):
    hook = CheckpointHook(interval=1, max_keep_ckpts=1)
    with watched(server, slow=True, bus=Bus(hook), work_dir=tmp_path) as job:
        tab.goto(server.url)
        tab.wait_for_function("() => parseInt(document.getElementById('saved')?.textContent) > 3")
        assert tab.locator("#files tr").count() <= 2  # the newest, and one that is removed meanwhile
        job.loop.stop()
        wait(tab, "state", "stopped")
        there = {path.name for path in tmp_path.glob("*.safetensors")}
        assert {*tab.locator("#files td:first-child").all_text_contents()} == there
        tab.reload()
        wait(tab, "state", "stopped")
        assert {*tab.locator("#files td:first-child").all_text_contents()} == there


@pytest.mark.long
def test_pause_resume_rate_checkpoint_and_stop(server, tab, tmp_path):
    with watched(server, slow=True, work_dir=tmp_path) as job:
        tab.goto(server.url)
        tab.click("#pause")
        wait(tab, "state", "paused")
        wait(tab, "pause", "Resume")
        at = job.loop.counters.iter
        tab.fill("#new-rate", "0.004")
        tab.press("#new-rate", "Enter")
        wait(tab, "events", "the learning rate 0.004 was asked for")
        assert job.loop.counters.iter == at
        tab.click("#pause")
        wait(tab, "state", "running")
        wait(tab, "events", "the learning rate is 0.004 now")
        wait(tab, "rate", "0.004")
        tab.click("#checkpoint")
        wait(tab, "files", "iter_")
        tab.click("#stop")
        wait(tab, "stop", "Really stop?")
        assert job.thread.is_alive()
        tab.wait_for_function("() => { const stop = document.getElementById('stop'); stop.click(); return stop.disabled; }")
        wait(tab, "state", "stopped")
        wait(tab, "why", "The run has ended.")
        assert tab.is_disabled("#pause")
        job.thread.join(60)
        assert job.error is None


@pytest.mark.long
def test_a_click_before_the_page_is_ready_is_not_lost(server, tab):
    held = []
    tab.route("**/static/run.js", lambda route: held.append(route))
    with watched(server, slow=True):
        tab.goto(server.url.replace("/#", "/runs/1/#"), wait_until="commit")
        tab.wait_for_selector("#set", state="attached")
        assert all(tab.is_disabled(f"#{name}") for name in (*BUTTONS, "new-rate"))
        until(lambda: tab.title() and held)  # a call of Playwright takes what has come
        held[0].continue_()
        tab.click("#pause")
        wait(tab, "state", "paused")


@pytest.mark.long
def test_the_rate_box_offers_the_present_rate_until_one_types(server, tab):
    def wait_for_box(wanted):
        tab.wait_for_function("wanted => document.getElementById('new-rate').value === wanted", arg=wanted)

    with watched(server, slow=True) as job:
        tab.goto(server.url)
        tab.wait_for_selector("#set:enabled")
        wait_for_box("0.1")
        job.loop.set_lr(0.05)
        wait_for_box("0.05")
        tab.fill("#new-rate", "0.004")
        job.loop.set_lr(0.02)
        wait(tab, "rate", "0.02")
        wait_for_box("0.004")
        tab.press("#new-rate", "Enter")
        wait(tab, "rate", "0.004")
        job.loop.set_lr(0.03)
        wait_for_box("0.03")


@pytest.mark.long
def test_a_wrong_rate_is_answered_on_the_page_and_a_button_that_does_not_work_says_why(server, tab):
    with watched(server, slow=True):
        tab.goto(server.url)
        tab.wait_for_selector("#set:enabled")
        wait(tab, "why", "Checkpoint now: this run has no work dir")
        assert tab.is_disabled("#checkpoint")
        assert tab.is_enabled("#pause")
        wait(tab, "rate", "0.1")
        tab.fill("#new-rate", "fast")  # as a user types: the page leaves that alone when the next event comes
        tab.click("#set")
        wait(tab, "events", "Learning rate: the learning rate must be above 0")
        assert tab.text_content("#rate") == "0.1"


@pytest.mark.long
def test_without_the_token_the_run_is_shown_and_cannot_be_changed(server, tab):
    with watched(server, slow=True):
        tab.goto(f"http://127.0.0.1:{server.port}/")
        wait(tab, "why", "it contains the token")
        assert all(tab.is_disabled(f"#{name}") for name in BUTTONS)
        tab.wait_for_selector("figure canvas")


@pytest.mark.long
def test_a_failed_run_says_why(server, tab):
    with failing(server, "out of <b>luck</b>"):
        tab.goto(server.url)
        wait(tab, "state", "failed")
        wait(tab, "events", "RuntimeError: out of <b>luck</b>")


@pytest.mark.long
def test_several_runs_are_listed_and_have_a_page_each(server, tab):
    with watched(server, slow=True, name="first"), Job(Bus(Watcher(server.board)), slow=True, name="second"):
        until(lambda: server.board.get(2) is not None)
        tab.goto(server.url)
        tab.click("text=second")
        wait(tab, "name", "second")
        tab.wait_for_selector("#pause:enabled")
        assert tab.url.endswith(("/runs/1/", "/runs/2/"))
        tab.click("text=all runs")
        tab.wait_for_selector("text=first")
        assert tab.url == f"http://127.0.0.1:{server.port}/?all"


def labels(tab):
    """The descriptions of the charts of several runs, by name."""
    said = tab.locator(".plot[aria-label]").evaluate_all("(all) => all.map(one => one.ariaLabel)")
    return {re.match(r"Curves of (\S+):", text)[1]: text for text in said}


def test_several_runs_share_the_charts_and_the_list_chooses_them(server, tab, tmp_path):
    for name, lr in (("a", 0.1), ("b", 0.2)):
        write_run(tmp_path / name, session(epoch=10, iter=100, settings={"optimizer.lr": lr, "seed": 3}))
    FolderWatcher(server.board, [tmp_path]).read_new()
    tab.goto(server.url)
    tab.wait_for_selector("figure canvas")
    assert [one.strip() for one in tab.locator("#heads th").all_text_contents()][4:6] == ["lr", "began"]
    found = labels(tab)
    assert re.match(r"Curves of loss: b 0\.\d+, a 0\.\d+$", found["loss"])
    assert found["accuracy"] == "Curves of accuracy: b val 0.8, b test 0.85, a val 0.8, a test 0.85"
    tab.get_by_label("curves of b").uncheck()
    tab.wait_for_function("() => document.querySelector('.plot').ariaLabel.startsWith('Curves of loss: a')")
    assert "b val" not in labels(tab)["accuracy"]


@pytest.mark.long
def test_the_curves_of_runs_that_go_on_grow_in_the_shared_chart(server, tab):
    with watched(server, slow=True, name="first"), Job(Bus(Watcher(server.board)), slow=True, name="second"):
        until(lambda: server.board.get(2) is not None)
        tab.goto(server.url)
        tab.wait_for_selector("figure canvas")
        # A function: an expression is evaluated as text at each look, which the page's policy refuses from the second on.
        tab.wait_for_function(f"() => ['first', 'second'].every(one => {LOSS}.includes(one))")
        before = tab.evaluate(LOSS)
        tab.wait_for_function(f"before => {LOSS} !== before", arg=before)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_the_page_of_several_runs_is_accessible_and_not_wider_than_the_screen(server, browser, tmp_path, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    for number in range(12):
        write_run(tmp_path / f"run-{number}", session(settings={"lr": number / 10, "optimizer": "AdamW" if number else "SGD"}))
    FolderWatcher(server.board, [tmp_path]).read_new()
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
    tab = context.new_page()
    tab.goto(server.url)
    tab.wait_for_selector("figure canvas", timeout=60_000)
    results = axe.Axe().run(tab)
    assert results.violations_count == 0, results.generate_report()
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    context.close()


@pytest.mark.long
def test_a_page_that_waits_shows_the_first_run_when_it_begins_and_a_lost_connection(server, tab):
    tab.goto(server.url)
    wait(tab, "notice", "No run has begun yet")
    with watched(server, slow=True):
        wait(tab, "state", "running")
        assert tab.is_visible("#pause")
        server.close()
        wait(tab, "state", "connection lost")
        wait(tab, "notice", "The connection is lost")
        assert tab.is_disabled("#pause")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_is_accessible_and_nothing_is_wider_than_the_screen(server, browser, tmp_path, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    with watched(server, bus=Bus(CheckpointHook(interval=100)), slow=True, work_dir=tmp_path):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
        tab = context.new_page()
        tab.goto(server.url)
        tab.wait_for_selector("#parts tr", timeout=60_000)
        tab.wait_for_selector("#files tr", timeout=60_000)
        tab.wait_for_selector("#pause:enabled", timeout=60_000)
        results = axe.Axe().run(tab)
        assert results.violations_count == 0, results.generate_report()
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        context.close()
