"""Find the name that was meant: for a misspelt name, or for the name of the same thing in another library."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

_INTERVAL = ("interval", "every", "val_interval")
_EPOCHS, _ITERS = ("max_epochs",), ("max_iters",)

_ELSEWHERE: dict[str, tuple[str, ...]] = {
    # options
    **dict.fromkeys(("every", "interval", "period", "freq", "frequency", "n", "every_n"), _INTERVAL),
    **dict.fromkeys(("every_n_epochs", "every_n_steps", "every_n_iters", "every_n_train_steps", "save_every"), _INTERVAL),
    **dict.fromkeys(("save_freq", "save_steps", "log_every", "log_every_n_steps", "logging_steps", "log_interval"), _INTERVAL),
    **dict.fromkeys(("check_val_every_n_epoch", "val_check_interval", "eval_steps", "eval_interval"), ("val_interval",)),
    **dict.fromkeys(("save_begin", "begin_iter", "begin_epoch", "start", "start_epoch", "start_iter"), ("begin",)),
    "metrics_every": ("interval",),
    "mode": ("rule",),
    **dict.fromkeys(("metric", "metric_name", "metric_for_best_model", "monitor", "save_best"), ("monitor", "save_best")),
    **dict.fromkeys(("save_total_limit", "n_saved", "max_to_keep", "keep"), ("max_keep_ckpts", "save_top_k")),
    **dict.fromkeys(("load_best", "restore_best_weights", "load_best_at_end"), ("load_best_model_at_end",)),
    **dict.fromkeys(("dirpath", "save_dir", "output_dir", "log_dir", "default_root_dir"), ("work_dir", "out_dir")),
    "filename": ("filename_tmpl",),
    "decay": ("momentum",),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "n_epochs"), _EPOCHS),
    **dict.fromkeys(("steps", "max_steps", "num_steps", "total_steps", "iterations", "iters", "num_iters"), _ITERS),
    **dict.fromkeys(("train_loader", "train_dataloader", "train_dataloaders", "train_dataset", "dataloader"), ("train_data",)),
    **dict.fromkeys(("val_loader", "val_dataloader", "val_dataloaders", "eval_dataset", "valid_loader"), ("val_data",)),
    **dict.fromkeys(("accumulation_steps", "gradient_accumulation_steps", "accumulate_grad_batches"), ("accumulate",)),
    **dict.fromkeys(("gradient_clip_val", "max_grad_norm", "clip_grad", "max_norm"), ("grad_clip",)),
    **dict.fromkeys(("precision", "mixed_precision", "fp16", "bf16"), ("amp",)),
    **dict.fromkeys(("logger", "loggers"), ("writers",)),
    **dict.fromkeys(("scheduler", "lr_scheduler"), ("scheduler", "schedulers")),
    "training_step": ("step",),
    "validation_step": ("val_step",),
    **dict.fromkeys(("condition", "filter", "event_filter", "predicate"), ("when",)),
    **dict.fromkeys(("thread", "background", "blocking", "executor"), ("offload",)),
    **dict.fromkeys(("queue_size", "maxsize", "capacity", "buffer", "buffer_size"), ("queue",)),
    # classes
    "trainer": ("TrainLoop",),
    **dict.fromkeys(("eventbus", "messagebus"), ("Bus",)),
    "callback": ("Hook",),
    "modelcheckpoint": ("CheckpointHook",),
    "earlystopping": ("EarlyStoppingHook",),
    "learningratemonitor": ("RuntimeInfoHook",),
}
"""Names elsewhere, in lower case, and our names for the same thing; the first one that is known is meant."""

_VALUES = {"rule": {"min": "less", "max": "greater"}}


def nearest(name: str, known: Iterable[str], *, most: int = 2, cutoff: float = 0.6) -> list[str]:
    """Return the names of ``known`` that ``name`` may stand for, the best first: at most one if another library calls it so."""
    lower: dict[str, str] = {}
    for one in known:
        lower.setdefault(one.lower(), one)  # the first of several spellings: aliases come last
    wanted = name.lower()
    for ours in _ELSEWHERE.get(wanted, ()):
        if ours.lower() in lower:
            return [lower[ours.lower()]]
    near = get_close_matches(wanted, lower, n=most, cutoff=cutoff)
    near = near or [one for one in lower if len(name) > 2 and _is_part(wanted, one)][:most]
    return [lower[one] for one in near]


def _is_part(wanted: str, known: str) -> bool:
    """Return True if one of the names has the other one at its end or at a word of it: ``loss`` in ``val/loss``."""
    at_word, at_end = rf"(\b|_){re.escape(wanted)}", rf"(\b|_){re.escape(known)}$"
    return bool(re.search(at_word, known) or re.search(at_end, wanted))


def is_misspelt(name: str, known: Iterable[str]) -> bool:
    """Return True if ``name`` differs from a known name by a letter or two."""
    return bool(get_close_matches(name, known, n=1, cutoff=0.9))


def did_you_mean(name: str, known: Iterable[str], *, most: int = 2, cutoff: float = 0.6) -> str:
    """Return ``" (did you mean 'this' or 'that'?)"``, or "" if no known name is similar."""
    near = nearest(name, known, most=most, cutoff=cutoff)
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""


def option_meant(name: str, value: object, known: Iterable[str]) -> str:
    """Return ``'did you mean rule="less"?'`` for the option ``mode="min"``, or "" if no known option is similar."""
    for near in nearest(name, known, most=1):
        return value_meant(near, value) or f"did you mean {near}=?"
    return ""


def value_meant(option: str, value: object) -> str:
    """Return ``'did you mean rule="less"?'`` for the value ``"min"`` of the option ``rule``, or ""."""
    ours = _VALUES.get(option, {}).get(value) if isinstance(value, str) else None
    return "" if ours is None else f'did you mean {option}="{ours}"?'
