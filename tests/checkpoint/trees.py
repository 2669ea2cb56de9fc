"""What trees in a checkpoint can hold, and how they are compared."""

import struct
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

SAFE = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64),
    *(torch.float8_e5m2, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32, torch.float64),
]
"""Dtypes that every safetensors knows."""

_FOREIGN = "complex32 complex64 complex128 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
DENSE = [*SAFE, *(getattr(torch, name) for name in _FOREIGN.split() if hasattr(torch, name))]
"""Also those that safetensors, or an older one, lacks."""


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def canonical(value: Any) -> Any:
    """A form whose equality is sameness of types, order, layout in memory and bits."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        order = torch.empty_like(value, device="meta").stride() if value.numel() else None  # nothing depends on it
        return kind, value.dtype, tuple(value.shape), order, value.requires_grad, bits(value)
    if kind is float:
        return "float", struct.pack("<d", value)
    if kind is complex:
        return "complex", struct.pack("<dd", value.real, value.imag)
    if isinstance(value, np.ndarray | np.generic):
        return kind, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        extra = (getattr(value, "default_factory", None), canonical(vars(value)) if kind is OrderedDict else None)
        return kind, extra, [(canonical(key), canonical(each)) for key, each in value.items()]
    if isinstance(value, set | frozenset):
        return kind, sorted(repr(canonical(each)) for each in value)
    if isinstance(value, list | tuple):
        return kind, [canonical(each) for each in value]
    return kind, value
