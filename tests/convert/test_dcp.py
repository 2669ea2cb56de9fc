"""Folders of torch.distributed.checkpoint: read without running anything of them."""

import dataclasses
import io
import json
import os
import pickle
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import Metadata

from trainbus.convert import (
    Contents,
    copy_in,
    dcp_write,
    open_contents,
    open_dcp,
    open_safetensors,
    safetensors_folder,
    save_contents,
    write_safetensors,
)
from trainbus.convert.contents import replace_tensors
from trainbus.convert.dcp_write import write_dcp
from trainbus.eventloop.checkpoint import load, load_whole, save, verify_shards
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError

from ..checkpoint.trees import DENSE, canonical
from ..scripts import run_script


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


def test_files_may_be_links_as_in_the_cache_of_the_hub(tmp_path):
    folder = saved(STATE, tmp_path / "a")
    for path in [*folder.iterdir()]:
        path.rename(tmp_path / path.name)
        path.symlink_to(f"../{path.name}")
    assert canonical(whole(open_dcp(folder))) == canonical(STATE)


def test_nothing_but_the_wanted_tensor_is_read_and_a_box_of_it_too(tmp_path):
    contents = open_dcp(saved(STATE, tmp_path / "a"))
    assert all(tensor.is_meta or not tensor.dim() for tensor in contents.tree["model"].values())
    weight = contents.tree["model"]["layer.weight"]
    (box,) = contents.boxes(weight)
    assert torch.equal(contents.read(weight, box._replace(offsets=(1, 0), shape=(2, 6))), WEIGHTS["layer.weight"][1:3])


@pytest.mark.parametrize("most", [copy_in.ONE_FILE.value, 0], ids=["one file", "sharded"])
def test_it_becomes_a_checkpoint_of_ours(tmp_path, change, most):
    change(copy_in.ONE_FILE, most)
    change(copy_in.PART, 100)
    tree = STATE | {"dtypes": of_each_dtype()}
    path = tmp_path / "ours.safetensors"
    info = save_contents(open_dcp(saved(tree, tmp_path / "a")), path)
    assert canonical(load_whole(path)) == canonical(tree)
    verify_shards(load(path), path)
    shards = [*tmp_path.glob("*.shards")]
    assert (len(shards), info.bytes > 0) == (most == 0, True)
    assert most or len([*shards[0].glob("__*")]) > 3


def test_a_checkpoint_that_cannot_be_written_leaves_no_shards(tmp_path, change):
    change(copy_in.ONE_FILE, 0)
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


def test_an_index_that_sets_attributes_of_its_classes_changes_none(tmp_path):
    code = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n(N}X\x05\x00\x00\x00stateK\x01stb."
    (tmp_path / ".metadata").write_bytes(code)
    with pytest.raises(CheckpointDamagedError):
        open_dcp(tmp_path)
    assert not hasattr(Metadata, "state")
    assert canonical(whole(open_dcp(saved(STATE, tmp_path / "a")))) == canonical(STATE)


@pytest.mark.parametrize("name", ["w", "o"], ids=["tensor", "object"])
def test_code_in_an_entry_is_refused_and_named(tmp_path, name):
    folder, evil = saved({"w": torch.ones(900), "o": "o" * 900}, tmp_path / "a"), io.BytesIO()
    torch.save([Runs(f"touch {tmp_path}/ran"), torch.ones(900)], evil)
    metadata = metadata_of(folder)
    (place,) = [place for index, place in metadata.storage_data.items() if index.fqn == name]
    place.relative_path, place.offset, place.length = "evil.distcp", 0, len(evil.getvalue())
    (folder / "evil.distcp").write_bytes(evil.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"evil\.distcp.*names code.*posix\.system"):
        whole(open_dcp(folder))
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
    "shape of no tensor": lambda metadata, tensor, places: metadata.state_dict_metadata.update(
        {"model.none": dataclasses.replace(tensor, size=torch.Size((0, 2**62, 2**62)), chunks=[])}
    ),
    "names": lambda metadata, tensor, places: metadata.state_dict_metadata.update({3: tensor}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_index_that_is_not_sound_is_refused(tmp_path, change):
    folder = saved(STATE, tmp_path / "a")
    changed(folder, CHANGES[change])
    with pytest.raises((CheckpointError, FileNotFoundError)):
        open_dcp(folder)


def test_objects_in_the_same_bytes_promise_no_more_than_the_files_have(tmp_path):
    folder = saved({str(number): f"{number}" * 999 for number in range(9)}, tmp_path / "a")
    metadata = metadata_of(folder)
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, (folder / "__0_0.distcp").stat().st_size // 2
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointDamagedError, match="more bytes than the files"):
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


