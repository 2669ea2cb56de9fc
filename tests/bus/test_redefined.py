"""What a notebook's cell defines and subscribes replaces what its last execution has subscribed."""

import textwrap

import pytest
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, Hook, Progress
from trainbus.eventloop.events import AfterRun

HOOK = """
class Mine(Hook):
    def after_run(self, event): heard.append({0!r})
    def state_dict(self): return {{}}
    def load_state_dict(self, state): ...
bus.add(Mine())
"""
FUNCTION = """
@bus.on("after_run")
def watch(event): heard.append({0!r})
"""
CALLABLE = """
class Watch:
    def __call__(self, event): heard.append({0!r})
bus.on("after_run", Watch())
"""
LAMBDA = """
bus.on("after_run", lambda event: heard.append("lambda"))
"""


class Notebook:
    def __init__(self, module="__main__"):
        self.bus, self.heard = Bus(), []
        self.names = {"__name__": module, "bus": self.bus, "heard": self.heard, "Hook": Hook}

    def execute(self, cell, name="<cell 1>"):
        exec(compile(textwrap.dedent(cell), name, "exec"), self.names)  # noqa: S102

    def hears(self):
        self.heard.clear()
        self.bus.publish(AfterRun(progress=Progress()))
        return list(self.heard)


@pytest.mark.parametrize("cell", [HOOK, FUNCTION, CALLABLE])
@pytest.mark.parametrize(("first", "second"), [("<cell 1>", "<cell 1>"), ("<cell 1>", "<cell 2>"), ("<stdin>", "<stdin>")])
def test_a_hook_or_function_that_is_defined_again_replaces_the_old_one(cell, first, second):
    notebook = Notebook()
    notebook.execute(cell.format("old"), first)
    with capture_logs() as logs:
        notebook.execute(("\n\n" if first == "<stdin>" else "") + cell.format("new"), second)
    assert notebook.hears() == ["new"]
    assert len(logs) == 1


@pytest.mark.parametrize("interactive", [True, False])
def test_a_class_without_functions_is_known_by_its_name_in_a_notebook_only(monkeypatch, interactive):
    monkeypatch.setattr("builtins.get_ipython", lambda: None, raising=False)
    if not interactive:
        monkeypatch.delattr("builtins.get_ipython")
    notebook = Notebook()
    notebook.execute("def hear(self, event): heard.append(self.text)\nclass Base(Hook):\n after_run = hear")
    for text in ("old", "new"):
        notebook.execute(f"class Mine(Base):\n text = {text!r}\nbus.add(Mine())")
    notebook.execute("bus.add(Mine())")  # of the same class
    assert notebook.hears() == (["new"] if interactive else ["old", "new"]) + ["new"]


def test_a_cell_with_a_lambda_subscribes_it_once():
    notebook = Notebook()
    for _ in range(3):
        notebook.execute(LAMBDA)
    notebook.execute(LAMBDA, "<cell 2>")  # another one, for all that is known
    assert notebook.hears() == ["lambda"] * 2


def test_the_old_function_leaves_all_its_mount_points_and_the_new_one_may_have_several():
    cell = FUNCTION + 'bus.on("after_test", watch)'
    notebook = Notebook()
    for text in ("old", "new"):
        notebook.execute(cell.format(text))
    assert [one.mount_point for one in notebook.bus.subscriptions] == ["after_run", "after_test"]


@pytest.mark.parametrize(
    "cell",
    [
        "for n in (1, 2):\n @bus.on('after_run')\n def watch(event, n=n): heard.append(n)",
        "for n in (1, 2):\n class Mine(Hook):\n  def after_run(self, event, n=n): heard.append(n)\n bus.add(Mine())",
        "def watch(event): heard.append(1)\nbus.on('after_run', watch)\n"
        "def watch(event): heard.append(2)\nbus.on('after_run', watch)",
        "class Mine(Hook):\n def __init__(self, n): self.n = n\n def after_run(self, event): heard.append(self.n)\n"
        "bus.add(Mine(1))\nbus.add(Mine(2))",
        "class Watch:\n def __init__(self, n): self.n = n\n def __call__(self, event): heard.append(self.n)\n"
        "bus.on('after_run', Watch(1))\nbus.on('after_run', Watch(2))",
    ],
)
def test_several_of_one_kind_in_one_execution_all_stay(cell):
    notebook = Notebook()
    notebook.execute(cell)
    assert notebook.hears() == [1, 2]


def test_a_hook_of_another_name_stays():
    notebook = Notebook()
    notebook.execute(HOOK.format("one") + "\nbus.hooks[0].name = 'one'")
    notebook.execute(HOOK.format("two"))
    assert notebook.hears() == ["one", "two"]


def test_outside_of_main_nothing_is_replaced():
    notebook = Notebook("mine")
    for text in ("old", "new"):
        notebook.execute(FUNCTION.format(text))
    assert notebook.hears() == ["old", "new"]
