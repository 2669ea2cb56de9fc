"""A torchtitan ``Trainer`` that trains the regression of the checks; ``llama`` makes one that trains a language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import BaseLoss
from torchtitan.components.metrics import BaseLogger, MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config.configs import TrainingConfig
from torchtitan.protocols import BaseModel
from torchtitan.protocols.model_spec import ModelSpec

from trainbus import attach
from trainbus.bridges.torchtitan.host import TorchtitanBridge
from trainbus.testing import host_job as job

from .standins import trainer as titan  # first

WARNINGS = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        "To get the last learning rate computed by the scheduler",  # torchtitan asks for it when it loads
        "torch.distributed is disabled, unavailable or uninitialized",  # `Job.stored` reads alone
        "DTensor random operators may not have complete support on cpu",
        "'set_vital' is deprecated",  # torchdata calls it
    )
]


class Tokenizer(BaseTokenizer):
    """None: the data are numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, *args, **kwargs):
        raise NotImplementedError

    decode = get_vocab_size = encode


class Samples(BaseDataLoader):
    """The batches of the checks, again and again."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        batches: int = 4
        seed: int = 1
        infinite: bool = True

    def __init__(self, config, **_):
        self.batches, self.given = list(job.loader(config.batches, config.seed)), 0

    def __iter__(self):
        while True:
            inputs, labels = self.batches[self.given % len(self.batches)]
            self.given += 1
            yield {"input": inputs}, labels

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class SquaredError(BaseLoss):
    """The sum over all samples, as losses are there."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        pass

    def __init__(self, config, **_):
        pass

    def __call__(self, outputs, labels, global_valid_tokens=None):
        loss = (outputs - labels).square().sum()
        return (loss if global_valid_tokens is None else loss / global_valid_tokens), {}


class Model(BaseModel):
    """The net of a job as a model of torchtitan, which makes its models without memory and initializes them later."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        net: Any = None

        def update_from_config(self, *, config, **_):
            pass

        def get_nparams_and_flops(self, model, seq_len):
            return 1, 1

        def to_dict(self):
            return {}

    def __init__(self, config):
        super().__init__()
        self.net = config.net
        self.beginning = {name: tensor.clone() for name, tensor in self.net.state_dict().items()}

    def verify_module_protocol(self):
        pass

    def init_weights(self, **_):
        self.net.load_state_dict(self.beginning)

    def forward(self, inputs):
        return self.net(inputs)


class AfterEpochs(Validator):
    """torchtitan's validates after the first step, too."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass

    def should_validate(self, step):
        return step % self.config.freq == 0


class Scores(BaseLogger):
    """Keeps the metrics of the last validation."""

    def log(self, metrics, step):
        self.last = metrics


class Trainer(titan.Trainer):
    """Ends when ``enough`` is set."""

    enough = False

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Trainer.Config):
        pass

    def should_continue_training(self):
        return not self.enough and super().should_continue_training()


class Job(job.HostJob):
    manager, mode = CheckpointManager, "async"  # of checkpoints that are written beside the training
    suffix = ""
    missing = TorchtitanBridge.missing
    window_ends_with_epoch = repeats_epoch_end = empty_epochs = False
    keeps_rate = takes_schedules = times_callbacks = False  # the rate is 0.01, and torchtitan has schedules but no callbacks
    continues = "the same command"

    def make(self, **options):
        steps = max(1, self.batches // self.accumulate)
        config = Trainer.Config(
            model_spec=ModelSpec(
                name="regression",
                flavor="tiny",
                model=Model.Config(net=self.net),
                parallelize_fn=lambda model, **_: model,
                pipelining_fn=None,
                post_optimizer_build_fn=None,
                state_dict_adapter=None,
            ),
            dump_folder=str(self.folder),
            tokenizer=Tokenizer.Config(),
            dataloader=Samples.Config(batches=self.batches),
            loss=SquaredError.Config(),
            optimizer=default_adamw(lr=0.01, fused=False, foreach=False),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0, total_steps=10**6),
            training=TrainingConfig(
                local_batch_size=job.SIZE,
                global_batch_size=job.SIZE * self.accumulate,
                steps=self.epochs * steps,
                disable_cuda_graphs=True,
                mixed_precision_param="float32",
            ),
            metrics=MetricsProcessor.Config(log_freq=10**6),  # the trainer looks at a loss that it logs
            checkpoint=self.manager.Config(
                enable=True,
                interval=max(1, self.every // self.accumulate),
                load_only=not self.every,
                last_save_model_only=False,
                keep_latest_k=2 if self.beside else 0,
                async_mode=self.mode if self.beside else "disabled",
            ),
            validator=AfterEpochs.Config(
                enable=self.validate, freq=steps, steps=1, dataloader=Samples.Config(batches=1, seed=2)
            ),
        )
        self.steps = steps
        self.trainer = config.build()
        self.model, self.optimizer = self.net, self.trainer.optimizers.optimizers[0]
        self.trainer.metrics_processor.logger = Scores()

    def attach(self, bus):
        self.bridge = attach(bus, self.trainer, epoch_steps=self.steps)
        return self.bridge

    def fit(self, resume=None):
        self.trainer.checkpointer.initial_load_path = None if resume is None else str(resume)
        self.trainer.checkpointer.initial_load_model_only = False
        self.trainer.train()

    def again(self):
        self.trainer.step = 0
        self.fit()

    def stop_itself(self):
        self.trainer.enough = True

    def evaluate(self):
        self.trainer.validator.validate(self.trainer.model_parts, self.trainer.step)
        return {"loss": self.trainer.metrics_processor.logger.last["validation_metrics/loss"]}

    def own(self):
        return self.folder / "checkpoint" / f"step-{self.kept()[-1]}"

    def kept(self):
        return sorted(int(path.parent.name.partition("-")[2]) for path in self.folder.glob("checkpoint/step-*/.metadata"))

    def stored(self, path):
        weights = {f"net.{name}": torch.empty_like(one) for name, one in self.net.state_dict().items()}
        dcp.load(weights, checkpoint_id=str(path), no_dist=True)
        return weights

    def files(self):
        return sorted(path.parent.name for path in self.folder.glob("*/.metadata"))

    @staticmethod
    def tensors(batch):
        inputs, labels = batch
        return inputs["input"], labels

    def parts(self):
        inside = ("checkpointer", "metrics_processor", "validator")
        return [*super().parts(), *(dict(vars(getattr(self.trainer, name, self.trainer))) for name in inside)]
