"""The kinds of hooks of other systems: those that a bus accepts, and those that it refuses with a reason."""

from __future__ import annotations

import sys
from typing import Any, Final

from trainbus.eventloop.bus import GuestKind

_INSTEAD: Final = {
    "model_checkpoint.ModelCheckpoint": 'CheckpointHook(save_best="...")',
    "early_stopping.EarlyStopping": 'EarlyStoppingHook("...")',
    "lr_monitor.LearningRateMonitor": "RuntimeInfoHook(), which reports learning rates, and LoggerHook(), which writes them",
    "progress.progress_bar.ProgressBar": "ProgressBar()",
    "stochastic_weight_avg.StochasticWeightAveraging": 'EMAHook(ema_type="StochasticWeightAverage")',
    "weight_averaging.WeightAveraging": "EMAHook()",
    "throughput_monitor.ThroughputMonitor": "IterTimerHook()",
    "callback.Callback": "a hook of your own (a class derived from trainbus.eventloop.Hook)",
}
"""Replacements for Lightning's callbacks, by module and class."""

_LIGHTNING: Final = tuple(
    GuestKind(
        f"{package}.callbacks.{base}",
        name=f"{package}.Callback",
        refusal=(
            "callbacks of Lightning use about 45 attributes of its Trainer, private ones too, which a run does not have; "
            f"add {ours} instead, or give the callback to a Lightning Trainer, and attach the bus to it: attach(bus, trainer)"
        ),
    )
    for package in ("lightning.pytorch", "pytorch_lightning")
    for base, ours in _INSTEAD.items()
)

GUESTS: tuple[GuestKind, ...] = (
    GuestKind("mmengine.hooks.hook.Hook", adapter="trainbus.compat.mmengine.guest:MMEngineHook", name="mmengine.hooks.Hook"),
    GuestKind(
        "transformers.trainer_callback.TrainerCallback",
        adapter="trainbus.compat.transformers_guests:TransformersHook",
        name="transformers.TrainerCallback",
    ),
    *_LIGHTNING,
)
"""Each kind, with the adapter that is imported for the first hook of that kind, or the reason for a refusal."""


def find_in_mmengine(kind: str, name: str) -> type | None:
    """Return the hook that a module of the user has registered in MMEngine's ``HOOKS`` or in a registry derived from it."""
    registry = sys.modules.get("mmengine.registry") if kind == "hook" else None
    return None if registry is None else _within(registry.HOOKS, name)


def _within(registry: Any, name: str) -> type | None:
    """Look in a registry of MMEngine and in its children. Nothing is imported, as ``registry.get`` would do."""
    if name in registry.module_dict:
        found: type = registry.module_dict[name]
        return found
    return next(filter(None, (_within(child, name) for child in registry.children.values())), None)
