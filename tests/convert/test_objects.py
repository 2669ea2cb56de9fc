"""Sparse tensors and values that are no plain data, in the formats of other programs."""

import pytest
import torch

from trainbus.convert import copy_in, export_weights, load_pth, open_contents, open_dcp, save_contents
from trainbus.convert.dcp_write import write_dcp
from trainbus.eventloop.checkpoint import load, load_whole, save
from trainbus.eventloop.errors import CheckpointValueError

from ..checkpoint.test_objects import SPARSE, SQUARE, VALUES, Moments, form

pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC|invariant)")  # torch says so once


def test_sparse_weights_come_from_files_of_torch_save_and_go_there(tmp_path):
    torch.save({"model": {"graph": SQUARE.to_sparse()}}, tmp_path / "a.pth")
    save(load_pth(tmp_path / "a.pth"), tmp_path / "b.safetensors")
    assert form(load(tmp_path / "b.safetensors")["model"]["graph"]) == form(SQUARE.to_sparse())
    export_weights(tmp_path / "b.safetensors", tmp_path / "b.pth", key="model")
    assert form(torch.load(tmp_path / "b.pth", weights_only=True)["graph"]) == form(SQUARE.to_sparse())


def test_sparse_weights_are_refused_by_formats_without_them(tmp_path):
    save({"state_dict": {"graph": SQUARE.to_sparse(), "w": torch.ones(2)}}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointValueError, match=r"graph.*sparse_coo.*\.pth"):
        export_weights(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    contents = open_contents(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointValueError, match=r"graph.*sparse_coo.*\.pth"):
        write_dcp({"model": contents.tree["state_dict"]}, contents, tmp_path / "theirs")


@pytest.mark.parametrize("most", [copy_in.ONE_FILE.value, 0], ids=["one file", "sharded"])
def test_objects_go_through_folders_of_dcp(tmp_path, change, most):
    change(copy_in.ONE_FILE, most)
    tree = {
        "state_dict": {"w": torch.ones(3)},
        "other": [*VALUES, *(make() for make in SPARSE.values()), Moments(torch.randn(200, 100), 2)],
    }
    save(tree, tmp_path / "a.safetensors")
    contents = open_contents(tmp_path / "a.safetensors")
    write_dcp({"model": contents.tree["state_dict"]}, contents, tmp_path / "theirs")
    save_contents(open_dcp(tmp_path / "theirs"), tmp_path / "b.safetensors")
    assert form(load_whole(tmp_path / "b.safetensors")["other"]) == form(tree["other"])
