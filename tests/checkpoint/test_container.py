import io
import math
import random
import struct
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from tests.checkpoint.trees import DENSE, SAFE, canonical
from tests.failing import fails
from trainbus.eventloop.checkpoint import StageBuffer, inspect, load, outline, save, stage, write
from trainbus.eventloop.errors import CheckpointValueError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch says so of any complex32 tensor


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), generator=torch.Generator().manual_seed(seed))
    return raw.to(torch.uint8).view(dtype).view(shape)


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors = st.builds(random_tensor, st.sampled_from(DENSE), shapes, st.integers(0, 1000))
strided = st.builds(lambda seed: random_tensor(torch.float32, (4, 6), seed).t()[::2, 1:], st.integers(0, 1000))
arrays = st.builds(
    lambda kind, shape, seed: np.random.default_rng(seed).integers(0, 100, shape).astype(kind),
    st.sampled_from(["b1", "i1", "<u2", ">i4", "<i8", "<f2", "<f4", ">f8", "<c8"]),
    shapes,
    st.integers(0, 1000),
)
numbers = st.booleans() | st.integers() | st.integers(-(2**200), 2**200) | st.floats() | st.complex_numbers()
texts = st.text(st.characters(), max_size=8) | st.binary(max_size=8)
keys = st.text(max_size=5) | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text(max_size=3))
of_torch = st.sampled_from([*DENSE, torch.device("cpu"), torch.device("cuda:3"), torch.Size([2, 3]), torch.Size([])])
sets = st.sets(st.integers() | st.text(max_size=3), max_size=3) | st.frozensets(keys, max_size=3)
scalars = arrays.map(lambda array: array.dtype.type(3))
counters = st.builds(Counter, st.text("ab", max_size=5))
leaves = st.none() | numbers | texts | tensors | strided | arrays | scalars | of_torch | sets | counters


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists, dicts = st.lists(children, max_size=4), st.dictionaries(keys, children, max_size=4)
    named = st.dictionaries(st.text("abc.", max_size=3), children, max_size=4)
    return lists | lists.map(tuple) | dicts | named | dicts.map(OrderedDict) | dicts.map(lambda items: defaultdict(list, items))


trees = st.recursive(leaves, _containers, max_leaves=12)


def round_trip(tree: Any, path: Path) -> Any:
    save(tree, path)
    return load(path)


@pytest.mark.long
@given(tree=trees)
def test_every_tree_round_trips_bitwise(path, tree):
    assert canonical(round_trip(tree, path)) == canonical(tree)


@given(first=trees, second=trees)
def test_a_buffer_can_be_reused_for_another_tree(path, first, second):
    buffer = StageBuffer()
    for tree in (first, second, second, first):
        write(stage(tree, buffer), path)
        assert canonical(load(path)) == canonical(tree)


@pytest.mark.parametrize("dtype", DENSE, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (2, 3)], ids=str)
def test_every_dense_dtype_and_shape_round_trips(path, dtype, shape):
    tensor = random_tensor(dtype, shape, seed=1)
    assert canonical(round_trip([b"", tensor], path)) == canonical([b"", tensor])


OTHERS = {each for each in vars(torch).values() if isinstance(each, torch.dtype)} - set(DENSE)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
@pytest.mark.parametrize("dtype", sorted(OTHERS, key=str), ids=str)
def test_every_other_dtype_of_torch_is_refused_with_its_path(dtype):
    """Those that torch cannot copy, and quantised ones; a new one that it can copy belongs to the dense ones."""
    tensor = torch.empty(4, dtype=dtype)
    with pytest.raises(CheckpointValueError, match=r"^model\.w: "):
        stage({"model": {"w": tensor}})


UNUSUAL = [
    *(2**63, 2**64, -(2**63) - 1, -0.0, float("inf"), float("nan")),
    struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf0\x7f")[0],  # another NaN
    *("\ud800 lone", {1, 2.5, "x", (1, 2)}, Counter({"x": -3}), defaultdict(dict, {1: {}}), defaultdict(None, {1: 2})),
    {True: 1, 2: 2, None: 3, 1.5: 4, (1, (2,)): 5, frozenset({1}): 6, "ü": 7, torch.float8_e5m2: torch.device("meta")},
    {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "__tree__": torch.ones(2), "__metadata__": torch.ones(3)},
    {"": {"": torch.ones(1)}} | {chr(code): torch.full((1,), code) for code in (0xD800, 0xDC00)},
    *(np.array(3.5), np.zeros((0, 3)), np.bool_(True), np.random.default_rng(0).bit_generator.state),
    *(random.Random(3).getstate(), torch.get_rng_state()),
    torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict(),  # with the versions of its modules
]


