"""Callbacks of Lightning are refused, with the reason and what to do instead."""

import importlib

import pytest

from eventloop import Bus, SubscribeError


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("ModelCheckpoint", "CheckpointHook"),
        ("EarlyStopping", "EarlyStoppingHook"),
        ("LearningRateMonitor", "RuntimeInfoHook"),
        ("TQDMProgressBar", "ProgressBar"),
        ("StochasticWeightAveraging", "EMAHook"),
        ("Timer", "a hook of your own"),
    ],
)
def test_a_callback_of_lightning_is_refused_with_the_reason_and_ours_for_it(package, name, ours):
    pytest.importorskip(package)
    kind = getattr(importlib.import_module(f"{package}.callbacks"), name)
    options = {"EarlyStopping": {"monitor": "loss"}, "StochasticWeightAveraging": {"swa_lrs": 0.1}}.get(name, {})
    with pytest.raises(SubscribeError) as caught:
        Bus().add(kind(**options))
    message = str(caught.value)
    assert message.startswith(
        f"{name} is a {package}.Callback, which cannot be a guest: callbacks of Lightning use about 45 attr"
    )
    assert f"; add {ours}" in message
    assert message.endswith("attach the bus to it: bus.attach(trainer)")


def test_an_object_of_another_library_is_an_error_that_names_the_guests():
    engine = pytest.importorskip("ignite.handlers")
    with pytest.raises(SubscribeError, match=r"takes Hook objects and guests \(.*transformers.TrainerCallback.*\), not Timer"):
        Bus().add(engine.Timer())
