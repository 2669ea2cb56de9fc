"""Checkpoints that trainbus 0.1 and 0.2 wrote."""

import json
from pathlib import Path

import pytest
import torch

from trainbus.cli import main
from trainbus.eventloop import CheckpointError
from trainbus.eventloop.checkpoint import load
from trainbus.eventloop.training import peek
from trainbus.eventloop.training.saves.contents import as_tree
from trainbus.eventloop.training.schema import FORMAT, UPGRADES, SavedData, SavedEntry, SavedState, read, upgraded

from .old_files import jobs

FILES = Path(__file__).parent / "old_files"


@pytest.mark.parametrize("version", ["0.1", "0.2"])
@pytest.mark.parametrize("job", ["own_loop", "train_loop"])
def test_a_run_resumed_from_an_old_file_ends_with_the_weights_of_an_uninterrupted_run(job, version, tmp_path):
    train = getattr(jobs, job)
    uninterrupted = train(tmp_path / "whole")
    resumed = train(tmp_path / "resumed", resume=FILES / f"{job}-{version}.safetensors")
    torch.testing.assert_close(resumed, uninterrupted, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*treespec", "ignore:You have overridden")
def test_a_bus_in_lightning_resumes_from_an_old_file(tmp_path):
    pytest.importorskip("lightning.pytorch")
    uninterrupted = jobs.lightning(tmp_path)
    resumed = jobs.lightning(tmp_path, resume=FILES / "lightning-0.2.ckpt")
    torch.testing.assert_close(resumed, uninterrupted, rtol=0, atol=0)


@pytest.mark.parametrize("file", sorted(FILES.glob("*.safetensors")), ids=lambda file: file.name)
def test_an_old_file_is_upgraded_version_by_version(file):
    tree = load(file)
    assert tree["format"] == 1
    new = upgraded(tree, SavedState)
    assert new["format"] == FORMAT
    assert new["state_dict"] is tree["state_dict"]
    assert "used" in tree["data"]  # the old tree stays as it is
    data = read(new, SavedState).data
    assert isinstance(data, SavedData)
    assert (data.train.used, data.train.begun) == (jobs.SAVED_AT - 6, False)
    assert peek(file).iter == jobs.SAVED_AT


def test_the_command_lists_shows_and_verifies_old_files(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    files = sorted(FILES.glob("*.safetensors"))
    assert main(["checkpoint", "ls", str(FILES)]) == 0
    listed = capsys.readouterr().out
    assert all(file.name in listed for file in files)
    assert main(["checkpoint", "verify", *map(str, files)]) == 0
    for file in files:
        capsys.readouterr()
        assert main(["checkpoint", "show", str(file), "--key", "progress", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tree"]["iter"] == jobs.SAVED_AT


def test_every_earlier_version_has_an_upgrade_and_a_later_one_or_another_kind_is_an_error():
    assert [*UPGRADES] == [*range(1, FORMAT)]
    with pytest.raises(CheckpointError):
        upgraded({"format": 1, "progress": {}}, SavedEntry)
    tree = upgraded(load(FILES / "own_loop-0.1.safetensors"), SavedState) | {"format": FORMAT + 1}
    with pytest.raises(CheckpointError) as caught:
        upgraded(tree, SavedState)
    assert str(FORMAT + 1) in str(caught.value)
    assert str(FORMAT) in str(caught.value)


@pytest.mark.parametrize("data", [[1], {"used": 1}, {"evaluated": 3}, "here"])
def test_a_file_with_a_broken_position_is_refused_whatever_its_version(data):
    tree = load(FILES / "own_loop-0.1.safetensors")
    for version in range(1, FORMAT + 1):
        with pytest.raises(CheckpointError):
            upgraded({**tree, "format": version, "data": data}, SavedState)


def test_a_tree_of_the_present_version_is_the_same_after_reading():
    tree = upgraded(load(FILES / "train_loop-0.2.safetensors"), SavedState)
    again = as_tree(read(tree, SavedState))
    assert tree.keys() - again.keys() == {"ema_state_dict", "param_schedulers"}  # keys of hooks
    assert tree["progress"].items() <= again["progress"].items()
    assert again["bus"] == tree["bus"]
