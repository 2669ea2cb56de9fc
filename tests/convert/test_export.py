import errno
import os
from collections import Counter, OrderedDict, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.checkpoint.faults import fill_up
from tests.checkpoint.trees import DENSE, SAFE, canonical
from tests.failing import fails
from trainbus.convert import export_tree, export_weights
from trainbus.eventloop.checkpoint import load, outline, save
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError, CheckpointValueError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch says so of any complex32 tensor


def exported(tree: Any, directory: Path) -> Any:
    save(tree, directory / "a.safetensors")
    export_tree(directory / "a.safetensors", directory / "a.pth")
    return torch.load(directory / "a.pth", weights_only=True)


def weights_of(tree: Any, directory: Path, suffix: str = ".pth", **options: Any) -> Any:
    save(tree, directory / "a.safetensors")
    out = directory / f"weights{suffix}"
    export_weights(directory / "a.safetensors", out, **options)
    return torch.load(out, weights_only=True) if suffix == ".pth" else load_file(out)


@pytest.mark.parametrize("dtype", DENSE, ids=str)
def test_tensors_of_every_dtype_and_the_dtype_itself_are_exported(tmp_path, dtype):
    tensor = torch.arange(16, dtype=torch.uint8).clamp(max=1).view(dtype)
    back, itself = exported([tensor, dtype], tmp_path)
    assert back.dtype == itself == dtype
    assert back.view(torch.uint8).equal(tensor.view(torch.uint8))


ALLOWED = [
    *(None, True, -(2**2038), 1.5, float("-inf"), 1j, "é\ud800", b"\x00\xff", torch.Size([2, 3]), torch.device("cuda:3")),
    *([1, [2]], (1, (), (2,), (1, 2, 3, 4)), {1, 2}, set(), {1: "a", None: 2, (1, 2): 3, "b": {}}),
    *(Counter("aab"), OrderedDict(b=1, a=2)),
]
CONVERTED = [
    *((np.float32(0.5), 0.5), (np.int64(-3), -3), (np.bool_(True), True), (np.complex128(1j), 1j), (frozenset({1}), {1})),
    *((b"", bytearray()), (defaultdict(list, a=[1]), {"a": [1]}), ({np.int64(1): np.float64(2)}, {1: 2.0})),
]


@pytest.mark.parametrize(("value", "becomes"), [*((value, value) for value in ALLOWED), *CONVERTED], ids=repr)
def test_types_allowed_by_weights_only_are_exported_unchanged_and_others_are_converted(tmp_path, value, becomes):
    back = exported({"value": value}, tmp_path)["value"]
    assert type(back) is type(becomes)
    assert back == becomes
    assert repr(back) == repr(becomes)


