"""The reference is complete: every public name has a docstring, every option a description, and numbers have units."""

import ast
import importlib.util
import inspect
import re
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

import trainbus
from trainbus.eventloop import Hook
from trainbus.hooks import WeightAverage, Writer

from .pages import DOCS, ROOT

sys.path[:0] = [str(ROOT), str(DOCS / "_site")]
try:
    import hook_options
    import rooms
    from descriptions import is_number
finally:
    del sys.path[:2]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ignite, when it is imported
LACKING = {name for name, (_, library) in trainbus._OPTIONAL.items() if not find_spec(library)}
NAMES = [(room, name) for room in rooms.ROOMS for name in rooms.names(room) if name not in LACKING]
HANDLERS = Hook, Writer, WeightAverage
CLASSES = [(name, cls) for kind in hook_options.TITLES for name, cls in hook_options.classes(kind)]


def value_of(room, name):
    module, _, attribute = rooms.path_of(room, name).rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def text_of(room, name):
    """The docstring of a public name; for a constant, the string below its assignment."""
    value = value_of(room, name)
    if inspect.isclass(value) or inspect.isroutine(value):
        return value.__doc__ if inspect.isclass(value) else inspect.getdoc(value)
    module, _, attribute = rooms.path_of(room, name).rpartition(".")
    source = Path(inspect.getsourcefile(importlib.import_module(module))).read_text()
    found = re.search(rf'^{attribute}\b.* = (?:.|\n)*?\n"""(.*?)"""', source, re.MULTILINE)
    return found and found[1]


@pytest.mark.parametrize(("room", "name"), NAMES)
def test_every_public_name_has_a_docstring(room, name):
    assert text_of(room, name), f"{rooms.path_of(room, name)} has no docstring"


def test_the_page_of_file_formats_is_written_from_the_schema():
    script = ROOT / ".ci" / "write_file_formats.py"
    spec = importlib.util.spec_from_file_location("write_file_formats", script)
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    assert writer.in_sync(), f"run python {script.relative_to(ROOT)}"


def test_every_name_of_trainbus_is_on_a_page():
    trainbus = importlib.import_module("trainbus")
    found = [name for _, name in NAMES]
    assert set(trainbus.__all__) - set(found) == set()


@pytest.mark.parametrize(("name", "cls"), CLASSES, ids=[name for name, _ in CLASSES])
def test_every_option_has_a_description_and_numbers_have_a_unit(name, cls):
    for option in hook_options.options(cls):
        assert option["words"], f"{name}({option['name']}=) has no line under Args:"
        if is_number(option["kind"]):
            assert option["unit"], f"{name}({option['name']}=): {option['words']!r} names no unit"


def test_public_functions_name_the_errors_that_they_raise():
    silent = [
        f"{rooms.path_of(room, name)}{member}: {', '.join(sorted(errors))}"
        for room, name in NAMES
        for member, errors in _unnamed_errors(value_of(room, name))
    ]
    assert not silent, "\n".join(silent)


def _unnamed_errors(value):
    """Each public function of a value with the errors that its own body raises and no docstring names."""
    functions = {"": value} if inspect.isfunction(value) else {}
    if inspect.isclass(value) and not getattr(value, "_is_protocol", False):
        own = {
            f".{name}": member
            for name, member in vars(value).items()
            if name == "__init__" or not name.startswith(("_", "test_"))
        }
        own = {name: getattr(member, "fget", None) or getattr(member, "__func__", member) for name, member in own.items()}
        functions = {name: member for name, member in own.items() if inspect.isfunction(member)}
    for name, function in functions.items():
        if function.__name__ == "touch" or not hasattr(function, "__code__") or function.__code__.co_filename == "<string>":
            continue  # fields that an event does not have, each of which says so; what a dataclass has written
        source = textwrap.dedent(inspect.getsource(function))
        raised = {_error(one) for one in ast.walk(ast.parse(source)) if isinstance(one, ast.Raise) and one.exc is not None}
        docs = f"{function.__doc__} {value.__doc__}"
        if errors := {error for error in raised if error and error not in docs}:
            yield name, errors


def _error(node):
    """Return the name of the error that a statement raises, or None. A subclass defines what raises NotImplementedError."""
    parts = ast.unparse(getattr(node.exc, "func", node.exc)).split(".")
    return next((part for part in parts if part[0].isupper() and part != "NotImplementedError"), None)


def test_public_methods_have_docstrings():
    undocumented = [
        f"{rooms.path_of(room, name)}.{member}" for room, name in NAMES for member in _undocumented(value_of(room, name))
    ]
    assert not undocumented, "\n".join(undocumented)


def _undocumented(value):
    """The public methods and properties of a class without a docstring, but for handlers, checks and overridden methods."""
    if not inspect.isclass(value) or getattr(value, "_is_protocol", False):
        return
    for name, member in vars(value).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        inherited = any(hasattr(base, name) for base in value.__mro__[1:])
        handler = (
            issubclass(value, Hook | Writer | WeightAverage)
            and value.__module__.startswith("trainbus.")
            and not name.startswith("_")
        )
        public = not name.startswith(("_", "test_")) and inspect.isfunction(function) and not inherited and not handler
        if public and not member.__doc__:
            yield name
