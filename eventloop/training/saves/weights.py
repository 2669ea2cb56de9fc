"""Load the weights of a model in a saved state as its own ``load_state_dict`` decides, and name them as checkpoints do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from trainbus.eventloop.checkpoint import (
    AsPath,
    WrapperNames,
    load_whole,
    pick_weights,
    same_but_for_wrappers,
)
from trainbus.eventloop.errors import CheckpointError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.privates import metadata_of, with_metadata

log = get_logger()


def checkpoint_names(model: torch.nn.Module) -> WrapperNames:
    """Return the names of a model's tensors, with and without those of wrappers."""
    return WrapperNames(model, model.state_dict())


def checkpoint_keys(model: torch.nn.Module) -> dict[str, str]:
    """Map the names in ``model.state_dict()`` to keys in checkpoints, which omit the names of wrappers.

    These are the names that DDP, FSDP, ``DataParallel``, ``torch.compile`` and activation checkpointing put there, around the
    model or a part of it. A submodule of the model's own that is called ``module`` stays.
    """
    return checkpoint_names(model).short


def load_weights(model: torch.nn.Module, weights: Mapping[str, Any] | AsPath, *, strict: bool = True) -> bool:
    """Load weights into ``model``, wrapped or not, by its own ``load_state_dict``; return True if all of them fit.

    Args:
        model: the model.
        weights: its ``state_dict`` with keys as in checkpoints, without wrapper names; or the path or URL of a checkpoint of
            one model.
        strict: False logs keys that are missing or unexpected and shapes that differ, and loads the others.

    Raises:
        CheckpointError: the model refuses the weights. It may have loaded some of them.
    """
    saved = weights if isinstance(weights, Mapping) else pick_weights(load_whole(weights))
    return SavedWeights("model", model, saved).load(strict=strict)


class SavedWeights:
    """The saved weights of a model, by the names that its ``load_state_dict`` knows."""

    def __init__(self, name: str, model: torch.nn.Module, saved: Mapping[str, Any]) -> None:
        self._name = name
        self._model = model
        own = model.state_dict()
        self._names = WrapperNames(model, own)
        self._own = own
        self._given = self._as_here(saved)

    def _as_here(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        names, metadata = self._names, metadata_of(saved)
        renamed = same_but_for_wrappers(saved, names.long)
        if not renamed and not names.wrapped:
            return saved
        given = {names.within(renamed.get(key, key)): value for key, value in saved.items()}
        return with_metadata(given, names.metadata_within(metadata, metadata_of(self._own) or ()))

    @property
    def fits(self) -> bool:
        """True if names and shapes are the model's, so that it will hardly refuse them."""
        return not any(self._problems(self._own).values())

    def recast(self) -> set[int]:
        """Return the ids of parameters that have another dtype than their saved values."""
        given, names = self._given, self._names
        return {
            id(parameter)
            for name, parameter in self._model.named_parameters(remove_duplicate=False)
            if isinstance(saved := given.get(names.within(names.without(name))), torch.Tensor)
            and saved.dtype != parameter.dtype
        }

    def copied(self) -> Callable[[], None]:
        """Return a function that gives the model the weights that it has now."""
        copies = {name: _copy(value) for name, value in self._own.items() if _is_there(value)}

        def put_back() -> None:
            with torch.no_grad():
                for name, value in self._model.state_dict().items():
                    if name in copies and _is_there(value) and value.shape == copies[name].shape:
                        value.copy_(copies[name])

        return put_back

    def load(self, *, strict: bool) -> bool:
        """Let the model load the weights; return True if all of them fit.

        Raises:
            CheckpointError: the model refuses them. With ``strict=False``, it refuses those of the right shape, too.
        """
        load, given = self._model.load_state_dict, self._given
        try:
            if strict:
                load(given)  # a method of the user's own may take no other argument
                return True
            return self._told(load(given, strict=False), {})
        except Exception as error:  # any: modules load their own state
            problems = self._problems(self._model.state_dict())
            refused = problems["of another shape"]
            if strict or not refused:
                raise self._explained(problems, error) from error
        fitting = {name: value for name, value in given.items() if self._names.without(name) not in refused}
        try:
            return self._told(load(with_metadata(fitting, metadata_of(given)), strict=False), refused)
        except Exception as error:  # likewise
            raise self._explained({}, error) from error

    def _problems(self, own: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """Return how the names and shapes differ: for each kind of problem, its text by checkpoint key."""
        given, short = self._given, self._names.without
        both = [(short(name), given[name], value) for name, value in own.items() if name in given]
        return {
            "missing": {name: name for name in sorted(short(name) for name in own if name not in given)},
            "unexpected": {name: name for name in sorted(short(name) for name in given if name not in own)},
            "of another shape": {
                key: f"{key} (saved {tuple(saved.shape)}, here {tuple(value.shape)})"
                for key, saved, value in both
                if isinstance(saved, torch.Tensor) and _is_there(value) and saved.shape != value.shape
            },
        }

    def _told(self, left: Any, refused: Mapping[str, str]) -> bool:
        """Warn of what was not loaded, as ``load_state_dict`` returned it; return True if there is nothing."""
        missing, unexpected = (
            sorted({self._names.without(name) for name in getattr(left, f"{kind}_keys", ())} - refused.keys())
            for kind in ("missing", "unexpected")
        )
        found = {"missing": missing, "unexpected": unexpected, "of another shape": [*refused.values()]}
        if any(found.values()):
            log.warning("the checkpoint fits the model only in part", id="weights-fit-in-part", model=self._name, **found)
        return not any(found.values())

    def _explained(self, problems: Mapping[str, Mapping[str, str]], error: Exception) -> CheckpointError:
        kinds = [(kind, [*texts.values()]) for kind, texts in problems.items() if texts]
        found = "; ".join(
            f"{kind}: {', '.join(texts[:8])}{f' and {len(texts) - 8} more' if len(texts) > 8 else ''}" for kind, texts in kinds
        )
        kind = type(self._model).__name__
        return CheckpointError(
            f"the checkpoint belongs to another {self._name}: {found}"
            if found
            else f"{kind}.load_state_dict() of the model {self._name!r} refuses the checkpoint: {error!r}"
        )


def _is_there(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not is_lazy(value)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy; in the memory of the processor, which has the checkpoint as well, unless the tensor is sharded."""
    tensor = tensor.detach()
    return tensor.clone() if tensor.is_cpu or hasattr(tensor, "to_local") else tensor.cpu()
