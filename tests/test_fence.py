"""Private names of other objects: only in a ``privates.py``; elsewhere only those listed here, with the reason."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainbus import eventloop
from trainbus.eventloop import ConfigurationError, privates

ROOT = Path(eventloop.__file__).resolve().parent.parent
FILES = sorted(
    file for room in ("eventloop", "hooks", "trainbus") for file in (ROOT / room).rglob("*.py") if file.name != "privates.py"
)
ALLOWED = {}
"""Private names outside of the fence, by file. The list must not grow."""
IN_C = ("torch.Tensor.", "torch.UntypedStorage.", "loader.", "module.")  # these cannot be taken away, or not in one place
DOCUMENTED = {"_replace", "_fields", "_exit", "_name_", "_unregister_task"}  # of named tuples, os, enums and asyncio


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in DOCUMENTED


def own_names(tree: ast.Module) -> set[str]:
    """Return the private names that classes of a module define: methods, attributes of the class, and of ``self``."""
    names: set[str] = set()
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        names.update(one.name for one in kind.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
        for node in ast.walk(kind):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            ):
                names.add(node.attr)
    return names


def foreign_names(source: str) -> Iterator[str]:
    """Yield the private names that a module takes from objects other than ``self``, ``cls``, and its own classes.

    Also those in ``getattr(x, "_name")`` and imports. A ``self`` of a function outside of a class is another object.
    """
    tree = ast.parse(source)
    own = own_names(tree)
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def visit(node: ast.AST, inside: bool) -> Iterator[str]:
        match node:
            case ast.Attribute(value=value, attr=name) if is_private(name):
                owner = ast.unparse(value)
                ours = owner in {"super()", *classes} or (inside and owner in {"self", "cls"})
                if not ours and name not in own:
                    yield name
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"), args=[_, ast.Constant(value=str(name)), *_]
            ):
                if is_private(name) and name not in own:
                    yield name
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                yield from (part for part in module.split(".") if is_private(part))
                yield from (alias.name for alias in aliases if is_private(alias.name))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside or isinstance(node, ast.ClassDef))

    return visit(tree, False)


@pytest.mark.long
def test_private_names_are_taken_from_their_tables_only():
    """Whoever asks which private names of a library we use reads one file. One that is gone leaves the list above."""
    found = {(str(file.relative_to(ROOT)), name) for file in FILES for name in foreign_names(file.read_text())}
    assert found == {(file, name) for file, names in ALLOWED.items() for name in names}


@pytest.mark.long
def test_no_private_name_of_a_table_is_written_as_text():
    """``replace(trainer, "_name", ...)`` is an access, too."""
    texts = [
        node.value
        for room in ("eventloop", "trainbus")
        for file in (ROOT / room).rglob("privates.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    tables = {part for text in texts if " " not in text for part in text.split(".") if is_private(part)}
    assert {"_inner_training_loop", "_foreach_copy_"} <= tables
    found = [
        f"{file.relative_to(ROOT)}: {node.value}"
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in tables
    ]
    assert not found


@pytest.mark.parametrize("path", [path for path in privates.TORCH if not path.startswith(IN_C)])
def test_a_torch_without_a_name_is_refused_when_trainbus_is_imported(path, monkeypatch):
    """Each name of torch's table is looked up; the error names library, version and name."""
    *parts, name = path.split(".")
    owner = torch
    for part in parts[1:]:
        owner = getattr(owner, part)
    monkeypatch.delattr(owner, name)
    with pytest.raises(ConfigurationError) as error:
        importlib.reload(privates)
    assert all(part in str(error.value) for part in (f"torch {torch.__version__} ", repr(name), "pip install"))


def test_a_scaler_without_a_name_is_refused_before_the_training(monkeypatch):
    scaler = torch.amp.GradScaler("cpu")
    privates.check_scaler(scaler)
    vars(scaler).pop("_per_optimizer_states")
    with pytest.raises(ConfigurationError, match="_per_optimizer_states"):
        privates.check_scaler(scaler)


def test_a_process_group_in_python_tells_no_timeout(monkeypatch):
    class Group(torch.distributed.ProcessGroup):
        pass

    monkeypatch.setattr(privates.distributed, "group", SimpleNamespace(WORLD=Group(0, 1)))
    assert privates.default_timeout() is None


def test_the_reader_of_sources_sees_each_kind_of_access():
    source = (
        "from torch._utils import _one\n"
        "class Own:\n    _mine = 1\n    def method(self, other): return self._any, other._two, Own._mine\n"
        "def around(self): return self._three, getattr(self, '_four'), self.__class__, other._mine\n"
    )
    assert set(foreign_names(source)) == {"_utils", "_one", "_two", "_three", "_four"}
