"""``CheckpointHook`` with a URL in other trainers: what they write, files or folders, goes to the store beside the training."""

import importlib

import pytest
import torch

from trainbus.eventloop import Bus
from trainbus.hooks import CheckpointHook

from .conformance import WARNINGS

pytestmark = WARNINGS


@pytest.mark.parametrize(
    ("host", "library"), [("transformers", "transformers"), ("ignite", "ignite"), ("lightning", "lightning")]
)
def test_a_store_gets_what_the_trainer_writes_and_the_weights_are_those_without_us(
    host, library, tmp_path, memory, monkeypatch
):
    pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    job = importlib.import_module(f"tests.bridges.conformance.{host}").Job
    alone = job(tmp_path / "alone", None, epochs=2)
    alone.fit()
    bus, told = Bus(CheckpointHook(interval=1, out_dir="memory://bucket", max_keep_ckpts=1)), []
    bus.on("checkpoint_uploaded", lambda event: told.append(event.path))
    ours = job(tmp_path / "run", bus, epochs=2)
    ours.fit()
    assert all(torch.equal(*pair) for pair in zip(alone.net.parameters(), ours.net.parameters(), strict=True))
    names = [path.rpartition("/")[2].partition(".")[0] for path in told]
    assert names in (["epoch_1", "epoch_2"], ["epoch_2"])  # an epoch may be over before the upload of the last one begins
    assert any("/bucket/run/epoch_2" in name for name in memory.store)
    assert not any("epoch_1" in name for name in memory.store)
