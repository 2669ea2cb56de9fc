"""Files with a right digest around anything: a tree or a typed error comes out, in memory that the size of the file bounds."""

import json
import resource
import tracemalloc
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.sealed import seal, split
from trainbus.eventloop.checkpoint import inspect, load, save, verify
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError

Ext = msgspec.msgpack.Ext

TREE: dict[str, Any] = {
    "w": torch.arange(6.0).view(2, 3),
    "c": [torch.ones(2, dtype=torch.complex64), torch.zeros(0, 3), torch.tensor(True)],
    "numpy": (np.arange(4), np.float32(3), {"a": np.zeros((2, 0))}),
    "odd": {1: {2**70, "ü"}, (2, frozenset({3})): Counter("aab"), None: defaultdict(list, {"x": [1]})},
    "ordered": OrderedDict(a=torch.float16, b=torch.device("cpu"), c=torch.Size([1, 2]), d=1 + 2j),
}
PER_BYTE, FIXED = 400, 2_000_000  # what Python objects may take of memory for a file's bytes


@pytest.fixture(scope="module")
def good(path: Path) -> bytes:
    save(TREE, path)
    return path.read_bytes()


@pytest.fixture(scope="module", autouse=True)
def little_memory():
    """An attempt to allocate gigabytes fails instead of succeeding unseen."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def with_tree(good: bytes, tree: bytes) -> bytes:
    """The same tensors, another tree."""
    header, data = split(good)
    begin = header["__tree__"]["data_offsets"][0]
    end = begin + len(tree)
    header["__tree__"] |= {"shape": [len(tree)], "data_offsets": [begin, end]}
    header["__digest__"]["data_offsets"] = [end, end + 4]
    return seal(header, data[:begin] + tree)


def tree_of(good: bytes) -> bytes:
    header, data = split(good)
    return data[slice(*header["__tree__"]["data_offsets"])]


class Reading(NamedTuple):
    """How reading went: whether it could be loaded, and by which readers more memory was taken than such a file is worth."""

    loaded: bool
    wasteful: list[tuple[str, int]]


def read(path: Path, data: bytes) -> Reading:
    """Read it in all ways. Raises whatever is no CheckpointError."""
    path.write_bytes(data)
    loaded = False
    peaks = []
    limit = FIXED + PER_BYTE * len(data)
    for reader in (inspect, verify, load):
        loaded, peak = taken(reader, path)
        if peak >= limit:  # or a thread of another test took it meanwhile, which does not repeat itself
            peak = min(peak, *(taken(reader, path)[1] for _ in range(3)))
        peaks.append((reader.__name__, peak))
    return Reading(loaded, [(name, peak) for name, peak in peaks if peak >= limit])


def taken(reader: Callable[[Path], object], path: Path) -> tuple[bool, int]:
    """Return whether it could be read, and the memory in bytes that it took at most."""
    tracemalloc.start()
    try:
        reader(path)
        loaded = True
    except CheckpointError as error:
        assert isinstance(error, CheckpointDamagedError) or "upgrade" in str(error)
        assert "alloc" not in str(error)  # torch says so as a RuntimeError
        loaded = False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return loaded, peak


# Bytes that promise more than follows: arrays, maps, binaries, extensions and texts of four billion, depth, bad names,
# numbers of thousands of digits, shapes of thousands of dimensions, attributes that hide methods.
NASTY = [
    *(bytes([code]) + b"\xff\xff\xff\xff" for code in (0xDD, 0xDF, 0xC6, 0xC9, 0xDB)),
    *(b"\x91" * 200, b"\x81\xc0" * 200, b"\xc1", b"\xd4\x01\x00", b"\xc7\x00\x01", b"\xd6\xff\x00\x00\x00\x00"),
    *(msgspec.msgpack.encode(one) for one in (2**64 - 1, -(2**63), float("nan"), "float64", "complex64", "<f8", "O", [2**40])),
    *(msgspec.msgpack.encode(Ext(code, b"\x91\xc0")) for code in range(18)),
    *(b"1" * 5000, b"[" * 1000, b"9," * 2000, msgspec.msgpack.encode([9] * 1000), msgspec.msgpack.encode([0] * 1000)),
    *(msgspec.msgpack.encode(Ext(code, data)) for code, data in ((2, b"\x7f" * 3000), (10, b"\x92\x80\x81\xa5items\x01"))),
    *(wrap * 150 for wrap in (b"\x91", b"\x81\xa1a", b"\xc7\x03\x05\x91")),
]


@st.composite
def mutations(draw: st.DrawFn, size: int) -> list[tuple[str, int, bytes]]:
    kinds = st.sampled_from(["set", "insert", "delete", "nasty", "copy"])
    pieces = st.one_of(st.binary(min_size=1, max_size=4), st.sampled_from(NASTY))
    one = st.tuples(kinds, st.integers(0, size), pieces)
    return draw(st.lists(one, min_size=1, max_size=5))


def mutate(data: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    for kind, at, piece in changes:
        if kind == "set":
            data = data[:at] + piece + data[at + len(piece) :]
        elif kind == "delete":
            data = data[:at] + data[at + len(piece) :]
        elif kind == "copy":
            data = data[:at] + data[at : at + 50] * 2 + data[at + 50 :]
        else:
            data = data[:at] + piece + data[at:]
    return data


one_file_for_all = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@one_file_for_all
@given(data=st.data())
def test_a_tree_with_any_damage(good, path, data):
    tree = tree_of(good)
    assert not read(path, with_tree(good, mutate(tree, data.draw(mutations(len(tree)))))).wasteful


words = st.sampled_from(["<f4", "|b1", "O", "f4,(", "float32", "complex64", "list", "x", "cpu", "cuda:99"])
numbers = st.integers(-(2**63), 2**64 - 1) | st.floats()
codes = st.integers(-2, 18)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    extensions = st.builds(lambda code, one: Ext(code, msgspec.msgpack.encode(one)), codes, inner)
    maps = st.dictionaries(st.integers(0, 9) | st.text(max_size=2), inner, max_size=3)
    return st.lists(inner, max_size=4) | maps | extensions | st.builds(Ext, codes, st.binary(max_size=12))


leaves = st.none() | st.booleans() | numbers | words | st.binary(max_size=9) | st.builds(Ext, st.just(1), st.just(b""))
values = st.recursive(leaves, _containers, max_leaves=10)
slots = st.just([0, 1, 2, 3]) | st.just([0, 1, 2, 3]) | st.lists(st.integers(-9, 9), max_size=6) | values
huge = st.sampled_from([[9] * 1000, [1] * 1000, [2**62, 4, 0]])
kinds = st.sampled_from(["complex64", "complex128", "float8_e8m0fnu", "x"])
described = st.tuples(kinds, st.lists(st.integers(-1, 2**40), max_size=3) | huge)
foreign = st.just({}) | st.just({}) | st.dictionaries(st.integers(0, 6), described, max_size=3) | values


@one_file_for_all
@given(tree=st.tuples(slots, foreign, values))
def test_a_tree_of_any_values(good, path, tree):
    assert not read(path, with_tree(good, msgspec.msgpack.encode(tree))).wasteful


@one_file_for_all
@given(data=st.data())
def test_a_header_with_any_damage(good, path, data):
    header, body = split(good)
    text = json.dumps(header).encode()
    assert not read(path, seal(mutate(text, data.draw(mutations(len(text)))), body)).wasteful


sizes = st.integers(-1, 40) | st.sampled_from([2**31, 2**32, 2**62, 2**63, 2**64, 2**64 + 1]) | st.floats() | st.text()
places = {
    "shape": st.lists(sizes, max_size=3) | huge | st.just([2**32] * 2),
    "data_offsets": st.lists(sizes, min_size=1, max_size=3),
}
dtypes = st.sampled_from(["U8", "F32", "F64", "BOOL", "I4", ""])
entries = st.fixed_dictionaries({"dtype": dtypes}, optional=places) | st.none() | st.lists(st.none(), max_size=2)


@one_file_for_all
@given(data=st.data())
def test_a_header_with_other_entries(good, path, data):
    header, body = split(good)
    for name in data.draw(st.lists(st.sampled_from([*header, "new"]), min_size=1, max_size=3)):
        found = header.get(name)
        one = data.draw(entries)
        header[name] = {**found, **one} if isinstance(found, dict) and isinstance(one, dict) else one
    text = json.dumps(header).encode()
    if data.draw(st.booleans()):  # one name twice
        name = data.draw(st.sampled_from(list(header)))
        text = text[:-1] + b"," + json.dumps({name: data.draw(entries)}).encode()[1:]
    assert not read(path, seal(text, body)).wasteful


@one_file_for_all
@given(data=st.data())
def test_damage_without_a_right_digest_is_always_found(good, path, data):
    damaged = mutate(good, data.draw(mutations(len(good))))
    found = read(path, damaged)
    assert not found.wasteful
    assert not found.loaded or damaged == good


def test_undamaged_files_are_read(good, path):
    assert read(path, good) == (True, [])
    assert read(path, with_tree(good, tree_of(good))) == (True, [])