@pytest.mark.parametrize("kind", ["b1", "i1", "<u2", ">i4", "<i8", "<u8", "<f2", ">f8", "<c8"])
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3)])
def test_arrays_become_tensors_with_the_same_numbers(tmp_path, kind, shape):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind)
    tensor = exported(array, tmp_path)
    assert tuple(tensor.shape) == shape
    assert tensor.numpy().dtype == array.dtype.newbyteorder("=")
    assert np.array_equal(tensor.numpy(), array)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": [2**2040]}, r"a\.0: .* 2,041 "),
        ({"a": {frozenset({1}): 2}}, r"a\.\(key\): .*frozenset\(\{1\}\)"),
        ({"a": {frozenset({1})}}, r"a\.\(item\): .*frozenset"),
        ({"a": {b"": 1}}, r"a\.\(key\): .*b''"),
        ({"a": np.zeros(2, np.longdouble)}, r"a: .*128"),
        ({"a": np.longdouble(2)}, r"a: .*128"),
    ],
    ids=["int", "key", "item", "bytes", "array", "scalar"],
)
def test_unconvertible_values_are_errors_with_their_path_and_leave_no_file(tmp_path, value, says):
    with pytest.raises(CheckpointValueError, match=says):
        exported(value, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_the_states_of_a_real_model_and_optimizer_load_from_an_export(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    state = model.state_dict()
    back = exported({"state_dict": state, "optimizer": optimizer.state_dict()}, tmp_path)
    assert back["state_dict"]._metadata == state._metadata
    twin = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    twin.load_state_dict(back["state_dict"])
    other = torch.optim.AdamW(twin.parameters(), lr=0.5)
    other.load_state_dict(back["optimizer"])
    assert other.state_dict()["state"][0]["exp_avg"].equal(optimizer.state_dict()["state"][0]["exp_avg"])
    assert other.param_groups[0]["lr"] == 0.1


AVERAGED, TRAINED = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
RUN = {"state_dict": {"w": AVERAGED}, "trained": {"w": TRAINED}, "progress": {"epoch": 1}}
MODELS = {"state_dict": {"G": {"w": AVERAGED}, "D": {"w": TRAINED}}}


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_exported_weights_are_only_the_averages_or_those_of_a_named_key_or_model(tmp_path, suffix):
    weights = weights_of(RUN, tmp_path, suffix)
    assert list(weights) == ["w"]
    assert weights["w"].equal(AVERAGED)
    assert weights_of(RUN, tmp_path, suffix, key="trained")["w"].equal(TRAINED)
    assert weights_of(MODELS, tmp_path, suffix, model="D")["w"].equal(TRAINED)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_model_loads_its_exported_weights(tmp_path, suffix):
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    other = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    other.load_state_dict(weights_of({"state_dict": model.state_dict()}, tmp_path, suffix))
    assert all(each.equal(other.state_dict()[name]) for name, each in model.state_dict().items())


def test_safetensors_exports_equal_those_of_the_safetensors_package(tmp_path):
    state = {str(dtype): torch.zeros(3, 2, dtype=dtype) for dtype in SAFE}
    state |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5), "turned": torch.arange(6.0).view(2, 3).t()}
    weights = weights_of({"state_dict": state}, tmp_path, ".safetensors")
    assert weights.keys() == state.keys()
    assert all(canonical(weights[name]) == canonical(tensor.contiguous()) for name, tensor in state.items())
    with safe_open(tmp_path / "weights.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_an_export_has_the_dtypes_that_the_installed_safetensors_package_writes(tmp_path):
    state = {}
    for dtype in (torch.complex64, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu):
        tensor = torch.arange(8, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)
        with suppress(Exception):  # an older one writes fewer
            save_file({"x": tensor}, tmp_path / "probe.safetensors")
            state[str(dtype)] = tensor
    assert state
    if str(torch.complex64) in state:
        state["conjugated"] = state[str(torch.complex64)].conj()
    weights = weights_of({"state_dict": state}, tmp_path, ".safetensors")
    assert all(weights[name].view(torch.uint8).equal(tensor.resolve_conj().view(torch.uint8)) for name, tensor in state.items())


def test_an_export_to_pth_keeps_strides_and_the_versions_of_modules(tmp_path):
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    tree = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
    back = exported(tree, tmp_path)
    assert back["state_dict"]["weight"].stride() == model.weight.stride()
    assert back["state_dict"]._metadata == model.state_dict()._metadata
    moment = optimizer.state_dict()["state"][0]["exp_avg"]
    assert back["optimizer"]["state"][0]["exp_avg"].stride() == moment.stride() != moment.contiguous().stride()
    assert back["optimizer"]["state"][0]["exp_avg"].equal(moment)


def test_tied_weights_are_under_each_name_in_safetensors_and_tied_and_in_the_file_once_in_pth(tmp_path):
    weight = torch.randn(1000)
    tied = {"a": weight, "b": weight}
    weights = weights_of({"state_dict": tied}, tmp_path, ".safetensors")
    assert weights["a"].equal(weights["b"])
    weights = weights_of({"state_dict": tied}, tmp_path, ".pth")
    assert weights["a"] is weights["b"]
    back = exported({**tied, "c": [weight.t()]}, tmp_path)
    assert back["a"] is back["b"]
    assert (tmp_path / "a.pth").stat().st_size < 2 * 4000


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"w": torch.ones(2), "c": torch.ones(2, dtype=torch.complex128)}, r"'c' .*torch\.complex128"),
        ({"w": torch.ones(2), "_extra_state": {"amax": 1}}, r"'_extra_state' .*\.pth"),
        ({"__metadata__": torch.ones(2)}, "'__metadata__'"),
        ({"\ud800": torch.ones(2)}, "ud800"),
        ({1: torch.ones(2)}, "1"),
    ],
    ids=["dtype", "extra", "metadata", "surrogate", "number"],
)
def test_dtypes_missing_in_safetensors_are_errors_and_are_exported_to_pth(tmp_path, state, says):
    with pytest.raises(CheckpointValueError, match=says):
        weights_of({"state_dict": state}, tmp_path, ".safetensors")
    assert not (tmp_path / "weights.safetensors").exists()
    assert weights_of({"state_dict": state}, tmp_path, ".pth").keys() == state.keys()


