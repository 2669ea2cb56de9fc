"""Two trainings in one folder of another trainer: a new one is told alone, and a resumed one goes on with the first."""

import pytest
import structlog
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Bus, Run
from eventloop.observe.record import Validation
from eventloop.observe.report.reported_run import ReportedRun
from hooks import LoggerHook, RunRecordHook
from hooks.writers import JSONLinesWriter

from .jobs import batches, network

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*treespec"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:resuming reads and drops"),
]

STEPS = 4  # an epoch


def new_bus():
    return Bus(RunRecordHook(), LoggerHook(1, writers=[JSONLinesWriter(), JSONLinesWriter("mine.jsonl")]))


def lightning(folder, epochs, resume, evaluate=False):
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).square().mean()

        def validation_step(self, batch, batch_idx):
            self.log("accuracy", 0.5)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=epochs, default_root_dir=folder, **quiet)
    new_bus().attach(trainer)
    module, data = Module(), DataLoader(TensorDataset(torch.ones(STEPS, 4)))
    val = data if evaluate else None
    trainer.fit(module, data, val, ckpt_path=folder / "last.ckpt" if resume else None)
    trainer.save_checkpoint(folder / "last.ckpt")
    if evaluate:
        trainer.validate(module, val, verbose=False)


def transformers(folder, epochs, resume, evaluate=False):
    jobs = pytest.importorskip("tests.bridges.transformers_jobs")
    data = jobs.plain_data(2 * STEPS)
    strategy = "epoch" if evaluate else "no"
    trainer = jobs.make(folder, new_bus(), data=data, num_train_epochs=epochs, save_strategy="epoch", eval_strategy=strategy)
    trainer.train(resume_from_checkpoint=resume)
    if evaluate:
        trainer.evaluate()


def ignite(folder, epochs, resume, evaluate=False):
    pytest.importorskip("ignite")
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.handlers import Checkpoint

    model = network()
    trainer = create_supervised_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    evaluator = create_supervised_evaluator(model)
    bridge = new_bus().attach(trainer, evaluator=evaluator, work_dir=folder)
    if evaluate:
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(batches(1)))
    if resume:
        Checkpoint.load_objects(bridge.to_save, torch.load(folder / "last.pt", weights_only=True))
    trainer.run(batches(STEPS), max_epochs=epochs)
    torch.save({name: one.state_dict() for name, one in bridge.to_save.items()}, folder / "last.pt")
    if evaluate:
        evaluator.run(batches(1))


def accelerate(folder, epochs, resume):
    library = pytest.importorskip("accelerate")
    accelerator, model = library.Accelerator(cpu=True), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.randn(STEPS, 4), torch.zeros(STEPS).long()), batch_size=1)
    model, optimizer, data = accelerator.prepare(model.eval(), optimizer, data)
    with Run(new_bus(), model=model, optimizer=optimizer, accelerator=accelerator, work_dir=folder) as run:
        if resume:
            accelerator.load_state(folder / "state")
        for _ in run.epochs(epochs):
            for inputs, labels in run.train(data):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                run.report(loss=loss)
        accelerator.save_state(folder / "state")


hosts = pytest.mark.parametrize("train", [lightning, transformers, ignite, accelerate], ids=lambda one: one.__name__)


def lines(path):
    return path.read_text().splitlines()


@hosts
def test_a_new_training_moves_the_files_of_the_earlier_run_and_says_so(tmp_path, train):
    train(tmp_path, 2, resume=False)
    names = ("run.json", "record.jsonl", "scalars.jsonl", "mine.jsonl")
    before = {name: (tmp_path / name).read_bytes() for name in names}
    for number in (1, 2):
        with structlog.testing.capture_logs() as logs:
            train(tmp_path, 1, resume=False)
        moved = [one["to"] for one in logs if one["log_level"] == "warning" and "to" in one]
        assert moved == [str(tmp_path / f"earlier-{number}")]
    assert {name: (tmp_path / "earlier-1" / name).read_bytes() for name in names} == before
    assert len(lines(tmp_path / "scalars.jsonl")) == len(lines(tmp_path / "mine.jsonl")) == STEPS
    now = ReportedRun(tmp_path)
    assert (len(now.story.sessions), now.epochs, now.iterations) == (1, 1, STEPS)


@hosts
def test_a_resumed_training_goes_on_with_the_files(tmp_path, train):
    train(tmp_path, 1, resume=False)
    train(tmp_path, 2, resume=True)
    assert not (tmp_path / "earlier-1").exists()
    now = ReportedRun(tmp_path)
    assert (now.epochs, now.iterations, len(lines(tmp_path / "scalars.jsonl"))) == (2, 2 * STEPS, 2 * STEPS)


@pytest.mark.parametrize("train", [lightning, transformers, ignite], ids=lambda one: one.__name__)
def test_an_evaluation_after_the_training_has_its_epoch_and_iteration(tmp_path, train):
    train(tmp_path, 2, resume=False, evaluate=True)
    assert [(one.epoch, one.iter) for one in ReportedRun(tmp_path).story.of(Validation)] == [(1, 4), (2, 8), (2, 8)]


def test_evaluations_beyond_a_resume_are_abandoned_and_no_others(tmp_path):
    transformers(tmp_path, 2, resume=False, evaluate=True)
    transformers(tmp_path, 2, resume=tmp_path / "checkpoint-4", evaluate=True)
    now = ReportedRun(tmp_path)
    assert [one.iter for one in now.story.abandoned if isinstance(one, Validation)] == [8, 8]
    assert [one.iter for one in now.story.of(Validation)] == [4, 8, 8]


def test_a_second_fit_of_a_trainer_that_goes_on_is_the_same_run(tmp_path):
    pl = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.demos.boring_classes import BoringModel

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    limits = {"limit_train_batches": STEPS, "limit_val_batches": 0}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, **quiet, **limits)
    new_bus().attach(trainer)
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(BoringModel())
    now = ReportedRun(tmp_path)
    assert (now.epochs, now.iterations, len(lines(tmp_path / "scalars.jsonl"))) == (2, 2 * STEPS, 2 * STEPS)
