"""Every optimizer that torch has, found by walking the module, with the options that torch's own tests try."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import pytest
import torch
from torch.testing._internal.common_optimizers import optim_db

from .jobs import home_of, job
from .kit import LOOP, OWN, tried
from .trainers import TRAINERS

KINDS = sorted(
    {kind for kind in vars(torch.optim).values() if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)}
    - {torch.optim.Optimizer},
    key=lambda kind: kind.__name__,
)
WAYS = {way.name: way for way in (OWN, LOOP, *TRAINERS)}


@cache
def variants(kind: type[torch.optim.Optimizer]) -> dict[str, dict[str, Any]]:
    """Return options by a short text: those of torch's own tests, and each implementation that the class has.

    Source: ``torch/testing/_internal/common_optimizers.py``, which ships with torch.
    """
    listed = [entry.kwargs for info in optim_db if info.optim_cls is kind for entry in info.optim_inputs_func(device="cpu")]
    taken = inspect.signature(kind).parameters
    listed += [{name: True} for name in ("foreach", "fused") if name in taken]
    return {", ".join(f"{name}={value}" for name, value in options.items()): options for options in listed or [{}]}


OPTIONS = [(kind, text) for kind in KINDS for text in variants(kind)]


def _id(value: Any) -> str:
    return value.__name__ if inspect.isclass(value) else str(value)


@pytest.mark.parametrize(("kind", "text"), OPTIONS, ids=_id)
def test_each_optimizer_resumes_with_each_of_its_options(kind, text, tmp_path, row):
    _resumes(kind, text, "own loop", tmp_path, row)


@pytest.mark.parametrize("way", [name for name in WAYS if name != "own loop"])
@pytest.mark.parametrize("kind", KINDS, ids=_id)
def test_each_optimizer_resumes_in_each_loop_and_trainer(kind, way, tmp_path, row):
    _resumes(kind, next(iter(variants(kind))), way, tmp_path, row)


def _resumes(kind, text, way, folder, row):
    options = variants(kind)[text]

    def optimizer(model):
        copied = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
        return kind(model.parameters(), **copied)

    home, reason = home_of(optimizer)
    if home is None:
        row("optimizers of torch", kind.__name__, text, way, f"not trained: {reason}")
        pytest.skip(reason)
    usual = home.name in ("dense", "matrices")  # trainers may refuse closures and sparse gradients
    row("optimizers of torch", kind.__name__, text, way, tried(WAYS[way], job(home, optimizer), folder, taken=usual))
