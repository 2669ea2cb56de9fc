"""A loop with generation phases: a policy learns to repeat its prompt, by REINFORCE with a baseline. Each phase is measured."""

import torch
from torch import nn
from torch.distributions import Categorical

from trainbus import Bus, CheckpointHook, LoggerHook, Run, RunRecordHook

TOKENS, LENGTH, COPIES = 8, 6, 4


class Policy(nn.Module):
    """Give the scores of the next token, from the prompt and the token before."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 32)
        self.scores = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, TOKENS))

    def forward(self, prompt, before):
        return self.scores(torch.cat([self.embedding(prompt), self.embedding(before)], dim=-1))


class Baseline:
    """The mean reward so far, a state of the training that is not a weight."""

    value = 0.0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@torch.no_grad()
def roll_out(policy, prompt):
    """Return answers, prompts × LENGTH."""
    answer = [prompt]
    for _ in range(LENGTH):
        answer.append(Categorical(logits=policy(prompt, answer[-1])).sample())
    return torch.stack(answer[1:], dim=1)


def reward_of(prompt, answer):
    """Return the share of tokens that repeat the prompt: here, a program; elsewhere, a model."""
    return (answer == prompt[:, None]).float().mean(1)


torch.manual_seed(0)
policy, baseline = Policy(), Baseline()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
prompts = torch.utils.data.DataLoader(torch.randint(TOKENS, (512,)), batch_size=64, shuffle=True)
bus = Bus(LoggerHook(interval=8), CheckpointHook(interval=5), RunRecordHook(), timing=True)

with Run(
    bus, model=policy, optimizer=optimizer, work_dir="runs/rl", seed=0, stateful={"baseline": baseline}, resume="auto"
) as run:
    for _ in run.epochs(10):
        for prompt in run.train(prompts):
            prompt = prompt.repeat_interleave(COPIES)
            with bus.span("roll-out"):
                answer = roll_out(policy, prompt)
            with bus.span("reward"):
                reward = reward_of(prompt, answer)
            with bus.span("update"):
                before = torch.cat([prompt[:, None], answer[:, :-1]], dim=1)
                scores = policy(prompt[:, None].expand_as(before), before)
                chosen = Categorical(logits=scores).log_prob(answer).sum(1)
                loss = -((reward - baseline.value) * chosen).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            baseline.value += 0.05 * (float(reward.mean()) - baseline.value)
            run.report(loss=loss, reward=reward.mean())

print(bus.costs())
