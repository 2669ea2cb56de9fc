"""EMAHook with its defaults in other trainers: a short training is as good with it as without it."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Bus
from hooks import EMAHook

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*treespec")

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


def lightning(folder, bus, callbacks=()):
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Linear(4, 2)

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx):
            self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.1)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=3, default_root_dir=folder, callbacks=list(callbacks), **quiet)
    if bus is not None:
        bus.attach(trainer)
    data = DataLoader(TensorDataset(X, Y), 8)
    trainer.fit(Module(), data, data)
    trainer.save_checkpoint(folder / "last.ckpt")
    state = torch.load(folder / "last.ckpt", weights_only=False)["state_dict"]
    Module().load_state_dict(state)
    return float(trainer.callback_metrics["accuracy"]), state


def transformers(folder, bus):
    jobs = pytest.importorskip("tests.bridges.conformance.transformers")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 2)

        def forward(self, x, labels=None):
            logits = self.net(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    data = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    metric = {"compute_metrics": lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}}
    options = {"num_train_epochs": 3, "per_device_train_batch_size": 8, "learning_rate": 0.1, "eval_strategy": "epoch"}
    trainer = jobs.make(folder, bus, model=Model, data=data, options={"eval_dataset": data, **metric}, **options)
    trainer.train()
    return next(line["eval_accuracy"] for line in reversed(trainer.state.log_history) if "eval_accuracy" in line), None


@pytest.mark.parametrize("train", [lightning, transformers], ids=lambda one: one.__name__)
def test_the_averages_of_a_short_training_are_as_good_as_its_weights(tmp_path, train):
    plain, averaged = train(tmp_path / "plain", None)[0], train(tmp_path / "averaged", Bus(EMAHook()))[0]
    assert plain > 0.85
    assert averaged == pytest.approx(plain, abs=0.08)


def test_a_checkpoint_of_a_pruned_model_has_the_keys_that_it_has_without_averages(tmp_path):
    pruning = pytest.importorskip("lightning.pytorch.callbacks").ModelPruning
    states = [
        lightning(tmp_path / name, bus, [pruning("l1_unstructured", amount=0.5)])[1]
        for name, bus in (("plain", None), ("averaged", Bus(EMAHook())))
    ]
    assert list(states[0]) == list(states[1]) == ["net.weight", "net.bias"]
