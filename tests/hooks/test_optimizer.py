"""The optimizer update: gradients, accumulation, clipping, mixed precision."""

import pytest
import torch

from trainbus.hooks import Fp16OptimizerHook, OptimizerHook


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_only_forward_passes_run_under_autocast(job, amp):
    seen: list[torch.dtype] = []
    elsewhere: list[bool] = []

    def step(model, batch):
        seen.append(model(batch[0]).dtype)
        return job.loss(model, batch)

    data = {"val_data": job.batches(1), "test_data": job.batches(1)}
    loop = job.loop(OptimizerHook(amp=amp), step=step, max_epochs=1, **data)
    loop.bus.on("before_iter", "after_iter", lambda event: elsewhere.append(torch.is_autocast_enabled("cpu")), priority=1)
    loop.run()
    loop.test()
    assert seen == [torch.bfloat16 if amp == "bf16" else torch.float16] * 7  # the look at val_data, too
    assert elsewhere == [False] * 12


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
    model, seen = job.model(), []
    loop = job.loop(hook, model=model, step=lambda m, b: loss(m, b, next(count)), train_data=batches, max_epochs=1)
    loop.bus.on("after_train_iter", lambda event: seen.append((event.run.updated, event.outputs.get("grad_norm"))))
    loop.run()
    assert job.same(job.weights(model), job.weights(expected))
    assert [updated for updated, _ in seen] == [False, True, False, False, False, True]
    reported = [float(norm) for _, norm in seen if norm is not None]
    assert hook.state_dict()["scaler"]["scale"] == scaler.get_scale() == 1024.0 * 2 / 2 * 2
    assert reported[::2] == norms[::2]
    assert all(0.05 < norm < 10 for norm in norms[::2])  # unscaled before it is clipped
