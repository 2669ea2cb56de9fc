"""What no simulation has: CUDA graphs, number formats of a card, and sharded models on NCCL."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from trainbus.eventloop import Bus, Run, TrainLoop
from trainbus.eventloop.checkpoint import AsyncSaver, load
from trainbus.hooks import CheckpointHook, EMAHook, JSONLinesWriter, LoggerHook, OptimizerHook

from ..training.conftest import assert_same, batches, model, step
from .conftest import CUDA
from .training_job import logged

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


def test_a_loss_in_the_memory_of_a_graph_is_logged_as_it_was_after_each_replay(tmp_path: Path):
    counter, loss = torch.zeros((), device="cuda"), torch.zeros((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter += 1
        loss.copy_(counter)
    bus, seen = Bus(LoggerHook(interval=1, writers=[JSONLinesWriter()])), list[Any]()
    bus.on("after_train_iter", lambda event: seen.append(event.outputs["loss"]), offload="thread")
    with Run(bus, model=torch.nn.Linear(1, 1).cuda(), work_dir=tmp_path) as run:
        for _ in run.epochs(1):
            for _ in run.train(range(500)):
                graph.replay()
                run.report(loss=loss)
    assert seen == [line["train/loss"] for line in logged(tmp_path)] == [float(number) for number in range(1, 501)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.bool])
def test_a_checkpoint_has_each_number_format(tmp_path: Path, dtype: torch.dtype):
    tree = {"tensor": (torch.randn(257, device="cuda") * 4).to(dtype), "empty": torch.empty(0, 3, device="cuda", dtype=dtype)}
    with AsyncSaver() as saver:
        saver.save(tree, tmp_path / "tree.safetensors")
    loaded = load(tmp_path / "tree.safetensors")
    for name, tensor in tree.items():
        assert loaded[name].dtype is dtype and loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].view(torch.uint8), tensor.cpu().view(torch.uint8))


@pytest.mark.parametrize("staging", ["block", "overlap"])
def test_a_sharded_model_on_nccl_resumes_exactly(tmp_path: Path, staging: Any):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def trained(folder: str, epochs: int, resume: str | None = None) -> dict[str, torch.Tensor]:
        network = model(dropout=0.3).cuda()
        fully_shard(network, mesh=init_device_mesh("cuda", (1,)))
        hooks = OptimizerHook(grad_clip=1.0), EMAHook(momentum=0.1), CheckpointHook(interval=1, staging=staging)
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
        options = {"train_data": batches(6), "max_epochs": epochs, "work_dir": tmp_path / folder, "seed": 3}
        bus = Bus(*hooks)
        bus.on("after_train_iter", lambda event: steps.append(event.progress.iter))
        TrainLoop(network, optimizer, step=step, bus=bus, device="cuda", **options).run(resume=resume)
        return {name: getattr(one, "full_tensor", one.clone)().cpu() for name, one in network.state_dict().items()}

    steps: list[int] = []
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        whole = trained("whole", 4)
        trained("stopped", 2)
        steps.clear()
        assert_same(trained("stopped", 4, resume="auto"), whole)
        assert steps == [*range(12, 24)]
    finally:
        distributed.destroy_process_group()
