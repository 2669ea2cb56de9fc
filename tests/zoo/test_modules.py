"""Every module of ``torch.nn`` with a state, with the inputs of torch's own tests; and modules whose state is odd."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import module_db

from . import odd_modules
from .kit import BATCHES, LOOP, OWN, Parts, tried
from .trainers import TRAINERS

WAYS = {way.name: way for way in (OWN, LOOP, *TRAINERS)}


def _inputs(info: Any) -> list[Any]:
    """Return what torch's tests give a module.

    Source: ``torch/testing/_internal/common_modules.py``, which ships with torch.
    """
    return info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True)


def _made(info: Any, number: int) -> tuple[nn.Module, Any]:
    """Return a module with new weights, and its inputs, which are the same at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        given = _inputs(info)[number]
    made = given.constructor_input
    return info.module_cls(*made.args, **made.kwargs), given.forward_input


def _listed() -> list[Any]:
    """Return (module, number of its input): the first, the middle and the last of the inputs that torch's tests give it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts = [(info, len(_inputs(info))) for info in module_db]
    numbers = [(info, number) for info, count in counts for number in sorted({0, count // 2, max(count - 1, 0)}) if count]
    return [pytest.param(info, number, id=f"{info.name}-{number}") for info, number in numbers]


def _float(value: Any) -> torch.Tensor | float:
    if isinstance(value, torch.Tensor):
        return value.float().square().mean() if value.numel() else 0.0
    return sum(map(_float, value)) if isinstance(value, list | tuple) else 0.0


@pytest.mark.parametrize(("info", "number"), _listed())
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_each_module_of_torch_resumes(info, number, tmp_path, row):
    model, inputs = _made(info, number)
    if inputs is None or not [*model.parameters()]:
        pytest.skip("it trains no weight")
    if not isinstance(_float(model(*inputs.args, **inputs.kwargs)), torch.Tensor):
        pytest.skip("its output is empty")

    def make():
        model, inputs = _made(info, number)

        def step(module, batch):
            return _float(module(*inputs.args, **inputs.kwargs))

        for tensor in (*inputs.args, *inputs.kwargs.values()):
            if isinstance(tensor, torch.Tensor):
                tensor.requires_grad_(False)
        model.train()
        step(model, 0)  # lazy parameters take their shapes
        return Parts(model, torch.optim.Adam(model.parameters(), lr=0.01), step, [0] * BATCHES)

    row("modules of torch.nn", info.name, f"input {number}", "own loop", tried(OWN, make, tmp_path))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", odd_modules.JOBS, ids=lambda make: make.__name__)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_each_odd_module_resumes_in_each_loop_and_trainer(make, way, tmp_path, row):
    outcome = tried(WAYS[way], make, tmp_path, taken=way in ("own loop", "`TrainLoop`"))
    row("modules with an odd state", make.__name__.replace("_", " "), (make.__doc__ or "").strip(), way, outcome)
