"""One job in MMEngine's Runner and in a TrainLoop or a Run of ours, with the same hooks of MMEngine."""

import json
import re
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import torch
from mmengine.evaluator import BaseMetric
from mmengine.hooks import CheckpointHook, DistSamplerSeedHook, IterTimerHook, LoggerHook, ParamSchedulerHook, RuntimeInfoHook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch.utils.data import DataLoader, Dataset

from trainbus.eventloop import Bus, Run, TrainLoop

BATCHES, SIZE = 7, 4
_numbers = count()


class Points(Dataset):
    """Points on a line, in an order of the samplers."""

    metainfo: ClassVar = {"classes": ("left", "right")}

    def __init__(self, count: int = BATCHES * SIZE, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(count, 6, generator=generator)
        self.labels = (self.inputs.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


class Net(BaseModel):
    """A small network with a buffer, as models of MMEngine are written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, mode: str) -> Any:
        scores = self.body(inputs)
        if mode == "loss":
            return {"loss_class": torch.nn.functional.cross_entropy(scores, labels), "spread": scores.detach().std()}
        return scores.argmax(1), labels


class Accuracy(BaseMetric):
    """MMEngine's side of the metric."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        predicted, labels = data_samples
        self.results.append((int((predicted == labels).sum()), len(labels)))

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        return {"accuracy": sum(right for right, _ in results) / sum(count for _, count in results)}


class OurAccuracy:
    """Our side of the metric."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right = self.count = 0

    def update(self, predicted: torch.Tensor, labels: torch.Tensor) -> None:
        self.right += int((predicted == labels).sum())
        self.count += len(labels)

    def compute(self) -> float:
        return self.right / self.count


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return DataLoader(Points(), batch_size=SIZE), DataLoader(Points(seed=2), batch_size=SIZE)


def optimizer_of(model: torch.nn.Module, groups: int = 1) -> torch.optim.Optimizer:
    body = model.body
    parameters = [{"params": body[0].parameters()}, {"params": [*body[1].parameters(), *body[3].parameters()], "lr": 0.02}]
    return torch.optim.SGD(parameters if groups > 1 else model.parameters(), lr=0.1, momentum=0.9)


def default_hooks() -> list[Any]:
    return [RuntimeInfoHook(), IterTimerHook(), DistSamplerSeedHook(), LoggerHook(interval=3), ParamSchedulerHook()]


def step(model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    loss, logged = model.parse_losses(model(**batch, mode="loss"))
    return {**logged, "loss": loss}


def val_step(model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    predicted, labels = model(**batch, mode="predict")
    return {"predicted": predicted, "labels": labels}


def theirs(work_dir: Path, hooks: list[Any], **job: Any) -> Runner:
    """Run the job in MMEngine's Runner."""
    runner = runner_of(work_dir, hooks, **job)
    runner.train()
    return runner


def runner_of(work_dir: Path, hooks: list[Any], *, resume: str | None = None, groups: int = 1, **job: Any) -> Runner:
    """Make MMEngine's Runner for the job."""
    model, (train, val) = Net(), loaders()
    limits = {key: job.pop(key) for key in ("max_epochs", "max_iters", "val_interval") if key in job}
    by_epoch = "max_epochs" in limits
    loops = {"train_dataloader": train, "train_cfg": {"by_epoch": by_epoch, **limits}}
    if job.pop("validates", True):
        loops |= {"val_dataloader": val, "val_cfg": {}, "val_evaluator": [Accuracy()]}
    none = ("runtime_info", "timer", "sampler_seed", "logger", "param_scheduler", "checkpoint")
    added = {"default_hooks": dict.fromkeys(none), "custom_hooks": hooks, "log_processor": {"by_epoch": by_epoch}}
    began = {"randomness": {"seed": 3}, "load_from": resume, "resume": resume is not None}
    update = {"optimizer": optimizer_of(model, groups)}
    name = f"theirs{next(_numbers)}"  # MMEngine's objects are global, by this name and the second
    return Runner(model, str(work_dir), optim_wrapper=update, experiment_name=name, **loops, **added, **began, **job)


def loop_of(work_dir: Path, hooks: list[Any], *, groups: int = 1, bus: Bus | None = None, **job: Any) -> TrainLoop:
    """Make our loop for the job."""
    model, (train, val) = Net(), loaders()
    config = {key: job.pop(key) for key in ("param_scheduler",) if key in job}
    bus = bus or Bus()
    bus.add(*hooks)
    validates = job.pop("validates", True)
    data = {"train_data": train, "val_data": val if validates else None, "metrics": {"accuracy": OurAccuracy()}}
    facts = {"work_dir": work_dir, "seed": 3, "name": "ours", "config": config}
    return TrainLoop(model, optimizer_of(model, groups), step=step, val_step=val_step, bus=bus, **data, **facts, **job)


def ours(work_dir: Path, hooks: list[Any], *, resume: Any = None, **job: Any) -> TrainLoop:
    """Run the job in our TrainLoop."""
    loop = loop_of(work_dir, hooks, **job)
    loop.run(resume=resume)
    return loop


def own_loop(
    work_dir: Path, hooks: list[Any], *, groups: int = 1, max_epochs: int, validates: bool = True, **config: Any
) -> Run:
    """Run the job in a loop around our Run."""
    model, (train, val) = Net(), loaders()
    bus = Bus(*hooks)
    optimizer = optimizer_of(model, groups)
    with Run(bus, model=model, optimizer=optimizer, work_dir=work_dir, seed=3, name="ours", config=config) as run:
        for _ in run.epochs(max_epochs):
            for batch in run.train(train):
                outputs = step(model, batch)
                optimizer.zero_grad()
                outputs["loss"].backward()
                optimizer.step()
                run.report(**outputs)
            for batch in run.validate(val, {"accuracy": OurAccuracy()}) if validates else ():
                run.report(**val_step(model, batch))
    return run


# --------------------------------------------------------------------------------------------------- what they leave

_TIMES = ("time", "data_time", "eta", "memory")


def scalars(work_dir: Path) -> list[dict[str, Any]]:
    """The lines of MMEngine's scalars.json, without times."""
    (file,) = work_dir.glob("*/vis_data/scalars.json")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in _TIMES} for line in lines]