# --------------------------------------------------------------------------------------------------------------- export


TIED = torch.arange(8.0).view(2, 4)
OURS = {
    "state_dict": OrderedDict(
        {"w": TIED, "tied": TIED, "scalar": torch.tensor(3.5), "none": torch.empty(0, 2), **of_each_dtype()}
    ),
    "optimizer": {"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [{"betas": (0.9, 0.99), "params": [0]}]},
    "rng": {"torch": torch.arange(5056).to(torch.uint8), "numpy": ("MT19937", np.arange(9, dtype=np.uint32))},
    "averages": {"w": torch.randn(200, 200), "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)},
    "parameters": [torch.nn.Parameter(torch.randn(3, 4).t()), torch.randn(2, 50, 300).mT.requires_grad_()],
    1: float("nan"),
}


@pytest.mark.parametrize("most", [copy_in.ONE_FILE.value, 0], ids=["one file", "sharded"])
def test_all_of_a_checkpoint_comes_back_from_a_folder(tmp_path, change, most):
    change(copy_in.ONE_FILE, most)
    change(dcp_write.GROUP, 100)
    save(OURS, tmp_path / "ours.safetensors")
    contents = open_contents(tmp_path / "ours.safetensors")
    write_dcp({"model": contents.tree["state_dict"], "opt": contents.tree["optimizer"]}, contents, tmp_path / "theirs")
    save_contents(open_dcp(tmp_path / "theirs"), tmp_path / "back.safetensors")
    back = load_whole(tmp_path / "back.safetensors")
    assert canonical(back) == canonical(OURS)
    assert back["state_dict"]["w"] is back["state_dict"]["tied"]
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".shards"} == {
        "ours.safetensors",
        "theirs",
        "back.safetensors",
    }


def test_torch_loads_what_we_write_and_tied_weights_are_stored_once(tmp_path):
    save(OURS, tmp_path / "ours.safetensors")
    contents = open_contents(tmp_path / "ours.safetensors")
    write_dcp({"model": contents.tree["state_dict"], "step": 7}, contents, tmp_path / "theirs")
    wanted = {name: torch.zeros_like(value) for name, value in OURS["state_dict"].items() if not name.startswith("torch.float")}
    tree = {"model": dict(wanted), "step": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tree, checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert tree["step"] == 7
    assert canonical(tree["model"]) == canonical({name: OURS["state_dict"][name] for name in wanted})
    places = {
        index.fqn: (place.relative_path, place.offset) for index, place in metadata_of(tmp_path / "theirs").storage_data.items()
    }
    assert places["model.w"] == places["model.tied"]
    assert len(set(places.values())) == len(places) - 1


def test_what_both_programs_have_is_read_from_their_own_folder_again(tmp_path):
    """DCP to ours to DCP."""
    contents = open_dcp(saved(STATE, tmp_path / "a"))
    save_contents(contents, tmp_path / "ours.safetensors")
    ours = open_contents(tmp_path / "ours.safetensors")
    write_dcp(ours.tree, ours, tmp_path / "b")
    keys = metadata_of(tmp_path / "a").state_dict_metadata.keys()
    assert keys == metadata_of(tmp_path / "b").state_dict_metadata.keys() - {"trainbus.tree"}
    assert canonical(whole(open_dcp(tmp_path / "b"))) == canonical(STATE)


def test_a_folder_is_replaced_as_a_whole_and_strange_files_in_it_are_kept(tmp_path):
    save(OURS, tmp_path / "ours.safetensors")
    contents = open_contents(tmp_path / "ours.safetensors")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes.txt").write_text("mine")
    write_dcp({"model": contents.tree["state_dict"]}, contents, tmp_path / "theirs")
    assert (tmp_path / "former-theirs" / "notes.txt").read_text() == "mine"
    with pytest.raises(CheckpointError, match="duplicated"):
        write_dcp({"a": {"b": 1}, "a.b": 2}, contents, tmp_path / "theirs")
    assert open_dcp(tmp_path / "theirs").tree["state_dict"].keys() == OURS["state_dict"].keys()
    assert {path.name for path in tmp_path.iterdir()} == {"ours.safetensors", "theirs", "former-theirs"}


MEMORY = """
    import sys, torch
    from pathlib import Path
    from trainbus.convert import open_contents, save_contents, open_dcp, write_safetensors, copy_in
    from trainbus.eventloop.checkpoint import save
    from trainbus.convert.dcp_write import write_dcp

    folder = Path(sys.argv[1])
    save({"state_dict": {f"w{n}": torch.full((4 << 20,), float(n)) for n in range(12)}}, folder / "ours.safetensors")
    (folder / "config.json").write_text("{}")
    copy_in.ONE_FILE.value = 0

    def peak():
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10

    def to_dcp():
        contents = open_contents(folder / "ours.safetensors")
        write_dcp({"model": contents.tree["state_dict"]}, contents, folder / "theirs")

    def to_hf():
        contents = open_contents(folder / "ours.safetensors")
        write_safetensors(contents.tree["state_dict"], contents, folder / "hf", folder / "config.json")

    def from_dcp():
        save_contents(open_dcp(folder / "theirs"), folder / "back.safetensors")

    for step in (to_dcp, to_hf, from_dcp):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = peak()
        step()
        print(peak() - before)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs the peak of a process's memory")
def test_of_192_mb_in_tensors_of_16_no_more_than_two_are_in_memory_and_when_imported_two_parts(tmp_path):
    # glibc would soon keep freed blocks of 16 MB for each thread, more or fewer of them as the threads take turns.
    exact = {"MALLOC_MMAP_THRESHOLD_": 1 << 20}
    done = run_script(MEMORY, folder=tmp_path, arguments=[tmp_path], environment=exact)
    assert done.returncode == 0, done.stderr
    to_dcp, to_hf, from_dcp = map(int, done.stdout.split())
    assert to_dcp < 40
    assert to_hf < 40
    assert from_dcp < 2 * 64 + 50  # whole, it would be 384


# ---------------------------------------------------------------------------------------------------------- safetensors


def test_a_folder_of_hugging_face_is_read_by_its_index(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(2, 2, dtype=torch.float16)}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"a": torch.zeros(9)}, tmp_path / "consolidated.safetensors")
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    tree = whole(open_safetensors(tmp_path))
    assert canonical(tree) == canonical({"a": torch.ones(3), "b": torch.zeros(2, 2, dtype=torch.float16)})


@pytest.mark.skipif(not hasattr(dcp, "HuggingFaceStorageWriter"), reason="torch 2.7 has none")
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


def test_a_shape_that_no_tensor_has_is_damage(tmp_path):
    for shape in ([0, 2**62, 2**62], [0, 10**30]):
        header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
        (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(CheckpointDamagedError):
            open_safetensors(tmp_path)


def test_a_folder_without_tensors_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"safetensors"):
        open_safetensors(tmp_path)


def test_weights_go_into_files_of_a_bounded_size_with_the_files_of_the_configuration(tmp_path, change):
    change(safetensors_folder.FILE, 60)
    save(OURS, tmp_path / "ours.safetensors")
    contents = open_contents(tmp_path / "ours.safetensors")
    weights = {name: contents.tree["state_dict"][name] for name in ("w", "tied", "none", "torch.bfloat16")}
    (tmp_path / "config").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "config" / name).write_text("{}")
    write_safetensors(weights, contents, tmp_path / "hf", tmp_path / "config")
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    files = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    assert names == {"config.json", "tokenizer.json", "model.safetensors.index.json", *files}
    expected = {name: OURS["state_dict"][name] for name in sorted(weights)}
    assert canonical(whole(open_safetensors(tmp_path / "hf"))) == canonical(expected)


def test_transformers_opens_the_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    config.save_pretrained(tmp_path / "config")
    save({"state_dict": dict(model.state_dict())}, tmp_path / "ours.safetensors")
    contents = open_contents(tmp_path / "ours.safetensors")
    write_safetensors(contents.tree["state_dict"], contents, tmp_path / "hf", tmp_path / "config" / "config.json")
    opened, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert canonical(dict(opened.state_dict())) == canonical(dict(model.state_dict()))
    model.save_pretrained(tmp_path / "theirs")
    theirs = whole(open_safetensors(tmp_path / "theirs"))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in theirs.items())
