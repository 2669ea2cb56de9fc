"""A training with a ``transformers.Trainer`` under ``torchrun``: FOLDER bus|checkpoints|none STEPS [resume]."""

import json
import os
import sys
from pathlib import Path

import torch
import transformers
from jobs import OnFirst
from torch import nn

from trainbus import Bus, CheckpointHook, EMAHook

torch.set_num_threads(1)
folder, steps, resume = Path(sys.argv[1]), int(sys.argv[3]), sys.argv[4] == "resume"
attached, checkpoints = sys.argv[2] != "none", sys.argv[2] == "checkpoints"
saving = {"save_steps": 6, "eval_steps": 6, "save_total_limit": 1, "metric_for_best_model": "loss", "greater_is_better": False}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x, labels=None):
        y = self.inner(x).squeeze(-1)
        return {"loss": (y - labels).square().mean(), "logits": y}


torch.manual_seed(0)
x = torch.randn(32, 3)
data = [{"x": one, "labels": one.sum()} for one in x]
args = transformers.TrainingArguments(
    str(folder),
    use_cpu=True,
    report_to=[],
    max_steps=steps,
    per_device_train_batch_size=2,
    save_strategy="steps" if checkpoints else "no",
    eval_strategy="steps" if checkpoints else "epoch",
    disable_tqdm=True,
    learning_rate=0.01,
    lr_scheduler_type="constant",
    logging_strategy="no",
    dataloader_pin_memory=False,
    **(saving if checkpoints else {}),
)
trainer = transformers.Trainer(Net(), args, train_dataset=data, eval_dataset=data[:8])
first, ema, names, begun = OnFirst(), EMAHook(momentum=0.1), [], []
if attached:
    bus = Bus()
    bus.add(first, ema, CheckpointHook(interval=6, by_epoch=False, save_last=False))
    bus.on("checkpoint_committed", lambda event: names.append(Path(event.path).name))
    bus.on("before_train", lambda event: begun.append((event.run.rank, event.run.world_size, event.progress.iter)))
    bus.attach(trainer, checkpoints=checkpoints)
trainer.train(resume_from_checkpoint=resume or None)
rank = int(os.environ["RANK"])
result = {"weights": [one.tolist() for one in trainer.model.state_dict().values()], "seen": len(first.iters), "names": names}
result["average"] = [one.tolist() for one in ema.average.tensors.values()] if attached else None
result["begun"] = begun
result["best"] = trainer.state.best_model_checkpoint
Path(f"{folder}.{rank}.json").write_text(json.dumps(result))
torch.distributed.barrier()
torch.distributed.destroy_process_group()  # without it, torch's threads abort some of the processes at their exit
