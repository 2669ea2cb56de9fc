"""``HostedRun``: a run inside another library's trainer, which steps, saves and resumes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from eventloop import events as ev
from eventloop.bridges.entry import same_tensor
from eventloop.bridges.saves import CHECKED, HostSaves, Writing
from eventloop.bus import Bus
from eventloop.checkpoint import AnyPath, weights_only
from eventloop.errors import ConfigurationError, TrainingError
from eventloop.events import Stage
from eventloop.log import get_logger
from eventloop.training import Driver, Run, Update, checkpoint_keys
from eventloop.training.agree import Alone
from eventloop.training.arguments import Limit, Models, Optimizers
from eventloop.training.distributed.ranks import world_size
from eventloop.training.distributed.rounds import Rounds, join_rounds
from eventloop.training.metrics import Metrics
from eventloop.training.optimizers import warn_if_useless
from eventloop.training.saves.contents import by_model, flat, gather_entry, gather_weights, restore_entry
from eventloop.training.saves.restore import publish_loaded
from eventloop.training.schema import SavedEntry, read, upgraded
from eventloop.training.state import ITERATIONS, Counters

log = get_logger()

Weights = Mapping[str, Mapping[str, torch.Tensor]]
"""Tensors by the name of the model and their name in its ``state_dict()``."""

_TRAINS: Final = "the trainer's own fit(), train() or run() does this"


def _refused(call: str, instead: str) -> Callable[..., NoReturn]:
    """Return a method that refuses what only a loop of one's own has."""

    def refuse(self: Run, *arguments: Any, **named: Any) -> NoReturn:
        raise TrainingError(f"run.{call}() is for your own loop, and here another trainer has the loop: {instead}")

    refuse.__doc__ = f"Raise TrainingError: {instead}."
    return refuse


