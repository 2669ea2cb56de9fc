"""The optimizer update: gradients, accumulation, clipping, mixed precision."""

import pytest
import torch

from eventloop import Hook
from hooks import Fp16OptimizerHook, OptimizerHook


class Steps(Hook):
    """Notes iterations with an update and which optimizers stepped."""

    def __init__(self):
        self.updated: list[bool] = []
        self.events: list[str] = []

    def before_optimizer_step(self, event):
        self.events.append(f"before {event.name}")

    def after_optimizer_step(self, event):
        self.events.append(f"after {event.name}")

    def after_train_iter(self, event):
        self.updated.append(event.run.updated)


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_only_forward_passes_run_under_autocast(job, amp):
    seen: list[torch.dtype] = []

    class Elsewhere(Hook):
        priority = 1

        def before_iter(self, event):
            assert not torch.is_autocast_enabled("cpu")

        def after_iter(self, event):
            assert not torch.is_autocast_enabled("cpu")

    def step(model, batch):
        seen.append(model(batch[0]).dtype)
        return job.loss(model, batch)

    data = {"val_data": job.batches(1), "test_data": job.batches(1)}
    loop = job.loop(Elsewhere(), OptimizerHook(amp=amp), step=step, max_epochs=1, **data)
    loop.run()
    loop.test()
    assert seen == [torch.bfloat16 if amp == "bf16" else torch.float16] * 7  # the look at val_data, too


def test_fp16_with_accumulation_and_clipping_is_torchs_own_recipe_to_the_bit(job):
    """The loop of torch's page "Automatic Mixed Precision examples", with an overflow in the second window."""
    factors = [1.0, 1.0, 1.0, float("inf"), 1.0, 1.0]
    batches = job.batches(6)

    def loss(model, batch, index):
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
