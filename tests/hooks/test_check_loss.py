"""A run ends when its loss is not finite."""

import pytest
import torch

from trainbus.eventloop import Bus, Run, TrainingError
from trainbus.hooks import CheckInvalidLossHook, CheckpointHook


def breaking(job, at, value, key="loss"):
    count = iter(range(1, 1000))

    def step(model, batch):
        loss = job.loss(model, batch)
        outputs = {"loss": loss, "aux_loss": loss.detach() * 2, "acc": torch.tensor(0.5)}
        if next(count) == at:
            outputs[key] = outputs[key] * value
        return outputs

    return step


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("key", "options"), [("loss", {}), ("aux_loss", {}), ("acc", {"keys": ["acc"]})])
def test_it_names_the_key_of_a_loss_or_of_another_output_that_is_named_and_the_iteration(job, key, options, value, logs):
    loop = job.loop(CheckInvalidLossHook(interval=3, **options), step=breaking(job, 6, value, key))
    with pytest.raises(TrainingError, match=rf"{key} .*(nan|inf).* 6 .*2"):
        loop.run()


def test_it_does_not_advise_to_resume_as_is(job, tmp_path):
    loop = job.loop(
        CheckInvalidLossHook(1), CheckpointHook(1), step=breaking(job, 6, float("nan")), work_dir=tmp_path, max_epochs=999
    )
    with pytest.raises(TrainingError) as caught:
        loop.run()
    assert any("lower the learning rate" in note and "before iteration 6" in note for note in caught.value.__notes__)
    assert not any('resume="auto"' in note for note in caught.value.__notes__)


@pytest.mark.parametrize(("interval", "key"), [(1, "acc"), (3, "aux_loss")])
def test_it_looks_only_every_so_often_and_at_losses(job, interval, key):
    loop = job.loop(CheckInvalidLossHook(interval=interval), step=breaking(job, 2, float("nan"), key))
    loop.run()
    assert loop.counters.iter == 2 * len(job.batches())


def test_a_missing_output_is_an_error_naming_the_outputs(job, logs):
    loop = job.loop(CheckInvalidLossHook(interval=1, keys="los"), step=breaking(job, 0, 1.0))
    with pytest.raises(TrainingError, match=r"'los'.*'aux_loss'"):
        loop.run()
    bus = Bus(CheckInvalidLossHook(interval=1))
    with pytest.raises(TrainingError, match="acc"), Run(bus, model=job.model()) as run:
        for _ in run.epochs(1):
            for _ in run.train(job.batches()):
                run.report(acc=0.5)
