"""Folders of torch.distributed.checkpoint: read without running anything of them."""

import io
import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import Metadata

from eventloop.checkpoint import Contents, copy_in, load, load_whole, open_dcp, open_safetensors, save_contents, verify_shards
from eventloop.checkpoint.contents import replace_tensors
from eventloop.errors import CheckpointDamagedError, CheckpointError

from .trees import DENSE, canonical


def saved(tree: Any, folder: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is one process
        dcp.save(tree, storage_writer=dcp.FileSystemWriter(folder, **options), no_dist=True)
    return folder


def whole(contents: Contents) -> Any:
    return replace_tensors(contents.tree, lambda _, tensor: contents.read(tensor))


def of_each_dtype() -> dict[str, torch.Tensor]:
    made = {}
    for dtype in DENSE:
        size = 12 * dtype.itemsize
        raw = torch.arange(size, dtype=torch.uint8) if dtype is not torch.bool else torch.arange(size) % 2
        made[str(dtype)] = raw.to(torch.uint8).view(dtype).view(3, 4)
    return made


pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

WEIGHTS = {"layer.weight": torch.arange(24.0).view(4, 6), "layer.bias": torch.ones(4, dtype=torch.bfloat16)}
STATE = {
    "model": {**WEIGHTS, "scalar": torch.tensor(3, dtype=torch.int64), "none": torch.empty(0, 5), "flag": torch.tensor(True)},
    "optimizer": {
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "foreach": None, "params": ["layer.weight", "layer.bias"]}]
    },
    "train_state": {"step": 7, "name": "ünï", "blob": b"\x80\x04\x00", "list": [1, 2.5, "x"], "pair": [{"a": 1}, {"a": 2}]},
}
"""DCP makes text of the keys of dicts, and lists of lists with tensors only."""


@pytest.mark.parametrize("options", [{}, {"single_file_per_rank": False}, {"thread_count": 2}])
def test_a_folder_is_read_as_it_was_saved(tmp_path, options):
    tree = STATE | {"dtypes": of_each_dtype()}
    assert canonical(whole(open_dcp(saved(tree, tmp_path / "a", **options)))) == canonical(tree)


def test_nothing_but_the_wanted_tensor_is_read_and_a_box_of_it_too(tmp_path):
    contents = open_dcp(saved(STATE, tmp_path / "a"))
    assert all(tensor.is_meta or not tensor.dim() for tensor in contents.tree["model"].values())
    weight = contents.tree["model"]["layer.weight"]
    (box,) = contents.boxes(weight)
    assert torch.equal(contents.read(weight, box._replace(offsets=(1, 0), shape=(2, 6))), WEIGHTS["layer.weight"][1:3])


@pytest.mark.parametrize("most", [copy_in.ONE_FILE, 0], ids=["one file", "sharded"])
def test_it_becomes_a_checkpoint_of_ours(tmp_path, monkeypatch, most):
    monkeypatch.setattr(copy_in, "ONE_FILE", most)
    monkeypatch.setattr(copy_in, "_PART", 100)
    tree = STATE | {"dtypes": of_each_dtype()}
    path = tmp_path / "ours.safetensors"
    info = save_contents(open_dcp(saved(tree, tmp_path / "a")), path)
    assert canonical(load_whole(path)) == canonical(tree)
    verify_shards(load(path), path)
    shards = [*tmp_path.glob("*.shards")]
    assert (len(shards), info.bytes > 0) == (most == 0, True)
    assert most or len([*shards[0].glob("__*")]) > 3


