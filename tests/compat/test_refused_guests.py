"""Callbacks of Lightning are refused, with the reason and what to do instead."""

import importlib
import re

import pytest

from trainbus.eventloop import Bus, SubscribeError

from ..failing import said


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("ModelCheckpoint", "CheckpointHook"),
        ("EarlyStopping", "EarlyStoppingHook"),
        ("LearningRateMonitor", "RuntimeInfoHook"),
        ("TQDMProgressBar", "ProgressBar"),
        ("StochasticWeightAveraging", "EMAHook"),
        ("Timer", "hook of your own"),
    ],
)
def test_a_callback_of_lightning_is_refused_with_the_reason_and_ours_for_it(name, ours):
    pytest.importorskip("lightning.pytorch")
    kind = getattr(importlib.import_module("lightning.pytorch.callbacks"), name)
    options = {"EarlyStopping": {"monitor": "loss"}, "StochasticWeightAveraging": {"swa_lrs": 0.1}}.get(name, {})
    message = said(Bus().add, kind(**options), error=SubscribeError)
    assert message.startswith(f"{name} is a lightning.pytorch.Callback")
    assert ours in message
    assert message.endswith("attach(bus, trainer)")


def test_a_callback_of_the_older_package_is_refused_too_and_of_others_the_guests_are_named():
    older = type("Timer", (), {"__module__": "pytorch_lightning.callbacks.callback", "__qualname__": "Callback"})
    assert "pytorch_lightning.Callback" in said(Bus().add, older(), error=SubscribeError)
    timer = pytest.importorskip("ignite.handlers").Timer()
    assert re.search(r"transformers\.TrainerCallback.*, not Timer", said(Bus().add, timer, error=SubscribeError))
