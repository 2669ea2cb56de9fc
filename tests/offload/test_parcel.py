import errno
import math
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainbus.eventloop import Event, Progress
from trainbus.eventloop.events import AfterTrainIter, AfterValEpoch
from trainbus.eventloop.offload import detacher
from trainbus.eventloop.offload.parcel import SharedSegment, pack, unpack
from trainbus.eventloop.offload.snapshot import Snapshot

detach = detacher()
TENSORS = [
    torch.arange(6.0).reshape(2, 3),
    torch.arange(6.0).reshape(2, 3).t(),
    torch.ones(3, dtype=torch.bfloat16),
    torch.zeros(0, 4),
    torch.tensor(3),
    torch.tensor([True, False]),
    torch.ones(2, 2, dtype=torch.complex64).conj(),
    torch.zeros(4, dtype=torch.int8),
    torch.ones(1).expand(5),
    torch.eye(3).to_sparse(),
]


@pytest.fixture
def ends():
    """Both ends of a segment, as the two processes have them."""
    writer = SharedSegment()
    reader = SharedSegment(os.dup(writer.descriptor))
    yield writer, reader
    writer.close()
    reader.close()


def through(ends, items: list) -> list:
    writer, reader = ends
    return unpack(pack(items, writer), reader)


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype}")
def test_tensors_arrive_with_dtype_shape_and_values(ends, tensor):
    [arrived] = through(ends, [tensor])
    assert arrived.dtype == tensor.dtype
    assert arrived.layout == tensor.layout
    assert torch.equal(arrived.to_dense(), tensor.to_dense())


def test_any_nesting_arrives_as_it_was(ends):
    value = {"array": np.arange(4.0), "list": [torch.ones(2), ("text", None)], 3: {1.5}, "empty": np.zeros((0, 2))}
    [arrived] = through(ends, [value])
    assert np.array_equal(arrived["array"], value["array"])
    assert arrived["empty"].shape == (0, 2)
    assert torch.equal(arrived["list"][0], torch.ones(2))
    assert arrived["list"][1] == ("text", None)
    assert arrived[3] == {1.5}


def test_parcels_may_grow_and_shrink_and_share_no_memory_with_what_was_unpacked(ends):
    [first] = through(ends, [{"tensor": torch.ones(3), "array": np.ones(3)}])
    for size in (1, 100_000, 10, 1_000_000, 0):
        [arrived] = through(ends, [torch.full((size,), 2.0)])
        assert torch.equal(arrived, torch.full((size,), 2.0))
    assert first["tensor"].tolist() == [1, 1, 1]
    first["tensor"].zero_()
    first["array"][:] = 0


def test_detached_events_arrive_as_events_of_their_class(ends):
    events = [
        AfterTrainIter(progress=Progress(iter=i), batch_idx=i, outputs={"loss": torch.tensor(float(i))}, run=object())
        for i in range(3)
    ]
    detached = [event.resolve() if isinstance(event := detach(one), Snapshot) else event for one in events]
    arrived = through(ends, [*detached, AfterValEpoch(progress=Progress(epoch=2), metrics={"accuracy": float("nan")})])
    assert [type(event) for event in arrived[:3]] == [type(event) for event in detached]
    assert [event.outputs for event in arrived[:3]] == [{"loss": float(i)} for i in range(3)]
    assert [event.progress.iter for event in arrived[:3]] == [0, 1, 2]
    assert isinstance(arrived[3], AfterValEpoch)
    assert arrived[3].metrics["accuracy"] != arrived[3].metrics["accuracy"]


def test_integers_of_any_size_arrive_as_they_were(ends):
    outputs = {"operations": 6 * 7 * 10**9 * 2 * 10**12, "least": -(2**70), "text": "NaN", "loss": math.inf}
    (arrived,) = through(ends, [detach(AfterTrainIter(progress=Progress(iter=3), outputs=outputs))])
    assert arrived.outputs == outputs
    assert arrived.progress.iter == 3


def test_an_integer_beyond_64_bits_changes_no_other_value_of_its_event(ends, registry):
    class Said(Event, kw_only=True):
        what: Any

    others = {1: "one", "data": b"raw", "when": datetime(2026, 1, 1, tzinfo=UTC), "loss": math.inf}
    (small,) = through(ends, [detach(Said(what={**others, "number": 2}))])
    (large,) = through(ends, [detach(Said(what={**others, "number": 2**70}))])
    assert small.what == {**others, "number": 2}
    assert large.what == {**others, "number": 2**70}


def test_an_event_that_msgpack_cannot_hold_is_an_error_here(ends, registry):
    class Odd(Event, kw_only=True):
        what: object

    with pytest.raises(TypeError):
        pack([Odd(what=object())], ends[0])


def test_closing_leaves_no_descriptor():
    before = len(list(Path("/proc/self/fd").iterdir()))
    segment = SharedSegment()
    pack([torch.ones(10)], segment)
    segment.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_parcel_that_finds_no_memory_leaves_room_for_smaller_ones(ends, monkeypatch):
    def full(descriptor: int, size: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    assert through(ends, [1]) == [1]
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", full)
        with pytest.raises(OSError, match="memory"):
            pack([torch.ones(10_000)], ends[0])
    assert through(ends, [2]) == [2]
    assert torch.equal(through(ends, [torch.ones(10_000)])[0], torch.ones(10_000))
