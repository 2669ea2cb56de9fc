"""``TrainerHost``: the host of a run inside another library's trainer, which steps, saves and resumes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch

from trainbus.bridges.saves import CHECKED, TrainerSaver
from trainbus.eventloop import events as ev
from trainbus.eventloop.checkpoint import weights_only
from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.privates import metadata_of, with_metadata
from trainbus.eventloop.training import Driver, HostedRun, HostFacts, Update, checkpoint_keys
from trainbus.eventloop.training.distributed.rounds import join_rounds
from trainbus.eventloop.training.driver import Step, around_step, watch_steps
from trainbus.eventloop.training.machine import Counters
from trainbus.eventloop.training.replicas import Replicas
from trainbus.eventloop.training.saved_run import SavedRun
from trainbus.eventloop.training.saves.contents import (
    by_model,
    flat,
    gather_entry,
    gather_weights,
    loose_parameters,
    restore_entry,
)
from trainbus.eventloop.training.saves.loose import tell_of_loose
from trainbus.eventloop.training.saves.restore import publish_loaded
from trainbus.eventloop.training.schema import SavedEntry, read, upgraded
from trainbus.eventloop.user_errors import contextmanager
from trainbus.eventloop.world import world_size

log = get_logger()

Weights = Mapping[str, Mapping[str, torch.Tensor]]
"""Tensors by the name of the model and their name in its ``state_dict()``."""


class TrainerHost:
    """The host of a run inside another trainer, which its bridge makes and drives.

        host = TrainerHost(".pt")
        run = HostedRun(bus, model=..., optimizer=..., host=host)
        drive = host.drive

    The trainer steps the optimizers, coordinates the processes, owns directories, seeds and the data, and writes and reads
    checkpoints. The state of the bus is one entry in them (:meth:`gather_entry`, :meth:`restore_entry`). In an iteration, the
    bridge makes these calls in order, as far as the trainer permits:

        drive.begin_iteration(batch, last=...)
        run.publish(BeforeForward, ...); run.publish(AfterForward, ...); ...  # if run.wants(...)
        before_step, after_step = host.around_step(optimizer)                 # to call around each real step
        host.window_open = ...
        drive.end_iteration(outputs)
        host.saver.write_due(save)
        if drive.should_stop(): ...                                           # set the trainer's own flag

    ``drive.end_evaluation`` publishes the metrics that it is given, and no means of outputs.

    With several processes, a request of one rank (``run.stop()``, ``checkpoints.save()``, ``pause()``, ``set_lr()``,
    ``cancel()``) takes effect on all ranks, which agree without a collective: see
    :mod:`trainbus.eventloop.training.distributed.rounds`. It is refused with an error in the log if a rank trains without a
    bus.

    Args:
        suffix: end of the names of the trainer's checkpoints, such as ``.ckpt``.
        resume_way: how a user resumes, with ``{}`` for the path of a checkpoint.
    """

    replicas: Replicas | None = None

    # The bridge sets these when they are known.
    train_data: Iterable[Any] | None = None
    epoch_length: int | None = None
    evaluation_length: int | None = None
    accumulation: int | None = None
    window_open = False
    """True inside an accumulation window: set it before ``end_iteration``. Saves and a stop wait for its end."""
    around_rates: Callable[[Callable[[], None]], None] | None = None
    convert: Callable[[Any], Any] = staticmethod(weights_only)
    """Makes an entry what the trainer's format can hold, or raises CheckpointValueError."""

    run: HostedRun
    drive: Driver

    def __init__(self, suffix: str = "", *, resume_way: str = "the trainer's own resume") -> None:
        self.facts = HostFacts(own_loop=False, suffix=suffix)
        self.resume_way = resume_way
        self.saver: TrainerSaver

    def join(self, run: SavedRun, drive: Driver) -> None:
        """Become the host of a run."""
        self.run, self.drive = cast("HostedRun", run), drive
        self.saver = TrainerSaver(self)

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Set the rank of the bus, and prepare the steps.

        Raises:
            ConfigurationError: the bus has an update, but the trainer steps the optimizers.
        """
        run = self.run
        run.bus.internal.set_rank(run.rank, run.world_size)
        for hook in run.bus.hooks:
            if isinstance(hook, Update):
                raise ConfigurationError(f"{hook.label} is on the bus, but the trainer steps the optimizers: remove the hook")
        if run.optimizers:
            tell_of_loose(loose_parameters(run), run.models, run.optimizers, saved=False)
        run.checkpointer.open()
        yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Let requests of one rank take effect on all ranks, if there are several, after ``before_train``."""
        yield
        state = self.run.state
        if world_size() > 1:
            state.join(join_rounds(state.own, lambda: state.counters.iter))
            state.machine.defer(state.leave)
            state.collect_requests()

    # --------------------------------------------------------------------------------------------------------- steps

    def around_step(self, optimizer: torch.optim.Optimizer) -> tuple[Step, Step]:
        """Return what to call before each real step of an optimizer, when its gradients are complete, and after the step.

        The functions publish and count the step, and ignore their arguments.
        """
        name = next(name for name, one in self.run.optimizers.items() if one is optimizer)
        return around_step(self.run, name, optimizer)

    def watch_steps(self) -> None:
        """Count and publish steps by torch's step hooks until the run ends, for trainers where these fire at the right time."""
        watch_steps(self.run)

    # --------------------------------------------------------------------------------------------------- checkpoints

    def gather_entry(self, path: str, stored: Mapping[str, Any] | None = None) -> tuple[Any, Weights]:
        """Return the state of the bus for the trainer's checkpoint ``path``, and the weights to store in the checkpoint.

        The entry is as :attr:`convert` makes it, by default plain values and tensors by reference. The weights are only those
        that hooks replace (``EMAHook`` gives the averaged ones); their raw values are in the entry.

        Args:
            path: the file; empty where the trainer names it later, and `CHECKED` where none is written.
            stored: the tensors that the checkpoint will hold, of the only model. Hooks get those that are the model's own, and
                none that the user's code has left out or replaced. By default they get all.

        Raises:
            CheckpointValueError: a value is neither a tensor nor a plain value; the error names its path.
        """
        wanted = self.run.wants(ev.BeforeSaveCheckpoint)
        own = gather_weights(self.run.models) if wanted else {}
        if wanted and stored is not None:
            keys = checkpoint_keys(self.run.models["model"])
            kept = {key for long, key in keys.items() if _same_place(stored.get(long), own["model"][key])}
            own["model"] = {key: tensor for key, tensor in own["model"].items() if key in kept}
        entry = {**gather_entry(self.run), "state_dict": flat(own) if own else {}}
        self.run.publish(ev.BeforeSaveCheckpoint, path=path, checkpoint=entry)
        changed = self._changed(own, entry.pop("state_dict"))
        if path not in ("", CHECKED) and self.run.running:
            self.run.publish(ev.CheckpointStaged, path=path)
        return self.convert(entry), changed

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
        own = gather_weights(self.run.models)
        for name, tensors in (weights or {}).items():
            keys = checkpoint_keys(self.run.models[name])
            own[name] |= {keys[long]: tensor for long, tensor in tensors.items()}
        state = {**entry, "state_dict": flat(own)}
        publish_loaded(self.run, path, state, read(state, SavedEntry).progress)
        for name, tensors in self._changed(own, state["state_dict"]).items():
            model = self.run.models[name]
            model.load_state_dict(with_metadata(dict(tensors), metadata_of(model.state_dict())), strict=False)
        restore_entry(self.run, read(state, SavedEntry))
        counters = self.run.counters
        log.info("the bus has resumed", **({"path": path} if path else {}), epoch=counters.epoch, iter=counters.iter)

    def continue_from(self, last: HostedRun | None) -> None:
        """Continue where the trainer's last run ended, if there is one: a further training, or an evaluation after it."""
        if last is not None:
            self.run.counters.restore(last.counters)
            self.run.state.resume()

    def resume_without_entry(self, counters: Counters, path: str = "") -> None:
        """Continue with the trainer's own counts from a checkpoint that was saved without a bus; warn if hooks have state."""
        publish_loaded(self.run, path, {"state_dict": flat(gather_weights(self.run.models))}, counters)
        hooks = [hook.label for hook in self.run.bus.hooks if hook.stateful]
        if hooks:
            log.warning(
                "the checkpoint was saved without this bus; its hooks start anew",
                id="saved-without-bus",
                path=path,
                hooks=hooks,
            )
        self.run.counters.restore(counters)
        self.run.state.resume()

    def _changed(self, before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Any]) -> Weights:
        """Return the tensors that a hook has replaced."""
        now = by_model(self.run.models, after)
        changed = {}
        for name, own in before.items():
            keys = checkpoint_keys(self.run.models[name])
            known = [(long, key) for long, key in keys.items() if key in own and key in now[name]]
            replaced = {long: now[name][key] for long, key in known if now[name][key] is not own[key]}
            if replaced:
                changed[name] = replaced
        return changed


def _same_place(one: object, other: object) -> bool:
    """Return True if two values are tensors in one place in memory; of sharded ones, their parts in this process."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    here, there = ((tensor.to_local() if hasattr(tensor, "to_local") else tensor) for tensor in (one, other))
    return here.device == there.device and here.data_ptr() == there.data_ptr() and here.shape == there.shape


def iterations_in(steps: int, window: int, length: int | None) -> int:
    """Return the number of batches in this number of steps; the last window of an epoch of some length may be shorter."""
    if not length:
        return steps * window
    epochs, rest = divmod(steps, -(-length // window))
    return epochs * length + min(rest * window, length)
