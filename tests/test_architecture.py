"""How hooks use the mechanism, read from the source of every module. The arrows between packages are in pyproject.toml."""

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from trainbus import eventloop

from . import inner_rings

ROOT = Path(eventloop.__file__).resolve().parent.parent
PUBLIC = (
    "trainbus.eventloop",
    *(f"trainbus.eventloop.{name}" for name in ("bus", "checkpoint", "errors", "events", "spelling", "training")),
    *(f"trainbus.eventloop.{name}" for name in ("annotations", "bounds", "checks", "lazy", "plain", "registry")),
    "trainbus.eventloop.terminal",
    "trainbus.eventloop.notebook",
    "trainbus.eventloop.device",  # the accelerator
    "trainbus.eventloop.platform",  # the operating system
    "trainbus.eventloop.privates",  # undocumented names of torch that hooks use, too
    "trainbus.eventloop.seams",  # limits and clocks
    "trainbus.eventloop.world",  # whether there is a process group
    "trainbus.eventloop.user_errors",  # context managers and notes that any exception passes
)
FILES = sorted(file for package in ("eventloop", "hooks", "trainbus") for file in (ROOT / package).rglob("*.py"))


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return name if name.startswith("trainbus") else f"trainbus.{name}"


MODULES = {module_name(file): file for file in FILES}


class Import(NamedTuple):
    """One imported name: ``from module import name`` or ``import module``."""

    module: str
    name: str | None
    lazy: bool
    typing: bool

    @property
    def target(self) -> str:
        """The module that is loaded."""
        inner = f"{self.module}.{self.name}"
        return inner if inner in MODULES else self.module

    def __repr__(self) -> str:
        return f"from {self.module} import {self.name}" if self.name else f"import {self.module}"


