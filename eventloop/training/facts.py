"""What a run and a loop say of themselves in a notebook and in a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainbus.eventloop.events import Progress
from trainbus.eventloop.notebook import card


def facts(
    models: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    progress: Progress,
    work_dir: Path | None,
) -> dict[str, Any]:
    """Return the facts by name. Counts of parameters are those of all models."""
    parameters = sum(one.numel() for model in models.values() for one in model.parameters())
    rates = [f"{type(one).__name__}, lr {one.param_groups[0].get('lr')}" for one in optimizers.values()]
    epochs, iters = progress.max_epochs, progress.max_iters
    return {
        "model": f"{', '.join(type(one).__name__ for one in models.values())}, {parameters:,} parameters",
        "optimizer": "; ".join(rates) or "none",
        "epochs": f"{progress.epoch} of {epochs}" if epochs is not None else str(progress.epoch),
        "iterations": f"{progress.iter:,} of {iters:,}" if iters is not None else f"{progress.iter:,}",
        "work dir": work_dir or "none",
    }


def described(kind: str, named: Mapping[str, Any]) -> str:
    """Return facts as one line."""
    return f"{kind}({', '.join(f'{name}: {value}' for name, value in named.items())})"


def carded(kind: str, named: Mapping[str, Any], bus: Any) -> str:
    """Return facts and the table of hooks as HTML."""
    return card(kind, named, bus.describe().html())
