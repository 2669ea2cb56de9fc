"""Your own loop with a bus: ``python examples/own_loop.py``. Trains y = sin(x) in a second, and keeps the best checkpoint.

Three lines make an ordinary PyTorch script publish every event (``Run``, ``run.epochs``, ``run.train``), and any hook works in
it. The body stays unchanged: forward, backward, step.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss

from trainbus import Bus, CheckpointHook, ConsoleWriter, EMAHook, IterTimerHook, JSONLinesWriter, LoggerHook, Run


def train(work_dir: Path, epochs: int = 20, resume: str | None = None) -> float:
    """Train, and validate the averaged weights after each epoch; return the last validation's loss."""
    torch.manual_seed(0)
    x = torch.linspace(-3, 3, 640).unsqueeze(1)
    data = torch.utils.data.TensorDataset(x, torch.sin(x))
    loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    bus = Bus()
    bus.add(EMAHook(momentum=0.05), IterTimerHook(), CheckpointHook(save_best="loss"))
    bus.add(LoggerHook(interval=50, writers=[ConsoleWriter(), JSONLinesWriter(interval=1)]))

    with Run(bus, model=model, optimizer=optimizer, work_dir=work_dir, seed=0, resume=resume) as run:
        for _ in run.epochs(epochs):
            for inputs, targets in run.train(loader):
                loss = mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
                optimizer.step()
                run.report(loss=loss)
            validation = run.validate(loader)
            for inputs, targets in validation:
                run.report(loss=mse_loss(model(inputs), targets))
    return float(validation.metrics["loss"])


if __name__ == "__main__":
    torch.set_num_threads(1)  # the network is too small for more
    train(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/own_loop"))
