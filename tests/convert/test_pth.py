import os
import pathlib
import sys
import tracemalloc
import zipfile
from argparse import Namespace
from collections import Counter, OrderedDict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trainbus.convert import load_pth
from trainbus.eventloop.checkpoint import load, save
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError

from ..checkpoint.trees import canonical

DATA = Path(__file__).parent / "data"
MMENGINE = DATA / "mmengine.pth"


@pytest.fixture
def mmengine(monkeypatch) -> Any:
    """Something that pickles like MMEngine's classes, and is gone before the file is read."""

    class HistoryBuffer:
        def __init__(self, values: Any = (), **more: Any) -> None:
            self._log_history, self._count_history, self.max_length = np.array(values), np.ones(len(values), int), 9
            vars(self).update(more)

        def mean(self) -> None:
            """Found by name, as a function of a class is under protocol 2."""

    class MessageHub:
        pass

    class ConfigDict(dict):
        def __reduce_ex__(self, protocol: Any) -> Any:
            return ConfigDict, (dict(self),), None, None, None, None

    places = {
        "mmengine.logging.history_buffer": HistoryBuffer,
        "mmengine.logging.message_hub": MessageHub,
        "mmengine.config.config": ConfigDict,
    }
    for name in ("mmengine", "mmengine.logging", "mmengine.config", *places):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, kind in places.items():
        kind.__module__, kind.__qualname__ = name, kind.__name__
        setattr(sys.modules[name], kind.__name__, kind)
    HistoryBuffer.mean.__qualname__ = "HistoryBuffer.mean"
    HistoryBuffer.mean.__module__ = HistoryBuffer.__module__

    def save(tree: Any, path: Path) -> Path:
        torch.save(tree, path)
        for name in [each for each in sys.modules if each.startswith("mmengine")]:
            monkeypatch.delitem(sys.modules, name)
        return path

    return SimpleNamespace(buffer=HistoryBuffer, hub=MessageHub, config=ConfigDict, save=save)


def saved(tree: Any, path: Path) -> Path:
    torch.save(tree, path)
    return path


def test_a_checkpoint_of_mmengine_is_read_where_mmengine_is_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "mmengine", None)  # importing it would raise
    tree = load_pth(MMENGINE)
    assert list(tree) == ["meta", "state_dict", "message_hub", "optimizer", "param_schedulers", "ema_state_dict"]
    with np.load(DATA / "mmengine.npz") as was:
        for key, weight in tree["state_dict"].items():
            assert np.array_equal(weight.numpy(), was[f"averaged/{key}"])
            assert np.array_equal(tree["ema_state_dict"][f"module.{key}"].numpy(), was[f"trained/{key}"])
        for index, state in tree["optimizer"]["state"].items():
            assert np.array_equal(state["exp_avg"].numpy(), was[f"exp_avg/{index}"])
    assert tree["ema_state_dict"]["steps"] == 4


