"""Search hyperparameters for scikit-learn's digits with Ray Tune, two trials at a time. ASHA ends those that are behind.

python examples/ray_tune_digits.py        # pip install "trainbus[ray,demo]"
"""

from pathlib import Path

import ray
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

from trainbus import Bus, Hook, LoggerHook, RunRecordHook, TrainLoop, mount

FILE = "checkpoint.safetensors"


class Report(Hook):
    """Report each validation to Tune, with a checkpoint of that moment."""

    metrics = None

    def after_val_epoch(self, event):
        self.metrics = {"epoch": event.progress.epoch, **event.metrics}
        self.folder = event.run.work_dir / "reported"
        event.run.checkpoints.save(FILE, directory=self.folder)  # after all handlers of this event

    @mount("before_train_epoch", "after_train")
    def report(self, event):
        if self.metrics is not None:
            metrics, self.metrics = self.metrics, None
            event.run.checkpoints.wait()
            tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(self.folder))  # copies it, or ends the trial


def step(model, batch):
    images, labels = batch
    logits = model(images)
    return {"loss": cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}


def train(config, hooks=()):
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train_data = DataLoader(data, batch_size=32, sampler=SubsetRandomSampler(range(1400)))
    val_data = DataLoader(Subset(data, range(1400, len(data))), batch_size=256)
    width = config["width"]
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    loop = TrainLoop(
        model,
        optimizer,
        step=step,
        train_data=train_data,
        val_data=val_data,
        bus=Bus(LoggerHook(interval=20), RunRecordHook(), Report(), *hooks),
        max_epochs=config["epochs"],
        work_dir=Path(config["folder"], tune.get_context().get_trial_name()),
        seed=0,
        config=config,
    )
    reported = tune.get_checkpoint()  # by this trial, before it failed
    if reported is None:
        loop.run()
    else:
        with reported.as_directory() as folder:
            loop.run(resume=Path(folder, FILE))


if __name__ == "__main__":
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)  # a cluster of its own
    folder = Path("runs/ray_tune").absolute()  # all machines reach it
    space = {"lr": tune.loguniform(1e-4, 1e-1), "width": tune.choice([8, 16, 32, 64]), "epochs": 8, "folder": str(folder)}
    asha = ASHAScheduler(time_attr="epoch", max_t=8, grace_period=2, reduction_factor=2)
    found = tune.Tuner(
        train,
        param_space=space,
        tune_config=tune.TuneConfig(metric="accuracy", mode="max", num_samples=8, scheduler=asha),
        run_config=tune.RunConfig(
            storage_path=str(folder.parent), name=folder.name, failure_config=tune.FailureConfig(max_failures=3)
        ),
    ).fit()
    best = found.get_best_result()
    print(f"best: {best.metrics['accuracy']:.1%}, lr={best.config['lr']:.2g} width={best.config['width']}")
    print(best.checkpoint.path)
    ray.shutdown()
