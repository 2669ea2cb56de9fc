"""Every metric of torchmetrics that a few predictions can feed: a validation gives what the metric gives by hand."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from trainbus import Bus, Run

from .kit import differences

torchmetrics = pytest.importorskip("torchmetrics")

MODULES = ("classification", "regression", "aggregation", "clustering", "nominal", "segmentation", "retrieval")
ARGUMENTS: dict[str, Any] = {
    "num_classes": 3, "num_labels": 3, "num_outputs": 1, "beta": 0.5, "p": 2, "nan_strategy": "ignore", "window": 2,
    "min_sensitivity": 0.5, "min_specificity": 0.5, "min_precision": 0.5, "min_recall": 0.5, "num_groups": 2,
}  # fmt: skip
"""Values of arguments that a metric needs."""


def _kinds() -> list[type[Any]]:
    import importlib

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = [importlib.import_module(f"torchmetrics.{name}") for name in MODULES]
    kinds = {kind for module in modules for kind in vars(module).values() if inspect.isclass(kind)}
    return sorted(
        {kind for kind in kinds if issubclass(kind, torchmetrics.Metric)}, key=lambda kind: (kind.__module__, kind.__name__)
    )


def made(kind: type[Any]) -> Any:
    needed = [
        name for name, each in inspect.signature(kind).parameters.items()
        if each.default is inspect.Parameter.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]  # fmt: skip
    return kind(**{name: ARGUMENTS[name] for name in needed})


def _feeds() -> dict[str, list[dict[str, torch.Tensor]]]:
    """Return batches of what metrics compare: the first kind that a metric takes is used."""
    generator = torch.Generator().manual_seed(3)
    rand = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    ints = lambda high, *shape: torch.randint(high, shape, generator=generator)  # noqa: E731
    sizes = (5, 5, 3)
    return {
        "classes": [{"preds": rand(n, 3).softmax(1), "target": ints(3, n)} for n in sizes],
        "labels": [{"preds": rand(n, 3), "target": ints(2, n, 3)} for n in sizes],
        "binary": [{"preds": rand(n), "target": ints(2, n), "groups": ints(2, n)} for n in sizes],
        "numbers": [{"preds": rand(n) + 0.1, "target": rand(n) + 0.1, "value": rand(n)} for n in sizes],
        "distributions": [{"p": rand(n, 4).softmax(1), "q": rand(n, 4).softmax(1)} for n in sizes],
        "clusters": [{"preds": ints(3, n), "target": ints(3, n), "data": rand(n, 3), "labels": ints(2, n)} for n in sizes],
        "searches": [{"preds": rand(n), "target": ints(2, n), "indexes": ints(2, n)} for n in sizes],
        "masks": [{"preds": ints(2, n, 3, 8, 8), "target": ints(2, n, 3, 8, 8)} for n in sizes],
    }


FEEDS = _feeds()


def by_hand(kind: type[Any]) -> tuple[list[dict[str, torch.Tensor]], Any] | None:
    """Return batches that a metric takes and the value by hand."""
    for batches in FEEDS.values():
        try:
            metric = made(kind)
            wanted = [name for name, each in inspect.signature(metric.update).parameters.items() if each.default is each.empty]
            for batch in batches:
                metric.update(**{name: batch[name] for name in wanted})
            return batches, metric.compute()
        except Exception:  # noqa: BLE001, S112 - another feed may do
            continue
    return None


@pytest.mark.parametrize("kind", _kinds(), ids=lambda kind: f"{kind.__module__.split('.')[1]}-{kind.__name__}")
@pytest.mark.filterwarnings("ignore")
def test_each_metric_gives_in_a_validation_what_it_gives_by_hand(kind, tmp_path, row):
    torch.manual_seed(0)
    group, name = f"metrics of torchmetrics, {kind.__module__.split('.')[1]}", kind.__name__
    found = by_hand(kind)
    if found is None:
        row(group, name, "", "validation", "not tried: it needs other arguments or data")
        pytest.skip("it needs other arguments or data")
    batches, expected = found
    model, seen = nn.Linear(1, 1), []
    bus = Bus()
    bus.on("after_val_epoch", lambda event: seen.append(dict(event.metrics)))
    with Run(bus, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), work_dir=tmp_path) as run:
        validation = run.validate(batches, metrics={"metric": made(kind)})
        torch.manual_seed(0)
        for batch in validation:
            run.report(**copy.deepcopy(batch))
    found = seen[0] if isinstance(expected, dict) else seen[0]["metric"]
    value = _plain(expected)
    if isinstance(value, dict):
        assert _plain({key: found[key if key in found else f"metric/{key}"] for key in value}) == value
    else:
        assert not differences(value, _plain(found)), (value, found)
    row(group, name, "", "validation", "as it was")


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [*map(_plain, value)] if isinstance(value, list | tuple) else value