def lines(work_dir: Path) -> list[str]:
    """The lines of MMEngine's log that hooks write, without what differs from run to run."""
    (file,) = work_dir.glob("*/*.log")
    text = file.read_text().replace(str(work_dir.absolute()), "DIR")
    times, runs = r"(eta|time|data_time|memory): [\d.:]+", r"(theirs\d*|ours)_\d{8}_\d{6}(_\d+)?"
    for pattern, name in ((times, r"\1"), (runs, "NAME"), (r"-[0-9a-f]{8}\.pth", "-DIGEST.pth")):
        text = re.sub(pattern, name, text)
    hooks = re.compile(r"Epoch\(|Iter\(|Exp name|[Cc]heckpoint|profil|did not improve|threshold")
    found = [line.partition(" - mmengine - ")[2] for line in text.splitlines()]
    return [line for line in found if hooks.search(line) and not line.startswith(("Hooks will", "Load checkpoint"))]


def checkpoint(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path, weights_only=False)
    return loaded


def names(work_dir: Path) -> list[str]:
    """The files that stay in the work dir, without those of the time."""
    return sorted(one.name for one in work_dir.iterdir() if one.is_file() and not re.fullmatch(r"\d{8}_\d{6}.*|\..*", one.name))


def same(one: Any, other: Any, path: str = "") -> None:
    """Assert that nested values are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, (first, second) in enumerate(zip(one, other, strict=True)):
            same(first, second, f"{path}[{index}]")
    else:
        assert one == other, path


def checkpoint_hook(**options: Any) -> CheckpointHook:
    return CheckpointHook(**{"interval": 1, **options})
