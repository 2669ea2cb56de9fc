from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from trainbus.compat.mmengine.checkpoints import from_mmengine, is_mmengine
from trainbus.convert import load_pth
from trainbus.eventloop import Bus, Run, TrainLoop, load_weights
from trainbus.eventloop.checkpoint import load, save
from trainbus.hooks import EMAHook

DATA = Path(__file__).parents[1] / "convert" / "data"


@pytest.fixture(scope="module")
def tree() -> Any:
    return load_pth(DATA / "mmengine.pth")


@pytest.fixture(scope="module")
def was() -> Any:
    with np.load(DATA / "mmengine.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file}


@pytest.fixture
def path(tmp_path, tree) -> Path:
    save(from_mmengine(tree), tmp_path / "imported.safetensors")
    return tmp_path / "imported.safetensors"


class Net(torch.nn.Module):
    """The model in the file, without MMEngine."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.ReLU(), torch.nn.Linear(3, 2)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def step(model: Net, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def resumed(path: Path, look: Any, *hooks: Any) -> Any:
    """Train on from `path` to the third epoch; return what ``look`` makes of the run before that, and how far it has come."""
    bus, model, seen = Bus(*hooks), Net(), []
    bus.on("before_train", lambda event: seen.append(look(event.run)))
    bus.on("after_train", lambda event: seen.append(event.progress))
    data = [(torch.ones(8, 4), torch.zeros(8, dtype=torch.long))] * 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    TrainLoop(model, optimizer, step=step, train_data=data, bus=bus, max_epochs=3).run(resume=path)
    return seen


def weights(was: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(f"{kind}/"): value for key, value in was.items() if key.startswith(f"{kind}/")}


def same(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> bool:
    state = model.state_dict()
    return state.keys() == expected.keys() and all(state[key].equal(expected[key]) for key in state)


def test_an_imported_file_has_the_averaged_weights_for_inference(path, was):
    model = Net()
    load_weights(model, load(path)["state_dict"])
    assert same(model, weights(was, "averaged"))


def test_a_run_resumes_with_raw_weights_averages_optimizer_and_learning_rate(path, was):
    hook = EMAHook()

    def look(run: Any) -> Any:
        moments = [state["exp_avg"].clone() for state in run.optimizers["optimizer"].state.values()]
        averages = {key: value.clone() for key, value in hook.average.tensors.items()}
        rate = run.optimizers["optimizer"].param_groups[0]["lr"]
        return same(run.model, weights(was, "trained")), averages, hook.average.steps, moments, run.progress, rate

    (trained, averages, steps, moments, progress, rate), end = resumed(path, look, hook)
    assert trained
    assert rate == pytest.approx(1e-3)
    assert steps == 4
    assert averages
    assert all(value.equal(was[f"averaged/{key}"]) for key, value in averages.items())
    assert [value.equal(was[f"exp_avg/{index}"]) for index, value in enumerate(moments)] == [True] * 6
    assert (progress.epoch, progress.iter, progress.update) == (2, 4, 4)
    assert (end.epoch, end.iter) == (3, 6)


def test_without_an_ema_hook_a_run_resumes_with_the_averaged_weights(path, was):
    assert resumed(path, lambda run: same(run.model, weights(was, "averaged")))[0]


def test_random_states_are_not_restored(path):
    torch.manual_seed(7)
    state = torch.get_rng_state()
    Net()  # as `resumed` makes one
    expected = torch.rand(3)
    torch.set_rng_state(state)
    assert resumed(path, lambda run: torch.rand(3))[0].equal(expected)


def test_entries_that_only_mmengine_uses_are_kept_separately_and_none_needs_averages_or_an_optimizer(tree):
    state = from_mmengine(tree)
    assert state["mmengine"].keys() == {"meta", "message_hub", "param_schedulers"}
    assert "param_schedulers" not in state
    state = from_mmengine({key: value for key, value in tree.items() if key not in ("ema_state_dict", "optimizer")})
    assert not {"ema_state_dict", "optimizer"} & state.keys()
    assert state["bus"] == {"hooks": {}, "publishes": {}}


def test_the_error_for_another_model_names_the_keys(path):
    model = torch.nn.Linear(2, 2)
    loop = TrainLoop(model, torch.optim.SGD(model.parameters(), 0.1), step=step, train_data=[1], bus=Bus(), max_epochs=3)
    with pytest.raises(Exception, match=r"bias, weight; .* layers\.0\.bias"):
        loop.run(resume=path)


@pytest.mark.parametrize("steps", [torch.ones(2, dtype=torch.int64), torch.tensor(float("nan")), "four", None, -1])
def test_averages_without_a_valid_step_count_start_at_0(tree, steps):
    state = from_mmengine({**tree, "ema_state_dict": {**tree["ema_state_dict"], "steps": steps}})
    assert state["bus"]["hooks"] == {"EMAHook": {"steps": 0}}


def test_several_optimizers_keep_their_names_and_loss_scalers_are_kept_separately(tree):
    one = tree["optimizer"]
    state = from_mmengine({**tree, "optimizer": {"G": {**one, "loss_scaler": {"scale": 2.0}}, "D": one}})
    assert state["optimizer"].keys() == {"G", "D"}
    assert state["optimizer"]["G"].keys() == {"state", "param_groups"}
    assert state["mmengine"]["optimizer"] == {"G": {"loss_scaler": {"scale": 2.0}}}


@pytest.mark.parametrize(
    "other",
    [
        None,
        {},
        {"state_dict": {}},
        {"state_dict": {}, "meta": {"epoch": 1}},
        {"meta": {"mmengine_version": "0.10.7", "epoch": 1, "iter": 2}},
        {"state_dict": {}, "meta": {"mmengine_version": "0.10.7", "epoch": "one"}},
    ],
)
def test_other_trees_are_not_recognised(other, tree):
    assert is_mmengine(tree)
    assert not is_mmengine(other)


def test_a_run_takes_its_place_and_weights_over():
    model = torch.nn.Module()
    model.layers = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    tree = load_pth(DATA / "mmengine.pth")
    with Run(model=model) as run:
        run.checkpoints.apply_state(tree)
        assert (run.progress.epoch, run.progress.iter) == (2, 4)
    assert torch.equal(model.layers[0].weight, tree["state_dict"]["layers.0.weight"])
