"""Options that were changed before a resume, and that its checkpoint overrides, are told."""

import pytest
import torch
from structlog.testing import capture_logs
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR, StepLR

from trainbus.eventloop import Bus, Run
from trainbus.hooks import CheckpointHook, ParamSchedulerHook


@pytest.fixture
def session(parts, tmp_path):
    """One session of a training, as a program of its own would make it; returns the loop and the options that it told of."""

    def run(
        epochs, *, optimizer=torch.optim.SGD, schedule=None, groups=1, save_optimizer=True, strict=True, seed=None, **options
    ):
        bus = Bus(CheckpointHook(1, save_optimizer=save_optimizer, save_param_scheduler=save_optimizer))
        model = parts.model()
        made = optimizer([{"params": [p]} for p in list(model.parameters())[:groups]], **{"lr": 0.1, **options})
        if schedule is not None:
            bus.add(ParamSchedulerHook(schedule(made), by="epoch"))
        loop = parts.loop(bus, model=model, optimizer=made, val_data=None, max_epochs=epochs, work_dir=tmp_path, seed=seed)
        with capture_logs() as logs:
            loop.run(resume="auto", strict=strict)
        return loop, [line["options"] for line in logs if line.get("id") == "options-differ"]

    return run


def test_a_changed_optimizer_option_is_reported_again_and_the_checkpoints_value_is_used(session):
    session(1)
    loop, told = session(2, lr=0.5, momentum=0.9)
    assert told == ["optimizer.lr is 0.1, not 0.5; optimizer.momentum is 0, not 0.9"]
    assert loop._optimizer.param_groups[0]["lr"] == 0.1
    assert session(3, lr=0.5)[1] == ["optimizer.lr is 0.1, not 0.5"]
    assert session(4)[1] == []


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: StepLR(optimizer, 1),
        lambda optimizer: SequentialLR(optimizer, [LinearLR(optimizer, 0.1), CosineAnnealingLR(optimizer, 5)], [1]),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=9),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    ],
)
def test_options_changed_by_a_schedule_are_not_reported(session, schedule, logs):
    session(1, schedule=schedule)
    loop, told = session(2, schedule=schedule)
    assert told == []
    loop.run(resume="auto")
    [nothing_left] = [line["event"] for line in logs if line["log_level"] == "warning"]
    assert "nothing is left to train" in nothing_left, "nor in another run of the same loop"


def by(schedule, length):
    return {"schedule": lambda made: schedule(made, length)}


def nested(steps):
    return {"schedule": lambda made: SequentialLR(made, [LinearLR(made, total_iters=steps), StepLR(made, 1)], [steps])}


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (by(CosineAnnealingLR, 5), by(CosineAnnealingLR, 50), ["param_schedulers.CosineAnnealingLR.T_max is 5, not 50"]),
        (nested(2), nested(3), ["param_schedulers.SequentialLR._schedulers[0].total_iters is 2, not 3"]),
        *(({"seed": 1}, {"seed": 2}, ["seed is 1, not 2"]), ({"seed": 1}, {}, [])),
        ({"groups": 2}, {"groups": 2, "lr": 0.5}, [f"optimizer.groups[{n}].lr is 0.1, not 0.5" for n in (0, 1)]),
        (
            *({"optimizer": torch.optim.AdamW}, {"optimizer": torch.optim.Adam}),
            ["optimizer.type is 'AdamW', not 'Adam'", "optimizer.weight_decay is 0.01, not 0"],
        ),
        # Without restored state the options are those that are given.
        ({"save_optimizer": False, **by(StepLR, 5)}, {"lr": 0.5, **by(StepLR, 6)}, []),
        ({}, {"optimizer": torch.optim.AdamW, "lr": 0.5, "strict": False}, []),
    ],
    ids=["schedule", "nested", "seed", "no seed", "groups", "another kind", "not saved", "not restored"],
)
def test_what_was_changed_is_reported_and_what_is_not_restored_keeps_its_options(session, first, second, told):
    session(1, **first)
    loop, reported = session(2, **second)
    assert all(one in "".join(reported) for one in told)
    assert bool(reported) == bool(told)
    assert told or loop._optimizer.param_groups[0]["lr"] == second.get("lr", 0.1)


def test_changed_options_are_reported_in_a_users_own_loop(parts, tmp_path):
    def session(lr, resume=None):
        model = parts.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        options = {"model": model, "optimizer": {"sgd": optimizer}, "work_dir": tmp_path, "resume": resume}
        with capture_logs() as logs, Run(Bus(CheckpointHook(1)), **options) as run:
            parts.train(run, parts.batches(2))
        return [line["options"] for line in logs if "options" in line]

    assert session(0.1) == []
    assert session(0.5, "auto") == ["optimizer.sgd.lr is 0.1, not 0.5"]


@pytest.mark.parametrize(("size", "told"), [(4, []), (2, [(3, 6)])])
def test_another_batch_size_within_an_epoch_is_reported(parts, bus, tmp_path, size, told):
    bus.on("after_train_iter", lambda event: (event.run.checkpoints.save(), event.run.stop()), once=2)
    data = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.arange(12) % 3)
    loader = lambda size: torch.utils.data.DataLoader(data, batch_size=size)  # noqa: E731
    parts.loop(bus, train_data=loader(4), val_data=None, work_dir=tmp_path).run()
    with capture_logs() as logs:
        parts.loop(train_data=loader(size), val_data=None, work_dir=tmp_path).run(resume="auto")
    assert [(line["before"], line["now"]) for line in logs if line.get("id") == "epoch-length-changed"] == told
