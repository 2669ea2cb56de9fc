"""Train on scikit-learn's handwritten digits with Ray Train, on two workers of this machine. One is killed on the way.

python examples/ray_digits.py        # pip install "trainbus[ray,demo]"
"""

import os
import signal
from pathlib import Path

import ray
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

from trainbus import Bus, CheckpointHook, RayTrainHook, Run


def train_func(config):
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train, val = random_split(data, [0.8, 0.2])
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=32, sampler=sampler)
    val_loader = DataLoader(val, batch_size=256, sampler=DistributedSampler(val, shuffle=False))

    bus = Bus(CheckpointHook(interval=1), RayTrainHook())
    with Run(bus, model=model, optimizer=optimizer, resume="auto") as run:  # work_dir: Ray's storage path
        for epoch in run.epochs(config["epochs"]):
            sampler.set_epoch(epoch)
            for images, labels in run.train(train_loader):
                loss = cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.report(loss=loss)
            for images, labels in run.validate(val_loader):
                run.report(accuracy=(model(images).argmax(1) == labels).float().mean())
            if run.rank == 1 and epoch == 3 and not run.checkpoints.resumed_from:
                os.kill(os.getpid(), signal.SIGKILL)  # as a machine that is lost


if __name__ == "__main__":
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)  # a cluster of its own
    result = TorchTrainer(
        train_func,
        train_loop_config={"epochs": 8},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(Path("runs").absolute()),
            name="ray",
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="accuracy"),
        ),
    ).fit()
    print(f"after {result.metrics['epoch'] + 1} epochs: accuracy {result.metrics['accuracy']:.1%}")
    print("runs/ray:", *sorted(Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints))
    ray.shutdown()
