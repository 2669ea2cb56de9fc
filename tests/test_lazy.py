"""Packages that load their names when they are used look as if they had loaded them."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainbus import eventloop

ROOT = Path(eventloop.__file__).resolve().parent.parent
LAZY = sorted(
    ".".join(("trainbus", *file.parent.relative_to(ROOT).parts)).replace("trainbus.trainbus", "trainbus")
    for part in ("eventloop", "hooks", "trainbus")
    for file in (ROOT / part).rglob("__init__.py")
    if "= lazy(__name__)" in file.read_text()
)


def test_the_packages_that_a_quick_command_passes_are_lazy():
    assert {"trainbus.eventloop", "trainbus.eventloop.checkpoint", "trainbus.hooks", "trainbus.observe"} <= set(LAZY)


@pytest.mark.parametrize("name", LAZY)
def test_each_public_name_is_there_and_is_what_a_star_imports(name):
    package = importlib.import_module(name)
    assert set(package.__all__) <= set(dir(package))
    space = {}
    exec(f"from {name} import *", space)  # noqa: S102
    assert {one: space[one] for one in package.__all__} == {one: getattr(package, one) for one in package.__all__}


@pytest.mark.parametrize("name", LAZY)
def test_no_name_is_also_that_of_a_module_whose_import_would_take_its_place(name):
    """Names that are imported with the package are safe: it sets them behind the import of the module."""
    package = importlib.import_module(name)
    eager = {one for one in package.__all__ if f".{one} import" in Path(package.__file__).read_text().partition("if TYPE")[0]}
    modules = {one.name for one in pkgutil.iter_modules(package.__path__)}
    assert modules & set(package.__all__) <= eager


def test_a_submodule_is_there_without_an_import_of_its_own():
    source = "import trainbus.eventloop as one; print(one.errors.TrainbusError.__name__, one.checkpoint.load.__name__)"
    found = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)  # noqa: S603
    assert found.stdout == "TrainbusError load\n"


def test_an_unknown_name_is_an_error_from_which_python_names_the_nearest():
    with pytest.raises(AttributeError) as caught:
        eventloop.TrainLop  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("TrainLop", eventloop)
    with pytest.raises(ImportError):
        from trainbus.eventloop import Nothing  # noqa: F401