def test_a_checkpoint_that_cannot_be_written_leaves_no_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(copy_in, "ONE_FILE", 0)
    contents = open_dcp(saved(STATE, tmp_path / "a"))
    (tmp_path / "a" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointDamagedError):
        save_contents(contents, tmp_path / "ours.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


# -------------------------------------------------------------------------------------------------------------- hostile


class Runs:
    """When it is unpickled, a command is run."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def metadata_of(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - ours


@pytest.mark.parametrize("place", ["whole", "planner_data", "storage_meta", "key"])
def test_code_in_the_index_is_refused_and_named(tmp_path, place):
    folder, evil = saved(STATE, tmp_path / "a"), Runs(f"touch {tmp_path}/ran")
    metadata: Any = metadata_of(folder)
    if place == "whole":
        metadata = evil
    elif place == "key":
        metadata.state_dict_metadata["evil"] = evil
    else:
        setattr(metadata, place, evil)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"\.metadata names code.*posix\.system"):
        open_dcp(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("tensor", [False, True])
def test_code_in_an_entry_is_refused_and_named(tmp_path, tensor):
    folder, evil = saved({"w": torch.ones(900), "o": "o" * 900}, tmp_path / "a"), io.BytesIO()
    torch.save(Runs(f"touch {tmp_path}/ran"), evil)
    metadata = metadata_of(folder)
    (place,) = [place for index, place in metadata.storage_data.items() if index.fqn == ("w" if tensor else "o")]
    place.relative_path, place.offset, place.length = "evil.distcp", 0, len(evil.getvalue())
    (folder / "evil.distcp").write_bytes(evil.getvalue() + bytes(4000))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"evil\.distcp|\.metadata") as error:
        whole(open_dcp(folder))
    assert tensor or "posix.system" in str(error.value)
    assert not (tmp_path / "ran").exists()


def changed(folder: Path, change: Any) -> None:
    metadata = metadata_of(folder)
    change(metadata, metadata.state_dict_metadata["model.layer.weight"], [*metadata.storage_data.values()])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


CHANGES = {
    "file elsewhere": lambda metadata, tensor, places: setattr(places[0], "relative_path", "../x"),
    "file that is absent": lambda metadata, tensor, places: setattr(places[0], "relative_path", "__9_0.distcp"),
    "beyond the file": lambda metadata, tensor, places: setattr(places[0], "offset", 10**9),
    "negative": lambda metadata, tensor, places: setattr(places[0], "length", -1),
    "huge tensor": lambda metadata, tensor, places: setattr(tensor, "size", torch.Size((10**9, 10**9))),
    "lacking chunk": lambda metadata, tensor, places: tensor.chunks.clear(),
    "twice the chunk": lambda metadata, tensor, places: tensor.chunks.append(tensor.chunks[0]),
    "no storage": lambda metadata, tensor, places: metadata.storage_data.clear(),
    "deep path": lambda metadata, tensor, places: metadata.planner_data.update({"model.flag": ("a",) * 10**5}),
    "one path for two": lambda metadata, tensor, places: metadata.planner_data.update({"model.flag": ("model", "scalar")}),
    "path through a value": lambda metadata, tensor, places: metadata.planner_data.update(
        {"model.flag": ("train_state", "step", "x")}
    ),
    "path of other things": lambda metadata, tensor, places: metadata.planner_data.update({"model.flag": (1.5,)}),
    "compressed": lambda metadata, tensor, places: setattr(places[0], "transform_descriptors", ["stream.zstd"]),
    "names": lambda metadata, tensor, places: metadata.state_dict_metadata.update({3: tensor}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_index_that_is_not_sound_is_refused(tmp_path, change):
    folder = saved(STATE, tmp_path / "a")
    changed(folder, CHANGES[change])
    with pytest.raises((CheckpointError, FileNotFoundError)):
        open_dcp(folder)


def test_another_dtype_or_shape_than_the_index_says_is_damage(tmp_path):
    folder = saved(STATE, tmp_path / "a")
    changed(folder, lambda metadata, tensor, places: setattr(tensor.properties, "dtype", torch.int32))
    with pytest.raises(CheckpointDamagedError, match=r"another tensor than the index says"):
        whole(open_dcp(folder))


def test_a_flipped_bit_is_found_in_tensors_and_objects_which_torch_loads_silently(tmp_path):
    folder = saved({"w": torch.full((512,), 1.5), "o": "o" * 512}, tmp_path / "a")
    part = folder / "__0_0.distcp"
    content = part.read_bytes()
    for what in (b"oooooooo", b"\x00\x00\xc0\x3f" * 8):
        part.write_bytes(content.replace(what, bytes([what[0] ^ 1]) + what[1:], 1))
        with pytest.raises(CheckpointDamagedError, match=r"checksum"):
            whole(open_dcp(folder))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04",
        b"not a pickle at all",
        b"\x80\x04N.",
        b"\x80\x02Nr\xff\xff\xff\x7f.",  # a place in the memo that would need 32 GB
        b"\x80\x02\x82\x01.",  # an object that another program has registered
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\x00\x00x.",
    ],
)
def test_a_pickle_that_torch_did_not_write_is_damage(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match=r"\.metadata"):
        open_dcp(tmp_path)


def test_an_index_cut_anywhere_is_damage(tmp_path):
    folder = saved(STATE, tmp_path / "a")
    content = (folder / ".metadata").read_bytes()
    for length in range(0, len(content), 97):
        (folder / ".metadata").write_bytes(content[:length])
        with pytest.raises(CheckpointDamagedError):
            open_dcp(folder)


# ---------------------------------------------------------------------------------------------------------- safetensors


def test_a_folder_of_hugging_face_is_read_by_its_index(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(2, 2, dtype=torch.float16)}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"a": torch.zeros(9)}, tmp_path / "consolidated.safetensors")
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    tree = whole(open_safetensors(tmp_path))
    assert canonical(tree) == canonical({"a": torch.ones(3), "b": torch.zeros(2, 2, dtype=torch.float16)})


@pytest.mark.parametrize("consolidated", [False, True])
def test_what_dcps_writer_for_hugging_face_leaves_is_read(tmp_path, consolidated):
    writer = dcp.HuggingFaceStorageWriter(
        path=str(tmp_path / "a"), save_distributed=True, enable_consolidation=consolidated, fqn_to_index_mapping=None
    )
    weights = {"layer.weight": torch.randn(4, 6), "layer.bias": torch.randn(4).bfloat16()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(weights, storage_writer=writer, no_dist=True)
    assert canonical(whole(open_safetensors(tmp_path / "a"))) == canonical(dict(sorted(weights.items())))


def test_parts_of_ranks_become_whole_tensors_and_a_missing_one_is_damage(tmp_path):
    weight = torch.arange(12.0).view(4, 3)
    for rank, begin in enumerate((0, 2)):
        info = json.dumps({"w": {"saved_offsets": [begin, 0]}})
        file = tmp_path / f"shard-0000{rank}-model-00001-of-00001.safetensors"
        save_file({"w": weight[begin : begin + 2].clone()}, file, {"DCP_SHARDING_INFO": info})
    assert torch.equal(whole(open_safetensors(tmp_path))["w"], weight)
    assert load_file(file)["w"].shape == (2, 3)
    (tmp_path / "shard-00000-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointDamagedError, match="'w'"):
        open_safetensors(tmp_path)


def test_a_folder_without_tensors_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"safetensors"):
        open_safetensors(tmp_path)
