"""Values that a checkpoint holds as the name of their type and their content."""

import enum
import sys
import types
from collections import deque, namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from msgspec.msgpack import Ext

from tests.checkpoint.sealed import sealed_tree
from tests.checkpoint.trees import canonical
from trainbus.eventloop.checkpoint import (
    Overlap,
    StageBuffer,
    load,
    load_whole,
    outline,
    pick_weights,
    save,
    stage,
    weights_only,
    write,
)
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError, CheckpointValueError

pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC|invariant)")  # torch says so once


class Norm(enum.Enum):
    SPECTRAL = "spectral"
    SIGN = 2
    ALSO_SIGN = 2  # noqa: PIE796 - an alias


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


class Bits(enum.Flag):
    A = 1
    B = 2


class Moments(NamedTuple):
    mean: Any
    var: Any = None

    class Inner(enum.Enum):
        ONE = 1


Plain = namedtuple("Plain", "a b")  # noqa: PYI024 - the other way to make one

WITH_TENSORS = Moments(torch.ones(2), [deque([torch.zeros(3), 1], maxlen=2)])
VALUES = [
    *(Norm.SPECTRAL, Norm.ALSO_SIGN, Level.LOW, Word.YES, Bits.A, Moments.Inner.ONE),
    *(Moments(1), Plain((1,), {2}), WITH_TENSORS, {Level.LOW: Norm.SIGN, Moments(1, 2): 3}, {Norm.SIGN, Level.LOW}),
    *(deque(), deque([1, deque([2])], maxlen=3), slice(None, 3), slice("a", (1,), 2.5), range(5), range(9, 2**70, -3)),
    *(bytearray(), bytearray(b"ab"), torch.strided, torch.sparse_csr, torch.channels_last, torch.per_tensor_affine),
]
SQUARE = torch.tensor([[0.0, 2.0, 0.0, 0.0], [1.0, 0.0, 0.0, 3.0]] * 2)
SPARSE: dict[str, Callable[[], torch.Tensor]] = {
    "coo": lambda: SQUARE.to_sparse(),
    "not coalesced": lambda: torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 2.0, 3.0], (4,), check_invariants=True),
    "hybrid": lambda: torch.sparse_coo_tensor([[0, 2]], torch.arange(6.0).view(2, 3), (4, 3), check_invariants=True),
    "empty": lambda: torch.zeros(3, 4).to_sparse(),
    "bfloat16": lambda: SQUARE.bfloat16().to_sparse(),
    "complex": lambda: SQUARE.to(torch.complex64).to_sparse(),
    "gradient": lambda: SQUARE.to_sparse().requires_grad_(),
    "parameter": lambda: torch.nn.Parameter(SQUARE.to_sparse()),
    "csr": SQUARE.to_sparse_csr,
    "csc": SQUARE.to_sparse_csc,
    "bsr": lambda: SQUARE.to_sparse_bsr((2, 2)),
    "bsc": lambda: SQUARE.to_sparse_bsc((2, 2)),
}


def form(value: Any) -> Any:
    """A form whose equality is sameness of types and bits, of sparse tensors and objects, too."""
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        parts = [getattr(value.detach(), name, lambda: 0) for name in ("is_coalesced", "_indices", "_values")]
        if value.layout is not torch.sparse_coo:
            names = ("crow_indices", "col_indices", "ccol_indices", "row_indices", "values")
            rows = value.layout in (torch.sparse_csr, torch.sparse_bsr)
            parts = [getattr(value.detach(), name) for name in (names[:2] if rows else names[2:4]) + names[4:]]
        return type(value), value.layout, value.shape, value.requires_grad, [form(part()) for part in parts]
    if isinstance(value, deque):
        return type(value), value.maxlen, [form(each) for each in value]
    if isinstance(value, tuple) and type(value) is not tuple:
        return type(value), [form(each) for each in value]
    if type(value) is list:
        return [form(each) for each in value]
    return canonical(value)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_an_object_comes_back_as_it_was(tmp_path, value):
    save({"state": {"x": value}}, tmp_path / "a.safetensors")
    assert form(load(tmp_path / "a.safetensors")["state"]["x"]) == form(value)
    assert form(stage([value]).tree()) == form([value])


@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_tensor_comes_back_as_it_was(tmp_path, name):
    buffer, path, sparse = StageBuffer(), tmp_path / "a.safetensors", SPARSE[name]()
    for tree in ({"x": torch.zeros(2), "y": sparse}, {"x": torch.ones(2), "y": sparse}):
        write(stage(tree, buffer), path)
        loaded = load(path)
        assert form(loaded["y"]) == form(sparse)
        assert torch.equal(loaded["x"], tree["x"])


