"""Call the user's steps, and check what a training step returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from eventloop.errors import TrainingError, stopped
from eventloop.training.arguments import Step


def called(name: str, step: Step, model: Any, batch: Any) -> Any:
    """Call a step; turn StopIteration, which would end the loop around it, into an error."""
    try:
        return step(model, batch)
    except StopIteration as error:
        raise stopped(error, f"{name}()") from error


def checked_outputs(outputs: Any) -> dict[str, Any]:
    """Return the outputs of a training step as a dict with a scalar ``"loss"``."""
    if not isinstance(outputs, Mapping):
        outputs = {"loss": outputs}
    if "loss" not in outputs:
        raise TrainingError(
            f"step() returned no 'loss', only {', '.join(map(repr, outputs)) or 'an empty dict'}; the update needs a loss"
        )
    loss = outputs["loss"]
    if not isinstance(loss, torch.Tensor):
        raise TrainingError(f"step() returned a loss of type {type(loss).__name__}; return a scalar tensor")
    if loss.numel() != 1:
        raise TrainingError(
            f"step() returned a loss of shape {tuple(loss.shape)}; return a scalar: reduce it, for example with .mean()"
        )
    return {**outputs, "loss": loss if loss.dim() == 0 else loss.reshape(())}
