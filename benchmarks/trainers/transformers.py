"""Hugging Face's Trainer, which saves by itself, and with a bus."""

from collections.abc import Mapping
from pathlib import Path

import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import Trainer, TrainingArguments

from benchmarks.save_job import SaveJob
from benchmarks.trainers import Way


def trainer(job: SaveJob) -> Trainer:
    transformers.logging.set_verbosity_error()
    arguments = TrainingArguments(
        str(job.directory),
        max_steps=job.steps,
        per_device_train_batch_size=job.rows,
        save_steps=job.interval,
        save_total_limit=1,
        logging_strategy="no",
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    return Trainer(job.model, arguments, train_dataset=job.data, optimizers=(job.optimizer, None))


def save(job: SaveJob) -> None:
    trainer(job).train()


def read(path: Path) -> Mapping[str, Tensor]:
    return load_file(path / "model.safetensors")


PATH = "checkpoint-{step}"
SAVERS = {"Hugging Face": Way(save, PATH, read)}