def test_a_model_with_a_sparse_buffer_resumes_as_by_torch_save(tmp_path):
    def model() -> Any:
        made = torch.nn.Linear(4, 2)
        made.register_buffer("graph", torch.zeros(4, 4).to_sparse())
        return made

    trained = model()
    trained.graph = SQUARE.to_sparse()
    optimizer = torch.optim.SGD(trained.parameters(), momentum=0.9)
    tree = {"model": trained.state_dict(), "optimizer": optimizer.state_dict()}
    write(stage(tree, overlap=Overlap([optimizer])), tmp_path / "a.safetensors")
    torch.save(tree, tmp_path / "a.pth")
    resumed, control = model(), model()
    resumed.load_state_dict(load(tmp_path / "a.safetensors")["model"])
    control.load_state_dict(torch.load(tmp_path / "a.pth", weights_only=True)["model"])
    assert form(resumed.graph) == form(control.graph)


def local_enum() -> Any:
    class Local(enum.Enum):
        X = 1

    return Local.X


class Noted(Moments):  # its instances have a __dict__
    pass


def noted() -> Any:
    made = Noted(1, 2)
    made.note = "lost"
    return made


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_a_nested_tensor_is_refused_with_its_path():
    with pytest.raises(CheckpointValueError, match=r"^x: .*nested.*unbind"):
        stage({"x": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])})


@pytest.mark.parametrize("value", [local_enum(), Bits.A | Bits.B, noted(), types.SimpleNamespace(a=1), torch.Generator()])
def test_what_has_more_than_a_content_is_refused_with_its_path(value):
    with pytest.raises(CheckpointValueError, match=r"^state\.x: .*; store "):
        stage({"state": {"x": value}})


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A checkpoint with values of a module that is not imported; yields its path, and the module."""
    module = types.ModuleType("norms_of_another_package")
    exec(  # noqa: S102 - so that the classes are that module's
        "import enum, collections\nclass Norm(enum.Enum):\n  SIGN = 1\nPair = collections.namedtuple('Pair', 'a b')",
        module.__dict__,
    )
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        tree = {
            "state_dict": {"w": torch.ones(2)},
            "optimizer": {"norm": module.Norm.SIGN, "pair": module.Pair(1, torch.ones(3))},
        }
        save(tree, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors", module


def test_a_class_that_is_not_imported_is_named_and_its_weights_can_be_had(elsewhere, tmp_path, monkeypatch):
    path, module = elsewhere
    with pytest.raises(CheckpointError, match=r"a\.safetensors .*Norm; import norms_of_another_package") as raised:
        load(path)
    assert not isinstance(raised.value, CheckpointDamagedError)
    norm = outline(path)["optimizer"]["norm"]
    assert (norm.type, norm.content) == ("norms_of_another_package:Norm", {"member": "SIGN"})
    assert torch.equal(pick_weights(load_whole(path))["w"], torch.ones(2))
    with pytest.raises(CheckpointValueError, match=r"optimizer\.norm: .*Norm"):
        weights_only(load_whole(path))
    save(load_whole(path), tmp_path / "b.safetensors")  # a copy keeps what it cannot make
    monkeypatch.setitem(sys.modules, module.__name__, module)
    loaded = load(tmp_path / "b.safetensors")["optimizer"]
    assert (loaded["norm"], type(loaded["pair"])) == (module.Norm.SIGN, module.Pair)


@pytest.mark.parametrize(
    "change", ["class Norm: pass", "class Norm(enum.Enum):\n  OTHER = 1", "def __getattr__(name): 1 / 0\ndel Norm"]
)
def test_a_class_that_has_changed_is_told_and_is_no_damage(elsewhere, monkeypatch, change):
    path, module = elsewhere
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(change, module.__dict__)  # noqa: S102 - likewise
    with pytest.raises(CheckpointError, match="Norm") as raised:
        load(path)
    assert not isinstance(raised.value, CheckpointDamagedError)


def crafted(name: Any, content: Any) -> bytes:
    pack = msgspec.msgpack.encode
    return sealed_tree(pack([[], {}, Ext(18, pack([name, content]))]))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(
            ("bytearray", {"content": 10**12}),
            ("deque", {"items": 3, "maxlen": None}),
            ("deque", {}),
            ("layout", {"name": "bool"}),
        ),
        *((1, {}), ("deque", [1]), ("range", {"start": 1.5, "stop": 2, "step": 3}), ("slice", {"x": 1})),
        ("sparse_coo", {"indices": 1, "values": 2, "size": [1], "coalesced": True, "kind": 0}),
    ],
)
def test_a_content_that_its_type_does_not_have_is_damage(tmp_path, name, content):
    (tmp_path / "a.safetensors").write_bytes(crafted(name, content))
    with pytest.raises(CheckpointDamagedError):
        load(tmp_path / "a.safetensors")


@pytest.mark.parametrize("name", ["os:system", "builtins:dict", "subprocess:Popen", "nonsense", "a.b:c", ":", "enum:Enum"])
def test_only_enums_and_named_tuples_are_found_by_name(tmp_path, name):
    (tmp_path / "a.safetensors").write_bytes(crafted(name, {"args": ["true"], "member": "true"}))
    with pytest.raises(CheckpointError, match="cannot be read here"):
        load(tmp_path / "a.safetensors")