@cache
def parsed(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


@cache
def imports(name: str) -> list[Import]:
    """All imports of a module, with whether they stand in a function and whether they are for type checkers only."""
    found: list[Import] = []

    def visit(node: ast.AST, *, lazy: bool, typing: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, None, lazy=lazy, typing=typing) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            found.extend(Import(node.module or "", alias.name, lazy=lazy, typing=typing) for alias in node.names)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.body:
                visit(child, lazy=inside, typing=True)
            for child in node.orelse:
                visit(child, lazy=inside, typing=typing)
            return
        for child in ast.iter_child_nodes(node):
            visit(child, lazy=inside, typing=typing)

    visit(parsed(name), lazy=False, typing=False)
    return found


DOTTED = re.compile(r"(eventloop|hooks|trainbus)(\.\w+)*(:\w+)?")
BY_USERS = {"trainbus.config.names"}
"""Modules that import what a user's text names."""


@cache
def by_name(name: str) -> set[str]:
    """The modules of ours that a module names in a string, as for ``import_module``: late imports and adapters."""
    found = set()
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and DOTTED.fullmatch(node.value):
            module = node.value.partition(":")[0]
            if module in MODULES and "." in node.value:
                found.add(module)
    return found - {name}


@pytest.mark.long
def test_rooms_import_rooms_above_them_neither_late_nor_by_name():
    """Layers are those of the linter, which sees no names in strings. Only `eventloop` itself stands above all its rooms."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [[one.strip() for one in layer.split("|")] for layer in contracts[0]["layers"]]
    floor = {room: -number for number, layer in enumerate(layers) for room in layer}

    def floor_of(module: str) -> int | None:
        return next((floor[room] for room in sorted(floor, key=len, reverse=True) if f"{module}.".startswith(f"{room}.")), None)

    assert {
        "trainbus.eventloop.bus",
        "trainbus.eventloop.offload.lane",
        "trainbus.eventloop.checkpoint.staging",
        "trainbus.hooks",
    } <= set(MODULES)
    for name in MODULES:
        here = floor_of(name)
        if here is None or name in BY_USERS:
            continue
        for target in by_name(name) | {one.target for one in house(name)}:
            there = floor_of(target)
            assert there is None or there <= here, f"{name} names {target}, which stands above it"


def test_entry_points_are_of_parts_around_the_engine():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["trainbus"]
    assert {*points.values()} <= {*MODULES} - {*under("trainbus.eventloop")}


def house(name: str) -> list[Import]:
    """What a module imports from our packages."""
    return [one for one in imports(name) if one.module.split(".")[0] == "trainbus"]


def under(package: str) -> Iterator[str]:
    return (name for name in MODULES if name == package or name.startswith(f"{package}."))


@pytest.mark.parametrize("name", sorted(under("trainbus.hooks")))
def test_hooks_use_public_names_of_eventloop_only_and_no_private_attributes_of_others(name):
    for one in house(name):
        if one.target in under("trainbus.hooks"):
            continue
        if one.target in PUBLIC:
            continue  # from eventloop import events
        assert one.module in PUBLIC, f"{name}: {one!r}"
        assert one.name, f"{name}: {one!r}; write `from eventloop import ...`"
        assert not one.name.startswith("_"), f"{name}: {one!r}"
        module = importlib.import_module(one.module)
        public = getattr(module, "__all__", vars(module))
        assert one.name in public, f"{name}: {one!r} is not in {one.module}.__all__"
    tree = parsed(name)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    own = {name for one in classes for name in (one.name, *map(ast.unparse, one.bases))} | {"self", "cls", "super()"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            assert ast.unparse(node.value) in own, f"{name}:{node.lineno}: {ast.unparse(node)}"


@pytest.mark.long
def test_nothing_imports_names_of_trainbus_which_loads_the_packages_when_a_name_is_used():
    for name in MODULES.keys() - {"trainbus.__main__"}:
        assert not any(one.module == "trainbus" and f"trainbus.{one.name}" not in MODULES for one in house(name)), name
    assert all(one.lazy or one.typing for one in house("trainbus"))


def test_modules_have_no_cycles_late_imports_and_names_in_strings_included():
    graph = {name: sorted(({one.target for one in house(name)} | by_name(name)) - {name}) for name in MODULES}
    # The one module by which the parts of a run know each other names them for type checkers.
    hub = "trainbus.eventloop.training.saved_run"
    graph[hub] = sorted({one.target for one in house(hub) if not one.typing})
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a cycle: {' → '.join([*path[path.index(name) :], name])}"
        if name in done:
            return
        for target in graph.get(name, ()):
            walk(target, (*path, name))
        done.add(name)

    for name in graph:
        walk(name, ())


def test_the_overloads_of_on_are_those_of_the_events():
    script = ROOT / ".ci" / "write_overloads.py"
    spec = importlib.util.spec_from_file_location("write_overloads", script)
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    builtin = {
        name: kind for name, kind in writer.registry.items() if kind.__module__ == "trainbus.eventloop.events.mount_points"
    }
    writer.registry = builtin
    assert writer.in_sync(), "run python .ci/write_overloads.py"


def test_stubs_are_installed_with_the_package():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    stubs = {ROOT / "eventloop" / "bus" / "overloads.pyi", ROOT / "eventloop" / "events" / "run_view.pyi"}
    installed = {file for stub in stubs for glob in data["*"] for file in stub.parent.glob(glob)}
    assert stubs == set((ROOT / "eventloop").glob("**/*.pyi")) <= installed


def test_each_attribute_of_a_runs_state_is_assigned_by_the_module_of_the_state_alone():
    """Others call a method of ``RunState``, ``Counters`` or ``ValidationPlan``, whose name says what happens."""
    homes = ("trainbus.eventloop.training.state", "trainbus.eventloop.training.machine")
    classes = {node.name: node for home in homes for node in parsed(home).body if isinstance(node, ast.ClassDef)}
    stored = {
        name: {
            node.attr
            for node in ast.walk(classes[name])
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
        }
        for name in ("RunState", "Counters", "ValidationPlan")
    }
    stored["Counters"] |= {"epoch", "iter", "update", "batches", "phase", "validations", "tests", "max_epochs", "max_iters"}
    owners = {"state": stored["RunState"], "counters": stored["Counters"], "plan": stored["ValidationPlan"]}
    assert {"outputs", "version", "resumed", "progress"} <= stored["RunState"]
    found = []
    for name in [*under("trainbus.eventloop"), *under("trainbus.hooks")]:
        for node in ast.walk(parsed(name)):
            if name not in homes and isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner = ast.unparse(node.value).rpartition(".")[2].strip("_")
                if node.attr in owners.get(owner, ()):
                    found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert not found


def test_the_outcome_of_a_save_is_told_in_one_place():
    told = {"CheckpointCommitted", "CheckpointFailed", "CheckpointSkipped"}
    calls = {name: [node for node in ast.walk(parsed(name)) if isinstance(node, ast.Call)] for name in MODULES}
    made = {name for name in MODULES if any(ast.unparse(node.func).rpartition(".")[2] in told for node in calls[name])}
    assert made == {"trainbus.eventloop.training.saves.requests"}


SPEAKS_TO_ACCELERATORS = re.compile(
    r"torch\.(accelerator|cuda|xpu|mps|mtia|hpu|npu|Stream|Event|get_device_module)\b"
    r"|\.(is_pinned|pin_memory|record_stream|current_stream)\b"
    r"|\bpin_memory=(?!False)"
)


def test_one_module_speaks_to_accelerators():
    assert SPEAKS_TO_ACCELERATORS.search("torch.empty(3, pin_memory=True)")
    found = {name for name in MODULES if SPEAKS_TO_ACCELERATORS.search(ast.unparse(parsed(name)))}
    assert found - {*under("trainbus.testing")} == {"trainbus.eventloop.device"}


OF_SOME_SYSTEMS = ("fcntl", "resource", "msvcrt", "termios", "pwd", "grp", "platform")
SYSTEMS_DIFFER = re.compile(
    r"sys\.platform$|signal\.(pthread_sigmask|siginterrupt)$|signal\.SIG(KILL|STOP|HUP|USR1|USR2|XCPU|BREAK)$|/(proc|sys|dev)/|os\.(name|open|kill|fork|link|symlink|pread|writev)$"
    r"|os\.(fsync|fdatasync|register_at_fork|sysconf|uname|sched_getaffinity|getppid|cpu_count|O_(BINARY|DIRECTORY|NOFOLLOW))$"
)


def asked_of_the_system(name: str) -> Iterator[str]:
    """Yield modules, attributes of modules, and paths in a module that differ between systems."""
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in OF_SOME_SYSTEMS)
        elif isinstance(node, ast.Attribute | ast.Constant):
            text = node.value if isinstance(node, ast.Constant) else ast.unparse(node)
            if isinstance(text, str) and SYSTEMS_DIFFER.match(text):
                yield text


def test_one_module_speaks_to_the_operating_system():
    assert "os.fsync" in {*asked_of_the_system("trainbus.eventloop.platform")}
    found = {name: told for name in MODULES if (told := [*asked_of_the_system(name)])}
    assert found.keys() - {*under("trainbus.testing")} == {"trainbus.eventloop.platform"}, found


ASKS_FOR_ALL_PROCESSES = re.compile(r"distributed\.(is_initialized|get_rank|get_world_size)\(\)")


def test_one_module_asks_which_process_this_is_and_how_many_there_are():
    assert ASKS_FOR_ALL_PROCESSES.search("torch.distributed.get_rank()")
    found = {name for name in MODULES if ASKS_FOR_ALL_PROCESSES.search(ast.unparse(parsed(name)))}
    assert found - {*under("trainbus.bridges.ignite")} == {"trainbus.eventloop.world"}  # there it is Ignite's module


def test_no_two_public_classes_share_a_name():
    simulated = {*under("trainbus.testing.sim")}  # it has the names of torch
    nodes = [node for name in MODULES.keys() - simulated for node in parsed(name).body]
    names = [node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_no_module_changes_attributes_of_an_exception_that_may_be_the_users():
    """``user_errors`` does it without those that the class may refuse; contextlib's context manager assigns a traceback."""
    for name in MODULES.keys() - {"trainbus.eventloop.user_errors"}:
        assert Import("contextlib", "contextmanager", lazy=False, typing=False) not in imports(name), name
        called = {
            one.func.attr for one in ast.walk(parsed(name)) if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute)
        }
        assert "add_note" not in called, name


