"""Hugging Face's Trainer, which saves by itself, and with a bus."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmarks.harness import SUBJECT
from benchmarks.save_job import SaveJob
from benchmarks.trainers import Way
from benchmarks.trainers.job import Job
from trainbus.bridges import attach
from trainbus.eventloop import Bus


def train_with(job: Job, *, callback: bool = False, bus: Bus | None = None, **options: object) -> None:
    """Train with an empty callback, with a bus, or with neither."""
    trainer = make_trainer(job, [TrainerCallback()] if callback else [], **options)
    if bus is not None:
        attach(bus, trainer)
    trainer.train()


def make_trainer(job: Job, callbacks: Sequence[TrainerCallback] = (), **options: object) -> Trainer:
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
    optimizers = (job.optimizer, None)
    trainer = Trainer(job.model, arguments, train_dataset=job.data, callbacks=list(callbacks), optimizers=optimizers)
    trainer.remove_callback(PrinterCallback)
    return trainer


def save(job: SaveJob, *, beside: bool = False) -> None:
    trainer = make_trainer(job, save_strategy="steps", save_steps=job.interval, save_total_limit=1)
    if beside:
        attach(Bus(), trainer, checkpoints=True)
    trainer.train()


def read(path: Path) -> Mapping[str, Tensor]:
    return load_file(path / "model.safetensors")


PATH = "checkpoint-{step}"
SAVERS = {"Hugging Face": Way(save, PATH, read), f"{SUBJECT} in Hugging Face": Way(partial(save, beside=True), PATH, read)}
