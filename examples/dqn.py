"""DQN in the shape of cleanrl: ``python examples/dqn.py``. Killed in the middle of an episode, it goes on bit for bit.

The environment, with the methods of gymnasium, is in the script. An iteration is one of its steps. The replay buffer is four
arrays and a count.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss

from trainbus import Bus, CheckpointHook, LoggerHook, Run

TOTAL, LEARNS_FROM, TRAINS_EACH, TARGET_EACH, BATCH, SIZE, GAMMA = 1500, 200, 2, 50, 32, 1000, 0.95


class Corridor:
    """A corridor of ten cells with a slippery floor; the way out is at its right end."""

    action_space = (0, 1)  # left, right

    def reset(self, *, seed=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.at, self.age = int(self.rng.integers(5)), 0
        return self.observed(), {}

    def observed(self):
        return np.array([self.at / 9, self.age / 40], dtype=np.float32)

    def step(self, action):
        slips = self.rng.random() < 0.1
        self.at = min(9, max(0, self.at + (1 if action != slips else -1)))
        self.age += 1
        return self.observed(), float(self.at == 9), self.at == 9, self.age >= 40, {}


def network():
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))


def train(work_dir, hooks=(), resume="auto"):
    """Train, and return the network and the lengths of the episodes."""
    torch.manual_seed(1)
    q, target, env = network(), network(), Corridor()
    target.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=2e-3)
    obs, _ = env.reset(seed=1)
    shapes = {"obs": (SIZE, 2), "next": (SIZE, 2), "action": (SIZE, 1), "reward": (SIZE,), "ended": (SIZE,)}
    buffer = {name: np.zeros(shape, np.int64 if name == "action" else np.float32) for name, shape in shapes.items()}
    bus = Bus(CheckpointHook(interval=100, by_epoch=False), LoggerHook(interval=100), *hooks)
    models = {"q": q, "target": target}
    with Run(bus, model=models, optimizer=optimizer, work_dir=work_dir, seed=1, resume=resume) as run:
        kept = run.keep(env=env, obs=obs, buffer=buffer, lengths=[])
        for step in run.iterations(TOTAL):
            epsilon = max(0.05, 1 - step / (0.5 * TOTAL))
            explores = np.random.random() < epsilon
            action = int(np.random.randint(2) if explores else q(torch.as_tensor(kept.obs)).argmax())
            following, reward, terminated, truncated, _ = env.step(action)
            row = {"obs": kept.obs, "next": following, "action": action, "reward": reward, "ended": terminated}
            for name, value in row.items():
                buffer[name][step % SIZE] = value
            kept.obs = following
            if terminated or truncated:
                kept.lengths.append(env.age)
                run.report(length=env.age)
                kept.obs, _ = env.reset()
            if step >= LEARNS_FROM and step % TRAINS_EACH == 0:
                chosen = np.random.randint(min(step, SIZE), size=BATCH)
                batch = {name: torch.as_tensor(rows[chosen]) for name, rows in buffer.items()}
                with torch.no_grad():
                    best = target(batch["next"]).max(dim=1).values
                    wanted = batch["reward"] + GAMMA * best * (1 - batch["ended"])
                loss = mse_loss(q(batch["obs"]).gather(1, batch["action"]).squeeze(), wanted)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.report(loss=loss)
            if step % TARGET_EACH == 0:
                target.load_state_dict(q.state_dict())
    return q, kept.lengths


if __name__ == "__main__":
    torch.set_num_threads(1)  # the network is too small for more
    train(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/dqn"))