class HostedRun(Run):
    """A run inside another trainer, made and driven by its bridge.

    The trainer steps the optimizers, coordinates the processes, owns directories, seeds and the data, and writes and reads
    checkpoints. The state of the bus is one entry in them (:meth:`gather_entry`, :meth:`restore_entry`).

    With several processes, a request of one rank (:meth:`stop`, :meth:`checkpoint_now`, :meth:`pause`, :meth:`set_lr`,
    :meth:`cancel`) takes effect on all ranks, which agree without a collective: see
    :mod:`eventloop.training.distributed.rounds`. It is refused with an error in the log if a rank trains without a bus.

    Args:
        bus: the bus.
        model: the model, without a wrapper, or several by name.
        optimizer: the optimizer, or several by name; None in a validation or test.
        work_dir: directory for the files of hooks.
        suffix: end of the names of the trainer's checkpoints, such as ``.ckpt``.
        name: name of the experiment; by default the name of the work dir.
    """

    # The bridge sets these when they are known.
    resume_way: str = "the trainer's own resume"
    """How a user resumes, with ``{}`` for the path of a checkpoint."""
    train_data: Iterable[Any] | None = None
    epoch_length: int | None = None
    evaluation_length: int | None = None
    accumulation: int | None = None

    def __init__(
        self,
        bus: Bus,
        *,
        model: Models,
        optimizer: Optimizers | None = None,
        work_dir: str | Path | None = None,
        suffix: str = "",
        name: str | None = None,
    ) -> None:
        super().__init__(bus, model=model, optimizer=optimizer, work_dir=work_dir, name=name)
        self._suffix = suffix
        self._saves: HostSaves = HostSaves(self, self._feeds)
        self._driver: HostedDriver = HostedDriver(self, bus, self.state, self._saves, self._restore, moves=False)

    @property
    def checkpoint_suffix(self) -> str:
        """End of the names of the trainer's checkpoints."""
        return self._suffix

    @property
    def running(self) -> bool:
        """True from ``begin_run`` to the end of the run."""
        return bool(self.state.scopes.innermost)

    @property
    def window_open(self) -> bool:
        """True inside an accumulation window: set it before ``end_iteration``. Saves and a stop wait for its end."""
        return self.state.in_window

    @window_open.setter
    def window_open(self, is_open: bool) -> None:
        self.state.in_window = is_open

    @property
    def driver(self) -> HostedDriver:
        """The :class:`HostedDriver` of this run, for its bridge."""
        return self._driver

    # A second loop would take the turns of the trainer, which could not continue.
    epochs = _refused("epochs", _TRAINS)
    train = _refused("train", _TRAINS)
    drive = _refused("drive", _TRAINS)
    validate = _refused("validate", "let the trainer validate by its own settings, or evaluate in an EvaluateHook")
    test = _refused("test", "call the trainer's own test or prediction after the training, or evaluate in an EvaluateHook")
    gather_state = _refused("gather_state", "the trainer's checkpoints have the state of the bus")
    apply_state = _refused("apply_state", "the trainer's own resume restores the bus")

    # --------------------------------------------------------------------------------------------------- checkpoints

    @property
    def saves(self) -> HostSaves:
        """The saves that hooks have requested."""
        return self._saves

    @property
    def save_due(self) -> bool:
        """True if the trainer must save at its next safe moment."""
        return bool(self._saves.due)

    def write_due(self, write: Callable[[AnyPath], object]) -> None:
        """At a safe moment, call ``write`` with the path of the due checkpoint, if there is one; see :class:`HostSaves`."""
        self._saves.write_due(write)

    @property
    def save_raises(self) -> bool:
        """True if a failure of the current save ends the training; False if a hook asked for a log line only."""
        return self._saves.raises

    def writing(self, path: AnyPath) -> Writing:
        """Report the file that the trainer writes in a ``with`` block, requested by a hook or not, as committed or failed.

        The block may come later, on the thread that writes.
        """
        return self._saves.writing(path)

    def gather_entry(self, path: str, stored: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], Weights]:
        """Return the state of the bus for the trainer's checkpoint ``path``, and the weights to store in the checkpoint.

        The entry holds plain values and tensors by reference. The weights are only those that hooks replace (``EMAHook`` gives
        the averaged ones); their raw values are in the entry.

        Args:
            path: the file; empty where the trainer names it later, and `CHECKED` where none is written.
            stored: the tensors that the checkpoint will hold, of the only model. Hooks get those that are the model's own, and
                none that the user's code has left out or replaced. By default they get all.

        Raises:
            CheckpointValueError: a value is neither a tensor nor a plain value; the error names its path.
        """
        wanted = self.wants(ev.BeforeSaveCheckpoint)
        own = gather_weights(self.models) if wanted else {}
        if wanted and stored is not None:
            keys = checkpoint_keys(self.models["model"])
            kept = {key for long, key in keys.items() if same_tensor(stored.get(long), own["model"][key])}
            own["model"] = {key: tensor for key, tensor in own["model"].items() if key in kept}
        entry = {**gather_entry(self), "state_dict": flat(own) if own else {}}
        self.publish(ev.BeforeSaveCheckpoint, path=path, checkpoint=entry)
        changed = self._changed(own, entry.pop("state_dict"))
        if path not in ("", CHECKED) and self.running:
            self.publish(ev.CheckpointStaged, path=path)
        plain: dict[str, Any] = weights_only(entry)
        return plain, changed

    def restore_entry(self, entry: Mapping[str, Any], path: str = "", weights: Weights | None = None) -> None:
        """Restore what :meth:`gather_entry` returned, between ``begin_run`` and ``begin_train``; hooks keep the tensors.

        Args:
            entry: the entry.
            path: the trainer's checkpoint.
            weights: the weights that belong to the entry; None if the trainer has loaded them into the model.

        Raises:
            CheckpointError: the value is not such an entry, or its format is too new.
        """
        entry = upgraded(entry, SavedEntry)
        own = gather_weights(self.models)
        for name, tensors in (weights or {}).items():
            keys = checkpoint_keys(self.models[name])
            own[name] |= {keys[long]: tensor for long, tensor in tensors.items()}
        state = {**entry, "state_dict": flat(own)}
        publish_loaded(self, path, state, read(state, SavedEntry).progress)
        for name, tensors in self._changed(own, state["state_dict"]).items():
            self.models[name].load_state_dict(dict(tensors), strict=False)
        restore_entry(self, read(state, SavedEntry))
        log.info("the bus has resumed", **({"path": path} if path else {}), epoch=self.counters.epoch, iter=self.counters.iter)

    def count_from(self, last: HostedRun | None) -> None:
        """Begin with the counts of the trainer's last run, such as for an evaluation after the training."""
        if last is not None:
            self.counters.restore(last.counters)
            self.state.set_progress()

    def resume_without_entry(self, counters: Counters, path: str = "") -> None:
        """Continue with the trainer's own counts from a checkpoint that was saved without a bus; warn if hooks have state."""
        publish_loaded(self, path, {"state_dict": flat(gather_weights(self.models))}, counters)
        hooks = [hook.label for hook in self.bus.hooks if hook.stateful]
        if hooks:
            log.warning("the checkpoint was saved without this bus; its hooks start anew", path=path, hooks=hooks)
        self.counters.restore(counters)
        self.state.resume()

    def _changed(self, before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Any]) -> Weights:
        """Return the tensors that a hook has replaced."""
        now = by_model(self.models, after)
        changed = {}
        for name, own in before.items():
            keys = checkpoint_keys(self.models[name])
            known = [(long, key) for long, key in keys.items() if key in own and key in now[name]]
            replaced = {long: now[name][key] for long, key in known if now[name][key] is not own[key]}
            if replaced:
                changed[name] = replaced
        return changed


