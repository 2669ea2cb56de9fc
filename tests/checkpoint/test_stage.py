import sys
import threading
from collections import OrderedDict, defaultdict
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from trainbus.eventloop.checkpoint import Overlap, StageBuffer, load, memory, packed, stage, verify, write
from trainbus.eventloop.errors import CheckpointError, CheckpointValueError

from ..waiting import until
from .trees import SAFE, canonical


def make_tree() -> dict[str, Any]:
    return {"model": {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(3)}, "lr": [0.1], "array": np.arange(3)}


def test_changes_after_staging_are_not_in_the_checkpoint(written):
    tree = make_tree()
    staged = stage(tree)
    tree["model"]["w"].zero_()
    tree["model"]["b"].add_(5)
    tree["lr"][0] = 7
    tree["array"][:] = 9
    tree["late"] = 1
    assert canonical(written(staged)) == canonical(make_tree())


def test_a_released_buffer_is_used_again(tmp_path):
    buffer = StageBuffer()
    for round_ in range(4):
        tree = make_tree()
        tree["model"]["b"].fill_(round_)
        write(stage(tree, buffer), tmp_path / f"{round_}")
        assert buffer.bytes == 36
    assert [load(tmp_path / f"{n}")["model"]["b"][0].item() for n in range(4)] == [0, 1, 2, 3]


def test_a_leased_buffer_is_never_written(tmp_path):
    buffer = StageBuffer()
    stage({"w": torch.full((4,), 0.0)}, buffer)  # dropped: its memory is used again
    one = stage({"w": torch.full((4,), 1.0)}, buffer)
    two = stage({"w": torch.full((4,), 2.0)}, buffer)
    assert buffer.bytes == 32
    write(one, tmp_path / "one")
    three = stage({"w": torch.full((4,), 3.0)}, buffer)
    assert buffer.bytes == 32
    buffer.clear()
    assert buffer.bytes == 0
    write(three, tmp_path / "three")
    write(two, tmp_path / "two")
    assert [load(tmp_path / name)["w"][0].item() for name in ("one", "two", "three")] == [1, 2, 3]


ONE = {"w": torch.zeros(2, 3)}
MANY = {f"w{index}": torch.full((2, 3), float(index)) for index in range(300)}
OTHERS = [
    *((ONE, {"w": torch.ones(shape)}) for shape in ((3, 2), (1, 6), (1, 1), (6,), (0, 3))),
    *((ONE, {"w": torch.ones(2, 3, dtype=dtype)}) for dtype in (torch.float64, torch.int32)),
    *((ONE, other) for other in ({}, {"v": torch.ones(2, 3)}, {"w": ONE}, ONE | {"x": torch.ones(0, 3)})),
    *(({"w": torch.zeros(one)}, {"w": torch.zeros(two)}) for one, two in (((0, 1), (1, 0)), ((0, 3), (0, 1)))),
    (MANY, {name: value.t().contiguous() for name, value in MANY.items()}),
    *((MANY, MANY | {"w280": one}) for one in (MANY["w280"].half(), MANY["w280"].view(3, 2), torch.arange(6.0).view(3, 2).t())),
]


@pytest.mark.parametrize(("first", "second"), OTHERS)
def test_a_buffer_follows_when_the_tensors_change(written, first, second):
    buffer = StageBuffer()
    stage(first, buffer).release()
    assert canonical(written(stage(second, buffer))) == canonical(second)


def forms(tree: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (type(one), one.requires_grad, one.stride(), one.tolist()) for name, one in tree.items()}


FORMS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "transposed in place": lambda x: torch.empty(0).set_(x.untyped_storage(), x.storage_offset(), (4, 4), (1, 4)),
    "parameter": torch.nn.Parameter,
    "frozen parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "requires a gradient": lambda x: x.detach().requires_grad_(),
}


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("many", [1, 40])  # by itself; joined with others
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_buffer_follows_when_a_tensor_changes_its_strides_or_its_kind(written, form, many, overlapping):
    tensors = {f"w{number}": torch.arange(16.0).view(4, 4) + number for number in range(many)}
    last = f"w{many - 1}"
    changed = tensors | {last: form(tensors[last])}
    with closing(Overlap([])) as overlap:
        buffer = StageBuffer()
        for tree in (tensors, changed, changed, tensors):
            assert forms(written(stage(tree, buffer, overlap=overlap if overlapping else None))) == forms(tree)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_tensor_that_requires_a_gradient_later_is_noticed_in_every_mode(written, mode):
    tensors = {f"w{number}": torch.ones(3) for number in range(40)}
    buffer = StageBuffer()
    with mode():
        stage(tensors, buffer)
        tensors["w7"].requires_grad_()
        assert written(stage(tensors, buffer))["w7"].requires_grad
        tensors["w7"].requires_grad_(False)
        assert not written(stage(tensors, buffer))["w7"].requires_grad


