"""The dtypes of tensors that a checkpoint can hold."""

import torch

SAFE = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64),
    *(torch.float8_e5m2, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32, torch.float64),
]
"""Those that every safetensors knows."""

_FOREIGN = "complex32 complex64 complex128 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
FOREIGN = [getattr(torch, name) for name in _FOREIGN.split() if hasattr(torch, name)]
"""Those that safetensors, or an older one, lacks."""
