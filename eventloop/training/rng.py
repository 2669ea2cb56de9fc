"""The global random states of a process: Python, numpy, torch and all CUDA devices."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def get_rng_state() -> dict[str, Any]:
    """Return the states of all global generators, in a form that a checkpoint can hold."""
    version, words, gauss = random.getstate()
    # 625 Python integers as one array: a checkpoint has this twice, and would take longer over them than over the weights.
    state = {
        "python": (version, np.array(words, np.uint32), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch: unannotated
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put back what :func:`get_rng_state` returned; CUDA states only where as many devices are there."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def other_rng_state(state: Mapping[str, Any] | None, rank: int) -> Mapping[str, Any] | None:
    """Return random states for ``rank`` that follow from those of rank 0, and differ from them."""
    if state is None:
        return None
    now = get_rng_state()
    try:
        set_rng_state(state)
        seed_everything(int(torch.randint(2**31, ())) + rank)
        return get_rng_state()
    finally:
        set_rng_state(now)
