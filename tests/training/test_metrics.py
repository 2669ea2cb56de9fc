"""Metrics of a validation."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

from trainbus.eventloop import ConfigurationError, Run, TrainingError
from trainbus.eventloop.training.coordinator import Coordinator
from trainbus.eventloop.training.metrics import Metrics
from trainbus.hooks import CheckpointHook, EarlyStoppingHook, JSONLinesWriter, LoggerHook
from trainbus.observe import RunRecordHook


class Accuracy:
    """As torchmetrics writes them."""

    def __init__(self):
        self.reset()

    def update(self, logits, labels):
        self.right += (logits.argmax(1) == labels).sum()
        self.seen += len(labels)

    def compute(self):
        return self.right / self.seen

    def reset(self):
        self.right, self.seen = torch.zeros(()), 0


class Sums(Accuracy):
    def update(self, loss, weight=2.0):
        self.right += loss * weight
        self.seen += 1

    def compute(self):
        return {"sum": self.right, "count": self.seen}


def val_step(model, batch):
    logits = model(batch[0])
    return {"loss": torch.nn.functional.cross_entropy(logits, batch[1]), "logits": logits, "labels": batch[1]}


def test_a_metric_gets_the_entries_that_its_update_names(parts):
    model = parts.model().eval()
    found = parts.loop(model=model, val_step=val_step, metrics={"accuracy": Accuracy()}).validate()
    batches = parts.batches(2, seed=2)
    right = sum((model(inputs).argmax(1) == labels).sum().item() for inputs, labels in batches)
    losses = [parts.step(model, batch).item() for batch in batches]
    assert found == {"loss": pytest.approx(sum(losses) / 2), "accuracy": pytest.approx(right / 8)}
    assert isinstance(found["accuracy"], float)


def test_a_metric_may_return_a_mapping_and_scalars_that_feed_one_are_no_separate_metrics(parts):
    found = parts.loop(val_step=lambda m, b: {"loss": 3.0, "weight": 4.0, "other": 0.5}, metrics={"sums": Sums()}).validate()
    assert found == {"loss": 3.0, "sums/sum": 24.0, "sums/count": 2, "other": 0.5}


@pytest.mark.parametrize("kind", [bool, torch.tensor, np.bool_], ids=["python", "torch", "numpy"])
def test_the_mean_of_booleans_is_the_share_that_is_true(parts, kind):
    hits = iter([True, False])
    assert parts.loop(val_step=lambda model, batch: {"hit": kind(next(hits))}).validate() == {"hit": 0.5}


def test_a_metric_that_takes_any_keyword_gets_all_outputs(parts):
    names = []
    metric = SimpleNamespace(update=lambda **outputs: names.append([*outputs]), compute=lambda: len(names), reset=lambda: None)
    assert parts.loop(val_step=val_step, metrics={"n": metric}).validate()["n"] == 2
    assert names == [["loss", "logits", "labels"]] * 2


def test_a_missing_entry_is_an_error_at_the_first_batch(parts, bus, trace):
    with pytest.raises(TrainingError, match=r"'accuracy'.*'logits', 'labels'.*'loss'"):
        parts.loop(bus, metrics={"accuracy": Accuracy()}).validate()
    assert len(trace.of("before_val_iter")) == 1


def test_metrics_are_reset_for_every_validation(parts, bus, trace):
    parts.loop(bus, val_step=val_step, metrics={"sums": Sums()}).run()  # whose weight has a value if there is none
    assert [e.metrics["sums/count"] for e in trace.of("after_val_epoch")] == [2, 2]


def test_a_metric_that_cannot_be_merged_over_ranks_is_warned_of_once_in_a_run(parts, monkeypatch, logs):
    run, made = Run(model=parts.model()), []
    two = Coordinator()  # ranks in one process
    two.size = 2
    monkeypatch.setattr(
        "trainbus.eventloop.training.data.Metrics", lambda *arguments: made.append(Metrics(*arguments)) or made[-1]
    )
    for _ in range(3):
        run.validate([1], {"accuracy": Accuracy()})
        made[-1].update({"logits": torch.zeros(1, 2), "labels": torch.zeros(1)})
        made[-1].compute(two)
    assert [entry["metric"] for entry in logs] == ["accuracy"]


VALUES = torch.arange(10.0)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(VALUES)


class OwnBatches(Sampler):
    def __iter__(self):
        yield from ([0, 1, 2, 3, 4, 5, 6], [7, 8], [9])


class Batches(BatchSampler):
    pass


PARTS = [VALUES[:4], VALUES[4:8], VALUES[8:]]
LOADERS = {
    "plain": DataLoader(VALUES, 4),
    "stream": DataLoader(Stream(), 4),
    "batch sampler": DataLoader(VALUES, batch_sampler=Batches(SequentialSampler(VALUES), 4, False)),
    "dynamic batch sampler": DataLoader(VALUES, batch_sampler=OwnBatches()),
    "list": PARTS,
    "batches inside": DataLoader(PARTS, batch_size=None),
    "tuples": [(part, part.numpy()) for part in PARTS],
    "tables": [{"x": {"inner": part}, "name": "text"} for part in PARTS],
}


def mean_of(batch):
    batch = batch["x"]["inner"] if isinstance(batch, dict) else batch[0] if isinstance(batch, tuple) else batch
    return {"loss": batch.mean()}


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_a_mean_is_one_of_samples_over_any_loader(parts, loader, logs):
    assert parts.loop(val_step=lambda model, batch: mean_of(batch), val_data=loader).validate() == {"loss": 4.5}
    assert not logs


@pytest.mark.parametrize("batch", [["a", "b"], ("a", 1), (torch.ones(2), torch.ones(3)), torch.ones(())])
def test_batches_of_unknown_size_count_alike_and_that_is_said_once_in_a_run(parts, batch, logs, bus):
    loop = parts.loop(bus, val_step=lambda model, batch: {"loss": 1.0}, val_data=[batch, batch], max_epochs=2)
    loop.run()
    assert [entry["means"] for entry in logs if "means" in entry] == [["loss"]]


@pytest.mark.parametrize("weight", [3, 3.0, torch.tensor(3), np.int64(3)])
def test_an_output_batch_size_is_the_weight_of_its_batch(parts, weight, logs):
    found = parts.loop(
        val_step=lambda model, batch: batch, val_data=[{"loss": 1.0, "batch_size": weight}, {"loss": 5.0, "batch_size": 1}]
    )
    assert found.validate() == {"loss": 2.0}
    run = Run(model=parts.model())
    with run:
        for values in (batches := run.validate([(1.0, weight), (5.0, 1)])):
            run.report(loss=values[0], batch_size=values[1])
    assert batches.metrics == {"loss": 2.0}
    assert not logs


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), "3", None, torch.ones(2)])
def test_a_weight_that_is_not_a_positive_number_is_an_error(parts, weight):
    loop = parts.loop(val_step=lambda model, batch: {"loss": 1.0, "batch_size": weight})
    with pytest.raises(TrainingError, match="batch_size"):
        loop.validate()


class Counts(torch.nn.Module):
    """A metric as torchmetrics has them: a module."""

    def __init__(self):
        super().__init__()
        self.reset()

    def reset(self):
        self.right = self.seen = 0

    def update(self, logits, labels):
        self.right += int((logits == labels).sum())
        self.seen += len(labels)

    def compute(self):
        return self.right / self.seen


class Wrapper(torch.nn.Module):
    def __init__(self, *metrics):
        super().__init__()
        self.metrics = torch.nn.ModuleList(metrics)

    def reset(self):
        for one in self.metrics:
            one.reset()

    def update(self, *args, **kwargs):
        for one in self.metrics:
            one.update(*args, **kwargs)

    def compute(self):
        return {"parts": {str(index): one.compute() for index, one in enumerate(self.metrics)}}


class Shifted(Wrapper):
    def update(self, *args, **kwargs):
        super().update(args[0] + 1, *args[1:], **kwargs)


@pytest.mark.parametrize(
    ("metric", "expected"), [(Wrapper(Counts(), Wrapper(Counts())), 1.0), (Shifted(Counts()), 0.0)], ids=["names", "positions"]
)
def test_a_wrapper_gets_the_entries_that_the_metrics_in_it_name(parts, metric, expected):
    outputs = {"loss": torch.ones(()), "logits": torch.arange(3), "labels": torch.arange(3), "text": "abc"}
    found = parts.loop(val_step=lambda model, batch: outputs, metrics={"m": metric}).validate()
    assert found["m/parts/0"] == expected


def test_an_entry_that_a_wrapped_metric_lacks_is_an_error_that_names_it(parts):
    with pytest.raises(TrainingError, match="'logits', 'labels'"):
        parts.loop(metrics={"m": Wrapper(Counts())}).validate()


def wrappers_of_torchmetrics():
    tm = pytest.importorskip("torchmetrics")
    accuracy, wrappers = tm.classification.BinaryAccuracy, tm.wrappers
    per_class = tm.classification.MulticlassAccuracy
    made = {
        "BinaryTargetTransformer": lambda: wrappers.BinaryTargetTransformer(accuracy(), threshold=0.5),
        "BootStrapper": lambda: wrappers.BootStrapper(accuracy(), num_bootstraps=3),
        "ClasswiseWrapper": lambda: wrappers.ClasswiseWrapper(per_class(2, average=None)),
        "LambdaInputTransformer": lambda: wrappers.LambdaInputTransformer(accuracy(), lambda preds: 1 - preds),
        "MetricInputTransformer": lambda: wrappers.MetricInputTransformer(accuracy()),
        "MetricTracker": lambda: wrappers.MetricTracker(accuracy()),
        "MinMaxMetric": lambda: wrappers.MinMaxMetric(accuracy()),
        "MultioutputWrapper": lambda: wrappers.MultioutputWrapper(tm.MeanSquaredError(), 1),
        "Running": lambda: wrappers.Running(accuracy(), 3),
        "MetricCollection": lambda: tm.MetricCollection(
            {"a": accuracy(), "b": wrappers.ClasswiseWrapper(per_class(2, average=None))}
        ),
        "CompositionalMetric": lambda: accuracy() + accuracy(),
    }
    # MultitaskWrapper takes tables by task, and FeatureShare shares a network of generative metrics.
    assert set(wrappers.__all__) - {"MultitaskWrapper", "FeatureShare"} <= made.keys()
    return made


@pytest.mark.long
def test_every_wrapper_of_torchmetrics_is_a_metric(parts):
    outputs = {"loss": torch.ones(()), "preds": torch.tensor([0, 1, 1, 1]), "target": torch.tensor([0, 1, 0, 1])}
    expected = {
        "MinMaxMetric": "m/raw",
        "ClasswiseWrapper": "m/multiclassaccuracy_0",
        "BootStrapper": "m/mean",
        "MetricCollection": "m/a",
    }
    values = {"LambdaInputTransformer": 0.25, "CompositionalMetric": 1.5, "ClasswiseWrapper": 0.5, "MultioutputWrapper": 0.25}
    columns = outputs | {name: outputs[name][:, None].float() for name in ("preds", "target")}
    for name, make in wrappers_of_torchmetrics().items():
        given = columns if name == "MultioutputWrapper" else outputs
        loop = parts.loop(val_step=lambda model, batch, given=given: given, metrics={"m": make()})
        for _ in range(2):  # each validation begins anew
            found = loop.validate()
            assert found["loss"] == 1.0
            if name != "BootStrapper":
                assert found[expected.get(name, "m")] == values.get(name, 0.75), (name, found)
        assert expected.get(name, "m") in found


# ------------------------------------------------------------------------------------ values that are not single numbers


class Returns(Accuracy):
    """Has any value."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def update(self, loss):
        pass

    def compute(self):
        return self.value


