"""PPO in the shape of cleanrl: ``python examples/ppo.py``. Killed in the middle of an episode, it goes on bit for bit.

The environment is a vector of walkers in numpy, with the methods of gymnasium, so that the script needs no other package. The
lines for trainbus are marked; the others are a PPO as people write it.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from trainbus import Bus, CheckpointHook, LoggerHook, Run  # trainbus

ENVS, STEPS, ITERATIONS, EPOCHS, MINIBATCHES = 8, 32, 20, 4, 4
RATE, GAMMA, LAMBDA, CLIP, ENTROPY, VALUE, MAX_NORM = 5e-3, 0.95, 0.9, 0.2, 0.01, 0.5, 0.5


class Walkers:
    """Walkers on a line that drifts; each should reach its goal, at +1, within 25 steps."""

    action_space = (0, 1)  # left, right

    def __init__(self, number):
        self.number = number

    def reset(self, *, seed=None):
        self.rng = np.random.default_rng(seed)
        self.at, self.age = self.rng.uniform(-1, 0.5, self.number), np.zeros(self.number)
        self.drift = self.rng.normal(0, 0.02, self.number)
        return self.observed(), {}

    def observed(self):
        return np.stack([self.at, self.drift * 10], axis=1).astype(np.float32)

    def step(self, actions):
        self.at = np.clip(self.at + 0.1 * (2 * actions - 1) + self.drift, -2, None)
        self.age += 1
        reached, late = self.at >= 1, self.age >= 25
        rewards, ended = np.where(reached, 1.0, -0.02), reached | late
        fresh = self.rng.uniform(-1, 0.5, self.number), self.rng.normal(0, 0.02, self.number)
        self.at, self.drift = np.where(ended, fresh[0], self.at), np.where(ended, fresh[1], self.drift)
        self.age[ended] = 0
        return self.observed(), rewards.astype(np.float32), reached, late, {"episodes": rewards[ended]}


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        self.actor = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def act(self, observation, action=None):
        chosen = Categorical(logits=self.actor(observation))
        action = chosen.sample() if action is None else action
        return action, chosen.log_prob(action), chosen.entropy(), self.critic(observation).flatten()


def train(work_dir, hooks=(), resume="auto"):
    """Train, and return the agent and the share of episodes that reached the goal, by iteration."""
    torch.manual_seed(1)
    agent, envs = Agent(), Walkers(ENVS)
    optimizer = torch.optim.Adam(agent.parameters(), lr=RATE, eps=1e-5)
    obs, _ = envs.reset(seed=1)
    done = np.zeros(ENVS, dtype=np.float32)
    bus = Bus(CheckpointHook(interval=5, by_epoch=False), LoggerHook(), *hooks)  # trainbus
    with Run(bus, model=agent, optimizer=optimizer, work_dir=work_dir, seed=1, resume=resume) as run:  # trainbus
        kept = run.keep(envs=envs, obs=obs, done=done, reached=[])  # trainbus
        for _ in run.epochs(max_iters=ITERATIONS):  # trainbus
            for iteration in run.train(range(ITERATIONS)):  # trainbus
                optimizer.param_groups[0]["lr"] = (1 - iteration / ITERATIONS) * RATE
                rows, ends = [], []
                for _ in range(STEPS):
                    state = torch.as_tensor(kept.obs)
                    with torch.no_grad():
                        action, logprob, _, value = agent.act(state)
                    before = torch.as_tensor(kept.done)
                    kept.obs, reward, reached, late, info = envs.step(action.numpy())
                    kept.done = (reached | late).astype(np.float32)
                    rows.append((state, action, logprob, value, torch.as_tensor(reward), before))
                    ends += info["episodes"].tolist()
                states, actions, logprobs, values, rewards, dones = map(torch.stack, zip(*rows, strict=True))
                with torch.no_grad():
                    following, after = agent.critic(torch.as_tensor(kept.obs)).flatten(), torch.as_tensor(kept.done)
                advantages, last = torch.zeros_like(rewards), 0.0
                for step in reversed(range(STEPS)):
                    delta = rewards[step] + GAMMA * following * (1 - after) - values[step]
                    advantages[step] = last = delta + GAMMA * LAMBDA * (1 - after) * last
                    following, after = values[step], dones[step]
                flat = [one.flatten(0, 1) for one in (states, actions, logprobs, advantages, advantages + values)]
                for _ in range(EPOCHS):
                    for chosen in torch.randperm(STEPS * ENVS).chunk(MINIBATCHES):
                        state, action, old, advantage, target = (one[chosen] for one in flat)
                        _, new, entropy, value = agent.act(state, action)
                        ratio, advantage = (new - old).exp(), (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                        policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                        loss = policy - ENTROPY * entropy.mean() + VALUE * 0.5 * (value - target).square().mean()
                        optimizer.zero_grad()
                        loss.backward()
                        nn.utils.clip_grad_norm_(agent.parameters(), MAX_NORM)
                        optimizer.step()
                kept.reached.append(float(np.mean([end > 0 for end in ends])))
                run.report(loss=loss, reached=kept.reached[-1])  # trainbus
    return agent, kept.reached


if __name__ == "__main__":
    torch.set_num_threads(1)  # the network is too small for more
    train(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/ppo"))