OTHERS = re.compile(
    r"\b(lightning|ignite|accelerate|hugging ?face|transformers|mmengine|imix|pointrix|ray|torchft|nvrx|nvidia_resiliency_ext"
    r"|uvicorn|starlette|fastapi|deepspeed|gymnasium|matplotlib|seaborn|torchmetrics|torcheval|tensorboard|wandb|w&b|mlflow"
    r"|jupyter|celery|keras)\b(?!\.co/docs/safetensors|\"\))",  # the source of the format; the name of a folder
    re.IGNORECASE,
)
"""The libraries of bridges, guests, writers and pages. The engine's own stores are reached by fsspec and s3fs."""


@pytest.mark.parametrize("name", sorted(under("trainbus.eventloop")))
def test_the_engine_names_no_other_library_not_even_in_its_texts(name):
    lines = MODULES[name].read_text().splitlines()
    assert [f"{number}: {line}" for number, line in enumerate(lines, 1) if OTHERS.search(line)] == []


ENGINE_ALONE = """
import sys

import torch

from trainbus.eventloop import Bus, TrainLoop, Update

data = [torch.ones(4, 2)] * 3


def train(epochs, **options):
    seen, bus, model = [], Bus(Update()), torch.nn.Linear(2, 1)
    bus.on("after_train_iter", lambda event: seen.append(event.progress.iter), offload="thread")
    bus.on("after_train_epoch", lambda event: event.run.checkpoints.save(f"{event.progress.epoch}.safetensors"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"step": lambda model, batch: model(batch).mean(), "train_data": data, "bus": bus, "work_dir": sys.argv[1]}
    TrainLoop(model, optimizer, max_epochs=epochs, **options).run(resume="auto")
    return seen


print(train(2), train(3))
print([name for name in sys.modules if name.startswith("trainbus.") and not name.startswith("trainbus.eventloop")])
print(sys.modules["trainbus"].__file__)
"""


@pytest.mark.long
def test_the_engine_trains_saves_and_resumes_without_the_parts_around_it(tmp_path):
    package = tmp_path / "trainbus"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "eventloop").symlink_to(ROOT / "eventloop")
    found = subprocess.run(  # noqa: S603
        [sys.executable, "-c", ENGINE_ALONE, str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == f"[0, 1, 2, 3, 4, 5] [6, 7, 8]\n[]\n{package / '__init__.py'}\n"


@pytest.mark.long
def test_tests_of_the_engine_and_the_hooks_pass_without_the_parts_around_them(tmp_path):
    """``python -m tests.inner_rings FOLDER`` runs all of them."""
    some = ("events", "bus", "checkpoint/test_container.py", "training/test_machine.py", "hooks/test_ema.py")
    found = inner_rings.run(tmp_path / "inner", "-n2", *(f"tests/{one}" for one in some))
    passed, skipped = (int(re.search(rf"(\d+) {word}", found.stdout)[1]) for word in ("passed", "skipped"))
    assert found.returncode == 0, found.stdout
    assert passed > 500
    assert skipped < passed / 10, found.stdout
