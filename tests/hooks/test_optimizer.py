"""The optimizer update: gradients, accumulation, clipping, mixed precision."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from eventloop import Bus, ConfigurationError, Hook, Run
from eventloop.checkpoint import load
from hooks.checkpoint import CheckpointHook
from hooks.optimizer import Fp16OptimizerHook, OptimizerHook


class Steps(Hook):
    """Notes iterations with an update and which optimizers stepped."""

    def __init__(self) -> None:
        self.updated: list[bool] = []
        self.events: list[str] = []

    def before_optimizer_step(self, event: Any) -> None:
        self.events.append(f"before {event.name}")

    def after_optimizer_step(self, event: Any) -> None:
        self.events.append(f"after {event.name}")

    def after_train_iter(self, event: Any) -> None:
        self.updated.append(event.run.updated)


def plain_model() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(3, 2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_windows_are_means_and_the_last_one_of_an_epoch_too(job: SimpleNamespace) -> None:
    model, steps = plain_model(), Steps()
    job.loop(OptimizerHook(accumulate=3), steps, model=model, optimizer=sgd(model), max_epochs=1).run()
    expected = plain_model()
    optimizer = sgd(expected)
    batches = job.batches()
    for window in (batches[:3], batches[3:]):
        optimizer.zero_grad()
        torch.stack([job.loss(expected, batch) for batch in window]).mean().backward()
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
    assert steps.updated == [False, False, True, True]
    assert steps.events == ["before optimizer", "after optimizer"] * 2


def test_gradients_are_clipped_once_a_step_and_their_norm_is_reported(job: SimpleNamespace) -> None:
    class Norms(Hook):
        def __init__(self) -> None:
            self.reported: list[float] = []
            self.clipped: list[float] = []

        def before_optimizer_step(self, event: Any) -> None:
            gradients = [p.grad for p in event.run.model.parameters()]
            self.clipped.append(float(torch.nn.utils.get_total_norm(gradients)))

        def after_train_iter(self, event: Any) -> None:
            self.reported += [float(event.outputs["grad_norm"])] if "grad_norm" in event.outputs else []

    norms = Norms()
    job.loop(OptimizerHook(accumulate=2, grad_clip={"max_norm": 0.01}), norms).run()
    assert len(norms.reported) == len(norms.clipped) == 4
    assert all(norm > 0.01 for norm in norms.reported)
    assert norms.clipped == pytest.approx([0.01] * 4, rel=1e-3)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_skipped_by_the_scaler_is_not_an_update(job: SimpleNamespace, fused: bool) -> None:
    model, steps = plain_model(), Steps()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    count = iter(range(10))

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return job.loss(model, batch) * (float("inf") if next(count) == 1 else 1.0)

    hook = OptimizerHook(scaler=torch.amp.GradScaler("cpu"))
    loop = job.loop(hook, steps, model=model, optimizer=optimizer, step=step, max_epochs=1)
    loop.run()
    assert steps.updated == [True, False, True, True]
    assert loop.counters.update == 3
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_only_forward_passes_run_under_autocast(job: SimpleNamespace, amp: Any) -> None:
    seen: list[torch.dtype] = []

    class Elsewhere(Hook):
        priority = 1

        def before_iter(self, event: Any) -> None:
            assert not torch.is_autocast_enabled("cpu")

        def after_iter(self, event: Any) -> None:
            assert not torch.is_autocast_enabled("cpu")

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(model(batch[0]).dtype)
        return job.loss(model, batch)

    data = {"val_data": job.batches(1), "test_data": job.batches(1)}
    loop = job.loop(Elsewhere(), OptimizerHook(amp=amp), step=step, max_epochs=1, **data)
    loop.run()
    loop.test()
    assert seen == [torch.bfloat16 if amp == "bf16" else torch.float16] * 7  # the look at val_data, too


def test_autocast_ends_with_an_exception(job: SimpleNamespace) -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        job.loop(OptimizerHook(amp="bf16"), step=step).run()
    assert not torch.is_autocast_enabled("cpu")


def test_the_scaler_state_is_resumed(job: SimpleNamespace, tmp_path: Path) -> None:
    def run(directory: Path, *more: Hook, resume: str | None = None) -> Any:
        hooks = (OptimizerHook(amp="fp16"), CheckpointHook(), *more)
        loop = job.loop(*hooks, work_dir=directory)
        loop.run(resume=resume)
        return job.weights(loop.model)

    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", job.StopAfter(3))
    scaler = load(tmp_path / "parts" / "iter_3.safetensors")["bus"]["hooks"]["OptimizerHook"]["scaler"]
    assert scaler["_growth_tracker"] == 3
    assert job.same(run(tmp_path / "parts", resume="auto"), whole)


def test_a_save_in_an_open_window_keeps_its_gradients(job: SimpleNamespace, tmp_path: Path) -> None:
    """A validation between the steps of a window saves the best at once; going on from there changes no bit."""

    def run(directory: Path, resume: Path | None = None) -> Any:
        hooks = (OptimizerHook(accumulate=4), CheckpointHook(save_best="acc", save_last=False))
        validation = {"val_data": job.batches(1), "val_interval": 6, "metrics": {"acc": job.Scores(0.9, 0.1)}}
        loop = job.loop(*hooks, work_dir=directory, max_iters=8, **validation)
        loop.run(resume=resume)
        return job.weights(loop.model)

    whole = run(tmp_path)
    window = load(tmp_path / "best_acc_iter_6.safetensors")["bus"]["hooks"]["OptimizerHook"]["window"]
    assert window["count"] == 2
    assert job.same(run(tmp_path / "resumed", tmp_path / "best_acc_iter_6.safetensors"), whole)


def test_the_hook_in_a_users_own_loop_is_an_error(job: SimpleNamespace) -> None:
    bus = Bus()
    bus.add(OptimizerHook())
    with pytest.raises(ConfigurationError, match="the body of your own loop"), Run(bus, model=job.model()):
        pass


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 0},
        {"accumulate": 1.5},
        {"grad_clip": 0},
        {"grad_clip": {"norm": 1}},
        {"grad_clip": True},
        {"amp": "fp8"},
    ],
)
def test_wrong_options_are_errors_at_construction(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        OptimizerHook(**options)


def test_fp16_unscales_and_clips_once_per_real_step(job: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    unscale, clip = torch.amp.GradScaler.unscale_, torch.nn.utils.clip_grad_norm_

    def counted(name: str, function: Any) -> Any:
        return lambda *args, **kwargs: (calls.append(name), function(*args, **kwargs))[1]

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", counted("unscale", unscale))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", counted("clip", clip))
    hook = Fp16OptimizerHook(grad_clip=1.0, grad_scaler_config={"init_scale": 8.0}, accumulate=2)
    scales: list[float] = []
    loop = job.loop(hook, max_epochs=1)
    loop.bus.on("before_optimizer_step", lambda event: scales.append(hook.state_dict()["scaler"]["scale"]))
    loop.run()
    assert calls == ["unscale", "clip"] * 2
    assert scales == [8.0, 8.0]


def test_fp16_with_accumulation_and_clipping_is_torchs_own_recipe_to_the_bit(job: SimpleNamespace) -> None:
    """The loop of torch's page "Automatic Mixed Precision examples", with an overflow in the second window."""
    factors = [1.0, 1.0, 1.0, float("inf"), 1.0, 1.0]
    batches = job.batches(6)

    def loss(model: nn.Module, batch: Any, index: int) -> torch.Tensor:
        return job.loss(model, batch) * factors[index]

    expected = job.model()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    norms: list[float] = []
    for index, batch in enumerate(batches):
        with torch.autocast("cpu", dtype=torch.float16):
            one = loss(expected, batch, index) / 2
        scaler.scale(one).backward()
        if index % 2:
            scaler.unscale_(optimizer)
            norms.append(float(torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.05)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    count = iter(range(6))
    hook = Fp16OptimizerHook(grad_clip=0.05, grad_scaler_config={"init_scale": 1024.0, "growth_interval": 1}, accumulate=2)
    model, steps, reported = job.model(), Steps(), list[float]()
    loop = job.loop(hook, steps, model=model, step=lambda m, b: loss(m, b, next(count)), train_data=batches, max_epochs=1)
    loop.bus.on(
        "after_train_iter",
        lambda event: reported.append(float(event.outputs["grad_norm"])) if "grad_norm" in event.outputs else None,
    )
    loop.run()
    assert job.same(job.weights(model), job.weights(expected))
    assert steps.updated == [False, True, False, False, False, True]
    assert hook.state_dict()["scaler"]["scale"] == scaler.get_scale() == 1024.0 * 2 / 2 * 2
    assert reported[::2] == norms[::2]
    assert all(0.05 < norm < 10 for norm in norms[::2])  # unscaled before it is clipped


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fp16OptimizerHook(grad_scaler_config={"scale": 8.0}),
        lambda: Fp16OptimizerHook(grad_scaler_config={"growth_factor": 0.5}),
        lambda: OptimizerHook(scaler={"init_scale": 8.0}),
        lambda: OptimizerHook(amp="bf16", scaler={"init_scale": 8.0}),
        lambda: OptimizerHook(amp="fp16", scaler=8.0),
    ],
)
def test_arguments_that_no_scaler_takes_are_errors_when_the_hook_is_made(make: Any) -> None:
    with pytest.raises(ConfigurationError, match="scaler"):
        make()