@pytest.mark.parametrize("size", [1, 1 << 16])
def test_memory_is_used_again_when_small_tensors_come_grow_and_go(written, size):
    buffer, large = StageBuffer(), torch.arange(float(size))
    places = set()
    for number in range(5):
        small = {f"s{index}": torch.full((64 * number,), float(index)) for index in range(number % 3)}
        staged = stage({"large": large, **small}, buffer)
        places.add(min(tensor.data_ptr() for tensor in staged.tree().values() if tensor.numel()))
        loaded = written(staged)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in {"large": large, **small}.items())
    assert len(places) == 1
    written(stage({"one": torch.ones(1)}, buffer))
    assert buffer.bytes == 4  # memory that is mostly unused is not kept


def test_tied_weights_are_stored_once_and_loaded_as_one(written):
    weight = torch.nn.Parameter(torch.randn(8, 8))
    staged = stage({"a": weight, "b": weight.detach(), "t": weight.t(), "row": weight[0]})
    assert staged.bytes < 2 * 256 + 32 + 1000
    loaded = written(staged)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert torch.equal(loaded["t"], weight.t())
    assert torch.equal(loaded["row"], weight[0])
    assert loaded["row"].data_ptr() != loaded["a"].data_ptr()


def test_releasing_twice_is_fine_and_writing_afterwards_is_not(tmp_path):
    staged = stage(make_tree())
    staged.release()
    staged.release()
    assert staged.released
    with pytest.raises(CheckpointError, match="released"):
        write(staged, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_staging_under_autograd_records_nothing():
    weight = torch.nn.Parameter(torch.ones(3))
    buffer = StageBuffer()
    stage({"w": weight}, buffer)
    version = weight._version
    stage({"w": weight}, buffer)
    assert weight._version == version
    assert weight.grad_fn is None


def test_writing_in_another_thread_while_staging_the_next(tmp_path):
    buffer = StageBuffer()
    threads = []
    for number in range(8):
        staged = stage({"w": torch.full((50_000,), float(number))}, buffer)
        threads.append(threading.Thread(target=write, args=(staged, tmp_path / f"{number}")))
        threads[-1].start()
    for thread in threads:
        thread.join()
    for number in range(8):
        assert torch.equal(load(tmp_path / f"{number}")["w"], torch.full((50_000,), float(number)))


class Opaque:
    pass


class Subclass(torch.Tensor):
    pass


class Mapping(dict):
    pass


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Opaque(), "Opaque"),
        (torch.nn.Linear(1, 1), r"Linear; .*state_dict\(\)"),
        (Mapping(), r"Mapping; .*dict\(...\)"),
        (lambda: None, "function"),
        (torch.zeros(2).as_subclass(Subclass), "Subclass"),
        (np.array(["x"]), "ndarray"),
        (np.array([None]), "ndarray"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (np.str_("x"), "str_"),
        (defaultdict(lambda: 1), "defaultdict"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.empty(2, dtype=torch.int4), "int4"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unsupported_values_are_refused_with_their_path_and_advice(value, says):
    with pytest.raises(CheckpointValueError, match=rf"^hooks\.EMAHook\.3\.model: .*{says}"):
        stage({"hooks": OrderedDict(EMAHook=[1, "x", (), {"model": value}])})


def test_a_tensor_that_turns_sparse_later_is_kept_as_that():
    buffer = StageBuffer()
    for tensor in (torch.eye(2), torch.eye(2).to_sparse(), torch.eye(2)):
        back = stage({"w": tensor}, buffer).tree()["w"]
        assert back.layout is tensor.layout
        assert torch.equal(back.to_dense(), torch.eye(2))


def test_a_reference_cycle_is_refused():
    tree: dict[str, Any] = {"a": [1]}
    tree["a"].append(tree)
    with pytest.raises(CheckpointValueError):
        stage(tree)


def test_a_tree_too_deep_for_the_stack_is_refused():
    tree: Any = 1
    for _ in range(90):
        tree = (tree,)

    def descend() -> None:
        try:
            descend()
        except RecursionError:
            stage(tree)

    with pytest.raises(CheckpointValueError):
        descend()


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_many_small_tensors_that_are_copied_together_keep_their_places(written, dtype):
    def make(number):
        rows = {f"r{index}": torch.full((index % 4 + 1, 3), index + number).to(dtype) for index in range(600)}
        scalars = {f"s{index}": torch.tensor(index + number).to(dtype) for index in range(9)}
        odd = {"t": torch.full((3, 4), number).to(dtype).t(), "e": torch.empty(0, 3, dtype=dtype)}
        return {**rows, **scalars, **odd}

    buffer = StageBuffer()
    for number in range(3):
        tree = make(number)
        assert canonical(written(stage(tree, buffer))) == canonical(tree)


COMPLEX = torch.tensor([[1 + 1j, 2 + 2j], [3 + 3j, 4 + 4j]])
VIEWS = [COMPLEX.t(), COMPLEX.conj(), COMPLEX.view(2, 2), torch.zeros_like(COMPLEX)]
TIED = [
    *(({"a": COMPLEX, "b": COMPLEX}, {"a": COMPLEX, "b": other}) for other in VIEWS),
    (MANY, MANY | {"a": MANY["w5"], "b": MANY["w5"]}),
]


@pytest.mark.parametrize("trees", [*TIED, *(trees[::-1] for trees in TIED)])
def test_a_buffer_follows_when_tensors_are_tied_or_become_different_views_or_untied(written, trees):
    buffer = StageBuffer()
    for tree in trees:
        loaded = written(stage(tree, buffer))
        assert canonical(loaded) == canonical({name: value.resolve_conj() for name, value in tree.items()})
        if "b" in tree and (tree["b"] is tree["a"] or not tree["b"].any()):
            assert (loaded["a"] is loaded["b"]) == (tree["a"] is tree["b"])


def test_a_key_too_long_for_python_to_make_digits_of_holds_tensors_like_any_other(written):
    tree = {10**5000: {"w": torch.ones(2)}, "list": {(10**5000,): torch.zeros(1)}}
    assert canonical(written(stage(tree))) == canonical(tree)


# Fresh memory for large copies.

LARGE = memory._FROM // 4 + 1000


def wait_for_threads():
    until(lambda: not any(one.name == "trainbus-memory" for one in threading.enumerate()))


@pytest.mark.parametrize("size", [0, 1, 4096, memory._FROM, memory._FROM + 1, 3 * memory._FROM + 12345])
def test_memory_has_the_size_that_was_asked_for_and_keeps_what_is_written(size):
    flat = memory.allocate(size)
    assert (flat.shape, flat.dtype) == ((size,), torch.uint8)
    flat.fill_(7)  # while a thread maps it
    wait_for_threads()
    assert int(flat.sum(dtype=torch.int64)) == 7 * size


@pytest.mark.parametrize("small", [0, 50])  # copied in one piece
def test_a_large_copy_has_every_value_also_of_small_tensors(small):
    tree = {"a": torch.arange(LARGE, dtype=torch.float32), "b": torch.arange(LARGE, dtype=torch.int32)}
    tree |= {f"small {number}": torch.full((1000,), float(number)) for number in range(small)}
    staged = stage(tree)
    staged.pieces()
    wait_for_threads()
    assert canonical(staged.tree()) == canonical(tree)


def test_a_system_that_does_not_map_ahead(monkeypatch):
    monkeypatch.setattr(memory, "map_pages", lambda begin, length: False)
    flat = memory.allocate(memory._FROM).fill_(3)
    assert int(flat.sum(dtype=torch.int64)) == 3 * memory._FROM


def test_memory_may_be_a_part_of_a_larger_piece(monkeypatch):
    """As aligned memory is: small tensors of equal shape, which are copied together, have their own place in it."""
    module = sys.modules["trainbus.eventloop.checkpoint.staging"]  # the package has a function of this name
    monkeypatch.setattr(module, "allocate", lambda size: torch.zeros(size + 4096, dtype=torch.uint8)[4096:])
    tree = {"large": torch.ones(10_000), "small": [torch.full((1000,), float(index)) for index in range(50)]}
    assert canonical(stage(tree).tree()) == canonical(tree)


@pytest.mark.parametrize("tensor", [torch.empty(2, device="meta"), torch.empty(2, dtype=torch.uint4)])
def test_a_packed_value_has_no_tensor_that_a_file_cannot_have(tensor):
    with pytest.raises(CheckpointValueError, match=r"state\.x"):
        packed({"state": {"x": tensor}})


@pytest.mark.parametrize("key", ["a", "\xe4"])
def test_values_from_elsewhere_are_put_into_a_staged_tree(tmp_path, key):
    tensors = [torch.zeros(2, dtype=dtype) for dtype in (*SAFE, torch.complex64)]
    odd = [torch.tensor(3.0), torch.empty(0, 2), torch.arange(6).view(2, 3).T, torch.ones(1, requires_grad=True)]
    odd.append(torch.full((2,), 1 + 2j).conj())
    value = {"state": (3, tuple(range(700)), None), "tensors": [*tensors, *odd], "array": np.arange(3)}
    staged = stage({key: torch.ones(3), "there": [], "more": {"x": torch.ones(1)}})
    staged.put("there", [packed(value), packed(None)])
    staged.put("new", [])
    write(staged, tmp_path / "a.safetensors")
    expected = {key: torch.ones(3), "there": [value, None], "more": {"x": torch.ones(1)}, "new": []}
    loaded = load(tmp_path / "a.safetensors")
    assert canonical(loaded) == canonical(expected)
    found = loaded["there"][0]["tensors"][len(tensors) :]
    assert [(one.stride(), one.requires_grad) for one in found] == [(one.stride(), one.requires_grad) for one in odd]
    verify(tmp_path / "a.safetensors")
