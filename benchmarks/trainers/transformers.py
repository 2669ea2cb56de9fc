"""Hugging Face's Trainer, which saves by itself, and with a bus."""

from collections.abc import Mapping
from pathlib import Path

import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmarks.save_job import SaveJob
from benchmarks.trainers import Way
from benchmarks.trainers.job import Job
from eventloop import Bus


def train_with(job: Job, *, callback: bool = False, bus: Bus | None = None, **options: object) -> None:
    """Train with an empty callback, with a bus, or with neither."""
    transformers.logging.set_verbosity_error()
    arguments = TrainingArguments(
        str(job.directory),
        max_steps=job.steps,
        per_device_train_batch_size=job.rows.number,
        **{"save_strategy": "no", "logging_strategy": "no", **options},
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    callbacks = [TrainerCallback()] if callback else []
    optimizers = (job.optimizer, None)
    trainer = Trainer(job.model, arguments, train_dataset=job.data, callbacks=callbacks, optimizers=optimizers)
    trainer.remove_callback(PrinterCallback)
    if bus is not None:
        bus.attach(trainer)
    trainer.train()


def save(job: SaveJob) -> None:
    train_with(job, save_strategy="steps", save_steps=job.interval, save_total_limit=1)


def read(path: Path) -> Mapping[str, Tensor]:
    return load_file(path / "model.safetensors")


PATH = "checkpoint-{step}"
SAVERS = {"Hugging Face": Way(save, PATH, read)}
