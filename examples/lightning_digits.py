"""Train a small network on scikit-learn's handwritten digits with Lightning. Started again, it continues where it was."""

from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from trainbus import Bus, CheckpointHook, EMAHook, LoggerHook, attach


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


if __name__ == "__main__":
    lightning.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train, val = random_split(data, [0.8, 0.2])
    train_loader, val_loader = DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=512)
    model = Digits()
    trainer = lightning.Trainer(
        max_epochs=10,
        callbacks=[ModelCheckpoint("runs/lightning", filename="{epoch}", save_last=True)],
        default_root_dir="runs/lightning",
        logger=False,
    )
    bus = Bus(EMAHook(momentum=0.01), LoggerHook(interval=40), CheckpointHook(save_best="accuracy", save_last=False))
    attach(bus, trainer)
    trainer.fit(model, train_loader, val_loader, ckpt_path="last")
    (metrics,) = trainer.validate(model, val_loader, verbose=False)
    print(f"accuracy {metrics['accuracy']:.1%}")
    print("runs/lightning:", *sorted(path.name for path in Path("runs/lightning").iterdir()))
