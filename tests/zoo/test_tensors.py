"""Tensors of every dtype that torch has, in every layout, as the state of an object, compared with ``torch.load``."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trainbus import Bus, Run
from trainbus.eventloop.errors import CheckpointValueError

from .kit import Outcome, differences

DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.view(8, 6).t(),
    "channels_last": lambda x: x.view(2, 4, 2, 3).contiguous(memory_format=torch.channels_last),
    "channels_last_3d": lambda x: x.view(2, 2, 2, 2, 3).contiguous(memory_format=torch.channels_last_3d),
    "a permuted part": lambda x: x.view(2, 4, 6).permute(2, 0, 1)[1:4],
    "with gaps": lambda x: x[::2],
    "rows of a wider one": lambda x: x.view(8, 6)[:, 1:4],
    "expanded": lambda x: x[:6].expand(4, 6),
    "expanded from one": lambda x: x[:1].expand(7),
    "overlapping": lambda x: x.as_strided((5, 4), (2, 1)),
    "0 dimensions": lambda x: x[3],
    "empty": lambda x: x[:0].view(0, 3),
    "one element": lambda x: x[:1].view(1, 1, 1),
    "not aligned": lambda x: x[1:6],
    "conjugated": lambda x: x.conj(),
    "negative part": lambda x: x.conj().imag,
    "a parameter": nn.Parameter,
    "sparse COO": lambda x: x.view(8, 6).to_sparse(),
    "sparse COO, not coalesced": lambda x: torch.sparse_coo_tensor(torch.tensor([[0, 0, 2]]), x[:3], (4,)),
    "sparse CSR": lambda x: x.view(8, 6).to_sparse_csr(),
    "sparse CSC": lambda x: x.view(8, 6).to_sparse_csc(),
    "sparse BSR": lambda x: x.view(8, 6).to_sparse_bsr((2, 2)),
    "sparse BSC": lambda x: x.view(8, 6).to_sparse_bsc((2, 2)),
}


class Box:
    """Holds a tensor as its state."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def tensor_of(dtype: torch.dtype) -> torch.Tensor:
    """Return 48 elements of arbitrary bits that are a number of the type."""
    if dtype is torch.bool:
        return torch.arange(48) % 3 == 0
    try:
        return torch.arange(48).to(dtype)
    except (RuntimeError, NotImplementedError):
        return torch.arange(48 * dtype.itemsize, dtype=torch.uint8).view(dtype)


def through_a_run(value: torch.Tensor, folder: Any) -> Any:
    """Save a tensor in a run, and return what a resumed run restores."""
    boxes = Box(value), Box()
    for box in boxes:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        resume = "auto" if box is boxes[1] else None
        with Run(Bus(), model=model, optimizer=optimizer, work_dir=folder, stateful={"box": box}, resume=resume) as run:
            if box is boxes[0]:
                for _ in run.epochs(1):
                    for _ in run.train([0]):
                        run.checkpoints.save()
    return boxes[1].value


def through_torch(value: torch.Tensor) -> Any:
    buffer = io.BytesIO()
    torch.save({"value": value}, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)["value"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_tensor_comes_back_as_it_was(dtype, layout, tmp_path, row):
    try:
        value = LAYOUTS[layout](tensor_of(dtype))
        control = through_torch(value)
    except Exception as error:  # noqa: BLE001 - torch has no such tensor
        pytest.skip(f"torch cannot: {type(error).__name__}")
    name = str(dtype).removeprefix("torch.")
    try:
        loaded = through_a_run(value, tmp_path)
    except CheckpointValueError as error:
        assert "stateful.box.value" in str(error)
        row("tensors", layout, name, "state of an object", Outcome("refused, by its path", "as it was"))
        return
    if not differences(control, loaded):
        same = not differences(value, loaded)
        row("tensors", layout, name, "state of an object", Outcome("as it was", "as it was" if same else "changed"))
        return
    dense = torch.empty_like(control).copy_(control)  # without gaps, and with memory for each element
    assert not differences(dense, loaded)
    row("tensors", layout, name, "state of an object", Outcome("as it was, without gaps", "as it was"))
