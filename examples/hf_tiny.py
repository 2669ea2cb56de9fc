"""Train a tiny transformer, made from a configuration, on a made-up task. Started again, it continues where it was."""

from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from trainbus import Bus, CheckpointHook, EMAHook, LoggerHook, attach


def sentences(count, seed):
    """Tokens 1 to 30, and whether more of them are even than odd."""
    tokens = torch.randint(1, 31, (count, 15), generator=torch.Generator().manual_seed(seed))
    labels = ((tokens % 2 == 0).sum(1) > 7).long()
    return [{"input_ids": one, "labels": label} for one, label in zip(tokens, labels, strict=True)]


def accuracy(predicted):
    return {"accuracy": (predicted.predictions.argmax(1) == predicted.label_ids).mean().item()}


if __name__ == "__main__":
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(vocab_size=31, max_position_embeddings=16, **sizes))
    args = TrainingArguments(
        "runs/hf",
        num_train_epochs=5,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        logging_steps=32,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model, args, train_dataset=sentences(2048, seed=0), eval_dataset=sentences(512, seed=1), compute_metrics=accuracy
    )
    bus = Bus(EMAHook(momentum=0.01), LoggerHook(interval=32), CheckpointHook(save_best="accuracy", save_last=False))
    attach(bus, trainer, checkpoints=True)  # a folder has its name only when it is complete
    trainer.train(resume_from_checkpoint=get_last_checkpoint("runs/hf"))
    print(f"accuracy {trainer.evaluate()['eval_accuracy']:.1%}")
    print("runs/hf:", *sorted(path.name for path in Path("runs/hf").iterdir()))