class HostedDriver(Driver):
    """Drive a :class:`HostedRun`. In an iteration, the bridge makes these calls in order, as far as the trainer permits.

        drive.begin_iteration(batch, last=...)
        run.publish(BeforeForward, ...); run.publish(AfterForward, ...); ...  # if run.wants(...)
        drive.before_step(optimizer); drive.after_step(optimizer)             # around each real step
        run.window_open = ...
        drive.end_iteration(outputs)
        run.write_due(save)
        if drive.should_stop(): ...                                           # set the trainer's own flag

    :meth:`end_validation` publishes the metrics that it is given, and no means of outputs.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._steps: dict[int, tuple[Callable[..., None], Callable[..., None]]] = {}
        self.host_folder = True

    def begin_train(self, *, max_epochs: Limit | None = None, max_iters: Limit | None = None) -> None:
        """Publish ``before_train``; let requests of one rank take effect on all ranks, if there are several."""
        super().begin_train(max_epochs=max_epochs, max_iters=max_iters)
        state = self.state
        if world_size() > 1:
            rounds = join_rounds(state.own, lambda: state.counters.iter)
            state.join(rounds)
            state.scopes.defer(partial(self._leave, rounds))
            state.settle()

    def end_unheard(self) -> None:
        """Count an iteration without ``after_train_iter``, where the bridge has published none of its other events."""
        state = self.state
        self._count_iteration()
        state.channel.exchange()
        if self._saves.requests or state.agreed.save:
            self._saves.save_if_asked()
        state.scopes.leave("iter")
        state.handle_requests()

    def begin_unheard(self, *, last: bool) -> None:
        """Begin an iteration without ``before_train_iter``, for a batch that the trainer leaves out."""
        state = self.state
        if state.scopes.innermost != "epoch":
            self._check_order("begin_iteration")
        state.begin_train_iteration()
        self._batch, self._last = None, last

    def take_batch(self, batch: Any, *, last: bool) -> None:
        """Set the batch of the present iteration behind its step, for a step that fetches its batches itself."""
        self._batch, self._last = batch, last

    def drop_iteration(self) -> None:
        """End the present iteration, if there is one, uncounted and without its ``after_x``: it found no batch."""
        if (scope := self.state.scopes.innermost) in ITERATIONS:
            self.state.scopes.leave(scope)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Publish ``before_optimizer_step``, when the gradients are complete."""
        self._steps[id(optimizer)][0]()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step that has happened, and publish ``after_optimizer_step``."""
        self._steps[id(optimizer)][1]()

    def watch_steps(self) -> None:
        """Count and publish steps by torch's step hooks until the run ends, for trainers where these fire at the right time."""
        for name, optimizer in self._run.optimizers.items():
            self._watch_steps(name, optimizer)

    def around_step(self, optimizer: torch.optim.Optimizer) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return :meth:`before_step` and :meth:`after_step` of one optimizer; they ignore their arguments."""
        return self._steps[id(optimizer)]

    def _begin(self) -> None:
        run, state = self._run, self.state
        state.scopes.enter("run")
        self._bus.set_rank(run.rank, run.world_size)
        state.scopes.defer(run.resume)
        state.scopes.defer(run.shared.clear)
        state.scopes.defer(self._forget)
        for hook in self._bus.hooks:
            if isinstance(hook, Update):
                raise ConfigurationError(f"{hook.label} is on the bus, but the trainer steps the optimizers: remove the hook")
        if run.optimizers:
            warn_if_useless(run.optimizers, run.models)
        self._saves.open(None)
        self._steps = {id(optimizer): self._around_step(name, optimizer) for name, optimizer in run.optimizers.items()}
        run.publish(ev.BeforeRun)

    def _leave(self, rounds: Rounds) -> None:
        """Remember on all ranks why they stopped, also after the training."""
        own = self.state.own
        self.state.join(Alone(own))
        own.reason = own.reason or rounds.agreed.reason
        rounds.close()

    def _share_failure(self, error: BaseException) -> None:
        """Do nothing: the trainer coordinates the processes."""

    def _lock(self) -> None:
        """Do nothing: the directories are the trainer's."""

    def _enter_evaluation_mode(self) -> None:
        """Do nothing: the trainer does."""

    def _begin_evaluation(self, call: str, stage: Stage, data: Any, metrics: Any) -> Any:
        return super()._begin_evaluation(call, stage, data, _HostMetrics())


class _HostMetrics(Metrics):
    """No metrics: the trainer computes them."""

    def update(self, outputs: Mapping[str, Any], samples: int = 1) -> None:
        """Do nothing, so that a validation costs nothing."""
