"""Makes ``mmengine.pth``, a checkpoint as MMEngine 0.10.7 saves it, and ``mmengine.npz``, what was in the model then.

Not part of the tests. Run it where MMEngine is installed (``pip install -e ".[bench]"``), in a directory outside of any git
repository, whose commit would be noted in the file.
"""

import tempfile

import numpy as np
import torch
from mmengine.evaluator import BaseMetric
from mmengine.hooks import EMAHook, Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset


class Net(BaseModel):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))

    def forward(self, inputs, labels, mode):
        scores = self.layers(inputs)
        return {"loss": F.cross_entropy(scores, labels)} if mode == "loss" else (scores.argmax(1), labels)


class Accuracy(BaseMetric):
    def process(self, data_batch, data_samples):
        guesses, labels = data_samples
        self.results.append((int((guesses == labels).sum()), len(labels)))

    def compute_metrics(self, results):
        return {"accuracy": np.float64(sum(right for right, _ in results) / sum(count for _, count in results))}


class Data(TensorDataset):
    metainfo = {"classes": ("negative", "positive"), "palette": np.array([[1, 2, 3], [4, 5, 6]], np.uint8)}  # noqa: RUF012


class SaveOnce(Hook):
    """CheckpointHook would put the directory of this machine into the file."""

    def after_train_epoch(self, runner):
        if runner.epoch != 1:
            return
        runner.message_hub.update_info("best_score", np.float64(0.5))
        runner.save_checkpoint(".", "mmengine.pth")
        ema = next(hook for hook in runner.hooks if isinstance(hook, EMAHook))
        averaged = {f"averaged/{key}": value.numpy() for key, value in ema.ema_model.module.state_dict().items()}
        trained = {f"trained/{key}": value.numpy() for key, value in runner.model.state_dict().items()}
        moments = runner.optim_wrapper.optimizer.state_dict()["state"]
        adam = {f"exp_avg/{index}": state["exp_avg"].numpy() for index, state in moments.items()}
        np.savez_compressed("mmengine.npz", **averaged, **trained, **adam)


def main():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(16, 4, generator=generator)
    data = Data(inputs, (inputs.sum(1) > 0).long())
    with tempfile.TemporaryDirectory() as work_dir:
        Runner(
            Net(),
            work_dir=work_dir,
            train_dataloader=DataLoader(data, batch_size=8),
            val_dataloader=DataLoader(data, batch_size=8),
            val_evaluator=[Accuracy()],
            val_cfg={},
            train_cfg={"by_epoch": True, "max_epochs": 2, "val_interval": 1},
            optim_wrapper={"optimizer": {"type": "AdamW", "lr": 0.01}},
            param_scheduler=[
                {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "begin": 0, "end": 2},
                {"type": "MultiStepLR", "milestones": [1], "by_epoch": True},
            ],
            default_hooks={"checkpoint": None},
            custom_hooks=[{"type": "EMAHook", "momentum": 0.1}, SaveOnce()],
            randomness={"seed": 0},
            experiment_name="tiny",
        ).train()


if __name__ == "__main__":
    main()
