"""Other packages, as far as they are installed."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch


def package(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            return None


def _vision() -> Any:
    """Import torchvision. Its operators, which models of classes do not use, cannot be loaded beside some builds of torch."""
    try:
        return package("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return package("torchvision")


VISION = _vision()
