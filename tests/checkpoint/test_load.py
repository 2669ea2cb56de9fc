import errno
import gc
import os
import sys
import tracemalloc
import weakref
from collections import OrderedDict, deque
from pathlib import Path
from threading import Semaphore
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.sealed import assert_refused, header_of, seal, sealed_tree, split
from tests.checkpoint.trees import canonical
from tests.failing import fails
from trainbus.eventloop.checkpoint import inspect, load, load_whole, outline, save, verify
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError

Ext, pack = msgspec.msgpack.Ext, msgspec.msgpack.encode
TREE: dict[str, Any] = {"w": torch.arange(5.0), "c": torch.ones(2, dtype=torch.complex64), "epoch": 3, "names": ("a",)}


@pytest.fixture(scope="module")
def good(path: Path) -> bytes:
    save(TREE, path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def large(path: Path) -> bytes:
    save({"w": torch.randn(100_000), "x": [torch.randn(10) for _ in range(100)]}, path)
    return path.read_bytes()


def assert_damaged(path: Path, data: bytes, says: str = "") -> None:
    path.write_bytes(data)
    assert_refused(path, load, verify, match=rf"damaged\.safetensors .*{says}")


def test_every_flipped_bit_of_a_small_file_is_detected(good, path):
    for offset in range(len(good)):
        damaged = bytearray(good)
        damaged[offset] ^= 1 << (offset % 8)
        assert_damaged(path, damaged)


def test_every_truncation_of_a_small_file_is_detected(good, path):
    for length in range(len(good)):
        assert_damaged(path, good[:length])


@given(data=st.data())
def test_random_damage_to_a_larger_file_is_detected(large, path, data):
    offset = data.draw(st.integers(0, len(large) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "zero", "append", "swap"]))
    damaged = bytearray(large)
    if kind == "flip":
        damaged[offset] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del damaged[offset:]
    elif kind == "zero":
        damaged[offset : offset + 512] = bytes(len(damaged[offset : offset + 512]))
    elif kind == "append":
        damaged += data.draw(st.binary(min_size=1, max_size=50))
    else:
        damaged = damaged[offset:] + damaged[:offset]
    if bytes(damaged) != large:
        assert_damaged(path, bytes(damaged))


@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(path, data):
    assert_damaged(path, data)
    with pytest.raises(CheckpointDamagedError):
        inspect(path)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, 10**6])
def test_an_absurd_header_length_allocates_nothing(good, path, length):
    path.write_bytes(length.to_bytes(8, "little") + good[8:])
    tracemalloc.start()
    try:
        assert_refused(path, load, verify, inspect, match="header")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_files_of_other_formats_are_refused(path):
    safetensors.torch.save_file({"w": torch.ones(3)}, path)
    assert_damaged(path, path.read_bytes(), "format")
    torch.save({"w": torch.ones(3)}, path)
    assert_refused(path, load, verify, match=r"trainbus checkpoint import")


def test_a_newer_format_version_is_named(good, path):
    header, data = split(good)
    header["__metadata__"]["version"] = "3"
    newer = seal(header, data)
    path.write_bytes(newer)
    for read in (load, verify, inspect, outline):
        with pytest.raises(CheckpointError, match=r"damaged\.safetensors .* 3") as caught:
            read(path)
        assert not isinstance(caught.value, CheckpointDamagedError)  # a run must not go on from an older file unasked
    assert_damaged(path, bytes([*newer[:-1], newer[-1] ^ 1]), "digest")
    path.write_bytes(seal(header | {"__tree__": {"at": "the end"}}, data))  # it may describe its tensors in another way
    with pytest.raises(CheckpointError, match=" 3"):
        load(path)


def test_a_flipped_bit_in_the_version_is_damage(good, path):
    at = good.index(b'"version":"2"') + len(b'"version":"')
    assert_damaged(path, bytes([*good[:at], good[at] ^ 1, *good[at + 1 :]]), "digest")


def test_a_dtype_that_this_torch_lacks_is_named(path):
    tree = pack([[0], {0: ["float3_e1m1", [8]]}, Ext(1, b"")])
    whole = sealed_tree(tree, tensor_bytes=8)
    path.write_bytes(whole)
    verify(path)
    for read in (load, outline):
        with pytest.raises(CheckpointError, match="'float3_e1m1'") as caught:
            read(path)
        assert not isinstance(caught.value, CheckpointDamagedError)
    assert_damaged(path, bytes([*whole[:-1], whole[-1] ^ 1]))
    with pytest.raises(CheckpointDamagedError, match="digest"):
        outline(path)


def test_a_loaded_tree_is_in_no_reference_cycle_so_its_memory_goes_with_it(path):
    weights = {"w": torch.randn(3, 4).t(), "c": torch.ones(2, dtype=torch.complex64), "p": torch.nn.Parameter(torch.ones(3))}
    save({"nested": [weights, (deque([torch.zeros(2)]), {1: torch.eye(2).to_sparse()})], "d": OrderedDict(weights)}, path)
    for read in (load, load_whole, outline):
        gc.disable()
        try:
            tree = read(path)
            held = [weakref.ref(tensor) for tensor in (*tree["nested"][0].values(), *tree["d"].values())]
            del tree
            assert [one() for one in held] == [None] * 6
        finally:
            gc.enable()


