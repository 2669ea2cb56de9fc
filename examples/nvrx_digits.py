"""Train a small network on scikit-learn's handwritten digits; NVRx's ``ft_launcher`` restarts it when it hangs.

    ft_launcher --ft-cfg-path examples/nvrx_digits.yaml --nproc-per-node 1 --max-restarts 3 examples/nvrx_digits.py --hang

``--hang`` has the first start hang after 200 iterations. Without the launcher it is an ordinary training.
"""

import os
import sys
import time
from datetime import timedelta

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from trainbus import Bus, CheckpointHook, HeartbeatHook, LoggerHook, TrainLoop
from trainbus.events import BeforeTrainIter

Batch = tuple[torch.Tensor, torch.Tensor]


def step(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss."""
    images, labels = batch
    return cross_entropy(model(images), labels)


def hang(event: BeforeTrainIter) -> None:
    """Hang in the first start of this job."""
    if event.progress.iter == 200 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        print("this process hangs", flush=True)
        time.sleep(3600)


if __name__ == "__main__":
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    model: nn.Module = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))
    if distributed.is_torchelastic_launched():  # by ft_launcher, or torchrun
        distributed.init_process_group("gloo", timeout=timedelta(minutes=2))
        model = DistributedDataParallel(model)
    bus = Bus(LoggerHook(interval=50), CheckpointHook(interval=1, max_keep_ckpts=2), HeartbeatHook())
    if "--hang" in sys.argv:
        bus.on("before_train_iter", hang)
    loop = TrainLoop(
        model,
        torch.optim.AdamW(model.parameters(), lr=5e-3),
        step=step,
        train_data=DataLoader(data, batch_size=32, shuffle=True),
        bus=bus,
        global_batch=32,
        max_epochs=8,
        work_dir="runs/nvrx",
        seed=0,
    )
    loop.run(resume="auto")
    if distributed.is_initialized():
        distributed.destroy_process_group()
