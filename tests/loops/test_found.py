"""Programs that the grammar wrote, and that were not exact."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from .kit import Kept, Said, Strike, left
from .trials import tried


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("kind", ["stop", "term"])
@pytest.mark.parametrize("order", ["head", "tail"])
def test_a_validation_that_a_stop_cuts_short_begins_again_with_the_states_of_its_beginning(tmp_path, order, kind, at):
    def train(tb, strike, folder):
        torch.manual_seed(0)
        net, keep = nn.Linear(1, 1), Kept()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        bus = tb.Bus(tb.CheckpointHook(interval=1, by_epoch=False), tb.PreemptionHook())
        with tb.Run(bus, model=net, optimizer=optimizer, work_dir=folder, stateful={"keep": keep}, resume="auto") as run:
            strike.run = run

            def validate():
                for _ in run.validate(range(2)):
                    keep["drawn"] += float(torch.rand(()))
                    strike(0)

            for _ in run.epochs(2):
                if order == "head":
                    validate()
                for _ in run.train(range(2)):
                    optimizer.zero_grad()
                    net(torch.rand(1, 1)).sum().backward()
                    optimizer.step()
                if order == "tail":
                    validate()
        return left(run, Said(folder), net=net, keep=keep)

    verdict = tried(train, [Strike(kind, 0, at)], tmp_path)
    assert verdict.exact, verdict


def shuffled(seed):
    return DataLoader(range(6), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("loaders", ["one", "two"])
@pytest.mark.parametrize("saved", [2, 4, 6])
def test_each_of_two_passes_draws_on_from_its_own_generator(tmp_path, loaders, saved):
    def train(tb, strike, folder):
        torch.manual_seed(0)
        first = shuffled(1)
        second = first if loaders == "one" else shuffled(2)
        net, seen = nn.Linear(1, 1), Kept()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        bus = tb.Bus(tb.CheckpointHook(interval=saved, by_epoch=False, save_last=False))
        with tb.Run(bus, model=net, optimizer=optimizer, work_dir=folder, stateful={"seen": seen}, resume="auto") as run:
            strike.run = run
            for _ in run.epochs(2):
                for loader in (first, second):
                    for batch in run.train(loader):
                        strike(0)
                        seen[f"batch {run.progress.iter}"] = batch[0].item() * 10 + batch[1].item()
                        optimizer.zero_grad()
                        net(torch.ones(1, 1)).sum().backward()
                        optimizer.step()
        return left(run, Said(folder), net=net, seen=seen)

    verdict = tried(train, [Strike("die", 0, saved + 2)], tmp_path)
    assert verdict.exact, verdict
