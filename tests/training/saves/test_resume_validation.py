"""A resumed run validates on the data, and with the random draws, of one that was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from eventloop import Bus, Run, TrainLoop
from eventloop.training.loaders import has_workers


def samples(count: int = 22) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.arange(count) % 3)


def a_part(generator: torch.Generator, **options: Any) -> DataLoader[Any]:
    """Other samples in each pass."""
    sampler = RandomSampler(samples(), replacement=True, num_samples=6, generator=generator)
    return DataLoader(samples(), batch_size=3, sampler=sampler, **options)


LOADERS = {
    "a generator of its own": lambda: a_part(torch.Generator().manual_seed(2)),
    "persistent workers": lambda: DataLoader(samples(8), batch_size=4, num_workers=1, persistent_workers=True),
    "both": lambda: a_part(torch.Generator().manual_seed(2), num_workers=1, persistent_workers=True),
}
LENGTHS = {"by epochs": {"max_epochs": 3}, "by iterations": {"max_iters": 16, "val_interval": 5}}


class Job:
    """Each validation's result, and a model with dropout that shows any draw too many."""

    def __init__(self, parts, work_dir: Path, val_data: Any, length: str, **options: Any) -> None:
        bus = Bus()
        self.bus = bus
        self.model = parts.model(dropout=0.3)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.scores: dict[int, float] = {}
        bus.on("after_val_epoch", lambda e: self.scores.update({e.progress.iter: float(e.metrics["loss"])}))
        options.setdefault("train_data", DataLoader(samples(), batch_size=4, shuffle=True))
        self.loop = TrainLoop(
            self.model,
            optimizer,
            step=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            val_data=val_data,
            bus=bus,
            work_dir=work_dir,
            seed=7,
            **LENGTHS[length],
            **options,
        )

    def save_at(self, mount_point: str, count: int) -> Job:
        heard: list[Any] = []

        def save(event: Any) -> None:
            heard.append(event)
            if len(heard) == count:
                event.run.request_save("here.safetensors")

        self.bus.on(mount_point, save, priority=95)
        return self

    def outcome(self, resume: Path | None = None) -> dict[str, Any]:
        self.loop.run(resume=resume)
        return {"model": self.model.state_dict(), "torch": torch.get_rng_state(), "last": list(self.scores.items())[-1]}


PLACES = [("after_train_iter", 7), ("before_val_iter", 3), ("after_val_epoch", 2)]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("mount_point", "count"), PLACES)
@pytest.mark.parametrize("loader", LOADERS)
def test_validations_after_a_resume_are_those_of_a_run_that_was_never_stopped(
    parts, tmp_path, loader, mount_point, count, length
):
    through = Job(parts, tmp_path, LOADERS[loader](), length).save_at(mount_point, count)
    whole = through.outcome()
    resumed = Job(parts, tmp_path / "again", LOADERS[loader](), length)
    parts.assert_same(resumed.outcome(tmp_path / "here.safetensors"), whole)
    assert resumed.scores.items() <= through.scores.items()


def test_the_same_for_a_save_that_a_resumed_run_makes_before_it_validates(parts, tmp_path):
    through = Job(parts, tmp_path, LOADERS["both"](), "by epochs").save_at("after_train_iter", 7)
    whole = through.outcome()
    again = Job(parts, tmp_path / "b", LOADERS["both"](), "by epochs").save_at("after_train_iter", 1)
    again.outcome(tmp_path / "here.safetensors")
    last = Job(parts, tmp_path / "c", LOADERS["both"](), "by epochs")
    parts.assert_same(last.outcome(tmp_path / "b" / "here.safetensors"), whole)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("mount_point", "count"), PLACES)
def test_a_generator_shared_by_training_and_validation_is_restored(parts, tmp_path, mount_point, count, length):
    def job(name: str) -> Job:
        generator = torch.Generator().manual_seed(2)
        train = DataLoader(samples(), batch_size=4, shuffle=True, generator=generator)
        return Job(parts, tmp_path / name, a_part(generator), length, train_data=train)

    through = job("a").save_at(mount_point, count)
    whole = through.outcome()
    resumed = job("b")
    parts.assert_same(resumed.outcome(tmp_path / "a" / "here.safetensors"), whole)
    assert resumed.scores.items() <= through.scores.items()


def test_a_validation_loader_of_another_kind_starts_from_its_beginning(parts, tmp_path):
    Job(parts, tmp_path, LOADERS["both"](), "by epochs").save_at("after_train_iter", 7).outcome()
    other = Job(parts, tmp_path / "again", parts.batches(2), "by epochs")
    other.outcome(tmp_path / "here.safetensors")
    assert len(other.scores) == 2


def test_several_validation_loaders_in_a_users_own_loop(parts, tmp_path):
    def train(name: str, resume: Path | None = None) -> list[float]:
        first, second = LOADERS["both"](), LOADERS["a generator of its own"]()
        model, bus, scores = parts.model(dropout=0.3), Bus(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        bus.on("after_train_iter", lambda e: e.run.request_save("here.safetensors"), once=4)
        with Run(bus, model=model, optimizer=optimizer, work_dir=tmp_path / name, seed=7, resume=resume) as run:
            for _ in run.epochs(3):
                for inputs, labels in run.train(parts.batches(3)):
                    optimizer.zero_grad()
                    F.cross_entropy(model(inputs), labels).backward()
                    optimizer.step()
                for loader in (first, second):
                    validation = run.validate(loader)
                    for inputs, labels in validation:
                        run.report(loss=F.cross_entropy(model(inputs), labels))
                    scores.append(float(validation.metrics["loss"]))
        assert has_workers(first)
        return scores

    whole = train("a")
    assert train("b", tmp_path / "a" / "here.safetensors") == whole[2:]
