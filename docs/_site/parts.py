import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from trainbus import Hook, mount, register


class Net(nn.Module):
    def __init__(self, width: int = 32):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, inputs):
        return self.layers(inputs)


def loader(batch_size: int = 32):
    inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size, shuffle=True)


def step(model, batch):
    inputs, targets = batch
    logits = model(inputs)
    return {"loss": cross_entropy(logits, targets), "accuracy": (logits.argmax(1) == targets).float().mean()}


@register
class Largest(Hook):
    def __init__(self, every: int = 100):
        self.every = every

    @mount(capture=lambda event: event.run.model.layers[0].weight, offload="thread")
    def after_train_epoch(self, weight):
        print("largest weight", float(weight.abs().max()))
