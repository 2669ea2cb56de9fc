"""Notebooks: the examples run in a real kernel, objects are tables, and what a person does at the desk is answered there."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainbus.eventloop import Bus, ConfigurationError, Hook, Run, TrainingError, TrainLoop, check_options
from trainbus.eventloop.notebook import Named, card, table
from trainbus.eventloop.seams import CLOCK
from trainbus.hooks import CheckpointHook
from trainbus.hooks.progress_cell import ProgressCell

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

EXAMPLES = sorted((Path(__file__).parents[1] / "examples/notebooks").glob("*.ipynb"))
DEFINES = """
from trainbus import Event, Hook, register

class Seen(Event):
    by: str

@bus.on(Seen)
def hear(event): print("{0} function, told by the", event.by)

@register
class Tells(Hook):
    def after_run(self, event): bus.publish(Seen(by="{0} hook"))

bus.add(Tells())
"""
PROBES = {
    "old": "from trainbus import Bus\nbus = Bus()\n" + DEFINES.format("old"),
    "new": DEFINES.format("new"),
    "hears": "with Run(bus, model=nn.Linear(2, 1)): pass",
    "task": "import asyncio\nloop = make_loop()\ntraining = asyncio.create_task(loop.arun(max_epochs=100_000))",
    "meanwhile": """
begun = loop.counters.iter
while loop.counters.iter < begun + 100:
    await asyncio.sleep(0.01)
loop.stop("seen enough")
await training
print("the task has ended")
""",
    "interrupted": """
import _thread
trained = loop
loop = make_loop()
loop.bus.on("after_train_epoch", lambda event: _thread.interrupt_main(), once=3)
loop.run(max_epochs=50)
""",
    "cancelled": """
import os, signal
loop = make_loop()
loop.bus.on("after_train_epoch", lambda event: os.kill(os.getpid(), signal.SIGINT), once=2)  # as the button
await loop.arun(max_epochs=100_000)
""",
    "twice": """
import os, signal
loop = make_loop()
loop.bus.on("after_train_epoch", lambda event: signal.raise_signal(signal.SIGINT), once=3)
loop.bus.on("on_exception", lambda event: signal.raise_signal(signal.SIGINT))
loop.run(max_epochs=50)
""",
    "unsaved": """
import _thread
from trainbus import TrainLoop
bare = TrainLoop(torch.nn.Linear(8, 1), loop._optimizer, step=step, train_data=data, max_epochs=50)
bare.bus.on("after_train_epoch", lambda event: _thread.interrupt_main(), once=1)
bare.run()
""",
    "again": "trained.run(max_epochs=5)\ndone = trained.run(max_epochs=5)",
    "lines": """
