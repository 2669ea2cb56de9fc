"""The training of the tests in this folder, as a user of Ray Train writes it. The workers of Ray import it by its name."""

import json
import os
import runpy
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from trainbus import Bus, CheckpointHook, Hook, RayTrainHook, Run, attach
from trainbus.eventloop import events

ROOT = Path(__file__).parents[3]
BATCHES = 10
INTERVAL = 5


class Witness(Hook):
    """Log what a worker does, one line of JSON each, and do what a test wants to happen."""

    observes = True

    def __init__(self, config: dict[str, Any]) -> None:
        self._log = Path(config["log"])
        self._kill = config.get("kill_at")
        self._seconds = config.get("seconds", 0.02)

    def tell(self, **line: Any) -> None:
        with self._log.open("a") as file:
            file.write(json.dumps({"at": time.time(), "rank": ray.train.get_context().get_world_rank(), **line}) + "\n")

    def before_train(self, event: events.BeforeTrain) -> None:
        known = ray.train.get_checkpoint()
        self.tell(begins=event.progress.iter, known=known and known.path)

    def after_train_iter(self, event: events.AfterTrainIter) -> None:
        self.tell(done=event.progress.iter + 1)
        time.sleep(self._seconds)
        killed = self._log.with_suffix(".killed")
        if self._kill == [event.run.rank, event.progress.iter + 1] and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def checkpoint_committed(self, event: events.CheckpointCommitted) -> None:
        self.tell(committed=event.progress.iter)


class Flawed(RayTrainHook):
    """A hook in whose process Ray takes no report after the first."""

    def before_train(self, event: events.BeforeTrain) -> None:
        super().before_train(event)
        report, calls = ray.train.report, []

        def failing(*arguments: Any, **options: Any) -> None:
            calls.append(1)
            if len(calls) > 1 and event.run.rank:
                raise RuntimeError("the store does not answer")
            report(*arguments, **options)

        ray.train.report = failing


def train(config: dict[str, Any]) -> None:
    os.environ.update(config.get("environment", {}))
    tempfile.tempdir = None  # the environment may say another
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    if config.get("shard"):
        fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    size = 8 * BATCHES
    data = TensorDataset(torch.randn(size, 4), torch.randn(size, 1))
    loader = DataLoader(data, batch_size=8, sampler=torch.utils.data.SequentialSampler(data))
    hook = (Flawed if config.get("flawed") else RayTrainHook)(interval=config.get("interval", 0.5))
    saves = CheckpointHook(**({"interval": INTERVAL, "by_epoch": False} | config.get("saves", {})))
    witness = Witness(config)
    with Run(Bus(saves, hook, witness), model=model, optimizer=optimizer, resume=config.get("resume", "auto"), seed=0) as run:
        for _ in run.epochs(config.get("epochs", 3)):
            for inputs, targets in run.train(loader):
                loss = (model(inputs) - targets).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.report(loss=loss, note="a text", parts=torch.zeros(3))
            validation = run.validate(loader)
            for inputs, targets in validation:
                run.report(error=(model(inputs) - targets).square().mean())
            witness.tell(validated=validation.metrics["error"], iterations=run.progress.iter)
    witness.tell(finished=run.progress.iter)


def train_alone() -> None:
    Run(Bus(RayTrainHook()), model=nn.Linear(1, 1))


def train_on_ray_data(config: dict[str, Any]) -> None:
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    witness = Witness(config)
    loader = ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=4)
    bus = Bus(CheckpointHook(INTERVAL, by_epoch=False), RayTrainHook(), witness)
    with Run(bus, model=model, optimizer=optimizer, resume="auto") as run:
        for epoch in run.epochs(2):
            for batch in run.train(loader):
                loss = model(batch["id"].float()[:, None]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                witness.tell(took=[epoch, run.progress.iter, batch["id"].tolist()])


def folder_of_run() -> Path:
    return Path(ray.train.get_context().get_storage().experiment_fs_path)


def newest_known() -> str | None:
    """Return the file or folder in the newest checkpoint that Ray knows."""
    known = ray.train.get_checkpoint()
    if known is None:
        return None
    with known.as_directory() as folder:
        return str(next(Path(folder).iterdir()))


def train_with_lightning(config: dict[str, Any]) -> None:
    import lightning.pytorch as pl
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer

    class Tiny(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return (self.layer(batch[0]) - batch[1]).square().mean()

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("error", (self.layer(batch[0]) - batch[1]).square().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    pl.seed_everything(0)
    data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    loader = DataLoader(data, batch_size=4)
    trainer = pl.Trainer(
        max_epochs=config["epochs"],
        accelerator="cpu",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        default_root_dir=folder_of_run(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    trainer = prepare_trainer(trainer)
    bus = Bus(CheckpointHook(1), RayTrainHook(), Witness(config))
    attach(bus, trainer)
    trainer.fit(Tiny(), loader, loader, ckpt_path=newest_known())


class TinyTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) - labels).square().mean()}


def make_transformers_trainer(folder: Path, epochs: int, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    data = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(16)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=4,
        eval_strategy="epoch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    return Trainer(model_init=TinyTransformer, args=arguments, train_dataset=data, eval_dataset=data)


def train_with_transformers(config: dict[str, Any]) -> None:
    from ray.train.huggingface.transformers import prepare_trainer

    trainer = prepare_trainer(make_transformers_trainer(folder_of_run(), config["epochs"], save_strategy="epoch"))
    bus = Bus(RayTrainHook(), Witness(config))
    attach(bus, trainer)
    trainer.train(resume_from_checkpoint=newest_known())


class Fails(Hook):
    """Fails once at an iteration; ``FOLDER/began-TRIAL`` has the iterations that the trial began at, a line each."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._at, self._folder = config["fails_at"], Path(config["folder"])

    def before_train(self, event: events.BeforeTrain) -> None:
        self._began = self._folder / f"began-{event.run.work_dir.name}"
        with self._began.open("a") as file:
            file.write(f"{event.progress.iter}\n")

    def after_train_iter(self, event: events.AfterTrainIter) -> None:
        if event.progress.iter + 1 == self._at and len(self._began.read_text().split()) == 1:
            raise OSError("the disk is gone")


class TakesRate(Hook):
    """Takes the learning rate of the trial behind a resume, as the guide tells for population based training."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._rate = config["lr"]

    def before_train(self, event: events.BeforeTrain) -> None:
        event.run.optimizers["optimizer"].param_groups[0].update(lr=self._rate)


def train_in_tune_with_the_hook_of_train(config: dict[str, Any]) -> None:
    Run(Bus(RayTrainHook()), model=nn.Linear(1, 1))


def train_in_tune(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    example = runpy.run_path(str(ROOT / "examples" / "ray_tune_digits.py"))
    example["train"](config, [Fails(config), TakesRate(config)])
