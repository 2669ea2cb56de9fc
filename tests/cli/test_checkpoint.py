import functools
import io
import json
import os
import pickle
import time
import zlib
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from trainbus.convert import copy_in
from trainbus.eventloop.checkpoint import inspect, link, load, note_scores, save
from trainbus.eventloop.checkpoint.unpack import ObjectParts

from ..failing import fails

MMENGINE = Path(__file__).parent.parent / "convert" / "data" / "mmengine.pth"


@pytest.fixture
def trainbus(trainbus, here) -> Any:
    """Runs ``trainbus checkpoint`` in an empty directory."""
    return functools.partial(trainbus, "checkpoint")


def tree(epoch: int = 1) -> dict[str, Any]:
    averaged, trained = torch.full((2, 3), float(epoch)), torch.full((2, 3), -float(epoch))
    return {
        "state_dict": {"head.weight": averaged, "module.tied": averaged, "count": torch.tensor(epoch)},
        "ema_state_dict": {"head.weight": trained, "module.tied": trained},
        "progress": {"epoch": epoch, "iter": 10 * epoch, "phase": "train"},
        "rng": {"numpy": ("MT19937", np.arange(300, dtype=np.uint32), 0), "bad": float("nan")},
        "optimizer": {"optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]}},
    }


def make(path: str, epoch: int = 1, age: float = 0) -> Path:
    save(tree(epoch), path)
    os.utime(path, (time.time() - age,) * 2)
    return Path(path)


def flip(path: Path) -> None:
    """Damage a tensor: the header stays as it is."""
    data = bytearray(path.read_bytes())
    data[data.index(load(path)["state_dict"]["head.weight"].numpy().tobytes())] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


# ----------------------------------------------------------------------------------------------------------------- ls


def test_ls_goes_by_the_progress_in_the_files_and_not_by_their_times_and_fits_80_columns(trainbus):
    make("epoch_2.safetensors", 2, age=60)
    make("best_accuracy_epoch_10.safetensors", 10, age=90)
    make("epoch_9.safetensors", 9)
    result = trainbus("ls", ".")
    assert result.err == ""
    assert max(map(len, result.out.splitlines())) <= 80
    head, *rows = (line.split() for line in result.out.splitlines())
    assert head == ["file", "epoch", "iter", "size", "when", "state"]
    assert rows[2].pop(0) == "→"  # what resume="auto" takes
    expected = [("epoch_2", "2", "20"), ("epoch_9", "9", "90"), ("best_accuracy_epoch_10", "10", "100")]
    assert [row[:3] for row in rows] == [[f"{name}.safetensors", *counts] for name, *counts in expected]
    assert {(*row[3:5], row[-1]) for row in rows} == {("2.1", "kB", "complete")}


def test_ls_marks_the_newest_and_shows_all_names_of_one_file(trainbus):
    make("epoch_1.safetensors", 1, age=60)
    link(make("epoch_2.safetensors", 2), "best_accuracy_epoch_2.safetensors")
    for name, missing in (("epoch_2", ""), ("epoch_3", " (missing)")):
        Path("last_checkpoint").write_text(f"{name}.safetensors")
        lines = trainbus("ls", ".").out.splitlines()
        assert lines[1].split()[0] == "epoch_1.safetensors"
        assert lines[2].split()[:2] == ["→", "epoch_2.safetensors"]
        assert lines[3].strip() == "= best_accuracy_epoch_2"
        assert lines[4] == f"→ last_checkpoint: {name}.safetensors{missing}"


def test_ls_and_show_tell_the_scores_of_the_files_that_have_some(trainbus):
    """Of the best file the metric that it is the best by; within 80 columns. A file that took a name has not its score."""
    for epoch, metrics in enumerate(({"loss": 0.123456, "accuracy": 0.5}, {"loss": "inf"}, {"loss": 0.5}), 1):
        path = make(f"epoch_{epoch}.safetensors", epoch)
        note_scores(Path(), inspect(path).digest, [path.name], metrics)
    link("epoch_1.safetensors", "best_accuracy_epoch_1.safetensors")
    make("epoch_3.safetensors", 30)
    lines = trainbus("ls", ".").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "accuracy 0.5 " in next(line for line in lines if "epoch_1.safetensors" in line)
    assert "loss inf" in next(line for line in lines if "epoch_2" in line)
    listed = {Path(one["names"][0]).stem: one["scores"] for one in json.loads(trainbus("ls", ".", "--json").out)}
    assert listed == {"epoch_1": {"loss": 0.123456, "accuracy": 0.5}, "epoch_2": {"loss": "inf"}, "epoch_3": {}}
    assert "scores: loss 0.123456, accuracy 0.5" in trainbus("show", "best_accuracy_epoch_1.safetensors").out
    assert "scores" not in trainbus("show", "epoch_3.safetensors").out
    assert json.loads(trainbus("show", "epoch_2.safetensors", "--json").out)["scores"] == {"loss": "inf"}


@pytest.mark.filterwarnings("ignore:torch.distributed is")  # there is one process
def test_exports_have_the_scores(trainbus):
    path = make("epoch_1.safetensors")
    note_scores(Path(), inspect(path).digest, [path.name], {"accuracy": 0.5})
    trainbus("export", path.name, "whole.pth")
    assert torch.load("whole.pth", weights_only=True)["scores"] == {"accuracy": 0.5}
    trainbus("export", path.name, "weights.safetensors", "--weights")
    with safe_open("weights.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "accuracy": "0.5"}
    save({"state_dict": {"w": torch.ones(2)}}, path)
    note_scores(Path(), inspect(path).digest, [path.name], {"accuracy": 0.75, "loss": "inf"})
    Path("config.json").write_text("{}")
    trainbus("export", path.name, "hf", "--hf", "--config", "config.json")
    with safe_open("hf/model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "accuracy": "0.75", "loss": "inf"}
    trainbus("export", path.name, "theirs", "--dcp")
    found = {"trainbus": {"scores": {"accuracy": None, "loss": None}}}
    dcp.load(found, checkpoint_id="theirs", no_dist=True)
    assert found["trainbus"]["scores"] == {"accuracy": 0.75, "loss": "inf"}


def test_ls_of_a_work_dir_names_the_newest_in_another_directory(trainbus):
    Path("elsewhere").mkdir()
    make("elsewhere/epoch_1.safetensors")
    Path("run").mkdir()
    Path("run/last_checkpoint").write_text("../elsewhere/epoch_1.safetensors")
    assert trainbus("ls", "run") == ("no checkpoints in run\n→ last_checkpoint: ../elsewhere/epoch_1.safetensors\n", "")


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_fifos_and_devices_in_a_directory_are_reported_and_not_opened(trainbus, command):
    make("epoch_1.safetensors")
    os.mkfifo("fifo.safetensors")
    os.mkfifo("last_checkpoint")
    Path("zero.safetensors").symlink_to("/dev/zero")
    result = trainbus(command, ".", status=1)
    assert "fifo.safetensors is a FIFO and not a regular file" in result.out
    assert "zero.safetensors is a device and not a regular file" in result.out
    assert "epoch_1.safetensors" in result.out


def test_only_ls_with_verify_finds_a_flipped_bit(trainbus):
    flip(make("epoch_1.safetensors"))
    trainbus("ls", ".")
    assert "epoch_1.safetensors is damaged: its bytes have the digest crc32:" in trainbus("ls", ".", "--verify", status=1).out
    make("epoch_1.safetensors")
    assert trainbus("ls", ".", "--verify").out.splitlines()[1].rstrip().endswith("verified")


def test_ls_shows_other_weights_and_leftovers_of_a_killed_process(trainbus):
    save_file({"w": torch.ones(2)}, "weights.safetensors")
    Path(".trainbus-0123.tmp").touch()
    result = trainbus("ls", ".")
    assert result.out.splitlines()[1].split()[0] == "weights.safetensors"
    assert result.out.splitlines()[1].split()[-1] == "weights"
    assert "unfinished: .trainbus-0123.tmp" in result.out


# ------------------------------------------------------------------------------------------------------------- verify


def test_verify_reads_every_byte_and_ends_with_status_1_and_a_line_for_each_damaged_file(trainbus):
    make("epoch_1.safetensors", age=60)
    flip(make("epoch_2.safetensors", 2))
    cut(make("epoch_3.safetensors", 3))
    lines = sorted(trainbus("verify", ".", status=1).out.splitlines())
    assert lines[0] == "1 of 3 files verified, 2 damaged"
    assert lines[1].startswith("damaged   epoch_2.safetensors is damaged: its bytes have the digest crc32:")
    assert lines[2].startswith("damaged   epoch_3.safetensors is damaged: the header promises")
    assert lines[3].startswith("verified  epoch_1.safetensors")


def test_verify_takes_several_files_and_reads_one_with_two_names_once(trainbus):
    link(make("epoch_1.safetensors"), "best_loss_epoch_1.safetensors")
    result = trainbus("verify", ".")
    assert result.out.count("verified") == 1
    assert "epoch_1.safetensors = best_loss_epoch_1.safetensors" in result.out
    result = trainbus("verify", make("a.safetensors"), make("b.safetensors"))
    assert result.err == ""
    assert result.out.splitlines()[-1] == "2 of 2 files verified"


def test_verify_without_checkpoints_is_an_error(trainbus):
    assert trainbus("verify", ".", status=2) == ("", "trainbus checkpoint verify: no checkpoints in .\n")
    save_file({"w": torch.ones(2)}, "weights.safetensors")
    trainbus("verify", ".", status=2)


# --------------------------------------------------------------------------------------------------------------- show


def test_show_has_names_shapes_dtypes_numbers_and_which_are_tied(trainbus):
    make("a.safetensors", 3)
    lines = trainbus("show", "a.safetensors").out.splitlines()
    assert lines[0].startswith("a.safetensors  ")
    assert "4 tensors" in lines[0]
    assert "  head.weight: float32 [2, 3]" in lines
    assert "  module.tied: float32 [2, 3] = state_dict.head.weight" in lines
    assert "  count: int64 []" in lines
    assert "progress: {'epoch': 3, 'iter': 30, 'phase': 'train'}" in lines
    assert "  numpy: tuple of 3" in lines
    assert "  optimizer: dict of 2, 1 tensor, 4 bytes" in lines
    assert not any("param_groups" in line for line in lines)  # it is a level deeper


@pytest.mark.parametrize(
    ("key", "shows"),
    [
        ("progress.epoch", ["1"]),
        ("state_dict.head.weight", ["float32 [2, 3]"]),
        ("state_dict.module", ["module.tied: float32 [2, 3] = state_dict.head.weight"]),
        ("optimizer.optimizer.state.0.step", ["float32 []"]),
        ("optimizer.optimizer.param_groups.0", ["lr: 0.1"]),
        ("rng.numpy.1", ["array uint32 [300]"]),
    ],
)
def test_show_of_a_key_shows_that_part_and_descends_to_the_given_depth(trainbus, key, shows):
    make("a.safetensors")
    assert trainbus("show", "a.safetensors", "--key", key).out.splitlines()[1:] == shows
    assert "param_groups" in trainbus("show", "a.safetensors", "--depth", 3).out
    assert "head.weight" not in trainbus("show", "a.safetensors", "--depth", 1).out


def test_show_json_is_for_programs(trainbus):
    make("a.safetensors")
    shown = json.loads(trainbus("show", "a.safetensors", "--json").out)
    assert shown["bytes"] == Path("a.safetensors").stat().st_size
    assert shown["digest"].startswith("crc32:")
    assert shown["tree"]["progress"] == {"epoch": 1, "iter": 10, "phase": "train"}
    assert shown["tree"]["state_dict"]["head.weight"] == {"tensor": {"dtype": "float32", "shape": [2, 3]}}
    assert shown["tree"]["state_dict"]["module.tied"]["tensor"]["same_as"] == "state_dict.head.weight"
    assert shown["tree"]["rng"]["bad"] == "nan"
    assert shown["tree"]["rng"]["numpy"][1] == {"array": {"dtype": "uint32", "shape": [300]}}
    assert shown["tree"]["optimizer"]["optimizer"]["param_groups"] == [{"lr": 0.1}]
    shown = json.loads(trainbus("show", "a.safetensors", "--json", "--key", "rng", "--depth", 1).out)
    assert (shown["key"], shown["tree"]) == ("rng", {"numpy": "tuple of 3", "bad": "nan"})


def test_show_of_shapes_of_integers_beyond_pythons_digit_limit_and_of_many_entries_in_short_with_advice(trainbus):
    save({"n": 2**20000, 2**20000: 1, "l": [2**20000, 1], "m": 2**64, "shape": torch.Size([2, 3])}, "a.safetensors")
    out = trainbus("show", "a.safetensors").out
    assert "n: 0x1000000" in out
    assert "shape: torch.Size([2, 3])" in out
    shown = json.loads(trainbus("show", "a.safetensors", "--json").out)["tree"]
    assert (shown["n"], shown["m"], shown["shape"]) == (hex(2**20000), 2**64, [2, 3])
    save({"state_dict": {f"layer{i}": torch.ones(1) for i in range(300)}}, "large.safetensors")
    out = trainbus("show", "large.safetensors").out
    assert len(out.splitlines()) < 30
    assert "… 280 more: --key state_dict" in out
    assert len(trainbus("show", "large.safetensors", "--key", "state_dict").out.splitlines()) == 301


def test_show_names_the_types_of_objects_without_their_classes(trainbus):
    parts = ObjectParts("theirs.package:Norm", {"member": "SIGN"})
    save({"norm": parts, "graph": torch.eye(2).to_sparse(), "last": deque([torch.ones(3)])}, "a.safetensors")
    assert trainbus("show", "a.safetensors").out.splitlines()[1:] == [
        "norm: theirs.package:Norm(member='SIGN')",
        "graph: sparse_coo of 5, 2 tensors, 40 bytes",
        "  indices: int64 [2, 2]",
        "  values: float32 [2]",
        "  coalesced: True",
        "  size: torch.Size([2, 2])",
        "  kind: 0",
        "last: deque of 2, 1 tensor, 12 bytes",
        "  items: list of 1, 1 tensor, 12 bytes",
        "  maxlen: None",
    ]
    shown = json.loads(trainbus("show", "a.safetensors", "--json").out)["tree"]
    assert shown["norm"] == {"object": {"type": "theirs.package:Norm", "content": {"member": "SIGN"}}}


def test_show_and_import_do_not_let_a_file_write_to_the_terminal(trainbus):
    save({"a\x1b[2Jb": "\x1b[2J", "[red]": "[bold]x"}, "a.safetensors")
    out = trainbus("show", "a.safetensors").out
    assert "\x1b" not in out
    assert "[red]: '[bold]x'" in out
    torch.save({"\x1b[2J": 1, "\ud800": 2}, "a.pth")
    assert "\\x1b[2J, \\ud800" in trainbus("import", "a.pth", "imported.safetensors").out
    torch.save({"\x1b[2J": torch.ones(2, device="meta")}, "b.pth")
    assert "\\x1b[2J: cannot store" in trainbus("import", "b.pth", "b.safetensors", status=2).err


# ------------------------------------------------------------------------------------------------------------- export


def test_export_writes_the_whole_checkpoint_or_weights_averaged_or_raw_of_one_model(trainbus):
    make("a.safetensors", 3)
    assert trainbus("export", "a.safetensors", "a.pth").out.startswith("exported a.pth")
    back = torch.load("a.pth", weights_only=True)
    assert back["progress"] == {"epoch": 3, "iter": 30, "phase": "train"}
    assert back["state_dict"]["head.weight"].equal(torch.full((2, 3), 3.0))
    assert back["rng"]["numpy"][1].tolist() == list(range(300))
    trainbus("export", "a.safetensors", "w.pth", "--weights")
    assert torch.load("w.pth", weights_only=True)["head.weight"].equal(torch.full((2, 3), 3.0))
    trainbus("export", "a.safetensors", "w.safetensors", "--weights", "--raw", "--strip")
    raw = load_file("w.safetensors")
    assert raw.keys() == {"head.weight", "tied"}
    assert raw["tied"].equal(torch.full((2, 3), -3.0))
    save({"state_dict": {"G": {"w": torch.ones(2)}, "D": {"w": torch.zeros(2)}}}, "two.safetensors")
    assert "several models, 'G', 'D'" in trainbus("export", "two.safetensors", "d.pth", "--weights", status=2).err
    trainbus("export", "two.safetensors", "d.pth", "--weights", "--model", "D")
    assert torch.load("d.pth", weights_only=True)["w"].equal(torch.zeros(2))


def test_export_writes_folders_for_other_programs(trainbus):
    state = {
        "state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(2, 3)}},
        "param_groups": [{"lr": 0.1, "params": [0]}],
    }
    weights = {"head.weight": torch.ones(2, 3), "count": torch.tensor(4)}
    kept = {"dataloader": {"dp_rank_0": b"x"}}
    tree = {"state_dict": weights, "optimizer": {"optimizer": state}, "parameters": {"optimizer": "head.weight"}, "dcp": kept}
    save(tree | {"progress": {"update": 9}}, "a.safetensors")
    said = trainbus("export", "a.safetensors", "theirs", "--dcp").out
    assert said.startswith("exported theirs  ")
    assert names_in("theirs") == {
        *("model.head.weight", "model.count", "optimizer.state.head.weight.step", "optimizer.state.head.weight.exp_avg"),
        *("optimizer.param_groups.0.lr", "optimizer.param_groups.0.params", "dataloader.dp_rank_0", "trainbus.tree"),
    }
    trainbus("export", "a.safetensors", "theirs", "--dcp", "--torchtitan", "--force")
    assert names_in("theirs") == {
        *("head.weight", "count", "optimizer.state.head.weight.step", "optimizer.state.head.weight.exp_avg"),
        *("optimizer.param_groups.head.weight.lr", "optimizer.param_groups.head.weight.initial_lr", "dataloader.dp_rank_0"),
        *("train_state.step", "train_state.ntokens_seen", "lr_scheduler.last_epoch", "trainbus.tree"),
    }
    Path("config.json").write_text("{}")
    said = trainbus("export", "a.safetensors", "hf", "--hf", "--config", "config.json").out
    assert "from_pretrained" in said
    assert load_file("hf/model.safetensors")["head.weight"].equal(torch.ones(2, 3))
    assert {path.name for path in Path().iterdir()} == {"a.safetensors", "theirs", "config.json", "hf"}


def names_in(folder: str) -> set[str]:
    return set(pickle.loads(Path(folder, ".metadata").read_bytes()).state_dict_metadata)  # noqa: S301 - ours


@pytest.mark.parametrize("command", ["export", "import"])
def test_nothing_is_overwritten_without_force_and_with_it_not_the_file_that_is_read(trainbus, command):
    source = make("a.safetensors") if command == "export" else MMENGINE
    out = Path("out.pth" if command == "export" else "out.safetensors")
    out.write_text("before")
    assert f"{out} exists; add --force to replace it" in trainbus(command, source, out, status=2).err
    assert out.read_text() == "before"
    trainbus(command, source, out, "--force")
    assert out.stat().st_size > 1000
    if command == "export":
        before = source.read_bytes()
        trainbus("export", source, "./a.safetensors", "--weights", "--force", status=2)
        assert source.read_bytes() == before


# ------------------------------------------------------------------------------------------------------------- import


def test_import_of_an_mmengine_checkpoint_reports_the_resumable_parts(trainbus):
    result = trainbus("import", MMENGINE, "out.safetensors")
    assert result.err == ""
    lines = dict(line.split(maxsplit=1) for line in result.out.splitlines())
    assert lines["from"] == "MMEngine 0.10.7"
    assert lines["resumes"] == "weights; averages of 4 updates (EMAHook); optimizer; epoch 2, iteration 4"
    assert "schedules" in lines["afresh"]
    assert "message_hub" in lines["kept"]
    trainbus("verify", "out.safetensors")
    assert load("out.safetensors")["progress"]["epoch"] == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"state_dict": {"w": torch.ones(1)}, "epoch": 3}, "nothing but the weights: load_weights"),
        (torch.nn.Linear(2, 3).state_dict(), "nothing but the weights"),
        ({"model": 1, "epoch": 3}, "a dict, unchanged: model, epoch"),
        ([1, 2], "a list, unchanged"),
    ],
    ids=["weights", "plain weights", "dict", "list"],
)
def test_import_of_another_file_keeps_the_tree_and_warns(trainbus, content, says):
    torch.save(content, "a.pth")
    assert says in trainbus("import", "a.pth", "a.safetensors").out
    read = load("a.safetensors")
    assert repr(read) == repr(content) or read["state_dict"].keys() == content.keys()


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_import_runs_no_code_and_gives_advice(trainbus):
    torch.save({"state_dict": {"w": torch.ones(1)}, "x": Runs()}, "a.pth")
    result = trainbus("import", "a.pth", "a.safetensors", status=2)
    assert "posix.system" in result.err
    assert "torch.save({'state_dict'" in result.err
    assert [path.name for path in Path().iterdir()] == ["a.pth"]


