"""EMAIterHook and EMAEpochHook: the model's own init_ema and update_ema, and its average after a resume."""

import pytest
import torch
from torch import nn

from trainbus.eventloop import ConfigurationError
from trainbus.hooks import CheckpointHook, EMAEpochHook, EMAHook, EMAIterHook, OptimizerHook


class Averaging(nn.Module):
    """A model that keeps the mean of old average and new weight in a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(3, 2)
        self.calls: list[str] = []

    def init_ema(self):
        self.calls.append("init")
        self.register_buffer("average", self.layer.weight.detach().clone())

    def update_ema(self):
        self.calls.append("update")
        self.average.lerp_(self.layer.weight.detach(), 0.5)

    def forward(self, batch):
        return self.layer(batch)


@pytest.mark.parametrize(
    ("found", "updates"), [([EMAIterHook()], 8), ([EMAIterHook(), OptimizerHook(accumulate=2)], 4), ([EMAEpochHook()], 2)]
)
def test_it_is_updated_after_each_step_or_epoch(job, found, updates):
    model = Averaging()
    job.loop(*found, model=model).run()
    assert model.calls == ["init"] + ["update"] * updates


def test_it_sees_the_new_weights(job):
    model = Averaging()
    first = model.layer.weight.detach().clone()
    job.loop(EMAIterHook(), model=model, max_iters=1).run()
    torch.testing.assert_close(model.average, (first + model.layer.weight.detach()) / 2)


def test_a_resumed_run_continues_the_average_of_the_checkpoint(job, tmp_path):
    straight = Averaging()
    job.loop(EMAIterHook(), model=straight).run()
    job.loop(EMAIterHook(), CheckpointHook(1), model=Averaging(), max_epochs=1, work_dir=tmp_path).run()
    resumed = Averaging()
    job.loop(EMAIterHook(), model=resumed, work_dir=tmp_path).run(resume="auto")
    assert resumed.calls == ["init"] + ["update"] * 4
    assert torch.equal(resumed.average, straight.average)


def test_a_second_run_continues_the_average_of_the_same_model_only(job):
    model, other, hook = Averaging(), Averaging(), EMAEpochHook()
    loop = job.loop(hook, model=model, max_epochs=1, val_data=job.batches(1))
    loop.run()
    loop.validate()
    job.loop(hook, model=other, max_epochs=1).run()
    assert model.calls == ["init", "update"]
    assert other.calls == ["init", "update"]


def test_the_model_inside_a_wrapper_is_found(job):
    model = Averaging()
    job.loop(EMAEpochHook(), model=nn.DataParallel(model)).run()
    assert model.calls == ["init", "update", "update"]


def test_one_of_several_models_is_named(job, logs):
    models = {"teacher": Averaging(), "student": job.model()}
    optimizer = torch.optim.SGD(models["student"].parameters(), lr=0.1)
    options = {"model": models, "optimizer": optimizer, "step": lambda both, batch: job.loss(both["student"], batch)}
    job.loop(EMAEpochHook(model="teacher"), **options).run()
    assert models["teacher"].calls == ["init", "update", "update"]
    for name in (None, "tutor"):
        with pytest.raises(ConfigurationError, match="'teacher', 'student'"):
            job.loop(EMAIterHook(model=name), **options).run()


def test_a_model_without_the_methods_is_an_error_naming_the_other_hook(job, logs):
    with pytest.raises(ConfigurationError, match=r"init_ema.*update_ema.*EMAHook"):
        job.loop(EMAIterHook()).run()


@pytest.mark.parametrize("kind", [EMAHook, EMAIterHook, EMAEpochHook])
def test_a_hook_added_during_a_run_is_an_error(job, kind):
    loop = job.loop(model=Averaging())
    loop.bus.on("before_train_iter", lambda event: loop.bus.add(kind()), once=2)
    with pytest.raises(ConfigurationError, match=kind.__name__):
        loop.run()
