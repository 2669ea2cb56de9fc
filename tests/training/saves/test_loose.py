"""Parameters that an optimizer trains and that are in no model of the run, such as the centres of a loss."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from trainbus.eventloop import Bus, CheckpointError, Run, TrainLoop
from trainbus.eventloop.checkpoint import load
from trainbus.hooks import CheckpointHook


class Scores:
    """A metric that is best after the first epoch."""

    def __init__(self) -> None:
        self.scores = [0.9, 0.5, 0.4, 0.3]

    def update(self) -> None: ...

    def reset(self) -> None: ...

    def compute(self) -> float:
        return self.scores.pop(0)


def loop(folder: Any, *, centres: int = 3, epochs: int = 3, seed: int = 0, stateful: bool = False, **hook: Any) -> TrainLoop:
    torch.manual_seed(seed)
    model, head = nn.Linear(8, 4), nn.Linear(4, centres, bias=False)
    optimizer = torch.optim.SGD([*model.parameters(), head.weight], lr=0.5, momentum=0.9)
    g = torch.Generator().manual_seed(1)
    data = [(torch.randn(8, 8, generator=g), torch.randint(3, (8,), generator=g)) for _ in range(4)]

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return cross_entropy(10 * normalize(model(batch[0])) @ normalize(head.weight).T, batch[1])

    made = TrainLoop(
        model,
        optimizer,
        step=step,
        train_data=data,
        val_data=data[:1],
        val_step=lambda *_: {},
        metrics={"acc": Scores()},
        sanity=0,
        bus=Bus(CheckpointHook(interval=1, **hook)),
        max_epochs=epochs,
        work_dir=folder,
        stateful={"head": head} if stateful else None,
    )
    made.centres = head.weight
    return made


@pytest.mark.parametrize("staging", ["block", "overlap"])
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("options", [{}, {"save_optimizer": False}])
def test_they_are_saved_once_and_come_back(tmp_path, staging, stateful, options, logs):
    whole = loop(tmp_path / "whole", stateful=stateful, staging=staging, **options)
    seen = []
    whole.bus.on("after_train_epoch", lambda event: seen.append(whole.centres.detach().clone()))
    whole.run()
    file = tmp_path / "whole" / "epoch_2.safetensors"
    assert ("loose" in load(file)) is not stateful
    assert any("in no model of the run" in entry["event"] for entry in logs) is not stateful
    resumed = loop(tmp_path / "resumed", seed=1, stateful=stateful)
    resumed.bus.on("before_train", lambda event: seen.append(resumed.centres.detach().clone()))
    resumed.run(resume=file)
    assert torch.equal(seen[3], seen[1])
    if not options:
        assert torch.equal(resumed.centres, whole.centres)
        assert torch.equal(resumed.model.weight, whole.model.weight)


def test_others_are_an_error_that_changes_nothing_or_stay_as_they_are(tmp_path, logs):
    loop(tmp_path).run()
    other = loop(tmp_path, centres=5, epochs=4)
    before = other.centres.detach().clone(), other.model.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"(?s)'optimizer'.*\(3, 4\).*\(5, 4\).*strict=False"):
        other.run(resume="auto")
    assert torch.equal(other.centres, before[0])
    assert torch.equal(other.model.weight, before[1])


def test_they_belong_to_the_best_weights(tmp_path):
    best = loop(tmp_path, save_best="acc", rule="greater", load_best_model_at_end=True)
    best.run()
    assert torch.equal(best.centres, load(tmp_path / "epoch_1.safetensors")["loose"]["optimizer"][0])


def test_a_file_of_an_earlier_version_has_none_which_is_told(tmp_path, logs):
    from trainbus.eventloop.checkpoint import save

    loop(tmp_path, epochs=1).run()
    tree = load(tmp_path / "epoch_1.safetensors")
    del tree["loose"]
    save(tree, tmp_path / "old.safetensors")
    loop(tmp_path / "new", seed=1).run(resume=tmp_path / "old.safetensors")
    assert any("stay as they are" in entry["event"] for entry in logs)


def actor_critic(folder: Any, *, resume: str | None = None, epochs: int = 4) -> tuple[list[float], list[torch.Tensor]]:
    """Train as SAC does: the temperature is a tensor with an optimizer of its own."""
    torch.manual_seed(0)
    actor, log_alpha = nn.Linear(2, 2), torch.zeros(1, requires_grad=True)
    optimizers = {"actor": torch.optim.Adam(actor.parameters()), "alpha": torch.optim.Adam([log_alpha], lr=0.1)}
    alphas = []
    bus = Bus(CheckpointHook(interval=1))
    with Run(bus, model=actor, optimizer=optimizers, work_dir=folder, resume=resume, seed=0) as run:
        for _ in run.epochs(epochs):
            for _ in run.train(range(3)):
                entropy = actor(torch.rand(4, 2)).log_softmax(1).exp().sum(1).mean()
                for name, loss in (("actor", -log_alpha.exp().detach() * entropy), ("alpha", log_alpha * entropy.detach())):
                    optimizers[name].zero_grad()
                    loss.backward()
                    optimizers[name].step()
                alphas.append(log_alpha.item())
    return alphas, [*actor.parameters()]


def test_a_temperature_with_an_optimizer_of_its_own_comes_back_without_a_warning(tmp_path, logs):
    alphas, weights = actor_critic(tmp_path / "whole")
    first, _ = actor_critic(tmp_path / "part", epochs=2)
    rest, resumed = actor_critic(tmp_path / "part", resume="auto")
    assert first + rest == alphas
    assert all(map(torch.equal, weights, resumed))
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == []
