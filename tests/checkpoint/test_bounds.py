"""What a file says is compared with its size, the memory there is and what is ever written, before anything is allocated."""

import math
import os
import tracemalloc
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from tests.checkpoint.sealed import assert_refused, header_of, prefixed, seal
from tests.failing import fails
from trainbus.cli import main
from trainbus.eventloop.checkpoint import inspect, is_plain_name, load, outline, save, unpack, verify
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointValueError
from trainbus.eventloop.platform import NOT_IN_NAMES, memory_of_machine
from trainbus.eventloop.training.saves.discover import find_checkpoint

Ext = msgspec.msgpack.Ext
pack = msgspec.msgpack.encode
TERABYTE = 10**12


def sparse(path: Path, data: int, tree: int) -> Path:
    """A file that takes no room on the disk."""
    header = prefixed(header_of({"w": {"dtype": "U8", "shape": [data], "data_offsets": [0, data]}}, data, tree))
    path.write_bytes(header)
    os.truncate(path, len(header) + data + tree + 4)
    return path


def with_tree(path: Path, tree: bytes, tensors: dict[str, Any] | None = None) -> Path:
    path.write_bytes(seal(header_of(tensors or {}, 0, len(tree)), tree))
    return path


def of(value: Any) -> bytes:
    return pack([[], {}, value])


