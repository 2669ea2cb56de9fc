"""The hooks and writers of Pointrix, with their names in trainbus."""

from __future__ import annotations

from functools import partial

from trainbus.config import Migration

_hook = partial(Migration, "Pointrix")

TABLE = (
    _hook(
        "LogHook",
        ("LoggerHook", "ProgressBar"),
        preset={"interval": 1},
        note="losses on the bar are smoothed the same way, 0.4·new + 0.6·old",
    ),
    _hook("CheckPointHook", ("CheckpointHook",), preset={"interval": 5000, "by_epoch": False}),
    _hook("Writer", ("Writer",), note="`write_scalars` takes the scalars of one moment at once"),
    _hook("TensorboardWriter", ("TensorBoardWriter",), note="a folder of the work dir: `directory=`"),
    _hook("ProgressLogger", ("ProgressBar",), note="made by its LogHook there"),
)
