"""A tiny Llama 3 of torchtitan with its text loader, a tokenizer of 60 words and texts of them; nothing is downloaded.

It has one layer, because most of a training's time goes into the saves: DCP takes a millisecond for each of their entries.

Its attention is torch's, because torchtitan's own is compiled. With several processes, FSDP2 divides sums by itself, because
gloo cannot.
"""

from __future__ import annotations

import json
from dataclasses import replace

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.validate import Validator
from torchtitan.config.configs import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

from .standins import trainer as titan  # first

WORDS = ["<bos>", "<eos>", *(f"w{index}" for index in range(60))]
TEXTS = [{"text": " ".join(f"w{(7 * text + place**2) % 60}" for place in range(30))} for text in range(64)]
DATASETS["words"] = DatasetConfig("in memory", lambda path: Dataset.from_list(TEXTS), lambda sample: sample["text"])


def write_tokenizer(folder):
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))


def spec():
    found = model_registry("debugmodel", attn_backend="flex")
    config, parallelize = found.model, found.parallelize_fn
    config.layers = config.layers[:1]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()

    def parallelized(model, **options):
        model = parallelize(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return replace(found, parallelize_fn=parallelized)


def make(tokenizer, work, *, steps=6, training=None, validator=None, metrics=None, manager=CheckpointManager, **checkpoint):
    """Return a trainer. ``tokenizer`` is a folder filled by `write_tokenizer`."""
    data = HuggingFaceTextDataLoader.Config(dataset="words")
    defaults = {"enable": True, "interval": 2, "last_save_model_only": False}
    options = {"local_batch_size": 2, "seq_len": 16, "steps": steps, "disable_cuda_graphs": True}
    options |= {"mixed_precision_param": "float32"} | (training or {})
    config = titan.Trainer.Config(
        model_spec=(model := spec()),
        hf_assets_path=str(tokenizer),
        dump_folder=str(work),
        dataloader=data,
        loss=CrossEntropyLoss.Config(global_vocab_size=model.model.vocab_size),
        optimizer=default_adamw(lr=1e-3, fused=False, foreach=False),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.5, total_steps=10),
        training=TrainingConfig(**options),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=MetricsProcessor.Config(**({"log_freq": 2} | (metrics or {}))),
        checkpoint=manager.Config(**(defaults | checkpoint)),
        activation_checkpoint=None,
        validator=Validator.Config(**({"enable": True, "freq": 3, "steps": 2, "dataloader": data} | (validator or {}))),
        debug=DebugConfig(seed=1),
    )
    return config.build()


def weights(trainer):
    """Return a copy of the whole weights."""
    found = trainer.model_parts[0].state_dict()
    return {name: (one.full_tensor() if hasattr(one, "full_tensor") else one).clone() for name, one in found.items()}