from trainbus import ConsoleWriter, LoggerHook
loop = make_loop()
loop.bus.add(LoggerHook(interval=16, writers=[ConsoleWriter()]))
await loop.arun()
""",
    "plain": "print(repr(bus), repr(loop), repr(loop.bus.hooks[0]), bus.describe(), sep='\\n')",
}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The executed cells by their source's first line, or the name of the probe. One kernel: it takes seconds to start."""
    read = [cell for path in EXAMPLES for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    found = [nbformat.v4.new_code_cell(cell.source) for cell in read]  # with ids of their own
    probes = {name: nbformat.v4.new_code_cell(source) for name, source in PROBES.items()}
    for name in ("interrupted", "cancelled", "twice", "unsaved"):
        probes[name].metadata.tags = ["raises-exception"]
    notebook = nbformat.v4.new_notebook(cells=[*found, *probes.values()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        patch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
        place = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
        nbclient.NotebookClient(notebook, timeout=120, resources=place).execute()
    return {cell.source.strip().splitlines()[0]: cell for cell in found} | probes


def html(cell: Any) -> list[str]:
    return [output.data["text/html"] for output in cell.outputs if "text/html" in output.get("data", {})]


def streams(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


@pytest.mark.long
def test_a_run_shows_its_validations_and_its_curve_in_one_output_and_its_result_as_a_table(cells):
    progress, result = html(cells["loop.run()"])
    assert [f"epoch {n}" for n in (3, 4)] == re.findall(r"epoch [34]", progress) or "<svg" in progress
    assert "<table" in result


@pytest.mark.long
def test_a_cell_is_not_told_that_it_blocks_the_event_loop_of_its_kernel(cells):
    assert "await loop.arun()" not in "".join(map(streams, cells.values()))


@pytest.mark.long
def test_a_second_run_trains_on(cells):
    progress, result = html(cells["loop.run(max_epochs=5)"])
    assert "epoch 4" in progress
    assert "epoch 5" in progress
    assert "accuracy" in result


@pytest.mark.long
def test_the_bus_and_its_costs_are_tables(cells):
    (bus,), (costs,) = html(cells["bus"]), html(cells["bus.costs()"])
    assert "CheckpointHook" in bus
    assert "after_train_iter" in bus
    assert re.search(r"forward.*%", costs)


@pytest.mark.long
def test_what_a_cell_defines_again_replaces_the_hook_the_function_and_the_event(cells):
    assert streams(cells["hears"]).splitlines() == ["new function, told by the new hook"]


@pytest.mark.long
def test_other_cells_run_while_a_task_trains(cells):
    assert "the task has ended" in streams(cells["meanwhile"])


@pytest.mark.long
def test_a_stop_says_how_to_go_on_and_await_trains_on_in_the_cell(cells):
    assert "enough for today" in streams(cells["loop = make_loop()"])
    assert re.search(r"the run was stopped; continue from .*epoch_2", streams(cells["loop = make_loop()"]))
    assert any("epoch 4/4" in one for one in html(cells["resumed = make_loop()"]))
    (card,) = html(cells["resumed"])
    assert "4 of 4" in card


@pytest.mark.long
def test_the_lines_of_the_console_are_one_output_of_the_cell_that_trains(cells):
    (lines,) = (one for one in html(cells["lines"]) if "<pre" in one)
    assert lines.count("epoch") == 8


@pytest.mark.long
def test_an_interrupt_is_one_line_that_resumes_and_the_same_cell_again_does(cells):
    (error,) = (one for one in cells["interrupted"].outputs if one.output_type == "error")
    assert len(error.traceback) == 1
    assert re.search(r"interrupted after iteration \d+; continue from .*epoch_\d\.safetensors with resume=", error.traceback[0])
    assert "nothing is left to train: max_epochs=5 was reached before" in streams(cells["again"])
    assert "run(max_epochs=10)" in streams(cells["again"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("probe", "line"),
    [
        ("cancelled", r"CancelledError: the run was interrupted after iteration \d+; loop.arun\(\) trains on"),
        (
            "twice",
            r"KeyboardInterrupt: the run was interrupted after iteration \d+; continue from .*epoch_\d.safetensors with .*",
        ),
        ("unsaved", r"KeyboardInterrupt: the run was interrupted after iteration \d+"),
    ],
)
def test_an_interrupt_of_an_awaited_training_or_of_one_without_a_checkpoint_is_one_line(cells, probe, line):
    (error,) = (one for one in cells[probe].outputs if one.output_type == "error")
    (shown,) = error.traceback
    assert re.fullmatch(line, shown)


@pytest.mark.long
def test_elsewhere_objects_are_lines_of_text(cells):
    said = streams(cells["plain"])
    assert "object at 0x" not in said
    assert "Row(" not in said
    assert re.search(r"TrainLoop\(model: Linear, 9 parameters, optimizer: SGD, lr 0.01, epochs: 4 of 4", said)
    assert "CheckpointHook(interval=1)" in said


class Mine(Hook):
    @check_options
    def __init__(self, text: str = "<script>") -> None:
        self.text = text

    def after_run(self, event: Any) -> None: ...


@pytest.fixture
def page(monkeypatch, change):
    """What a page was told to show, and the clock."""
    found = SimpleNamespace(shown=[], time=0.0)
    handle = SimpleNamespace(update=lambda bundle, **_: found.shown.append(bundle))
    pages = SimpleNamespace(display=lambda bundle, **_: handle.update(bundle) or handle)
    monkeypatch.setitem(sys.modules, "IPython.display", pages)
    change(CLOCK, lambda: found.time)
    return found


def test_a_page_gets_as_many_updates_as_it_can_show_and_the_last_one(page):
    bar = ProgressCell()
    for done in range(1, 7):
        bar.draw(str(done), done, 6)
        page.time += 0.125
    bar.end()
    assert [bundle["text/plain"] for bundle in page.shown] == ["1", "3", "5", "6"]


def test_the_curve_has_one_point_for_an_iteration(page):
    bar = ProgressCell()
    for iteration, loss in ((1, 4.0), (2, 3.0), (2, 2.0), (3, 1.0)):
        bar.point(iteration, loss)
    bar.end()
    (points,) = re.findall(r'points="([^"]+)"', page.shown[-1]["text/html"])
    assert len(points.split()) == 3


def test_a_loop_names_its_work_dir_and_refuses_another_length_while_it_runs(tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = lambda model, batch: model(batch).sum()  # noqa: E731
    loop = TrainLoop(model, optimizer, step=step, train_data=[torch.ones(1, 2)], max_epochs=2, work_dir=tmp_path)
    assert f"work dir: {tmp_path}" in repr(loop)
    refused = []

    @loop.bus.on("after_train_iter", once=1)
    def again(event):
        with pytest.raises(TrainingError, match="already running"):
            loop.run(max_epochs=9)
        refused.append(loop.max_epochs)

    loop.run()
    assert refused == [2]
    assert loop.counters.epoch == 2


def test_text_of_users_is_no_html():
    (shown,) = {one._repr_html_() for one in (Mine(),)}
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    made = [table("<b>", ("<i>",), [("<u>",)]), card("<b>", {"<i>": "<u>"}), Named({"<b>": "<i>"})._repr_html_() or ""]
    assert not any(re.search("<[biu]>", one) for one in made)


def rows_of(html: str) -> list[list[str]]:
    """The cells of the rows of a table's body."""
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr[^>]*>(<td.*?)</tr>", html)]


@pytest.mark.parametrize("number", [3, 40, 41])
def test_a_short_table_has_all_rows(number):
    shown = rows_of(Named({f"metric_{i}": i for i in range(number)})._repr_html_() or "")
    assert shown == [[f"metric_{i}", str(i)] for i in range(number)]


def test_a_long_table_has_its_first_and_last_rows_and_says_how_to_see_the_others():
    metrics = Named({f"metric_{i}": i for i in range(5000)})
    shown = rows_of(metrics._repr_html_() or "")
    assert [int(value) for _, value in shown[:30] + shown[31:]] == [*range(30), *range(4990, 5000)]
    assert shown[30] == ["… 4,960 of 5,000 rows are left out; print() shows all …"]
    assert "'metric_2500': 2500" in str(metrics)


def test_a_long_list_of_subscriptions_names_the_mount_point_again_below_what_is_left_out():
    bus = Bus()
    for number in range(60):
        bus.on("before_run" if number < 20 else "after_run", lambda event: None, priority=number)
    shown = rows_of(bus._repr_html_())[-41:]  # the card has other rows above
    assert [(at, row[0]) for at, row in enumerate(shown) if row[0] and at != 30] == [
        (0, "before_run"),
        (20, "after_run"),
        (31, "after_run"),
    ]
    assert shown[30] == ["… 20 of 60 rows are left out; print(bus.describe()) shows all …"]
    assert str(bus.describe()).count("lambda at") == 60


class Posts(Hook):
    @check_options
    def __init__(self, api_key: str, to: str) -> None: ...

    def after_run(self, event: Any) -> None: ...


def test_a_hook_shows_no_secrets():
    hook = Posts(api_key="sk-123", to="https://chat.example/services/T0/B0")
    for shown in (repr(hook), hook._repr_html_()):
        assert "sk-123" not in shown
        assert "T0" not in shown
        assert "https://chat.example" in shown


def test_a_run_and_a_loop_say_where_they_are(tmp_path):
    model = torch.nn.Linear(2, 1)
    bus = Bus(CheckpointHook(1))
    with Run(bus, model=model, work_dir=tmp_path / "x") as run:
        assert "state: running" in repr(run)
        assert "Linear, 3 parameters" in run._repr_html_()
    assert "state: closed" in repr(run)
    assert repr(bus) == f"Bus(CheckpointHook) with {len(bus.subscriptions)} subscriptions, idle"


@pytest.mark.parametrize(("length", "more"), [({"max_epochs": 1}, {"max_iters": 9}), ({"max_iters": 2}, {"max_epochs": 2})])
def test_another_length_is_of_the_same_kind(length, more):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = lambda model, batch: model(batch).sum()  # noqa: E731
    loop = TrainLoop(model, optimizer, step=step, train_data=[torch.ones(1, 2)] * 2, **length)
    with pytest.raises(ConfigurationError, match=r"this loop counts (epochs|iterations): give run\(\) max_"):
        loop.run(**more)
    loop.run()
    loop.run(**{name: 2 * value for name, value in length.items()})
    assert loop.counters.iter == 4
