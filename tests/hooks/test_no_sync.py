"""The training thread never waits for a number: everything that would is recorded with the file that asked for it."""

import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import hooks

from .conftest import make_loop

ROOT = Path(__file__).parents[2]
OURS = (str(ROOT / "eventloop"), str(ROOT / "hooks"))
ASKING = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__")
DATA = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(5)]


@pytest.fixture
def asked(monkeypatch):
    """Who asked a tensor for its number on the training thread: name of the method, and its caller if that is one of us."""
    found = []
    training = threading.current_thread()

    def watched(name, original):
        def ask(self, *args, **kwargs):
            caller = sys._getframe(1)
            if threading.current_thread() is training and caller.f_code.co_filename.startswith(OURS):
                found.append(f"{name} in {caller.f_code.co_filename}:{caller.f_lineno}")
            return original(self, *args, **kwargs)

        return ask

    monkeypatch.setattr(torch.Tensor, "is_cpu", False, raising=False)  # as on a device; on the CPU there is nothing to wait for
    for name in ASKING:
        monkeypatch.setattr(torch.Tensor, name, watched(name, getattr(torch.Tensor, name)))
    return found


def step(model, batch):
    inputs, target = batch
    loss = functional.mse_loss(model(inputs), target)
    numbers = {"correct": (inputs > 0).sum(), "share": inputs.mean(dtype=torch.float64), "norms": loss.reshape(1)}
    return {"loss": loss, "logits": inputs} | numbers


def test_logging_every_iteration_does_not_synchronise_with_the_device(asked, tmp_path):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    used = (
        hooks.OptimizerHook(grad_clip={"max_norm": 1.0}),
        hooks.RuntimeInfoHook(),
        hooks.IterTimerHook(),
        hooks.EMAHook(momentum=0.01),
        hooks.CheckInvalidLossHook(interval=1),
        hooks.LoggerHook(interval=1, writers=[hooks.JSONLinesWriter()]),
        hooks.ParamSchedulerHook(schedule, by="iter"),
        hooks.CheckpointHook(interval=1),
    )
    make_loop(*used, model=model, optimizer=optimizer, step=step, train_data=DATA, work_dir=tmp_path).run()
    assert asked == []
    assert len((tmp_path / "scalars.jsonl").read_text().splitlines()) == 10


def test_a_synchronisation_is_detected(asked, bus):
    """The watch itself: a hook that asks on the training thread is seen."""
    code = compile("def ask(event):\n    event.outputs['loss'].item()\n", str(ROOT / "hooks" / "bad.py"), "exec")
    names = {}
    exec(code, names)  # noqa: S102 - a handler that pretends to be one of ours
    bus.on("after_train_iter", names["ask"])
    make_loop(bus=bus, model=torch.nn.Linear(3, 1), step=step, train_data=DATA, max_epochs=1).run()
    assert len(asked) == len(DATA)
    assert asked[0].endswith("bad.py:2")