def test_wrapper_prefixes_are_removed_on_request(tmp_path):
    state = {"state_dict": {"module._orig_mod.w": AVERAGED, "head.module.b": TRAINED, "modules.c": TRAINED}}
    assert list(weights_of(state, tmp_path)) == ["module._orig_mod.w", "head.module.b", "modules.c"]
    assert list(weights_of(state, tmp_path, strip=True)) == ["w", "head.b", "modules.c"]


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize(
    ("tree", "options", "says"),
    [
        ({"a": 1}, {}, "'a'"),
        ([1], {}, "state_dict"),
        ({"state_dict": {}}, {}, "'state_dict'"),
        ({"state_dict": {"w": TRAINED}}, {"key": "trained"}, r"\(trained\) .*'state_dict'"),
        ({"state_dict": {"w": AVERAGED, "module.w": TRAINED}}, {"strip": True}, r"'w' and 'module\.w' .*'w'"),
        (MODELS, {}, "'G', 'D'"),
        (MODELS, {"model": "E"}, r"'E' .*'G', 'D'"),
        (RUN, {"model": "G"}, "name"),
    ],
)
def test_weights_that_are_not_there_or_not_one_models_are_an_error_naming_the_entries(tmp_path, suffix, tree, options, says):
    with pytest.raises(CheckpointError, match=says):
        weights_of(tree, tmp_path, suffix, **options)


def test_a_damaged_checkpoint_is_not_exported_nor_any_to_another_suffix(tmp_path):
    save(RUN, tmp_path / "a.safetensors")
    data = bytearray((tmp_path / "a.safetensors").read_bytes())
    data[data.index(AVERAGED.numpy().tobytes())] ^= 1
    (tmp_path / "a.safetensors").write_bytes(data)
    for export in (export_tree, export_weights):
        with pytest.raises(CheckpointDamagedError):
            export(tmp_path / "a.safetensors", tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()
    with pytest.raises(CheckpointError, match=r"out\.bin: .*\.pth"):
        export_tree(tmp_path / "a.safetensors", tmp_path / "out.bin")
    with pytest.raises(CheckpointError, match=r"\.safetensors"):
        export_weights(tmp_path / "a.safetensors", tmp_path / "out.onnx")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_full_disk_keeps_the_existing_file(tmp_path, monkeypatch, suffix):
    save(RUN, tmp_path / "a.safetensors")
    out = tmp_path / f"out{suffix}"
    out.write_text("before")
    monkeypatch.setattr(os, "fsync", fails(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(CheckpointError, match=rf"out{suffix}.*No space left"):
        export_weights(tmp_path / "a.safetensors", out)
    assert out.read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"a.safetensors", out.name}


@pytest.mark.parametrize("room", [0, 5_000, 500_000])
def test_a_disk_filling_up_during_an_export_raises_its_own_error(tmp_path, monkeypatch, room):
    save({"state_dict": {"a": torch.randn(100_000), "b": torch.randn(100_000)}}, tmp_path / "a.safetensors")
    fill_up(monkeypatch, room)
    with pytest.raises(CheckpointError, match=r"out\.pth.*No space left") as error:
        export_weights(tmp_path / "a.safetensors", tmp_path / "out.pth")
    assert isinstance(error.value.__cause__, OSError)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_an_outline_has_the_tree_with_shapes_and_dtypes_and_no_data(tmp_path):
    tied = torch.ones(2, 3)
    tree = {"a": tied, "b": [tied, torch.ones(4, dtype=torch.complex64)], "n": {"epoch": 3, "x": np.arange(2)}}
    save(tree, tmp_path / "a.safetensors")
    seen = outline(tmp_path / "a.safetensors")
    assert seen["a"] is seen["b"][0]
    assert (seen["a"].device.type, seen["a"].shape, seen["a"].dtype) == ("meta", (2, 3), torch.float32)
    assert (seen["b"][1].shape, seen["b"][1].dtype) == ((4,), torch.complex64)
    assert seen["n"]["epoch"] == 3
    assert seen["n"]["x"].tolist() == [0, 1]
    data = bytearray((tmp_path / "a.safetensors").read_bytes())
    data[data.index(tied.numpy().tobytes())] ^= 1  # it reads only header and tree
    (tmp_path / "a.safetensors").write_bytes(data)
    assert outline(tmp_path / "a.safetensors")["a"].shape == (2, 3)
    with pytest.raises(CheckpointDamagedError):
        load(tmp_path / "a.safetensors")


def test_the_outline_of_a_damaged_file_is_a_typed_error_for_any_byte(tmp_path):
    save({"w": torch.zeros(3), "c": torch.ones(2, dtype=torch.complex64), "n": (1, "é")}, tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    for offset in range(len(data)):
        damaged = bytearray(data)
        damaged[offset] ^= 0x41
        (tmp_path / "b.safetensors").write_bytes(damaged)
        try:
            outline(tmp_path / "b.safetensors")
        except CheckpointDamagedError as error:
            assert "b.safetensors is damaged" in str(error)  # and damage to the data is not seen