CHANGES: dict[tuple[str, str], list[Any]] = {
    ("w", "shape"): [[6], [-5], [2**62, 2**62]],
    ("w", "dtype"): ["F64", "X"],
    ("w", "data_offsets"): [[0, 20], [20, 16], [8, 28]],
    ("c", "data_offsets"): [[4, 20], [2**63, 2**63 + 16]],
    ("__tree__", "data_offsets"): [[0, 40]],
    ("__digest__", "shape"): [[2, 2]],
    **{("__metadata__", field): [value] for field, value in (("version", "x"), ("digest", "md5"), ("format", "pt"))},
}


def test_a_header_that_contradicts_itself_is_refused_even_with_a_right_digest(good, path):
    for (name, field), values in CHANGES.items():
        for value in values:
            header, data = split(good)
            header[name][field] = value
            assert_damaged(path, seal(header, data))
    header, data = split(good)
    assert_damaged(path, seal(b"{" * 50_000, data))
    assert_damaged(path, seal({name: header[name] for name in reversed(header)}, data))


ARRAYS = [("O", 1, b"12345678"), (None, 1, b"12345678"), ("f4,(", 1, b"1234"), ("a", 1, b"1234"), ("<f4", 2**40, b"1234")]
CODES = [(15, b"load"), (16, b"nonsense"), (4, b"12345678"), (7, pack([[1]]))]


@pytest.mark.parametrize(
    "tree",
    [
        *(b"", b"\xc1", b"\x93" * 5000, *(b"\x93\x90\x80" + (many + b"\xff\xff\xff\xff") * 50 for many in (b"\xdd", b"\xdf"))),
        *(pack([slots, {}, Ext(1, b"")]) for slots in ([], [7])),
        *(pack([[0], {}, Ext(99, b"")]), pack([[0], {0: ["complex64", [99]]}, Ext(1, b"")])),
        *(pack([[], {}, Ext(code, data)]) for code, data in CODES),
        *(pack([[], {}, Ext(13, pack([dtype, [size], data]))]) for dtype, size, data in ARRAYS),
    ],
)
def test_a_malformed_tree_is_refused_even_with_a_right_digest(path, tree):
    path.write_bytes(sealed_tree(tree, tensor_bytes=8))
    with pytest.raises(CheckpointDamagedError):
        load(path)


@pytest.mark.parametrize("shape", [[1], [2**30], [2**60], [-1], [0, -1], [2**40, 2**40]])
def test_a_tree_that_promises_a_tensor_more_memory_than_it_has_is_refused(path, shape):
    tree = pack([[0], {0: ["complex64", shape]}, Ext(1, b"")])
    path.write_bytes(sealed_tree(tree))
    with pytest.raises(CheckpointDamagedError):
        load(path)


INLINE = [("quint4x2", [2], b"xx"), ("qint8", [0], b""), ("nothing", [1], b"x"), ("int8", [2], b"x"), ("int8", [-1, -1], b"x")]
INLINE += [
    ("int8", [-1, 0], b""),
    ("int8", [2**62, 4, 0], b""),
    ("int8", [2**63] * 9, b"x"),
    ("int8", [1.0], b"x"),
    ("int8", 1, b"x"),
]


@pytest.mark.parametrize("parts", INLINE)
def test_a_tensor_within_a_tree_that_torch_could_crash_on_is_refused(path, parts):
    path.write_bytes(sealed_tree(pack([[], {}, Ext(17, pack(parts))])))
    with pytest.raises(CheckpointDamagedError):
        load(path)


def test_names_in_a_tree_are_not_imported(path, monkeypatch):
    path.write_bytes(sealed_tree(pack([[], {}, Ext(15, b"_dynamo")])))
    monkeypatch.delattr(torch, "_dynamo", raising=False)  # reading it would import the module, as this does
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    with pytest.raises(CheckpointDamagedError):
        load(path)
    assert "torch._dynamo" not in sys.modules


def test_a_disk_that_cannot_read_a_file_has_damaged_it(good, path, monkeypatch):
    path.write_bytes(good)
    monkeypatch.setattr(sys.modules[verify.__module__], "read_exactly", fails(OSError(errno.EIO, os.strerror(errno.EIO))))
    assert_refused(path, load, verify, inspect, match=r"damaged\.safetensors.*Input/output error")


def test_a_missing_file_is_a_file_not_found_error(tmp_path):
    assert_refused(tmp_path / "nothing", load, verify, inspect, error=FileNotFoundError)


def test_a_wrong_device_is_the_callers_mistake_and_no_damage(good, path):
    path.write_bytes(good)
    with pytest.raises(RuntimeError, match="nowhere") as caught:
        load(path, map_location="nowhere")
    assert not isinstance(caught.value, CheckpointDamagedError)
    assert load(path, map_location=torch.device("meta"))["w"].is_meta


