"""A run goes on from a checkpoint that was exported for torch.load and imported again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eventloop import Bus
from eventloop.checkpoint import export_tree, load_pth, save
from hooks import CheckpointHook, EMAHook


def test_a_run_resumes_bitwise_from_a_reimported_export(tmp_path, parts):
    data = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.arange(12) % 3)

    def train(name: str, epochs: int, resume: Path | None = None) -> Any:
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        bus = Bus()
        bus.add(EMAHook(), CheckpointHook(interval=1))
        model = parts.model(dropout=0.3)
        loop = parts.loop(bus, model=model, train_data=loader, max_epochs=epochs, work_dir=tmp_path / name, seed=0)
        loop.run(resume=resume)
        return model.state_dict()

    whole = train("whole", 3)
    train("half", 2)
    export_tree(tmp_path / "half" / "epoch_2.safetensors", tmp_path / "half.pth")
    save(load_pth(tmp_path / "half.pth"), tmp_path / "back.safetensors")
    parts.assert_same(whole, train("rest", 3, tmp_path / "back.safetensors"))
