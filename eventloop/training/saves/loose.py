"""Loose parameters: those that an optimizer trains and that are in no model of the run, such as the centres of a loss.

A checkpoint holds them by the name of the optimizer, in its order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trainbus.eventloop.errors import CheckpointError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training.optimizers import parameters_of

log = get_logger()

Loose = dict[str, list[torch.nn.Parameter]]


def tell_of_loose(
    loose: Loose,
    models: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    *,
    saved: bool,
) -> None:
    """Log which optimizers have loose parameters; ``saved`` tells whether checkpoints hold them."""
    trains = any(len(loose.get(name, ())) < len(parameters_of(one)) for name, one in optimizers.items())
    for name, some in loose.items():
        facts = {"optimizer": name, "parameters": len(some), "models": ", ".join(models)}
        if not trains:
            log.warning(
                "this optimizer has no parameter of the models, so its steps train none of them; make it from the parameters "
                "of the model that you give to the run, or give the run its model, too",
                id="optimizer-without-model",
                **facts,
            )
        elif saved:
            log.info(
                "this optimizer trains parameters that are in no model of the run; checkpoints hold them, but not the buffers "
                "of their modules: a module in model= or stateful= is saved as a whole",
                **facts,
            )
        else:
            log.warning(
                "this optimizer trains parameters that are in no model of the run, so the trainer's checkpoints do not hold "
                "them: make them a part of the model",
                id="loose-parameters-not-saved",
                **facts,
            )


class SavedLoose:
    """The saved values of loose parameters, and those of the run.

    Raises:
        CheckpointError: their number or shapes differ, and ``strict`` is True; else the log says so.
    """

    def __init__(self, saved: Mapping[str, list[torch.Tensor]], own: Loose, *, strict: bool) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name in own.keys() | saved.keys():
            here, there = own.get(name, []), saved.get(name, [])
            if [one.shape for one in here] == [one.shape for one in there]:
                self._pairs += zip(here, there, strict=True)
                continue
            shapes = [str([tuple(one.shape) for one in some]) for some in (there, here)]
            problem = (
                f"of the parameters of optimizer {name!r} that are in no model, the checkpoint has {len(there)} of shapes "
                f"{shapes[0]}, and the optimizer has {len(here)} of shapes {shapes[1]}"
            )
            if strict and saved:
                raise CheckpointError(f"{problem}; strict=False keeps those of this program")
            log.warning(f"{problem}; those of this program stay as they are", id="loose-parameters-not-loaded", optimizer=name)

    def load(self) -> None:
        """Give the parameters their saved values."""
        with torch.no_grad():
            for parameter, value in self._pairs:
                parameter.copy_(value)
