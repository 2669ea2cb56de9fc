"""The layouts of torch's distributed engines become the state of a run."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from trainbus.cli import main
from trainbus.convert.layouts import from_dcp, to_dcp
from trainbus.eventloop import Bus, CheckpointError, TrainLoop
from trainbus.eventloop.checkpoint import load

from ..checkpoint.trees import canonical


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))


def groups(model: nn.Module) -> Any:
    named = [*model.named_parameters()]
    return [
        {"params": [one for name, one in named if ("bias" in name) is bias], "weight_decay": 0.0 if bias else 0.1}
        for bias in (False, True)
    ]


BATCHES = [torch.linspace(-1, 1, 16).view(4, 4) * scale for scale in (1, 2, 3)]


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) * torch.arange(4.0)).sum()


def trained(make: Any, epochs: int) -> tuple[nn.Module, Any]:
    model = net()
    optimizer = make(groups(model))
    for batch in BATCHES * epochs:
        step(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def torchtitan(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Its keys: weights at the top, flat names in the optimizer."""
    _, flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    states = {"lr_scheduler": {"last_epoch": 3}, "dataloader": {"dp_rank_0": b"\x80\x04N.", "world_size": 1}}
    return {**model.state_dict(), "optimizer": flat, "train_state": {"step": 3, "ntokens_seen": 99}, **states}