@pytest.mark.parametrize("value", UNUSUAL, ids=lambda value: type(value).__name__)
def test_unusual_values_round_trip(path, value):
    assert canonical(round_trip(value, path)) == canonical(value)


def from_torch_save(tree: Any) -> Any:
    file = io.BytesIO()
    torch.save(tree, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "permuted": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "channels_last": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "one channel": lambda x: x[:, :1].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "column": lambda x: x.flatten()[:8].clone().view(1, 8).t(),
    "scalar": lambda x: x[0, 0, 0, 0].clone(),
    "empty": lambda x: x[:, :, :0].clone().transpose(0, 1),
}
"""Dense ones, by the kinds of views that every dtype has."""
GAPPY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sliced": lambda x: x[:, ::2, 1:],
    "of another": lambda x: x.permute(0, 2, 3, 1)[:, 1:],
    "expanded": lambda x: x[:1].expand(3, -1, -1, -1),
    "expanded within": lambda x: x.transpose(1, 2)[:, :1].expand(-1, 5, -1, -1),
}


@pytest.mark.parametrize("dtype", DENSE, ids=str)
def test_tensors_of_every_dtype_and_layout_come_back_as_from_torch_save(path, dtype):
    make = {**LAYOUTS, **GAPPY}
    tensors = {name: lay_out(random_tensor(dtype, (2, 3, 4, 5), index)) for index, (name, lay_out) in enumerate(make.items())}
    control = from_torch_save(tensors)
    save(tensors, path)
    meta, staged = outline(path), stage(tensors).tree()
    for name, loaded in load(path).items():
        assert canonical(loaded) == canonical(control[name]), name
        strides = control[name].stride() if name in LAYOUTS else torch.empty_like(control[name]).stride()
        if loaded.numel():
            assert loaded.stride() == meta[name].stride() == staged[name].stride() == strides, name
        assert (loaded.dtype, loaded.shape) == (meta[name].dtype, meta[name].shape)
        assert canonical(staged[name]) == canonical(loaded)


@pytest.mark.parametrize("view", [torch.Tensor.conj, lambda x: x.conj().imag, lambda x: x.conj().t()])
def test_views_that_conjugate_or_negate_come_back_as_the_numbers_that_they_show(path, view):
    shown = view(random_tensor(torch.complex64, (2, 3), 0))
    loaded = round_trip(shown, path)
    assert torch.equal(loaded.nan_to_num(), shown.resolve_conj().resolve_neg().nan_to_num())
    assert not (loaded.is_conj() or loaded.is_neg())


def test_what_requires_a_gradient_and_what_is_a_parameter_comes_back_as_from_torch_save(path):
    weight = torch.nn.Parameter(torch.ones(3, 2).t())
    frozen = torch.nn.Parameter(torch.arange(3), requires_grad=False)
    latent = torch.ones(2, requires_grad=True)
    tree = {"all": [weight, frozen], "mixed": [latent, latent * 2, 1, weight], "same memory": weight.detach()}
    control = from_torch_save(tree)
    loaded = round_trip(tree, path)

    def facts(tree: Any) -> list[Any]:
        tensors = [*tree["all"], *tree["mixed"][:2], tree["mixed"][3], tree["same memory"]]
        return [(type(one), one.requires_grad, one.is_leaf, one.stride(), one.tolist()) for one in tensors]

    assert facts(loaded) == facts(control)
    assert loaded["all"][0] is loaded["mixed"][3]
    assert loaded["same memory"].data_ptr() == loaded["all"][0].data_ptr()
    assert facts(stage(tree).tree()) == facts(control)


def test_arrays_in_the_order_of_fortran_keep_it(path):
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    loaded = round_trip([array, array.T], path)
    assert [one.strides for one in loaded] == [array.strides, array.T.strides]
    assert [one.tolist() for one in loaded] == [array.tolist(), array.T.tolist()]


def classes(base: type) -> list[type]:
    """All public classes below ``base`` in ``torch.optim``, wherever they are defined."""
    below = [each for one in base.__subclasses__() for each in (one, *classes(one))]
    found = {each for each in below if each.__module__.startswith("torch.optim") and not each.__name__.startswith("_")}
    return sorted(found, key=lambda each: each.__name__)


OPTIMIZERS = classes(torch.optim.Optimizer)
SCHEDULERS = classes(torch.optim.lr_scheduler.LRScheduler)


