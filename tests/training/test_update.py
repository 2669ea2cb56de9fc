"""The loop's own update compared with plain torch, number by number."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainbus.eventloop import Bus, ConfigurationError, Run, TrainingError, Update


def plain(parts, model, optimizer, loader, *, epochs=2, accumulate=1, clip=None):
    """Train as without trainbus; return the norms of the gradients."""
    norms = []
    for _ in range(epochs):
        batches = list(loader)
        for start in range(0, len(batches), accumulate):
            window = batches[start : start + accumulate]
            optimizer.zero_grad()
            for batch in window:
                (parts.step(model, batch) / len(window)).backward()
            if clip is not None:
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
    return norms


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_a_train_loop_ends_bitwise_where_a_plain_loop_does(parts, bus, workers):
    dataset = TensorDataset(torch.randn(22, 4), torch.arange(22) % 3)

    def make():
        model, loader = parts.model(dropout=0.5), DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01), loader

    model, optimizer, loader = make()
    parts.loop(bus, model=model, optimizer=optimizer, train_data=loader, val_data=None, max_epochs=3, seed=11).run()
    expected, optimizer, loader = make()
    torch.manual_seed(11)
    plain(parts, expected, optimizer, loader, epochs=3)
    parts.assert_same(dict(model.state_dict()), dict(expected.state_dict()))


@pytest.mark.parametrize(("count", "accumulate", "clip"), [(4, 2, None), (5, 2, None), (7, 4, None), (2, 4, None), (3, 1, 0.1)])
def test_an_update_steps_with_the_mean_gradient_also_of_a_partial_window_and_reports_the_norm_before_clipping(
    parts, bus, count, accumulate, clip
):
    norms = []
    bus.on("after_train_iter", lambda e: norms.append(e.outputs.get("grad_norm")), priority=50)
    bus.add(Update(accumulate=accumulate, grad_clip=clip))
    batches = parts.batches(count)
    loop = parts.loop(bus, train_data=batches, val_data=None)
    loop.run()
    expected = parts.model()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    expected_norms = plain(parts, expected, optimizer, batches, accumulate=accumulate, clip=clip)
    if clip is not None:
        parts.assert_same(norms, expected_norms)
        assert all(norm > clip for norm in norms)
        parts.assert_same(dict(loop.model.state_dict()), dict(expected.state_dict()))
    torch.testing.assert_close(dict(loop.model.state_dict()), dict(expected.state_dict()))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_skipped_by_the_scaler_is_not_an_update(parts, bus, fused):
    trace = parts.Trace(bus, inside=True)
    bus.add(Update(scaler=torch.amp.GradScaler("cpu", init_scale=2.0, enabled=True)))
    model, weights = parts.model(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    bus.on("after_train_iter", lambda e: weights.append(e.run.model[0].weight.detach().clone()), priority=50)

    def step(model, batch):
        loss = parts.step(model, batch)
        return loss * float("inf") if len(weights) == 1 else loss

    parts.loop(bus, model=model, optimizer=optimizer, step=step, val_data=None, max_epochs=1).run()
    assert [e.progress.update for e in trace.of("before_train_iter")] == [0, 1, 1]
    assert trace.of("after_run")[0].progress.update == 2
    assert len(trace.of("after_optimizer_step")) == 2
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


def test_several_optimizers_step_in_one_update(parts, bus, trace):
    models = {"a": parts.model(1), "b": parts.model(2)}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    names = []
    bus.on("after_optimizer_step", lambda e: names.append(e.name))
    both = lambda models, batch: parts.step(models["a"], batch) + parts.step(models["b"], batch)  # noqa: E731
    parts.loop(bus, model=models, optimizer=optimizers, step=both, val_data=None, max_epochs=1).run()
    assert names == ["a", "b"] * 3
    assert trace.of("after_run")[0].progress.update == 3


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"accuracy": 1.0}, "no 'loss', only 'accuracy'"),
        ({}, "an empty dict"),
        (None, "of type NoneType"),
        (1.5, "of type float"),
        (torch.ones(3), r"shape \(3,\)"),
        (torch.ones(()), "requires_grad is False"),
    ],
)
def test_a_loss_that_the_update_cannot_use_is_a_clear_error(parts, result, message):
    with pytest.raises(TrainingError, match=message):
        parts.loop(step=lambda model, batch: result).run()


def test_step_can_return_a_loss_of_one_element_in_a_mapping_of_outputs(parts, bus, trace):
    parts.loop(bus, step=lambda model, batch: {"loss": parts.step(model, batch).reshape(1, 1), "size": len(batch[0])}).run()
    assert {(e.outputs["size"], e.outputs["loss"].dim()) for e in trace.of("after_train_iter")} == {(4, 0)}


def test_two_updates_are_an_error(parts, bus):
    loop = parts.loop(bus)
    second = Update()
    second.name = "second"
    bus.add(second)
    with pytest.raises(ConfigurationError, match="second"):
        loop.run()


def test_an_argument_that_clipping_does_not_take_is_an_error():
    with pytest.raises(ConfigurationError, match="grad_clip"):
        Update(grad_clip={"norm": 1})


@pytest.mark.parametrize(
    "mistake",
    [
        lambda loss, optimizer: loss.backward(),
        lambda loss, optimizer: loss.backward(retain_graph=True),
        lambda loss, optimizer: (loss.backward(), optimizer.step(), optimizer.zero_grad()),
    ],
    ids=["backward", "kept graph", "step"],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_calls_the_optimizer_is_an_error_in_the_first_iteration(parts, bus, mistake, accumulate):
    def step(model, batch):
        loss = parts.step(model, batch)
        mistake(loss, loop._optimizer)
        return loss

    bus.add(Update(accumulate=accumulate))
    loop = parts.loop(bus, step=step, sanity=0)
    with pytest.raises(TrainingError, match=r"step\(\).*backward\(\)"):
        loop.run()


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_a_norm_without_any_gradient_is_0(norm_type):
    model = torch.nn.Linear(1, 1)
    with Run(Bus(), model=model, optimizer=torch.optim.SGD([{"params": model.parameters()}], lr=0.1)) as run:
        assert run.steps.clip_grad_norm(1.0, norm_type) == 0


def test_an_optimizer_may_have_no_parameter(tmp_path):
    class Empty(torch.optim.SGD):
        def __init__(self) -> None:
            super().__init__([{"params": []}], lr=0.1)

    with Run(Bus(), model=torch.nn.Linear(1, 1), optimizer={"empty": Empty()}, work_dir=tmp_path) as run:
        assert run.steps.clip_grad_norm(1.0) == 0
