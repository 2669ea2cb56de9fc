"""Train a small network on scikit-learn's handwritten digits with Accelerate. Started again, it continues where it was."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from trainbus import Bus, EMAHook, LoggerHook, Run

EPOCHS = 6
FOLDER = Path("runs/accelerate")

if __name__ == "__main__":
    set_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train, val = random_split(data, [0.8, 0.2])
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    train_loader, val_loader = DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=512)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)

    bus = Bus(EMAHook(momentum=0.01), LoggerHook(interval=40))
    with Run(bus, model=model, optimizer=optimizer, accelerator=accelerator, work_dir=FOLDER) as run:
        first = len(list(FOLDER.glob("epoch_*")))
        if first:
            accelerator.load_state(FOLDER / f"epoch_{first}")
        for epoch in run.epochs(EPOCHS):
            model.train()
            for images, labels in run.train(train_loader):
                loss = cross_entropy(model(images), labels)
                run.report(loss=loss)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            right = []
            for images, labels in run.validate(val_loader):
                with torch.no_grad():
                    predicted = model(images).argmax(1)
                right.append(torch.eq(*accelerator.gather_for_metrics((predicted, labels))))
            accelerator.print(f"epoch {epoch + 1}: accuracy {torch.cat(right).float().mean():.1%}")
            accelerator.save_state(FOLDER / f"epoch_{epoch + 1}")
    accelerator.print(f"{FOLDER}:", *sorted(path.name for path in FOLDER.iterdir()))