def stepped(kind: type) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.randn(3, 2)) for _ in range(2)]
    optimizer = kind(parameters, lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    for parameter in parameters:
        parameter.grad = torch.randn(3, 2)
        if kind is torch.optim.SparseAdam:
            parameter.grad = parameter.grad.to_sparse()
    optimizer.step(lambda: torch.tensor(1.0))
    return optimizer


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_state_of_every_torch_optimizer_round_trips(path, kind):
    state = stepped(kind).state_dict()
    assert state["state"]
    loaded = round_trip(state, path)
    assert canonical(loaded) == canonical(state)
    stepped(kind).load_state_dict(loaded)


def make_scheduler(kind: type, optimizer: torch.optim.Optimizer) -> Any:
    lrs = torch.optim.lr_scheduler
    parts = [lrs.ConstantLR(optimizer), lrs.StepLR(optimizer, 2)]
    arguments: dict[type, tuple[Any, ...]] = {
        **dict.fromkeys((lrs.LambdaLR, lrs.MultiplicativeLR), (optimizer, lambda epoch: 0.5)),
        **dict.fromkeys((lrs.CosineAnnealingLR, lrs.CosineAnnealingWarmRestarts, lrs.PolynomialLR), (optimizer, 5)),
        lrs.StepLR: (optimizer, 2),
        lrs.MultiStepLR: (optimizer, [1, 3]),
        lrs.ExponentialLR: (optimizer, 0.9),
        lrs.SequentialLR: (optimizer, parts, [2]),
        lrs.ChainedScheduler: (parts,),
        lrs.CyclicLR: (optimizer, 0.01, 0.1),
        lrs.OneCycleLR: (optimizer, 0.1, 10),
        torch.optim.swa_utils.SWALR: (optimizer, 0.05),
    }
    return kind(*arguments.get(kind, (optimizer,)))


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_the_state_of_every_torch_scheduler_round_trips(path, kind):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    scheduler = make_scheduler(kind, optimizer)
    optimizer.step()
    for _ in range(3):
        scheduler.step(*([0.5] if kind is torch.optim.lr_scheduler.ReduceLROnPlateau else []))
    state = scheduler.state_dict()
    if any(map(callable, state.values())):
        pytest.skip("torch 2.7 leaves a function in it, which torch.load(weights_only=True) refuses, too")
    loaded = round_trip(state, path)
    assert canonical(loaded) == canonical(state)
    make_scheduler(kind, optimizer).load_state_dict(loaded)


def test_introspection_found_the_optimizers_and_schedulers():
    assert {torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS} <= set(OPTIMIZERS)
    assert {torch.optim.lr_scheduler.SequentialLR, torch.optim.lr_scheduler.ReduceLROnPlateau} <= set(SCHEDULERS)
    assert torch.optim.swa_utils.SWALR in SCHEDULERS
    assert {each for each in vars(torch.optim).values() if isinstance(each, type)} - {torch.optim.Optimizer} == set(OPTIMIZERS)


def test_safetensors_opens_the_file_and_returns_the_same_tensors(path):
    model = {f"x{index}": random_tensor(dtype, (3, 4), index) for index, dtype in enumerate(SAFE)}
    save({"model": model, "epoch": 3, "odd": torch.ones(5, dtype=torch.int8), "none": torch.ones(0, 2)}, path)
    opened = load_file(path)
    for name, tensor in model.items():
        assert canonical(opened[f"model.{name}"]) == canonical(tensor)
    assert opened["none"].shape == (0, 2)
    with safe_open(path, "pt") as handle:
        assert handle.metadata() == {"format": "trainbus.checkpoint", "version": "2", "digest": "crc32"}


@given(tree=trees)
def test_safetensors_opens_every_written_file(path, tree):
    save(tree, path)
    assert {"__tree__", "__digest__"} <= set(load_file(path))


def test_the_digest_is_the_crc32_of_all_bytes_before_it(path):
    info = save({"w": torch.randn(1 << 19)}, path)
    data = path.read_bytes()
    assert int.from_bytes(data[-4:], "little") == zlib.crc32(data[:-4])
    assert info.digest == f"crc32:{zlib.crc32(data[:-4]):08x}"
    assert (info.path, info.bytes) == (path, len(data))
    assert info.seconds > 0
    tree = {"b": torch.ones(3), "a": [1, torch.zeros(2, dtype=torch.int64)]}
    save(tree, path)
    first = path.read_bytes()
    save(tree, path)
    assert path.read_bytes() == first  # the same tree gives the same bytes


def test_tensors_begin_at_multiples_of_their_element_size(path):
    save([random_tensor(dtype, (3,), 0) for dtype in DENSE], path)
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert header % 8 == 0
    for entry in inspect(path).tensors.values():
        begin, end = entry.data_offsets
        assert begin % ((end - begin) // math.prod(entry.shape)) == 0


def test_the_last_checkpoint_is_written_even_when_no_thread_can_be_started(path, monkeypatch):
    monkeypatch.setattr("threading.Thread.start", fails(RuntimeError("can't create new thread at interpreter shutdown")))
    assert round_trip(torch.ones(1 << 19), path).sum() == 1 << 19
