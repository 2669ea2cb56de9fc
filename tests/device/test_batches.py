"""Batches in pinned memory reach a device without a wait of the training thread."""

from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from trainbus.eventloop import device as door
from trainbus.eventloop.training.data import to_device

from .conftest import DeviceUnderTest


class Tokens(dict[str, torch.Tensor]):
    """A mapping that moves itself, as a tokenizer's output does."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Tokens":
        return Tokens({name: value.to(device, non_blocking=non_blocking) for name, value in self.items()})


class Plain(Tokens):
    def to(self, device: torch.device) -> "Plain":  # type: ignore[override]
        return Plain(super().to(device))


def pinned(*values: float) -> torch.Tensor:
    return door.empty_pinned((len(values),), torch.float32).copy_(torch.tensor(values))


def packed() -> PackedSequence:
    sequence = pack_sequence([torch.tensor([1.0, 3.0]), torch.tensor([2.0])])
    return sequence._replace(data=pinned(*sequence.data.tolist()))


BATCHES: dict[str, tuple[Any, Any]] = {
    "tensors": (lambda: (pinned(1, 2, 3), [pinned(4)]), lambda batch: [*batch[0].tolist(), *batch[1][0].tolist()]),
    "tokens": (lambda: {"text": Tokens(ids=pinned(1, 2, 3, 4))}, lambda batch: batch["text"]["ids"].tolist()),
    "sequence": (packed, lambda batch: [*batch.data.tolist(), 4]),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_pinned_batch_is_moved_without_a_wait(accelerator: DeviceUnderTest, stream: str, kind: str):
    make, numbers = BATCHES[kind]
    batch = make()
    with accelerator.no_waits():
        moved = to_device(batch, accelerator.device)
    del batch
    others = [pinned(0, 0, 0, 0) for _ in range(3)]
    assert sorted(numbers(moved)) == [1, 2, 3, 4]
    del others


def test_an_object_whose_method_takes_no_option_moves_itself(accelerator: DeviceUnderTest):
    moved = to_device(Plain(ids=pinned(1, 2)), accelerator.device)
    assert moved["ids"].device == accelerator.device
    assert moved["ids"].tolist() == [1, 2]
