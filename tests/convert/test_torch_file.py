"""Files of torch.save written beside the training: the same promises as for the container."""

import zipfile
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import torch

from trainbus.convert import Pickled, load_pth, zip_file
from trainbus.eventloop.checkpoint import AsyncSaver
from trainbus.eventloop.errors import CheckpointError, CheckpointValueError

from ..scripts import run_script


class Settings:
    def __init__(self, values):
        self.values = values


def training():
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def write(tree, path):
    with AsyncSaver() as saver:
        pickled = Pickled(tree)
        return saver.save(pickled.storages, path, write=pickled.write).result(30)


def records(path):
    """The bytes up to the record that torch numbers each file with."""
    data = path.read_bytes()
    marker = b"archive/.data/serialization_id"
    return data[: data.index(marker) - 30] if marker in data else data[: data.index(b"PK\1\2")]


def names(directory):
    return sorted(each.name for each in directory.iterdir())


def test_the_file_has_the_bytes_that_torch_save_writes(tmp_path):
    model, optimizer = training()
    base = torch.arange(10.0)
    tree = {
        "model": model.state_dict(),
        "parameter": model.weight,
        "optimizer": optimizer.state_dict(),
        "views": [base[2:4], base, base.view(2, 5).t(), base[::2]],
        "dtypes": [torch.ones(3, dtype=dtype) for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.uint16)],
        "others": [torch.empty(0), torch.tensor(1.5), torch.eye(3).to_sparse(), torch.ones(2, requires_grad=True)],
        "values": [Namespace(a=1), Path("x"), {1, 2}, (1, None), b"bytes", 2**80, torch.float16, torch.device("cpu")],
        "conjugated": torch.ones(2, dtype=torch.complex64).conj(),
    }
    torch.save(tree, tmp_path / "archive.pt")
    info = write(tree, tmp_path / "ours.pt")
    assert records(tmp_path / "ours.pt") == records(tmp_path / "archive.pt")
    assert info.bytes == (tmp_path / "ours.pt").stat().st_size
    assert info.path == tmp_path / "ours.pt"


def test_torch_and_the_importer_read_the_file(tmp_path):
    model, optimizer = training()
    info = write({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    assert info.digest.startswith("crc32:")
    loads = (partial(torch.load, weights_only=True), partial(torch.load, weights_only=True, mmap=True), load_pth)
    for found in (read(tmp_path / "c.pt") for read in loads):
        assert torch.equal(found["model"]["weight"], model.weight)
        assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    for tree in ({}, [], {"größe": "語", "none": None}):
        write(tree, tmp_path / "c.pt")
        assert torch.load(tmp_path / "c.pt", weights_only=True) == tree
    weight = torch.zeros(100_000)  # tied tensors and views stay shared and are stored once
    info = write({"a": weight, "b": weight, "view": weight[:10]}, tmp_path / "c.pt")
    assert info.bytes < 2 * weight.nbytes
    found = torch.load(tmp_path / "c.pt", weights_only=True)
    found["a"][0] = 1
    assert found["b"][0] == found["view"][0] == 1


def test_nothing_in_the_file_changes_after_the_save(disk, tmp_path):
    settings, counts, weight = Settings({"lr": 1}), {"steps": [1]}, torch.ones(5)
    pickled = Pickled({"settings": settings, "counts": counts, "weight": weight})
    with AsyncSaver(busy="queue") as saver:
        saver.save({}, tmp_path / "before")
        assert disk.reached.wait(30)  # the next one is not being written yet
        saver.save(pickled.storages, tmp_path / "c.pt", write=pickled.write)
        settings.values["lr"], counts["steps"] = 2, [7]
        counts["steps"].append(8)
        weight += 1
        disk.go.set()
    found = torch.load(tmp_path / "c.pt", weights_only=False)
    assert (found["settings"].values, found["counts"], found["weight"][0].item()) == ({"lr": 1}, {"steps": [1]}, 1)


def test_what_torch_save_refuses_is_refused_at_once_and_a_url_by_the_next_call():
    with pytest.raises(CheckpointValueError, match="lambda"):
        Pickled({"step": lambda: 1})
    weight = torch.zeros(4)
    with pytest.raises(CheckpointValueError, match=r"torch\.float32 and torch\.int32"):
        Pickled([weight, weight.view(torch.int32)])
    with pytest.raises(CheckpointError):
        write({}, "memory://bucket/c.pt")


def test_sizes_and_offsets_that_need_64_bits_are_given_in_64(tmp_path, change):
    change(zip_file.LARGE, 500)
    layout = zip_file.ZipLayout([("small", b"a" * 100), ("large", b"b" * 5000), ("behind", b"c" * 10), ("none", b"")])
    with (tmp_path / "z").open("wb") as file:
        file.writelines(layout.parts())
    # A reader takes 32 bits of ones as the sign to look there.
    data = (tmp_path / "z").read_bytes().replace((500).to_bytes(4, "little"), b"\xff" * 4)
    assert len(data) == layout.bytes
    (tmp_path / "z").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "z") as archive:
        assert archive.testzip() is None
        sizes = {info.filename.removeprefix("archive/"): info.file_size for info in archive.infolist()}
    assert list(sizes.items()) == [("small", 100), ("large", 5000), ("behind", 10), ("none", 0)]


_KILLED = """
import os, signal, sys, torch
from trainbus.convert import Pickled
from trainbus.eventloop.checkpoint import AsyncSaver
real, left = os.writev, [3]
def writev(descriptor, parts):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(descriptor, parts)
os.writev = writev
with AsyncSaver() as saver:
    pickled = Pickled([torch.ones(1000, 1000) for _ in range(50)])
    saver.save(pickled.storages, sys.argv[1], write=pickled.write)
"""


def test_a_process_killed_in_the_middle_leaves_the_old_file(tmp_path, tmp_path_factory):
    write(torch.zeros(4), tmp_path / "c.pt")
    assert run_script(_KILLED, tmp_path_factory.mktemp("script"), arguments=[tmp_path / "c.pt"]).returncode == -9
    assert torch.load(tmp_path / "c.pt").shape == (4,)
    assert len(names(tmp_path)) == 2  # the temporary file, whose name says so
    assert names(tmp_path)[0].startswith(".trainbus-")