def test_what_is_too_large_for_one_file_is_imported_sharded_and_exported_from_a_store(trainbus, memory, change):
    change(copy_in.ONE_FILE, 0)
    Path("theirs").mkdir()
    save_file({"w": torch.arange(6.0)}, "theirs/model.safetensors")
    said = trainbus("import", "theirs", "memory://bucket/ours.safetensors").out
    (shards,) = (line.split()[-3] for line in said.splitlines() if line.startswith("sharded"))
    assert memory.isdir(f"bucket/{shards}")
    trainbus("verify", "memory://bucket/ours.safetensors")
    trainbus("import", "theirs", "here.safetensors")
    (old,) = Path().glob("*.shards")
    for path in (*old.iterdir(), old):
        os.utime(path, (1e9, 1e9))  # nothing writes to it
    trainbus("import", "theirs", "here.safetensors", "--force")
    assert [path.name for path in Path().glob("*.shards")] == [load("here.safetensors")["shards"]] != [old.name]
    Path("config.json").write_text("{}")
    trainbus("export", "memory://bucket/ours.safetensors", "again", "--hf", "--config", "config.json")
    assert load_file("again/model.safetensors")["w"].equal(torch.arange(6.0))


def test_import_of_a_folder_runs_no_code_of_it_and_names_the_file_and_the_code(trainbus):
    Path("theirs").mkdir()
    Path("theirs/.metadata").write_bytes(pickle.dumps(Runs()))
    said = trainbus("import", "theirs", "a.safetensors", status=2).err
    assert "theirs/.metadata names code" in said
    assert "posix.system" in said
    assert [path.name for path in Path().iterdir()] == ["theirs"]


