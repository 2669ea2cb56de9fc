"""The dtypes of tensors in a file, as torch's objects."""

from __future__ import annotations

from typing import Final

import torch

from trainbus.eventloop.checkpoint.container import FOREIGN, SAFE

SAFE_NAMES: Final[dict[torch.dtype, str]] = {getattr(torch, name): safe for name, (safe, _) in SAFE.items()}
SAFE_DTYPES: Final = {name: dtype for dtype, name in SAFE_NAMES.items()}
FOREIGN_DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in FOREIGN if hasattr(torch, name)}
FOREIGN_NAMES: Final = {dtype: name for name, dtype in FOREIGN_DTYPES.items()}
DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in (*SAFE_NAMES, *FOREIGN_NAMES)}
"""All dtypes of tensors in a file, by torch's name. torch crashes where it makes a tensor of some of the others."""