SEVERAL = [
    (torch.tensor([0.1, 0.2, 0.3]), "a Tensor of shape (3,)"),
    (torch.eye(2), "a Tensor of shape (2, 2)"),
    (np.array([0.1, 0.2]), "a ndarray of shape (2,)"),
    ([0.1, 0.2], "a list of 2"),
]


@pytest.mark.parametrize(("value", "shown"), SEVERAL)
def test_a_value_that_is_not_one_number_is_returned_and_said_once_to_be_in_no_log(parts, bus, tmp_path, value, shown, logs):
    bus.add(LoggerHook(writers=[JSONLinesWriter()]))
    bus.add(RunRecordHook())
    bus.add(CheckpointHook(1, save_best="auto", rule="less"))  # which takes the first that is a number
    metrics = {"each": Returns(value), "maps": Returns({"a": value, "b": 0.5})}
    found = parts.loop(bus, metrics=metrics, work_dir=tmp_path).run()
    assert found["each"] is found["maps/a"] is value
    told = [(one["metric"], one["value"]) for one in logs if "metric" in one]
    assert told == [("each", shown), ("maps/a", shown)]
    lines = [json.loads(line) for line in (tmp_path / "scalars.jsonl").read_text().splitlines()]
    assert [line["val/maps/b"] for line in lines if "val/maps/b" in line] == [0.5] * 2
    assert not [name for line in lines for name in line if name in ("val/each", "val/maps/a")]
    assert (tmp_path / "best_maps_b_epoch_1.safetensors").exists()


@pytest.mark.parametrize(("value", "shown"), SEVERAL)
@pytest.mark.parametrize("sanity", [0, 1])
@pytest.mark.parametrize(
    "hook", [CheckpointHook(save_best="each", rule="less"), EarlyStoppingHook("each", rule="less")], ids=["best", "early"]
)
def test_a_hook_that_follows_such_a_value_is_an_error_that_names_it(parts, bus, tmp_path, value, shown, sanity, hook):
    """Before the training, if the look at the first batches shows it."""
    bus.add(hook)
    loop = parts.loop(bus, metrics={"each": Returns(value)}, work_dir=tmp_path, sanity=sanity)
    with pytest.raises(ConfigurationError if sanity else TrainingError, match=f"'each', whose value is {re.escape(shown)}"):
        loop.run()
    assert bool(loop.counters.iter) is not bool(sanity)
