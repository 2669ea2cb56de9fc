"""A run ends when its loss is not finite."""

import pytest
import torch
from structlog.testing import capture_logs

from eventloop import Bus, ConfigurationError, Run, TrainingError
from hooks.check_loss import CheckInvalidLossHook


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
@pytest.mark.parametrize("key", ["loss", "aux_loss"])
def test_it_names_the_key_and_the_iteration(job, key, value):
    loop = job.loop(CheckInvalidLossHook(interval=3), step=breaking(job, 6, value, key))
    with pytest.raises(TrainingError, match=rf"{key} .*(nan|inf).* 6 .*2"), capture_logs():
        loop.run()


@pytest.mark.parametrize(("interval", "key"), [(1, "acc"), (3, "aux_loss")])
def test_it_looks_only_every_so_often_and_at_losses(job, interval, key):
    loop = job.loop(CheckInvalidLossHook(interval=interval), step=breaking(job, 2, float("nan"), key))
    loop.run()
    assert loop.counters.iter == 2 * len(job.batches())


def test_other_outputs_can_be_named(job):
    loop = job.loop(CheckInvalidLossHook(interval=1, keys=["acc"]), step=breaking(job, 2, float("nan"), "acc"))
    with pytest.raises(TrainingError, match=r"acc .*nan"), capture_logs():
        loop.run()


def test_a_missing_output_is_an_error_naming_the_outputs(job):
    loop = job.loop(CheckInvalidLossHook(interval=1, keys="los"), step=breaking(job, 0, 1.0))
    with pytest.raises(TrainingError, match=r"'los'.*'aux_loss'"), capture_logs():
        loop.run()
    bus = Bus(CheckInvalidLossHook(interval=1))
    with pytest.raises(TrainingError, match="acc"), capture_logs(), Run(bus, model=job.model()) as run:
        for _ in run.epochs(1):
            for _ in run.train(job.batches()):
                run.report(acc=0.5)


@pytest.mark.parametrize("keys", [[], [1]])
def test_keys_that_are_no_names_are_an_error(keys):
    with pytest.raises(ConfigurationError, match="keys"):
        CheckInvalidLossHook(keys=keys)
