"""TRL's trainers with a bus: subclasses of ``transformers.Trainer``."""

import pytest
import torch

pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

import transformers  # noqa: E402
import trl  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast  # noqa: E402

from trainbus import attach  # noqa: E402
from trainbus.eventloop import Bus  # noqa: E402
from trainbus.hooks import EMAHook  # noqa: E402
from trainbus.testing.host_job import assert_same, heard, noted  # noqa: E402

from .jobs import weights_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
WORDS = [f"w{index}" for index in range(30)]
OFF = dict.fromkeys(("bf16", "activation_checkpointing", "dataloader_pin_memory"), False)
COMMON = {"max_steps": 4, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2, "max_length": 16}
COMMON |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_strategy": "no", **OFF}


def tokenizer():
    end, unknown = "<eos>", "<unk>"
    vocabulary = {word: index for index, word in enumerate([*WORDS, end, unknown])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, pad_token=end, unk_token=unknown)


def model():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16, bos_token_id=30, eos_token_id=30)
    return GPT2LMHeadModel(config)


def sft(folder):
    data = datasets.Dataset.from_list([{"text": " ".join(WORDS[index : index + 5])} for index in range(8)])
    arguments = trl.SFTConfig(str(folder), **COMMON)
    return trl.SFTTrainer(model(), arguments, train_dataset=data, processing_class=tokenizer())


def dpo(folder):
    rows = [{"prompt": f"w{index}", "chosen": " w1 w2", "rejected": " w3 w4"} for index in range(8)]
    both = {"train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer()}
    return trl.DPOTrainer(model(), ref_model=model(), args=trl.DPOConfig(str(folder), **COMMON), **both)


@pytest.mark.parametrize("make", [sft, dpo])
def test_a_trainer_of_trl_publishes_saves_beside_the_training_and_keeps_its_weights(tmp_path, make):
    transformers.logging.set_verbosity_error()
    alone = make(tmp_path / "alone")
    alone.train()
    bus, losses = Bus(EMAHook(momentum=0.1)), []
    names = heard(bus)
    bus.on("after_train_iter", lambda event: losses.append(float(event.outputs["loss"])))
    told = noted(bus, "checkpoint_committed", "path")
    trainer = make(tmp_path / "bus")
    attach(bus, trainer, checkpoints=True)
    trainer.train()
    assert_same(weights_of(trainer.model), weights_of(alone.model))
    assert len(losses) == names.count("after_forward") == names.count("after_optimizer_step") == 4
    folders = [tmp_path / "bus" / f"checkpoint-{step}" for step in (2, 4)]
    assert told == [str(folder) for folder in folders]
    names = {path.name for path in (tmp_path / "alone" / "checkpoint-4").iterdir()}
    assert {path.name for path in folders[1].iterdir()} >= names | {"trainbus.pt"}
    GPT2LMHeadModel.from_pretrained(folders[1])
