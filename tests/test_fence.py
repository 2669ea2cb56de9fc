"""Private names of other objects: in the bridges only in ``privates.py``; elsewhere only those listed here, with the reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

import eventloop

ROOT = Path(eventloop.__file__).parent
BRIDGES = sorted(file for file in (ROOT / "bridges").rglob("*.py") if file.name != "privates.py")
OTHERS = sorted(file for file in ROOT.rglob("*.py") if "bridges" not in file.relative_to(ROOT).parts)
ALLOWED = {
    # torch's batched kernels and counters of changes: there is no public name for them
    "checkpoint/layout.py": {"_foreach_copy_"},
    "checkpoint/overlap.py": {"_foreach_copy_", "_version"},
    "training/update.py": {"_foreach_mul_", "_per_optimizer_states", "_step_supports_amp_scaling"},  # as GradScaler does
    # torch.save's format: what its own pickler writes, and a sharded writer's record of a file
    "checkpoint/sharded.py": {"_StorageInfo"},
    "checkpoint/torch_file.py": {
        *("_backward_hooks", "_cdata", "_dtype_to_storage_type_map", "_rebuild_tensor_v2", "_untyped_storage", "_utils")
    },
    # torch.distributed: the store and backends of the default group, and Join's own configuration
    "observe/exchange.py": {"_get_default_store"},
    "training/distributed/ranks.py": {"_device_types", "_get_backend", "_get_default_store", "_timeout"},
    "training/distributed/rounds.py": {"_get_default_store"},
    "training/distributed/shares.py": {"_join_config"},
    # torch's dispatch and modes: a public way costs more, or does not exist
    "offload/collectives.py": {"_python_dispatch"},
    "offload/scalars.py": {"_C", "_cuda_getCurrentRawStream", "_set_grad_enabled"},
    # torch's DataLoader: its fetchers, its iterator with the workers
    "training/data.py": {"_IterableDatasetFetcher", "_MapDatasetFetcher", "_utils"},
    "training/loaders.py": {"_get_iterator"},
    "training/worker_signals.py": {"_iterator"},
    # torch's modules, optimizers and trees
    "training/optimizers.py": {"_optimizer_step_pre_hooks"},
    "training/sanity.py": {"_buffers"},
    "training/saves/capture.py": {"_buffers", "_parameters"},
    "training/saves/restore.py": {"_pytree"},
    # Accelerate: the objects that register_for_checkpointing() was given; the run has an accelerator without a bridge
    "training/accelerator.py": {"_custom_objects"},
    # Python: is there a GIL, and multiprocessing's children, which a forked process must not end
    "offload/lane.py": {"_is_gil_enabled"},
    "offload/process.py": {"_children"},
}
"""Private names outside of the bridges, by file. The list must not grow."""
DOCUMENTED = {"_replace", "_fields", "_exit"}  # of named tuples and os


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
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
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


def table_names() -> set[str]:
    """Return the private names in the tables of all bridges."""
    names: set[str] = set()
    for file in (ROOT / "bridges").glob("*/privates.py"):
        texts = [node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
        names.update(text.rpartition(".")[2] for text in texts if isinstance(text, str) and " " not in text)
    return {name for name in names if is_private(name)}


def test_bridges_take_private_names_from_their_tables_only():
    """Whoever asks which private names of a library we use reads one file."""
    found = {f"{file.relative_to(ROOT)}: {name}" for file in BRIDGES for name in foreign_names(file.read_text())}
    assert not found


def test_bridges_write_no_private_name_as_text():
    """``replace(trainer, "_name", ...)`` is an access, too."""
    tables = table_names()
    assert "_inner_training_loop" in tables
    found = [
        f"{file.relative_to(ROOT)}: {node.value}"
        for file in BRIDGES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in tables
    ]
    assert not found


def test_other_rooms_take_only_the_private_names_that_are_listed():
    """A new one needs a reason here; one that is gone leaves the list."""
    found = {(str(file.relative_to(ROOT)), name) for file in OTHERS for name in foreign_names(file.read_text())}
    assert found == {(file, name) for file, names in ALLOWED.items() for name in names}


def test_the_reader_of_sources_sees_each_kind_of_access():
    source = (
        "from torch._utils import _one\n"
        "class Own:\n    _mine = 1\n    def method(self, other): return self._any, other._two, Own._mine\n"
        "def around(self): return self._three, getattr(self, '_four'), self.__class__, other._mine\n"
    )
    assert set(foreign_names(source)) == {"_utils", "_one", "_two", "_three", "_four"}
