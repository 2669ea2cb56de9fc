"""Layouts of weights on four processes: what is saved is the state of one process, and comes back on any other layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from trainbus.cli import main
from trainbus.eventloop.checkpoint import load_whole

from . import meshes

OTHERS = {
    "FSDP2": "TP",
    "HSDP": "PP",
    "TP": "FSDP2",
    "SP": "TP x FSDP2",
    "TP x FSDP2": "PP x FSDP2",
    "CP x FSDP2": "SP",
    "PP": "TP x FSDP2",
    "PP x FSDP2": "experts",
    "experts": "PP",
    "experts on meshes": "HSDP",
}
"""Each layout, and another one that its checkpoint is resumed on."""


def together(everyones: list[Any]) -> dict[str, torch.Tensor]:
    """Return what all processes have; of one name they must have the same."""
    found: dict[str, torch.Tensor] = {}
    for own in everyones:
        for name, value in own.items():
            assert torch.equal(found.setdefault(name, value), value), name
    return found


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


def in_file(path: Path) -> dict[str, torch.Tensor]:
    """Return what :func:`meshes.facts` does, from a checkpoint: averages are in ``state_dict``."""
    tree = load_whole(path)
    state, names = tree["optimizer"]["optimizer"]["state"], tree["parameters"]["optimizer"].split("\n")
    found = dict(tree["ema_state_dict"])
    for number, one in state.items():
        found |= {f"{names[number]}: {key}": value for key, value in one.items()}
    for group in tree["optimizer"]["optimizer"]["param_groups"]:
        found |= {f"{names[number]}: lr": torch.tensor(group["lr"]) for number in group["params"]}
    return found | {f"average of {name}": tree["state_dict"][name] for name in names}


def resumes(ranks: Any, file: Path, places: list[tuple[str, int]], expected: Any, losses: Any, **options: Any) -> None:
    """Check that a run begins with what was saved after two epochs, and ends as one that has these losses."""
    for number, (kind, size) in enumerate(places):
        resumed = ranks(meshes.train, kind, str(file.parent / f"{number}"), 3, str(file), size=size, **options)
        equal(together([begun for begun, _, _ in resumed]), expected)
        own = max((one for _, _, one in resumed), key=lambda one: sum(one.values()))  # the first stage has none
        assert own == pytest.approx({at: value for at, value in losses.items() if at >= 8}, rel=1e-3)


def test_stages_of_a_pipeline_are_resumed_as_experts_of_which_each_process_has_some(ranks, tmp_path):
    saved = ranks(meshes.train, "PP x FSDP2", str(tmp_path), 2, None, size=4)
    equal(in_file(tmp_path / "epoch_2.safetensors"), expected := together([end for _, end, _ in saved]))
    (single,) = ranks(meshes.train, "", str(tmp_path / "single"), 3, str(tmp_path / "epoch_2.safetensors"), size=1)
    equal(single[0], expected)
    resumes(ranks, tmp_path / "epoch_2.safetensors", [("experts on meshes", 4)], expected, single[2])


@meshes.AVERAGES
@pytest.mark.long
@pytest.mark.parametrize("staging", ["block", "overlap"])
@pytest.mark.parametrize("kind", OTHERS)
def test_a_layout_is_saved_as_one_process_and_resumed_on_others(ranks, tmp_path, kind, staging):
    ((_, two, _),) = ranks(meshes.train, "", str(tmp_path / "two"), 2, None, size=1)
    ((_, _, losses),) = ranks(meshes.train, "", str(tmp_path / "three"), 3, None, size=1)
    saved = ranks(meshes.train, kind, str(tmp_path / "saved"), 2, None, staging, size=4)
    file = tmp_path / "saved" / "epoch_2.safetensors"
    expected = together([end for _, end, _ in saved])
    torch.testing.assert_close(expected, two, rtol=1e-3, atol=1e-4)
    equal(in_file(file), expected)
    for name in ("verify", "ls"):
        assert main(["checkpoint", name, str(file if name == "verify" else file.parent)]) == 0
    resumes(ranks, file, [(kind, 4), (kind, 2), ("", 1), (OTHERS[kind], 4)], expected, losses)
    assert main(["checkpoint", "export", str(file), str(tmp_path / "dcp"), "--dcp", "--raw"]) == 0
    (again,) = ranks(meshes.engine_reads, str(tmp_path / "dcp"), size=1)
    equal(again, {name: value for name, value in expected.items() if not name.startswith("average")})


@meshes.AVERAGES
@pytest.mark.long
def test_a_mesh_of_three_dimensions_is_saved_as_one_process_and_resumed_on_others(ranks, tmp_path):
    saved = ranks(meshes.train, "HSDP x TP", str(tmp_path), 2, None, size=8)
    equal(in_file(tmp_path / "epoch_2.safetensors"), expected := together([end for _, end, _ in saved]))
    (single,) = ranks(meshes.train, "", str(tmp_path / "single"), 3, str(tmp_path / "epoch_2.safetensors"), size=1)
    places = [("HSDP x TP", 8), ("HSDP x TP", 4), ("TP x FSDP2", 4)]
    resumes(ranks, tmp_path / "epoch_2.safetensors", places, expected, single[2])


@meshes.AVERAGES
@pytest.mark.long
def test_experts_that_are_one_parameter_on_a_mesh_of_their_own_are_saved_as_one_process(ranks, tmp_path):
    kind = "grouped experts x FSDP2"
    saved = ranks(meshes.train, kind, str(tmp_path), 2, None, size=4)
    equal(in_file(tmp_path / "epoch_2.safetensors"), expected := together([end for _, end, _ in saved]))
    (single,) = ranks(meshes.train, kind, str(tmp_path / "single"), 3, str(tmp_path / "epoch_2.safetensors"), size=1)
    resumes(ranks, tmp_path / "epoch_2.safetensors", [(kind, 4), (kind, 2)], expected, single[2])
