"""Optimizers, schedules and models of other packages, as those list them; a package that is not installed is left out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from .installed import VISION
from .installed import package as imported
from .jobs import HOMES, Home, classified, home_of, job, rows
from .kit import OWN, Parts, tried

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the packages
    pytest.mark.timeout(120),
]


MakeOptimizer = Callable[[nn.Module], Any]


# ------------------------------------------------------------------------------------------------------- optimizers


def _optimizers() -> dict[str, list[MakeOptimizer]]:
    """Return for each name the ways to make the optimizer, the first of which that trains is taken."""
    found: dict[str, list[MakeOptimizer]] = {}
    if package := imported("pytorch_optimizer"):
        for name in sorted(package.get_supported_optimizers()):
            found[f"pytorch_optimizer: {name}"] = _ways(package.load_optimizer(name))
        for name in (
            "Lookahead",
            "SAM",
            "GSAM",
            "WSAM",
            "BSAM",
            "LookSAM",
            "FriendlySAM",
            "TRAC",
            "ScheduleFreeWrapper",
            "OrthoGrad",
            "PCGrad",
            "GradientCentralization",
        ):
            if kind := getattr(package, name, None):
                found.setdefault(f"pytorch_optimizer: {name.lower()}", _ways(kind))
    for module in ("schedulefree", "prodigyopt", "transformers.optimization"):
        if package := imported(module):
            for name, kind in sorted(vars(package).items()):
                if (
                    inspect.isclass(kind)
                    and issubclass(kind, torch.optim.Optimizer)
                    and kind.__module__.startswith(module.partition(".")[0])
                ):
                    found[f"{module.partition('.')[0]}: {name}"] = _ways(kind)
    if VISION and (package := imported("timm.optim")):
        for name in sorted(package.list_optimizers()):
            found[f"timm: {name}"] = [
                lambda model, name=name, package=package: package.create_optimizer_v2(model, opt=name, lr=0.01)
            ]
    return found


def _ways(kind: Any) -> list[MakeOptimizer]:
    """Return ways to make an optimizer: of weights, or around another optimizer."""
    sgd = lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)  # noqa: E731
    return [
        lambda model: kind(model.parameters(), lr=0.01),
        lambda model: kind(model.parameters()),
        lambda model: kind([*model.parameters()], sgd(model)),
        lambda model: kind(sgd(model)),
        lambda model: kind(model.parameters(), base_optimizer=torch.optim.SGD, lr=0.01),
        lambda model: kind(model.parameters(), base_optimizer=sgd(model)),
        lambda model: kind(model.parameters(), lr=0.01, num_iterations=12),
        lambda model: kind(model.parameters(), lr=0.01, model=model),
        lambda model: kind(model),
        lambda model: kind(model, lr=0.01),
        lambda model: kind(model=model, params=model.parameters(), base_optimizer=torch.optim.SGD, lr=0.01),
        lambda model: kind(model, model.parameters(), base_optimizer=sgd(model)),
        lambda model: kind(model.parameters(), lr=0.01, num_data=16),
        lambda model: kind(model.parameters(), lr=0.01, relative_step=False, scale_parameter=False),
    ]


OPTIMIZERS = _optimizers()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_of_other_packages_resumes(name, tmp_path, row):
    group, _, kind = name.partition(": ")
    optimizer, home, reason = _first_that_trains(OPTIMIZERS[name])
    if home is None:
        row(f"optimizers of {group}", kind, "", "own loop", f"not trained: {reason}")
        pytest.skip(reason)
    row(f"optimizers of {group}", kind, home.name, "own loop", tried(OWN, job(home, _in_training(optimizer)), tmp_path))


def _first_that_trains(ways: list[MakeOptimizer]) -> tuple[MakeOptimizer, Home | None, str]:
    reasons = []
    for optimizer in ways:
        home, reason = home_of(_in_training(optimizer))
        if home is not None:
            return optimizer, home, ""
        reasons.append(reason)
    return ways[0], None, reasons[0]


def _in_training(optimizer: MakeOptimizer) -> MakeOptimizer:
    """Switch an optimizer that has modes to training, as its documentation says."""

    def make(model: nn.Module) -> Any:
        made = optimizer(model)
        if callable(train := getattr(made, "train", None)):
            train()
        return made

    return make


# -------------------------------------------------------------------------------------------------------- schedules


def _schedules() -> dict[str, Callable[[Any], Any]]:
    found: dict[str, Callable[[Any], Any]] = {}
    if package := imported("transformers.optimization"):
        special = {"inverse_sqrt": {}, "cosine_with_min_lr": {"min_lr": 0.001}, "cosine_warmup_with_min_lr": {"min_lr": 0.001}}
        special |= {"warmup_stable_decay": {"num_decay_steps": 4}}
        for name in package.TYPE_TO_SCHEDULER_FUNCTION:
            found[f"transformers: {name.value}"] = lambda optimizer, name=name, package=package: package.get_scheduler(
                name, optimizer, num_warmup_steps=3, num_training_steps=20, scheduler_specific_kwargs=special.get(name.value)
            )
    if package := imported("pytorch_optimizer"):
        for name in sorted(package.get_supported_lr_schedulers()):
            kind = package.load_lr_scheduler(name)
            if inspect.isclass(kind) and kind.__module__.startswith("pytorch_optimizer"):
                found[f"pytorch_optimizer: {name}"] = lambda optimizer, kind=kind: kind(
                    optimizer, **{key: value for key, value in _STEPS.items() if key in inspect.signature(kind).parameters}
                )
    return found


_STEPS = {"t_max": 20, "max_lr": 0.1, "min_lr": 0.001, "init_lr": 0.01, "warmup_steps": 3, "total_steps": 20, "total_iters": 20}
SCHEDULES = _schedules()


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_schedule_of_other_packages_resumes(name, tmp_path, row):
    group, _, kind = name.partition(": ")
    plain = job(HOMES[0], lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def make() -> Parts:
        parts = plain()
        parts.schedule = SCHEDULES[name](parts.optimizer)
        return parts

    try:
        parts = make()
        parts.schedule.state_dict()
        parts.schedule.step(*([parts.metric()] if kind in ("reduce_lr_on_plateau", "greedy") else []))
    except Exception as error:  # noqa: BLE001 - it needs other arguments
        row(f"schedules of {group}", kind, "", "own loop", f"not tried: {type(error).__name__}")
        pytest.skip(str(error))
    by = "metric" if kind in ("reduce_lr_on_plateau", "greedy") else "iter"

    def stepped() -> Parts:
        parts = make()
        parts.by = by
        return parts

    row(f"schedules of {group}", kind, "", "own loop", tried(OWN, stepped, tmp_path))


# ----------------------------------------------------------------------------------------------------------- models


def _families() -> Iterator[Any]:
    """Yield the smallest model of each family of torchvision: a family is a module."""
    if not VISION:
        return
    models = VISION.models
    smallest: dict[str, tuple[int, str]] = {}
    for name in models.list_models(module=models):
        family = models.get_model_builder(name).__module__.rpartition(".")[2]
        size = models.get_model_weights(name).DEFAULT.meta["num_params"]
        smallest[family] = min(smallest.get(family, (size, name)), (size, name))
    for family, (_, name) in sorted(smallest.items()):
        yield pytest.param(name, id=family)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*_families()])
def test_a_model_of_each_family_of_torchvision_resumes(name, tmp_path, row):
    models = VISION.models
    size = {"inception_v3": 75, "alexnet": 64, "squeezenet1_1": 64, "maxvit_t": 224}.get(name, 32)
    options: dict[str, Any] = {"num_classes": 3}
    if name.startswith("vit"):
        options["image_size"] = 32
    if name in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": False}

    def make() -> Parts:
        model = models.get_model(name, **options).train()
        return Parts(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), classified, rows(3, size, size))

    row("models of torchvision", name, "", "own loop", tried(OWN, make, tmp_path))


def _adapters() -> list[str]:
    peft = imported("peft")
    return sorted(kind.value for kind in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING) if peft else []


@pytest.mark.parametrize("kind", _adapters())
def test_each_adapter_of_peft_resumes(kind, tmp_path, row):
    import peft
    import transformers

    config = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)]
    given: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], "num_virtual_tokens": 4}
    given |= {"feedforward_modules": [], "num_hidden_layers": 2, "total_step": 40, "tinit": 2, "tfinal": 10, "r": 2}
    taken = {key: value for key, value in given.items() if key in inspect.signature(config).parameters}
    ids = [torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(number)) for number in range(4)]

    def make() -> Parts:
        base = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
        )
        model = peft.get_peft_model(transformers.LlamaForCausalLM(base), config(**taken))
        step = lambda model, batch: cross_entropy(model(batch).logits.flatten(0, 1)[-16:], batch.flatten())  # noqa: E731
        return Parts(model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01), step, ids)

    try:
        parts = make()
        parts.update(parts.data[0])
    except Exception as error:  # noqa: BLE001 - it needs other arguments
        row("adapters of peft", kind.lower(), "", "own loop", f"not tried: {type(error).__name__}")
        pytest.skip(f"{type(error).__name__}: {error}")
    row("adapters of peft", kind.lower(), "", "own loop", tried(OWN, make, tmp_path))
