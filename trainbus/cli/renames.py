"""The names of trainbus 0.2 that are others now: the table of ``trainbus migrate``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MODULES: Final[Mapping[str, str]] = {
    "eventloop.bridges": "trainbus.bridges",
    "eventloop.config": "trainbus.config",
    "eventloop.observe": "trainbus.observe",
    "hooks.compat": "trainbus.compat",
    "hooks.demo": "trainbus.demo",
    "hooks.toy": "trainbus.testing",
    "eventloop": "trainbus.eventloop",
    "hooks": "trainbus.hooks",
}
"""Modules, those in others first."""

HOMES: Final = (
    "trainbus",
    "trainbus.events",
    "trainbus.errors",
    "trainbus.media",
    "trainbus.observe",
    "trainbus.bridges",
    "trainbus.bridges.ray",
    "trainbus.convert",
    "trainbus.testing",
    "trainbus.demo",
    "trainbus.eventloop",
    "trainbus.eventloop.registry",
)
"""Where a name is looked for that its module does not have any more."""

CLASSES: Final[Mapping[str, str]] = {"Run": "run", "TrainLoop": "loop", "Bus": "bus"}
"""Classes whose objects have renamed members, and the name that such an object usually has."""

MEMBERS: Final[Mapping[str, Mapping[str, str]]] = {
    "run": {
        "apply_state": "checkpoints.apply_state",
        "best": "checkpoints.best",
        "check_savable": "checkpoints.check",
        "checkpoint_dir": "checkpoints.directory",
        "checkpoint_now": "checkpoints.save",
        "checkpoint_suffix": "checkpoints.suffix",
        "gather_state": "checkpoints.gather_state",
        "heard": "wants",
        "keeps_checkpoints_in": "checkpoints.keeps_in",
        "note_options": "checkpoints.note_options",
        "request_save": "checkpoints.save",
        "resume": "unpause",
        "resumed_from": "checkpoints.resumed_from",
        "accumulation": "steps.accumulation",
        "between_steps": "steps.between",
        "costs": "bus.costs",
        "epoch_length": "data.epoch_length",
        "evaluation_data": "data.evaluation",
        "evaluation_length": "data.evaluation_length",
        "foreign_averages": "foreign.averages",
        "foreign_schedulers": "foreign.schedulers",
        "foreign_settings": "foreign.settings",
        "last_batch": "data.last_batch",
        "one_epoch": "data.one_epoch",
        "stepped": "steps.of",
        "total_iters": "data.total_iters",
        "train_data": "data.train",
        "wait_for_saves": "checkpoints.wait",
    },
    "loop": {"checkpoint_now": "save", "look": "check", "resume": "unpause", "val": "validate"},
    "bus": {"emit": "publish", "remove": "off"},
}
"""Members of a run, a loop and a bus."""

COMMON: Final = {"epoch_length", "evaluation_data", "last_batch", "one_epoch", "total_iters", "train_data"}
"""Those that objects of users may have, too."""

MEDIA: Final[Mapping[str, str]] = {
    "report_figure": "Figure",
    "report_histogram": "Histogram",
    "report_image": "Image",
    "report_text": "Text",
}
"""``run.report_image(name, value)`` is ``run.report(name=Image(value))``."""

FUNCTIONS: Final[Mapping[str, str]] = {"attach": "trainbus"}
"""``bus.attach(trainer)`` is ``attach(bus, trainer)``: methods of a bus that are functions, and their module."""

OPTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "CheckpointHook": {"save_begin": "begin"},
    "EMAHook": {"begin_iter": "begin", "begin_epoch": "by_epoch=True, begin"},
    "EvaluateHook": {"period": "interval"},
    "RayTrainHook": {"metrics_every": "interval"},
}
"""Options of hooks."""
