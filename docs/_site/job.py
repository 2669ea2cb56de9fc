import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(512, 16)
targets = inputs[:, :4].argmax(1)  # four classes
train = DataLoader(TensorDataset(inputs[:384], targets[:384]), batch_size=32, shuffle=True)
val = DataLoader(TensorDataset(inputs[384:], targets[384:]), batch_size=32)

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, batch):
    inputs, targets = batch
    logits = model(inputs)
    accuracy = (logits.argmax(1) == targets).float().mean()
    return {"loss": cross_entropy(logits, targets), "accuracy": accuracy, "logits": logits}