def nested(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def flat(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return {"model": weights, "optimizer": state}


def in_an_app(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    return {"app": {"model": weights, "optim": state}}


def by_number(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def write(tree: Any, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tree, checkpoint_id=folder, no_dist=True)
    return folder


def accelerate(model: nn.Module, optimizer: Any, folder: Path) -> Path:
    tree = nested(model, optimizer)
    write({"model": tree["model"]}, folder / "pytorch_model_fsdp_0")
    write({"optimizer": tree["optimizer"]}, folder / "optimizer_0")
    (folder / "random_states_0.pkl").write_bytes(b"a pickle")
    return folder


def adam(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.99))


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


@pytest.mark.parametrize("make", [adam, sgd])
@pytest.mark.parametrize("layout", [torchtitan, nested, flat, in_an_app, by_number, accelerate])
def test_a_run_goes_on_from_a_folder_as_the_training_that_wrote_it_would_have(tmp_path, layout, make, capsys):
    parts = trained(make, 1)
    folder = tmp_path / "theirs"
    accelerate(*parts, folder) if layout is accelerate else write(layout(*parts), folder)
    ours = tmp_path / "ours.safetensors"
    assert main(["checkpoint", "import", str(folder), str(ours)]) == 0
    counted = 3 if make is adam or layout is torchtitan else 0
    assert f"iteration {counted}" in capsys.readouterr().out
    model = net()
    loop = TrainLoop(model, make(groups(model)), step=step, train_data=BATCHES, max_iters=counted + 3, bus=Bus())
    loop.run(resume=ours)
    for name, value in trained(make, 2)[0].state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_what_no_run_uses_is_kept_and_not_unpickled(tmp_path):
    folder = write(torchtitan(*trained(adam, 1)), tmp_path / "theirs")
    main(["checkpoint", "import", str(folder), str(tmp_path / "ours.safetensors")])
    kept = load(tmp_path / "ours.safetensors")["dcp"]
    assert kept["dataloader"] == {"dp_rank_0": b"\x80\x04N.", "world_size": 1}
    assert kept["train_state"] == {"step": 3, "ntokens_seen": 99}


def test_a_folder_with_weights_only_gives_weights(tmp_path, capsys):
    model, _ = trained(adam, 1)
    folder = write(model.state_dict(), tmp_path / "theirs")
    assert main(["checkpoint", "import", str(folder), str(tmp_path / "ours.safetensors")]) == 0
    assert "nothing but the weights" in capsys.readouterr().out
    assert torch.equal(load(tmp_path / "ours.safetensors")["state_dict"]["0.weight"], model.state_dict()["0.weight"])


def test_a_file_of_torch_save_with_named_parameters_is_one_too(tmp_path):
    parts = trained(adam, 1)
    torch.save(nested(*parts), tmp_path / "a.pt")
    assert main(["checkpoint", "import", str(tmp_path / "a.pt"), str(tmp_path / "ours.safetensors")]) == 0
    state = load(tmp_path / "ours.safetensors")
    assert state["parameters"]["optimizer"].split("\n")[0] == "0.weight"
    assert state["progress"]["iter"] == 3


def test_names_that_are_parts_of_others_are_told_apart(tmp_path):
    weights = {"a": torch.ones(1), "a.b": torch.zeros(2)}
    flat = {"state.a.x": 1, "state.a.b.x": 2, "param_groups.a.lr": 0.1, "param_groups.a.b.lr": 0.1}
    state = from_dcp({"model": weights, "optimizer": flat})
    assert state["optimizer"]["optimizer"]["state"] == {0: {"x": 1}, 1: {"x": 2}}
    assert state["parameters"]["optimizer"] == "a\na.b"


def test_several_optimizers_keep_their_names(tmp_path):
    folder = write(
        {"model": WEIGHTS, "optimizer": {"G": by_number(*trained(adam, 1))["optimizer"], "D": NAMED}}, tmp_path / "a"
    )
    assert main(["checkpoint", "import", str(folder), str(tmp_path / "ours.safetensors")]) == 0
    state = load(tmp_path / "ours.safetensors")
    assert [*state["optimizer"]] == ["G", "D"]
    assert state["parameters"] == {"D": "w"}
    assert (len(state["optimizer"]["G"]["state"]), state["progress"]["iter"]) == (6, 3)


WEIGHTS = {"w": torch.ones(2)}
NAMED = {"state": {"w": {"step": float("inf")}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}


@pytest.mark.parametrize(
    "optimizer",
    [
        {"param_groups": None},
        {"param_groups": [3]},
        {"param_groups": [{"lr": 0.1, "params": None}]},
        {"param_groups": [{"lr": 0.1}], "state": {}},
        NAMED | {"state": None},
        NAMED | {"state": {"w": torch.ones(2)}},
        {"param_groups.w.lr": 0.1, "state.w.a": 1, "state.w.a.b": 2},
    ],
    ids=str,
)
def test_an_optimizer_of_another_layout_is_an_error_of_ours(tmp_path, optimizer):
    for number, tree in enumerate([{"model": WEIGHTS, "optimizer": one} for one in (optimizer, {"G": optimizer})]):
        with pytest.raises(CheckpointError, match=r"optimizer|'G'"):
            from_dcp(tree)
        torch.save(tree, tmp_path / "a.pt")
        assert main(["checkpoint", "import", str(tmp_path / "a.pt"), str(tmp_path / f"{number}.safetensors")]) in (0, 2)


def test_a_folder_of_folders_lists_them(tmp_path, capsys):
    for number in (10, 20):
        write({"w": torch.ones(1)}, tmp_path / f"step-{number}")
    assert main(["checkpoint", "import", str(tmp_path), str(tmp_path / "ours.safetensors")]) == 2
    assert "step-10, step-20" in capsys.readouterr().err


def test_a_state_of_a_parameter_in_no_group_is_an_error():
    with pytest.raises(CheckpointError, match="'b'"):
        from_dcp({"model": {}, "optimizer": {"state": {"b": {}}, "param_groups": [{"params": ["a"]}]}})


def ours(*, named: bool = True) -> tuple[dict[str, Any], Any]:
    model, optimizer = trained(lambda parameters: adam([one for group in parameters for one in group["params"]]), 1)
    names = [name for ending in ("weight", "bias") for name, _ in model.named_parameters() if ending in name]
    tree = {"state_dict": dict(model.state_dict()), "optimizer": {"optimizer": optimizer.state_dict()}}
    return {**tree, **({"parameters": {"optimizer": "\n".join(names)}} if named else {})}, (model, optimizer)


def test_an_optimizer_is_named_as_torch_names_it():
    tree, parts = ours()
    _, theirs = get_state_dict(*parts)
    assert canonical(to_dcp(tree)["optimizer"]["param_groups"]) == canonical(theirs["param_groups"])
    assert {name: canonical(one) for name, one in to_dcp(tree)["optimizer"]["state"].items()} == {
        name: canonical(one) for name, one in theirs["state"].items()
    }


def test_names_that_a_file_lacks_follow_from_the_weights_with_a_warning_or_not_at_all(logs):
    model = net()
    optimizer = adam(model.parameters())
    step(model, BATCHES[0]).backward()
    optimizer.step()
    tree = {"state_dict": dict(model.state_dict()), "optimizer": {"optimizer": optimizer.state_dict()}}
    assert list(to_dcp(tree)["optimizer"]["state"]) == [name for name, _ in model.named_parameters()]
    assert logs[0].get("id") == "optimizer-names-missing"
    with pytest.raises(CheckpointError, match="no names"):
        to_dcp(ours(named=False)[0])
    del tree["state_dict"]["2.bias"]
    with pytest.raises(CheckpointError, match="no names"):
        to_dcp(tree)


def test_optimizers_of_several_models_become_one_and_the_models_keep_their_names():
    state = {"state": {0: {"m": 1}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    tree = {"state_dict": {"G": {"w": 1}, "D": {"w": 2}}, "optimizer": {"g": state, "d": state}}
    tree["parameters"] = {"g": "G.w", "d": "D.w"}
    exported = to_dcp(tree)
    assert exported["model"] == tree["state_dict"]
    groups = [{"lr": 0.1, "params": ["G.w"]}, {"lr": 0.1, "params": ["D.w"]}]
    assert exported["optimizer"] == {"state": {"G.w": {"m": 1}, "D.w": {"m": 1}}, "param_groups": groups}
    with pytest.raises(CheckpointError, match="torchtitan has one model"):
        to_dcp(tree, torchtitan=True)


def test_a_parameter_that_is_in_no_model_has_no_name_to_be_exported_by():
    tree, _ = ours()
    tree["parameters"]["optimizer"] = tree["parameters"]["optimizer"].replace("2.bias", "")
    with pytest.raises(CheckpointError, match="in no model"):
        to_dcp(tree)


def test_without_weights_or_optimizer_there_is_less_to_export():
    with pytest.raises(CheckpointError, match="no weights"):
        to_dcp({"progress": {}})
    weights = {"w": torch.ones(1)}
    assert to_dcp({"state_dict": weights}) == {"model": weights}
    assert to_dcp({"state_dict": weights}, torchtitan=True) == weights
