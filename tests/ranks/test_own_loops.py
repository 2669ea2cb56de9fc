"""Loops that people write, on two ranks: stopped at any place and resumed, they end as one that was never stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch

from trainbus.eventloop import Bus, Run
from trainbus.hooks import CheckpointHook, DistSamplerSeedHook, EMAHook

from . import jobs


class Seen(dict[str, float]):
    """What the code of a loop has done, which is saved."""

    def state_dict(self) -> dict[str, float]:
        return dict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.clear()
        self.update(state)

    def add(self, name: str, value: float = 1) -> None:
        self[name] = self.get(name, 0) + value


def validated(run: Run, seen: Seen) -> None:
    for batch in run.validate(jobs.loader(shuffle=False, rows=16)):
        seen.add("drawn", float(torch.rand(())))
        run.report(error=jobs.step(run.model, batch))


def learn(run: Run, batch: Any) -> None:
    run.optimizers["optimizer"].zero_grad()
    jobs.step(run.model, batch).backward()
    run.optimizers["optimizer"].step()


def validation_at_the_top(run: Run, seen: Seen, data: Any) -> None:
    for _ in run.epochs(2):
        seen.add("heads", float(torch.rand(())))
        for batch in run.train(data):
            if run.progress.batch_idx % 3 == 1:
                validated(run, seen)
            learn(run, batch)
            seen.add("steps")
        seen.add("tails")


def validation_behind_the_step(run: Run, seen: Seen, data: Any) -> None:
    for _ in run.epochs(2):
        for batch in run.train(data):
            learn(run, batch)
            if run.progress.batch_idx % 3 == 1:
                validated(run, seen)
            seen.add("steps", float(torch.rand(())))
        validated(run, seen)
        seen.add("tails")


def calls(run: Run, seen: Seen, data: Any) -> None:
    drive = run.drive()
    drive.begin_train(max_epochs=2)
    if drive.validation_comes_first:
        validated(run, seen)
    while run.progress.epoch < 2 and not drive.should_stop():
        seen.add("heads", float(torch.rand(())))
        for batch in drive.begin_epoch(data):
            drive.begin_iteration(batch)
            learn(run, batch)
            drive.end_iteration()
            seen.add("steps", float(torch.rand(())))
            if drive.should_stop():
                drive.abandon_epoch()
                break
        else:
            drive.end_epoch()
            seen.add("tails")
            validated(run, seen)
    drive.end_train()


def train(loop: Any, folder: str, stop: tuple[str, int] | None) -> tuple[Any, ...]:
    """Train two epochs, or until a stop at an event; return what is left."""
    model, seen, data = jobs.make_loop(None, dropout=0.3).model, Seen(), jobs.loader(shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    bus = Bus(EMAHook(momentum=0.5), DistSamplerSeedHook(), CheckpointHook(interval=2, by_epoch=False))
    if stop is not None:
        bus.on(stop[0], lambda event: event.run.rank == 1 and event.run.stop(), once=stop[1])
    options = {"stateful": {"seen": seen}, "work_dir": folder, "seed": 5, "resume": "auto"}
    with Run(bus, model=model, optimizer=optimizer, **options) as run:
        if not run.progress.iter:
            torch.rand(run.rank)  # the ranks draw different numbers from here on
        loop(run, seen, data)
    return (
        {name: value.tolist() for name, value in jobs.weights(model).items()},
        {name: value.tolist() for name, value in bus.hooks[0].average.tensors.items()},
        dict(seen),
        (run.progress.epoch, run.progress.iter, run.progress.update),
        torch.rand(2).tolist(),
    )


STOPS = [
    ("after_train_iter", 5),
    ("before_val_iter", 3),
    ("after_val", 2),
    ("after_train_epoch", 1),
    ("before_optimizer_step", 11),
]


@pytest.mark.parametrize("stops", [STOPS[:2], pytest.param(STOPS[2:], marks=pytest.mark.long)], ids=["some", "rest"])
@pytest.mark.parametrize("loop", [validation_at_the_top, validation_behind_the_step, calls])
def test_a_loop_of_ones_own_on_two_ranks_is_exact(ranks, tmp_path, loop, stops):
    whole = ranks(train, loop, str(tmp_path / "whole"), None)
    for number, stop in enumerate(stops):
        folder = str(tmp_path / str(number))
        ranks(train, loop, folder, stop)
        assert any(Path(folder).glob("*.safetensors"))
        found = ranks(train, loop, folder, None)
        for rank, (one, other) in enumerate(zip(whole, found, strict=True)):
            kept = [2] if rank else []  # a checkpoint has the stateful objects of rank 0
            for part in {*range(5)} - {*kept}:
                assert one[part] == other[part], (stop, rank, part)
