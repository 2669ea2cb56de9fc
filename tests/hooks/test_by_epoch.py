"""Hooks that count epochs are refused in a training that is one long epoch, before its first iteration."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from trainbus.eventloop import Bus, ConfigurationError, Run, TrainLoop
from trainbus.hooks import CheckpointHook, EMAEpochHook, EvaluateHook, ParamSchedulerHook

from .conftest import batches, files, loss_of, small_model


class Averaging(nn.Sequential):
    def init_ema(self): ...

    def update_ema(self): ...


def hooks(optimizer):
    return {
        "CheckpointHook(interval=1)": (CheckpointHook(interval=1), "by_epoch=False"),
        'ParamSchedulerHook(by="epoch")': (ParamSchedulerHook(StepLR(optimizer, 1), by="epoch"), 'by="iter"'),
        "EvaluateHook(by_epoch=True)": (EvaluateHook(1, dict, by_epoch=True), "by_epoch=False"),
        "EMAEpochHook": (EMAEpochHook(), "EMAIterHook"),
    }


NAMES = [*hooks(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))]


def parts(name):
    model = Averaging(*small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook, way_out = hooks(optimizer)[name]
    return model, optimizer, Bus(hook), way_out


@pytest.mark.parametrize("name", NAMES)
def test_the_error_of_a_loop_and_of_its_check_names_the_hook_and_the_way_out(tmp_path, name):
    model, optimizer, bus, way_out = parts(name)
    loop = TrainLoop(model, optimizer, step=loss_of, train_data=batches(), bus=bus, max_iters=8, work_dir=tmp_path)
    found = loop.check()
    assert not found.ok
    with pytest.raises(ConfigurationError) as error:
        loop.run()
    for text in (str(error.value), *found.errors):
        assert name in text
        assert "max_iters=8" in text
        assert way_out in text
    assert loop.counters.iter == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("endless", [True, False])
def test_your_own_loop_may_have_several_epochs_in_so_many_iterations(tmp_path, name, endless):
    model, optimizer, bus, way_out = parts(name)

    def train():
        with Run(bus, model=model, optimizer=optimizer, work_dir=tmp_path) as run:
            for _ in run.epochs(max_iters=8):
                for batch in run.train(batches(), endless=endless):
                    optimizer.zero_grad()
                    loss_of(model, batch).backward()
                    optimizer.step()
        return run.progress.epoch

    if endless:
        with pytest.raises(ConfigurationError, match=way_out):
            train()
    else:
        assert train() == 2


def test_last_and_best_files_need_no_interval(tmp_path):
    model = small_model()
    optimizer, bus = torch.optim.SGD(model.parameters(), lr=0.1), Bus(CheckpointHook(save_best="loss"))
    data = {"train_data": batches(), "val_data": batches(1), "val_interval": 4}
    TrainLoop(model, optimizer, step=loss_of, **data, bus=bus, max_iters=8, work_dir=tmp_path).run()
    assert files(tmp_path) >= {"epoch_1"}