def test_its_message_hub_is_plain_data_and_all_of_it_round_trips_through_a_checkpoint(tmp_path):
    tree = load_pth(MMENGINE)
    save(tree, tmp_path / "again")
    assert canonical(load(tmp_path / "again")) == canonical(tree)
    hub = tree["message_hub"]
    loss = hub["log_scalars"]["train/loss"]
    assert loss.keys() == {"log_history", "count_history", "max_length"}
    assert loss["log_history"].dtype == np.float64
    assert loss["log_history"].shape == (4,)
    assert loss["count_history"].tolist() == [1, 1, 1, 1]
    assert type(hub["runtime_info"]["best_score"]) is np.float64
    assert hub["runtime_info"]["best_score"] == 0.5
    assert tree["meta"]["dataset_meta"]["palette"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert type(tree["param_schedulers"][1]["milestones"]) is Counter


def test_message_hubs_and_configs_as_older_versions_pickle_them(tmp_path, mmengine):
    hub = mmengine.hub()
    functions = {"mean": mmengine.buffer.mean}
    hub._log_scalars = {"loss": mmengine.buffer([1.0, 2.0], statistics_methods=functions)}
    hub._runtime_info, hub._resumed_keys = {"cfg": mmengine.config(lr=0.1, inner=mmengine.config(a=1))}, {"cfg": True}
    tree = load_pth(mmengine.save({"message_hub": hub}, tmp_path / "a.pth"))["message_hub"]
    assert tree.keys() == {"log_scalars", "runtime_info", "resumed_keys"}
    assert tree["log_scalars"]["loss"]["log_history"].tolist() == [1.0, 2.0]
    assert tree["runtime_info"] == {"cfg": {"lr": 0.1, "inner": {"a": 1}}}
    assert type(tree["runtime_info"]["cfg"]) is dict


@pytest.mark.parametrize("says", [r"hub\.0: .*HistoryBuffer", r"x\.f: .* builtins\.getattr"])
def test_a_history_buffer_that_is_none_and_a_function_outside_of_one_are_named_with_their_path(tmp_path, mmengine, says):
    buffer = mmengine.buffer()
    del buffer._log_history
    tree = {"hub": [buffer]} if "hub" in says else {"x": {"f": mmengine.buffer.mean}}
    with pytest.raises(CheckpointError, match=rf"a\.pth: {says}"):
        load_pth(mmengine.save(tree, tmp_path / "a.pth"))


class Runs:
    """When it is unpickled, a command is run."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize(
    ("zipped", "named"),
    [(True, r": pathlib\S*\.PurePosixPath, posix\.system\."), (False, r": posix\.system\.")],  # before torch 1.6: the first
)
def test_code_is_refused_and_not_run_and_all_of_it_is_named(tmp_path, zipped, named):
    path, weights = tmp_path / "a.pth", {"w": torch.arange(3.0)}
    torch.save(weights, path, _use_new_zipfile_serialization=zipped)
    assert load_pth(path)["w"].tolist() == [0, 1, 2]
    evil = {"state_dict": weights, "evil": Runs(f"touch {tmp_path}/ran"), "where": pathlib.PurePosixPath("a")}
    torch.save(evil, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=named) as error:
        load_pth(path)
    assert "weights_only=False" in str(error.value)
    assert not (tmp_path / "ran").exists()


def test_the_stand_ins_are_removed_also_after_an_error(tmp_path):
    before = set(torch.serialization.get_safe_globals())
    load_pth(MMENGINE)
    with pytest.raises(CheckpointError):
        load_pth(saved(Runs("false"), tmp_path / "a.pth"))
    assert set(torch.serialization.get_safe_globals()) == before


def test_bytes_and_numpy_arrays_and_scalars_are_read_unchanged(tmp_path):
    arrays = [np.arange(6, dtype=">i4").reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.array(1.5)]
    arrays += [np.zeros((0, 3), np.float16), np.array([True, False]), np.array([1 + 2j])]
    tree = [*arrays, np.float32(0.1), np.int64(-3), np.bool_(True), b"", b"\xff"]
    back = load_pth(saved([*tree, bytearray(b"a")], tmp_path / "a.pth"))
    assert canonical(back) == canonical([*tree, b"a"])


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([None]), np.array(["2020-01-01"], "M8[D]")], ids=["U", "O", "M"])
def test_an_array_of_anything_but_numbers_is_refused_with_its_path(tmp_path, array):
    with pytest.raises(CheckpointError, match=r"a\.pth: info\.names: "):
        load_pth(saved({"info": {"names": array}}, tmp_path / "a.pth"))


def test_every_flipped_bit_in_a_tensor_is_detected(tmp_path):
    data = saved({"w": torch.ones(4)}, tmp_path / "a.pth").read_bytes()
    start = data.index(torch.ones(4).numpy().tobytes())
    for offset in range(start, start + 16):
        damaged = bytearray(data)
        damaged[offset] ^= 1
        (tmp_path / "b.pth").write_bytes(damaged)
        with pytest.raises(CheckpointDamagedError, match=r"b\.pth .*checksum"):
            load_pth(tmp_path / "b.pth")


def test_a_flipped_bit_that_says_encrypted_is_detected(tmp_path):
    data = bytearray(saved({"w": torch.ones(4)}, tmp_path / "a.pth").read_bytes())
    data[data.index(b"PK\x01\x02") + 8] ^= 1
    (tmp_path / "b.pth").write_bytes(data)
    with pytest.raises(CheckpointDamagedError, match=r"b\.pth .*encrypted"):
        load_pth(tmp_path / "b.pth")


def test_every_truncation_is_detected(tmp_path):
    data = saved({"w": torch.ones(4)}, tmp_path / "a.pth").read_bytes()
    for length in range(4, len(data), 7):
        (tmp_path / "b.pth").write_bytes(data[:length])
        with pytest.raises(CheckpointDamagedError, match=r"b\.pth"):
            load_pth(tmp_path / "b.pth")


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda path: path.write_text("hello"), r"a\.pth"),
        (lambda path: torch.save({"w": 1}, path, pickle_protocol=4), r"a\.pth .* 149"),
        (lambda path: torch.save(ENDLESS, path), " 100 "),
    ],
    ids=["text", "protocol", "endless"],
)
def test_what_torch_has_not_written_so_is_an_error_that_names_the_cause(tmp_path, write, says):
    write(tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=says):
        load_pth(tmp_path / "a.pth")


def repacked(path: Path, how: int, more: dict[str, bytes] | None = None) -> Path:
    """The parts of a file of torch.save, written by something else."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, data in (parts | (more or {})).items():
            archive.writestr(name, data)
    return path


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path):
    path = repacked(saved({"w": torch.zeros(10**6)}, tmp_path / "a.pth"), zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    with pytest.raises(CheckpointDamagedError, match="compressed"):
        load_pth(path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    assert load_pth(repacked(saved({"w": torch.zeros(3)}, tmp_path / "b.pth"), zipfile.ZIP_STORED))["w"].tolist() == [0, 0, 0]


class Calls:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "call",
    [
        (bytearray, 10**14),
        (torch._utils._rebuild_tensor_v2, torch.zeros(1).untyped_storage(), 0, (2**40,), (1,), False, OrderedDict()),
        (torch._utils._rebuild_tensor_v2, torch.zeros(1).untyped_storage(), 2**62, (1,), (1,), False, OrderedDict()),
    ],
    ids=["bytes", "beyond", "offset"],
)
def test_tensors_and_bytes_beyond_those_of_the_file_are_refused(tmp_path, call):
    with pytest.raises(CheckpointError):
        load_pth(saved({"w": Calls(*call)}, tmp_path / "a.pth"))


def test_a_list_that_is_held_many_times_over_is_one_list_and_fills_no_memory(tmp_path, monkeypatch):
    bomb: list[Any] = [b"", 1]
    for _ in range(40):
        bomb = [bomb, bomb]
    tree = load_pth(saved(bomb, tmp_path / "a.pth"))
    assert tree[0] is tree[1]
    monkeypatch.setattr("trainbus.eventloop.checkpoint.tree.MAX_VALUES", 10_000)
    with pytest.raises(CheckpointError, match="10,000"):
        save(tree, tmp_path / "a.safetensors")


def test_tensors_that_share_or_spread_their_bytes_are_read(tmp_path):
    weight = torch.ones(2000)
    tree = {"a": weight, "b": weight, "half": weight[:1000], "spread": torch.ones(1).expand(5000)}
    loaded = load_pth(saved(tree, tmp_path / "a.pth"))
    assert all(torch.equal(loaded[name], tree[name]) for name in tree)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs the maps of a process")
def test_tensors_are_mapped_and_may_be_changed_without_changing_the_file(tmp_path):
    path = saved({"w": torch.zeros(4096)}, tmp_path / "a.pth")
    before, tree = path.read_bytes(), load_pth(path)
    assert str(path) in Path("/proc/self/maps").read_text()
    tree["w"] += 1
    assert tree["w"].sum() == 4096
    assert path.read_bytes() == before


def test_the_arguments_of_a_script_are_a_dict(tmp_path):
    arguments = Namespace(lr=0.1, inner=Namespace(sizes=np.arange(2)))
    tree = load_pth(saved({"args": arguments}, tmp_path / "a.pth"))
    assert canonical(tree) == canonical({"args": {"lr": 0.1, "inner": {"sizes": np.arange(2)}}})


def test_attributes_that_hide_the_methods_of_a_dict_are_refused(tmp_path):
    tree = OrderedDict(a=1)
    vars(tree)["pop"] = [1]
    with pytest.raises(CheckpointError, match=r"'pop' .* OrderedDict"):
        load_pth(saved(tree, tmp_path / "a.pth"))


def test_a_file_of_torch_save_keeps_strides_parameters_and_ties_when_it_is_imported(tmp_path):
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    tree = {"state_dict": model.state_dict(), "tied": model.state_dict()["weight"], "optimizer": optimizer.state_dict()}
    tree["turned"], tree["own"] = torch.randn(3, 4).t(), torch.nn.Parameter(torch.randn(2, 3, 4).mT)
    save(load_pth(saved(tree, tmp_path / "a.pth")), tmp_path / "b.safetensors")
    back = load(tmp_path / "b.safetensors")
    assert canonical(back) == canonical(tree)
    assert back["tied"].data_ptr() == back["state_dict"]["weight"].data_ptr()
    assert back["state_dict"]["weight"].stride() == model.weight.stride() != model.weight.contiguous().stride()