@pytest.mark.parametrize("sizes", [[9], [1], [2**63 - 1], [2**70], [2**70, 0]])
def test_a_hundred_thousand_dimensions_are_refused_quickly(tmp_path, sizes):
    shape = sizes * 100_000
    path = with_tree(tmp_path / "a", of(1), {"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}})
    assert_refused(path, load, outline)
    foreign = pack([[0], {0: ["complex64", [min(size, 2**63) for size in shape]]}, Ext(1, b"")])
    path = with_tree(tmp_path / "a", foreign, {"w": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}})
    for read in (load, outline):
        with pytest.raises(CheckpointDamagedError) as error:
            read(path)
        assert len(str(error.value)) < 1000


SHAPES = [(100,), (10, 10), (1,) * 99 + (100,), (), (2, 3), (101,), (2**62, 0), (2**62, 4), (2**62, 2**62)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_must_have_as_many_elements_as_the_header_gives_it_bytes(tmp_path, shape):
    tree = pack([[0], {}, Ext(1, b"")])
    info = {"dtype": "U8", "shape": shape, "data_offsets": [0, 100]}
    (tmp_path / "a").write_bytes(seal(header_of({"w": info}, 100, len(tree)), bytes(100) + tree))
    if math.prod(shape) == 100:
        assert load(tmp_path / "a").shape == shape
        return
    assert_refused(tmp_path / "a", load, outline, inspect, verify, match="'w'")


@pytest.mark.skipif(memory_of_machine() is None, reason="the memory of this machine is unknown")
def test_a_file_larger_than_memory_is_refused_and_a_run_falls_back(tmp_path):
    state = {"format": 1, "state_dict": {}, "progress": {}, "bus": {}, "rng": None}
    save(state, tmp_path / "good.safetensors")
    path = sparse(tmp_path / "huge.safetensors", TERABYTE, 10)
    assert inspect(path).tensors["w"].shape == (TERABYTE,)
    with pytest.raises(CheckpointDamagedError, match="1,000,000,0"):
        load(path)
    with capture_logs() as logs:
        assert find_checkpoint(tmp_path) == (tmp_path / "good.safetensors", state)
    assert [entry["path"] for entry in logs] == [str(path)]


def test_an_out_of_memory_error_is_converted_so_that_a_run_falls_back(tmp_path, monkeypatch):
    save({"w": torch.ones(3)}, tmp_path / "a")
    monkeypatch.setattr(torch, "empty", fails(RuntimeError("DefaultCPUAllocator: can't allocate memory")))
    with pytest.raises(CheckpointDamagedError, match="memory"):
        load(tmp_path / "a")


def test_a_tree_of_ten_gigabytes_is_not_read(tmp_path):
    path = sparse(tmp_path / "huge.safetensors", 0, 10**10)
    assert_refused(path, inspect, outline, load, verify, match="10,000,000,000")


@pytest.mark.parametrize("token", [b"\x90", b"\x80", b"\xc0", Ext], ids=["lists", "dicts", "None", "sets"])
def test_values_are_counted_before_they_are_made(tmp_path, monkeypatch, token):
    monkeypatch.setattr(unpack, "_TOKENS", 1000)
    item = pack(Ext(7, b"\x90")) if token is Ext else token
    count = (6 << 20) // len(item)
    path = with_tree(tmp_path / "a", b"\x93\x90\x80\xdd" + count.to_bytes(4, "big") + item * count)
    for read in (load, outline):
        tracemalloc.start()
        with pytest.raises(CheckpointDamagedError, match="1,000"):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
        tracemalloc.stop()


VALUES: list[Any] = [
    *(None, True, 0, -1, 200, 2**15, 2**31, 2**63, -(2**7), -(2**15), -(2**31), -(2**63), 2**70, 1.5, 1j, 10**5000),
    *("", "a" * 31, "a" * 32, "a" * 300, "a" * 70_000, "ü", b"", b"x" * 300, b"x" * 70_000),
    *([], [1] * 15, [1] * 16, [1] * 70_000, {}, {str(i): i for i in range(16)}, {i: (i,) for i in range(300)}),
    *((), {1, 2}, frozenset({3}), Counter("aab"), OrderedDict(a=1), torch.Size([1, 2]), torch.float32, torch.device("cpu")),
    *(np.arange(4), np.float32(1), np.zeros((2, 3), np.int8), torch.ones(2)),
]


def test_every_value_is_counted_to_its_end_and_is_worth_eight_tokens_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(unpack, "_SMALL", 0)
    for value in VALUES:
        tree = [value] * 3
        save(tree, tmp_path / "a")
        monkeypatch.setattr(unpack, "_TOKENS", 8 * (4 + 3 * (2 * len(value) if hasattr(value, "__len__") else 1)) + 20)
        load(tmp_path / "a")
    monkeypatch.setattr(unpack, "_TOKENS", 3)
    with pytest.raises(CheckpointDamagedError, match=" 3 "):
        load(with_tree(tmp_path / "a", of([1, 2, 3])))


def test_more_than_is_read_is_refused_when_it_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr("trainbus.eventloop.checkpoint.tree.MAX_VALUES", 10)
    monkeypatch.setattr("trainbus.eventloop.checkpoint.layout.MAX_TREE_BYTES", 1000)
    for good in ({"loss": list(range(8))}, {"a": bytes(900)}):
        save(good, tmp_path / "a")
    monkeypatch.setattr("trainbus.eventloop.checkpoint.container.MAX_HEADER_BYTES", 1400)
    hiding = OrderedDict(a=1)
    vars(hiding)["pop"] = 1
    for bad, named in (
        ({"loss": list(range(9))}, r"loss: .* 10 "),
        ({"a": bytes(1000)}, r"torch\.from_numpy"),
        ({"x": hiding}, r"x: .*OrderedDict.* pop"),
        ([torch.ones(1) for _ in range(8)], "tensors"),
    ):
        with pytest.raises(CheckpointValueError, match=named):
            save(bad, tmp_path / "a")


def nested(depth: int, wrap: Any) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


WRAPS = {
    "list": lambda value: [value],
    "dict": lambda value: {"a": value},
    "tuple": lambda value: Ext(5, pack([value])),
    "key": lambda value: Ext(9, pack([[Ext(5, pack([value]))], [1]])) if value == 1 else Ext(5, pack([value])),
    "ordered": lambda value: Ext(10, pack([{"a": value}, {}])),
    "attributes": lambda value: Ext(10, pack([{}, {"_metadata": value}])),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("depth", [101, 150, 500, 5000])
def test_a_tree_deeper_than_any_that_is_written_is_refused(tmp_path, wrap, depth):
    path = with_tree(tmp_path / "a", of(nested(depth, WRAPS[wrap])) if depth < 5000 else b"\x93\x90\x80" + b"\x91" * depth)
    assert_refused(path, load, outline)


@pytest.mark.parametrize("wrap", [WRAPS["list"], WRAPS["dict"], lambda value: (value,), lambda value: OrderedDict(a=value)])
def test_the_deepest_tree_that_is_written_is_read(tmp_path, wrap):
    tree = nested(100, wrap)
    save(tree, tmp_path / "a")
    assert load(tmp_path / "a") == tree
    with pytest.raises(CheckpointValueError, match=" 100 "):
        save(wrap(tree), tmp_path / "a")


@pytest.mark.parametrize("attributes", [{"items": [1]}, {"__class__": 1}, {"keys": None}, Ext(9, pack([[1], [2]]))])
def test_attributes_that_hide_the_methods_of_a_dict_are_refused(tmp_path, attributes):
    path = with_tree(tmp_path / "a", of(Ext(10, pack([{"a": 1}, attributes]))))
    with pytest.raises(CheckpointDamagedError, match="OrderedDict"):
        load(path)


@pytest.mark.parametrize("slots", [[-1], [1], [2**63], [None]])
def test_tensors_are_counted_from_the_first(tmp_path, slots):
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    path = with_tree(tmp_path / "a", pack([slots, {}, Ext(1, b"")]), {"w": entry})
    assert_refused(path, load, outline)


HUGE = Ext(2, (10**5000).to_bytes(2100, "little", signed=True))


ODD_KEYS = Ext(9, pack([[HUGE, Ext(5, pack([HUGE]))], [1, 2]]))
ODD = [HUGE, [HUGE], {"progress": {"epoch": HUGE, "iter": HUGE}}, ODD_KEYS, {"state_dict": ODD_KEYS}]
ODD += [{"state_dict": [1], "shards": HUGE}, nested(99, WRAPS["tuple"])]
COMMANDS = ["ls .", "verify FILE", "show FILE", "show FILE --json", "show FILE --key a"]
COMMANDS += ["export FILE a.pth --force", "export FILE a.pth --weights --force"]


@pytest.mark.parametrize("tree", ODD)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_ends_in_a_traceback_over_an_odd_tree(tmp_path, monkeypatch, capsys, tree, command):
    monkeypatch.chdir(tmp_path)
    with_tree(Path("a.safetensors"), of(tree))
    assert main(["checkpoint", *command.replace("FILE", "a.safetensors").split()]) in (0, 1, 2)
    capsys.readouterr()


NAMES = ["a", "ä.safetensors", "…", "x" * 255, os.fsdecode(b"caf\xe9"), "a b", "-"]
NAMES += [name for name in ("a\\b", "c:d") if not {*name} & {*NOT_IN_NAMES}]
NO_NAMES = ["", ".", "..", "a/b", "/a", "a/", "a\0", "x" * 256, "\ud800", None, 7, b"a", ["a"]]


@pytest.mark.parametrize(("name", "plain"), [*((name, True) for name in NAMES), *((name, False) for name in NO_NAMES)])
def test_names_of_files(name, plain):
    assert is_plain_name(name) is plain