def test_a_file_that_import_cannot_read_or_write_is_an_error(trainbus):
    assert "must end in .safetensors" in trainbus("import", MMENGINE, "out.pth", status=2).err
    told = trainbus("import", "nowhere.pth", "a.safetensors", status=2).err
    assert told == "trainbus checkpoint import: nowhere.pth: no such file\n"
    data = MMENGINE.read_bytes()
    Path("a.pth").write_bytes(data[: len(data) // 2])
    assert "a.pth is damaged" in trainbus("import", "a.pth", "a.safetensors", status=1).err


# --------------------------------------------------------------------------------------------------------------- URLs


def test_ls_and_verify_of_a_url_list_its_files(trainbus, memory):
    for epoch in (9, 10):
        save(tree(epoch), f"memory://bucket/run/epoch_{epoch}.safetensors")
    memory.pipe_file("/bucket/run/last_checkpoint", b"epoch_10.safetensors")
    memory.pipe_file("/bucket/run/.trainbus-0123.tmp", b"")
    memory.pipe_file("/bucket/run/notes.txt", b"")
    result = trainbus("ls", "memory://bucket/run")
    assert result.err == ""
    rows = [line.split() for line in result.out.splitlines()]
    assert rows[1][:5] == ["epoch_9.safetensors", "9", "90", "2.1", "kB"]
    assert rows[2][:4] == ["→", "epoch_10.safetensors", "10", "100"]
    assert result.out.splitlines()[3] == "→ last_checkpoint: epoch_10.safetensors"
    assert result.out.splitlines()[4].startswith("unfinished: .trainbus-0123.tmp")
    assert trainbus("verify", "memory://bucket/run").out.splitlines()[-1] == "2 of 2 files verified"
    url = "memory://bucket/run/epoch_9.safetensors"
    assert trainbus("verify", url).out.startswith(f"verified  {url}")


def test_show_and_export_take_urls(trainbus, memory):
    url = "memory://bucket/run/epoch_3.safetensors"
    save(tree(3), url)
    assert trainbus("show", url, "--key", "progress.epoch").out.splitlines()[-1] == "3"
    trainbus("export", url, "a.pth")
    assert torch.load("a.pth", weights_only=True)["progress"]["epoch"] == 3
    make("b.safetensors", 4)
    out = "memory://bucket/out/w.pth"
    assert trainbus("export", "b.safetensors", out, "--weights").out.startswith(f"exported {out}")
    back = torch.load(io.BytesIO(memory.cat_file("/bucket/out/w.pth")), weights_only=True)
    assert back["head.weight"].equal(torch.full((2, 3), 4.0))
    assert f"{out} exists; add --force to replace it" in trainbus("export", url, out, status=2).err
    trainbus("export", url, "memory://bucket/run/epoch_3.safetensors", "--weights", "--force", status=2)
    trainbus("export", url, "memory://bucket/out/w.safetensors", "--weights")
    assert [name for name in memory.store if ".trainbus-" in name] == []


def test_files_may_be_named_by_urls_of_all_kinds(trainbus, memory):
    make("a.safetensors")
    trainbus("verify", f"file://{Path.cwd()}/a.safetensors")
    trainbus("ls", f"file://{Path.cwd()}")
    trainbus("import", MMENGINE, "memory://bucket/ours.safetensors")
    trainbus("verify", "memory://bucket/ours.safetensors")
    Path("last_checkpoint").write_text("nowhere://bucket/epoch_1.safetensors")  # ls does not ask there
    assert trainbus("ls", ".").out.splitlines()[-1] == "→ last_checkpoint: nowhere://bucket/epoch_1.safetensors"


def test_a_file_of_a_newer_version_is_listed_as_that(trainbus):
    data = make("a.safetensors").read_bytes().replace(b'"version":"2"', b'"version":"3"')
    Path("a.safetensors").write_bytes(data[:-4] + zlib.crc32(data[:-4]).to_bytes(4, "little"))
    make("b.safetensors")
    result = trainbus("ls", ".", status=1)
    assert [line.split()[-1] for line in result.out.splitlines()[1:3]] == ["complete", "unreadable"]
    assert "a.safetensors cannot be read here: it has format version 3, this trainbus reads up to 2; upgrade" in result.out
    trainbus("show", "a.safetensors", status=2)


# ------------------------------------------------------------------------------------------------------- all commands


@pytest.mark.parametrize("command", [["verify"], ["show"], ["export", "out.pth"]], ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("nowhere.safetensors", 2, "nowhere.safetensors: no such file"),
        ("a.pth", 2, "trainbus checkpoint import a.pth"),
        ("plain.safetensors", 2, "plain safetensors"),
        ("notes.txt", 2, "checkpoints end in .safetensors"),
        ("cut.safetensors", 1, "cut.safetensors is damaged"),
        ("memory://bucket/cut.safetensors", 1, "memory://bucket/cut.safetensors is damaged"),
        ("memory://bucket/a", 2, "memory://bucket/a: no such"),
        ("nowhere://bucket/a", 2, "cannot reach nowhere://bucket/a"),
        ("run", 2, "trainbus checkpoint ls run"),
    ],
)
def test_what_cannot_be_read_is_told_from_damage(trainbus, memory, command, name, status, says):
    torch.save({"w": 1}, "a.pth")
    save_file({"w": torch.ones(1)}, "plain.safetensors")
    Path("notes.txt").write_text("hello, this is a text")
    Path("run").mkdir()
    cut(make("cut.safetensors"))
    memory.pipe_file("/bucket/cut.safetensors", Path("cut.safetensors").read_bytes())
    told = " ".join(" ".join(trainbus(command[0], name, *command[1:], status=status)).split())
    assert says in told or (command[0], name) == ("verify", "run")  # which takes directories


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_damage_in_a_store_ends_with_status_1(trainbus, memory, command):
    memory.pipe_file("/bucket/cut.safetensors", make("a.safetensors").read_bytes()[:-100])
    assert "memory://bucket/cut.safetensors is damaged" in trainbus(command, "memory://bucket", status=1).out


def test_a_file_that_cannot_be_written_ends_with_status_1(trainbus, monkeypatch):
    make("a.safetensors")
    monkeypatch.setattr(os, "fsync", fails(OSError(28, "No space left on device")))
    result = trainbus("export", "a.safetensors", "a.pth", status=1)
    assert "cannot write a.pth" in result.err
    assert "No space left on device" in result.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("ls nowhere", "no such directory"),
        ("ls file", "is a file, not a directory"),
        ("ls nowhere://bucket/a", "cannot reach nowhere://bucket/a"),
        ("ls memory://bucket/a", "memory://bucket/a: no such"),
        ("show a.safetensors --key dikt", "'dikt' is not in the checkpoint; found there: state_dict, ema_state_dict"),
        ("show a.safetensors --key state_dict.heat", "'heat' is not under 'state_dict'; found there: "),
        ("show a.safetensors --key progress.epoch.x", "'x' is not under 'progress.epoch', which is a single value"),
        ("export a.safetensors out.bin", "must end in .pth or .pt"),
        ("export a.safetensors out.safetensors", "--weights"),
        ("export a.safetensors out.pth --raw", "--raw works only with --weights or --dcp or --hf"),
        ("export a.safetensors out.pth --strip", "--strip works only with --weights or --hf"),
        ("export a.safetensors out.pth --model m", "--model works only with --weights or --hf"),
        ("export a.safetensors out --torchtitan", "--torchtitan works only with --dcp"),
        ("export a.safetensors out --weights --config c.json", "--config works only with --hf"),
        ("export a.safetensors out --weights --dcp", "--weights and --dcp exclude each other"),
        ("export a.safetensors out --hf", "--config FILE"),
        ("export a.safetensors out --hf --config nowhere.json", "nowhere.json: no such file"),
        ("export a.safetensors file --dcp", "file is a file; name a folder"),
        ("export a.safetensors folder --dcp", "folder exists; add --force"),
        ("export a.safetensors . --dcp --force", ". has the checkpoint in it"),
        ("export a.safetensors memory://bucket/out --dcp", "memory://bucket/out is a URL"),
        ("export a.safetensors out --dcp", "no names of the optimizer's parameters"),
        ("import folder out.safetensors", "folder has no tensors in .safetensors files"),
        ("export a.safetensors nowhere/out.pth", "nowhere: no such directory"),
        ("export a.safetensors .", ". is a directory"),
        ("export plain.safetensors out.pth --weights --raw", "leave out --raw"),
        ("", "Usage: trainbus checkpoint"),
        *((words, "--help shows the options") for words in ("nonsense", "show", "show a --depth 0", "ls")),
    ],
)
def test_a_mistake_is_told_with_status_2_and_leaves_no_file(trainbus, words, says):
    make("a.safetensors")
    save({"state_dict": {"w": torch.ones(2)}}, "plain.safetensors")  # without averages
    Path("file").touch()
    Path("folder").mkdir()
    before = sorted(Path().iterdir())
    result = trainbus(*words.split(), status=2)
    assert result.out == ""
    assert says in " ".join(result.err.split())
    assert sorted(Path().iterdir()) == before


def test_no_pickle_is_touched_when_a_checkpoint_is_read(trainbus, monkeypatch):
    make("a.safetensors")
    refuse = fails(AssertionError("unpickled"))
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    for command in (["ls", "."], ["verify", "."], ["show", "a.safetensors"], ["export", "a.safetensors", "b.pth"]):
        trainbus(*command)
