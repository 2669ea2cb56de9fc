"""Train a small network on scikit-learn's handwritten digits with Ignite. Started again, it continues where it was."""

from pathlib import Path

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Accuracy
from ignite.utils import manual_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from trainbus import Bus, CheckpointHook, EMAHook, LoggerHook, attach

EPOCHS = 10
FOLDER = Path("runs/ignite")

if __name__ == "__main__":
    manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train, val = random_split(data, [0.8, 0.2])
    train_loader, val_loader = DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=512)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()})

    @trainer.on(Events.EPOCH_COMPLETED)
    def validate():
        evaluator.run(val_loader)
        print(f"epoch {trainer.state.epoch}: accuracy {evaluator.state.metrics['accuracy']:.1%}")

    to_save = {"model": model, "optimizer": optimizer, "trainer": trainer}
    bus = Bus(EMAHook(momentum=0.01), LoggerHook(interval=40), CheckpointHook(save_best="accuracy", save_last=False))
    to_save["bus"] = attach(bus, trainer, evaluator=evaluator, work_dir=FOLDER)
    saver = Checkpoint(to_save, DiskSaver(FOLDER, require_empty=False), n_saved=1)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)
    if saved := sorted(FOLDER.glob("checkpoint_*.pt"), key=lambda path: path.stat().st_mtime):
        Checkpoint.load_objects(to_save, torch.load(saved[-1]))
    if trainer.state.epoch < EPOCHS:  # else Ignite begins again
        trainer.run(train_loader, max_epochs=EPOCHS)
    print(f"{FOLDER}:", *sorted(path.name for path in FOLDER.iterdir()))