def test_a_good_file_verifies_and_loads(good, large, path):
    for data in (large, good):
        path.write_bytes(data)
        verify(path)
    assert canonical(load(str(path))) == canonical(TREE)


def test_verifying_reads_a_large_file_through_a_small_buffer(tmp_path):
    save({"w": torch.randn(15 << 20)}, tmp_path / "c")
    tracemalloc.start()
    try:
        verify(tmp_path / "c")
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.long
def test_damage_is_found_in_each_piece_of_a_large_file(tmp_path):
    path = tmp_path / "damaged.safetensors"
    small = [torch.randn(1000) for _ in range(900)]
    tree = {"large": torch.randn(9 << 20), "small": small, "odd": torch.ones(700_001, dtype=torch.int8)}
    save(tree, path)
    assert canonical(load(path)) == canonical(tree)
    verify(path)
    whole = path.read_bytes()
    for place in (*range(1 << 20, len(whole), 5_000_011), len(whole) - 900_000, len(whole) - 1):
        assert_damaged(path, whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :], "digest")
    assert_damaged(path, whole[: len(whole) // 2])


@pytest.mark.parametrize("read", [load, verify])
def test_a_piece_is_read_while_the_digest_of_the_one_before_is_made(tmp_path, monkeypatch, read):
    save({"w": torch.randn(12 << 20)}, tmp_path / "c")
    module, reads, met = sys.modules[verify.__module__], Semaphore(0), []
    crc32, read_exactly = module.crc32, module.read_exactly

    def make_digest(parts, crc=0):
        if len(parts[0]) > 4 << 20:
            met.append(reads.acquire(timeout=5) and reads.acquire(timeout=5))  # of this piece and of the next one
            reads.release()
        return crc32(parts, crc)

    def read_piece(file, size, into=None):
        if into is not None:  # not the header
            reads.release()
        return read_exactly(file, size, into)

    monkeypatch.setattr(module, "crc32", make_digest)
    monkeypatch.setattr(module, "read_exactly", read_piece)
    read(tmp_path / "c")
    assert met
    assert all(met)


def test_loaded_tensors_can_be_changed_one_without_the_other(tmp_path):
    weight = torch.ones(3)
    save({"a": weight, "tied": weight, "b": torch.ones(3)}, tmp_path / "c")
    loaded = load(tmp_path / "c")
    version = loaded["b"]._version
    loaded["a"].add_(1)
    assert loaded["tied"].tolist() == [2, 2, 2]
    assert loaded["b"].tolist() == [1, 1, 1]
    assert loaded["b"]._version == version


def test_each_loaded_tensor_has_aligned_memory_of_its_own_as_from_torch_load(tmp_path):
    large = torch.randn(700_001).to(torch.float16)
    tensors = [torch.ones(3, dtype=torch.int8), large, *(torch.randn(number) for number in range(1, 60)), torch.ones(2, 3).t()]
    tensors += [torch.full((2,), 1j), torch.tensor(3.0)]
    save([*tensors, tensors[0]], tmp_path / "c")
    loaded = load(tmp_path / "c")
    assert loaded[-1] is loaded[0]
    for tensor, original in zip(loaded, tensors, strict=False):
        assert torch.equal(tensor, original)
        assert tensor.data_ptr() % 64 == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert not tensor._is_view()


STRIDES = [[1, 1], [3, 0], [2**62, 1], [4, 1], [1], [3, 1, 1], [-3, 1], [2**63, 1], ["3", 1], 3]


@pytest.mark.parametrize("strides", STRIDES, ids=str)
def test_strides_that_leave_gaps_or_share_memory_are_refused(path, strides):
    tensors = {"w": {"dtype": "U8", "shape": [2, 3], "data_offsets": [0, 6]}}
    tree = pack([[0], {}, Ext(1, b""), {0: strides}, {}])
    path.write_bytes(seal(header_of(tensors, 6, len(tree)), bytes(6) + tree))
    assert_refused(path, load, outline, match="rebuilt")


def test_files_of_version_1_load(path):
    """As 0.1 and 0.2 wrote them: without the forms of tensors."""
    tree = pack([[0], {0: ["complex64", [1]]}, Ext(1, b"")])
    path.write_bytes(sealed_tree(tree, tensor_bytes=8))
    assert inspect(path).version == 1
    assert load(path).tolist() == [0j]


def test_a_loaded_tensor_saves_only_itself(tmp_path):
    save([torch.ones(3), torch.ones(100_000)], tmp_path / "c")
    assert load(tmp_path / "c")[0].untyped_storage().nbytes() == 12


def test_inspect_describes_without_reading_the_data(good, path):
    path.write_bytes(good)
    description = inspect(path)
    tensors = {name: (each.dtype, each.shape) for name, each in description.tensors.items()}
    assert tensors == {"c": ("U8", (16,)), "w": ("F32", (5,))}
    assert (description.path, description.bytes, description.version) == (path, len(good), 2)
    assert description.digest == f"crc32:{int.from_bytes(good[-4:], 'little'):08x}"
    damaged = bytearray(good)
    damaged[-6] ^= 1
    path.write_bytes(damaged)
    assert inspect(path) == description
