"""A resumed run validates on the data, and with the random draws, of one that was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.utils.data import DataLoader, RandomSampler

from eventloop import Bus, Run
from eventloop.training.rng import has_workers

from .jobs import Job, samples


def a_part(generator: torch.Generator, **options: Any) -> DataLoader[Any]:
    """Other samples in each pass."""
    sampler = RandomSampler(samples(), replacement=True, num_samples=6, generator=generator)
    return DataLoader(samples(), batch_size=3, sampler=sampler, **options)


LOADERS = {
    "a generator of its own": lambda: a_part(torch.Generator().manual_seed(2)),
    "persistent workers": lambda: DataLoader(list(samples())[:8], batch_size=4, num_workers=1, persistent_workers=True),
    "both": lambda: a_part(torch.Generator().manual_seed(2), num_workers=1, persistent_workers=True),
}
LENGTHS = {"by epochs": {"max_epochs": 3}, "by iterations": {"max_iters": 16, "val_interval": 5}}


PLACES = [("after_train_iter", 7), ("before_val_iter", 3), ("after_val_epoch", 2)]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("mount_point", "count"), PLACES)
@pytest.mark.parametrize("loader", LOADERS)
def test_validations_after_a_resume_are_those_of_a_run_that_was_never_stopped(
    parts, tmp_path, loader, mount_point, count, length
):
    def job(name: str) -> Job:
        return Job(parts, tmp_path / name, val_data=LOADERS[loader](), **LENGTHS[length])

    check(parts, job, tmp_path, mount_point, count)


def check(parts: Any, job: Any, tmp_path: Path, mount_point: str, count: int) -> None:
    through = job("a").save_at(mount_point, count).run()
    whole = through.outcome
    resumed = job("b").run(resume=tmp_path / "a" / "here.safetensors")
    parts.assert_same(resumed.outcome, whole)
    assert resumed.scores.items() <= through.scores.items()


def test_the_same_for_a_save_that_a_resumed_run_makes_before_it_validates(parts, tmp_path):
    def job(name: str) -> Job:
        return Job(parts, tmp_path / name, val_data=LOADERS["both"](), max_epochs=3)

    whole = job("a").save_at("after_train_iter", 7).run().outcome
    job("b").save_at("after_train_iter", 1).run(resume=tmp_path / "a" / "here.safetensors")
    last = job("c").run(resume=tmp_path / "b" / "here.safetensors")
    parts.assert_same(last.outcome, whole)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("mount_point", "count"), PLACES)
def test_a_generator_shared_by_training_and_validation_is_restored(parts, tmp_path, mount_point, count, length):
    def job(name: str) -> Job:
        generator = torch.Generator().manual_seed(2)
        train = DataLoader(samples(), batch_size=4, shuffle=True, generator=generator)
        return Job(parts, tmp_path / name, train_data=train, val_data=a_part(generator), **LENGTHS[length])

    check(parts, job, tmp_path, mount_point, count)


def test_a_validation_loader_of_another_kind_starts_from_its_beginning(parts, tmp_path):
    Job(parts, tmp_path, val_data=LOADERS["both"](), max_epochs=3).save_at("after_train_iter", 7).run()
    other = Job(parts, tmp_path / "again", val_data=parts.batches(2), max_epochs=3).run(resume=tmp_path / "here.safetensors")
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
