"""Resume from a checkpoint: find it, check it against the run, restore its state. Tell how to resume a run that ended."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from msgspec import UNSET
from msgspec.structs import replace

from trainbus.eventloop import events as ev
from trainbus.eventloop.checkpoint import AnyPath, RemotePath, as_path, load, sharded_in, verify_shards
from trainbus.eventloop.checkpoint.pieces import mapped
from trainbus.eventloop.checkpoint.shards import stranded
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError, ConfigurationError, TrainingError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training.distributed.layout import DataRank
from trainbus.eventloop.training.machine import RUN
from trainbus.eventloop.training.optimizers import parameters_of
from trainbus.eventloop.training.rng import other_rng_state
from trainbus.eventloop.training.saved_run import SavedRun
from trainbus.eventloop.training.saves.agreed import agreed
from trainbus.eventloop.training.saves.apart import own_part
from trainbus.eventloop.training.saves.contents import as_tree, parameter_names, restore_state, unwrapped_state
from trainbus.eventloop.training.saves.discover import Found, Read, find_checkpoint, newest_candidate, read_checkpoint
from trainbus.eventloop.training.saves.foreign import convert_foreign
from trainbus.eventloop.training.schema import SavedCounts, SavedRank, SavedState, Tree, read, upgraded
from trainbus.eventloop.user_errors import add_note, contextmanager
from trainbus.eventloop.world import this_rank, world_size

HOSTED: Final = "trainbus"
"""Key of the state that :meth:`trainbus.eventloop.Run.gather_state` adds to another checkpoint."""

log = get_logger()

_way: ContextVar[str] = ContextVar("trainbus_way_to_resume", default="")


def publish_loaded(run: SavedRun, path: str, checkpoint: Tree, progress: SavedCounts) -> None:
    """Publish ``after_load_checkpoint`` with the progress in the checkpoint, which the run does not have yet.

    It has no limits, which belong to the training that begins later.
    """
    counters = msgspec.structs.replace(run.state.counters, max_epochs=None, max_iters=None)
    counters.restore(progress)
    run.bus.publish(ev.AfterLoadCheckpoint(run=run, progress=counters.snapshot(), path=path, checkpoint=checkpoint))


class Restore:
    """Restore the state that a run resumes from. ``source`` and ``strict`` are the run's ``resume=`` and ``strict=``."""

    def __init__(self, run: SavedRun, source: str | Path | None, *, strict: bool) -> None:
        self._run = run
        self._source = source if source is None or source == "auto" else as_path(source).absolute()
        self._strict = strict
        self._given: Mapping[str, Any] | None = None
        self._may_load = False
        if source == "auto" and run.work_dir is None:
            raise ConfigurationError('resume="auto" searches the work_dir: give work_dir=, or a path as resume=')
        suffix = self._source.suffix if isinstance(self._source, Path) and not self._source.is_dir() else ""
        if suffix in (".pth", ".pt", ".ckpt", ".bin"):
            raise ConfigurationError(
                f"resume={str(source)!r} is a file of torch.save: convert it with "
                f"`trainbus checkpoint import {source} {Path(str(source)).stem}.safetensors` and resume from the result"
            )

    @property
    def automatic(self) -> bool:
        """True for ``resume="auto"``."""
        return self._source == "auto"

    @property
    def given(self) -> bool:
        """True if the checkpoint to resume from was given: by its path, or as a tree."""
        return self._given is not None or not (self._source is None or self.automatic)

    def load(self) -> None:
        """Restore the state that a handler of ``before_run`` passed to ``apply_state``, or else the checkpoint."""
        self._may_load = True
        given, self._given = self._given, None
        if given is not None:
            self._apply_given(given)
        elif self._source is not None:
            self._load_found(self._find())

    def _load_found(self, found: Found | None) -> None:
        if found is None:
            log.info("no checkpoint to resume from; a new run begins", work_dir=str(self._run.work_dir))
            return
        path, state = found
        state = state_of_rank(state, this_rank(), self._run.coordinator.layout.data)
        if self._run.host.saver.sharded or sharded_in(state) is not None:
            state = self.with_shards(state, path)
        self._apply(state, str(path))
        self._run.checkpoints.resumed_from = path

    def apply_state(self, from_: Mapping[str, Any]) -> None:
        """Restore the state in another program's checkpoint; during ``before_run``, do it after the last handler."""
        state = self._run.state
        if state.machine.innermost is not RUN or state.has_trained:
            raise TrainingError(
                "run.checkpoints.apply_state() must come before training begins: call it right after `with Run(...) as run:`, "
                "before run.epochs() and run.train(), or in a handler of before_run; or begin a new run"
            )
        if self._may_load:
            self._apply_given(from_)
        else:
            self._given = from_

    def begin_with(self, from_: Mapping[str, Any]) -> None:
        """Like :meth:`apply_state`; before the run begins, restore the state when it does."""
        if self._run.state.machine.is_open:
            self.apply_state(from_)
        else:
            self._given = from_

    def _apply_given(self, from_: Mapping[str, Any]) -> None:
        state = from_.get(HOSTED)
        if not isinstance(state, Mapping):
            converted = convert_foreign(from_)
            if converted is None:
                raise CheckpointError(
                    f"this checkpoint has no key {HOSTED!r} with the state of a run, only "
                    f"{', '.join(map(repr, list(from_)[:8])) or 'nothing'}; run.checkpoints.gather_state(checkpoint) adds it"
                )
            state = converted[0]
        # Loading copies weights. Optimizers and hooks keep the given tensors, and training changes them in place.
        kept = {key: value for key, value in state.items() if key != "state_dict"}
        own = mapped(
            kept, lambda one: not isinstance(one, dict) and type(one) not in (list, tuple), lambda _, leaf: _copy(leaf)
        )
        given = own_part({**state, **own}, self._run.coordinator.layout)
        self._apply(state_of_rank(given, this_rank(), self._run.coordinator.layout.data), "")

    def _apply(self, state: Mapping[str, Any], path: str) -> None:
        run, state = self._run, dict(state)
        publish_loaded(run, path, state, read(state, SavedState).progress)
        restore_state(run, state, strict=self._strict)
        counters = run.state.counters
        log.info("resumed", path=path or "the given state", epoch=counters.epoch, iter=counters.iter)

    def _find(self) -> Found | None:
        """Load the checkpoint to resume from: of several ranks, the newest good one that any of them finds."""
        lost = dict[str, str]()
        for mirror in self._run.checkpointer.mirrors if self.automatic else ():
            lost |= mirror.recover()
        found = self._newest(dict(lost))
        if found is None and (lost or self.automatic) and (reason := "; ".join(lost.values()) or self._stranded()):
            raise CheckpointError(
                f"{reason}. There is no other checkpoint: give what is missing, or remove it to begin a new run"
            )
        return found

    def _stranded(self) -> str:
        """Return which parts of a sharded save there are on any rank, whose file none has; empty if there are none."""
        here = (one for one in self._run.checkpointer.directories if isinstance(one, Path))
        own = "".join(
            [f"{one.parent} is a part of a save whose file no rank has" for place in here for one in stranded(place)][:1]
        )
        return next(filter(None, self._run.coordinator.distinct(own).values()), "")

    def _newest(self, damaged: dict[str, str]) -> Found | None:
        """``damaged`` has sharded checkpoints that are not to be resumed from, by directory, each with the reason."""
        ranks = self._run.coordinator

        def read_file(path: AnyPath) -> Any:
            state = load(path)
            if (name := sharded_in(state)) in damaged:
                raise CheckpointDamagedError(damaged[name])
            if ranks.size == 1:
                verify_shards(state, path)
            return state

        if ranks.size == 1:
            return self._find_here(read_file)
        while True:
            found = agreed(ranks, lambda: self._find_here(read_file), self._look_here)
            if found is None or (name := sharded_in(found[1])) is None:
                return found
            # All read the tensors, each some files: a large model would keep one rank busy for long.
            problem = _caught(partial(verify_shards, found[1], found[0], share=(ranks.rank, ranks.size)))
            for rank, error in ranks.distinct(problem).items():
                if isinstance(error, CheckpointDamagedError):
                    damaged[name] = str(error)
                elif error is not None:
                    add_note(error, f"on rank {rank}")
                    raise error
            if name not in damaged:
                return found

    def _look_here(self) -> AnyPath | None:
        known = self._run.checkpointer.directories
        if self._source == "auto":
            return newest_candidate(*known)
        path = as_path(self._source or "")
        if path.is_dir():
            return newest_candidate(path, known=known)
        return path if path.exists() else None

    def _find_here(self, read: Read) -> Found | None:
        if self._source == "auto":
            return find_checkpoint(*self._run.checkpointer.directories, read=read)
        way_out = (
            'give the path or URL of a checkpoint, or of a directory with some; resume="auto" takes the newest one in the work '
            "dir, and begins a new run if it finds none"
        )
        return read_checkpoint(as_path(self._source or ""), read, way_out, known=self._run.checkpointer.directories)

    def with_shards(self, state: Mapping[str, Any], path: Any) -> dict[str, Any]:
        """Return a tree with sharded tensors, of which this process has its part: those of the file ``path``, or whole ones."""
        from trainbus.eventloop.checkpoint.sharded import put_shards, spread  # takes a second; only for sharded models

        state = own_part(dict(state), self._run.coordinator.layout)
        like = placement(self._run.models, self._run.optimizers, state.get("parameters", {}))
        if sharded_in(state) is None:
            return spread(state, like)
        there = partial(like, by_name=True)  # what was whole among sharded tensors, and no weight, is so for a reason
        made = dict[str, Any]()
        problem = _caught(lambda: made.update(spread(put_shards(state, path, like), there)))
        for rank, one in self._run.coordinator.distinct(problem).items():
            if one is not None:
                add_note(one, f"on rank {rank}")
                raise one
        return made


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)


def _caught(do: Callable[[], object]) -> CheckpointError | OSError | None:
    """Return the error of a rank, which the others need to know."""
    try:
        do()
    except (CheckpointError, OSError) as error:
        return error
    return None


def placement(
    models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer], saved: Mapping[str, str]
) -> Callable[..., torch.Tensor]:
    """Return a function that makes an empty tensor for each path in a sharded checkpoint, sharded as in this run.

    Weights, and averages of them under other keys, are sharded like the model's, optimizer state like its parameter, another
    tensor like weights of its shape, unless ``by_name``. Anything else is not sharded. ``saved`` has the names of each
    optimizer's parameters, in the order of the checkpoint.
    """
    known: dict[tuple[str | int, ...], torch.Tensor] = {}
    for name, model in models.items():
        prefix = ("state_dict",) if set(models) == {"model"} else ("state_dict", name)
        known |= {(*prefix, key): value for key, value in unwrapped_state(model).items() if isinstance(value, torch.Tensor)}
    by_shape = {value.shape: value for value in known.values()}
    for name, names in parameter_names(models, optimizers).items():
        own = names.split("\n")
        parameters = dict(zip(own, parameters_of(optimizers[name]), strict=False))
        there = saved[name].split("\n") if name in saved else own
        # By number where names do not tell: of 0.2, or of parameters in no model.
        order = [parameters[key] for key in there] if sorted(there) == sorted(parameters) else parameters_of(optimizers[name])
        for index, parameter in enumerate(order):
            known["optimizer", name, "state", index] = known["gradients", name, index] = parameter

    def like(path: tuple[str | int, ...], shape: torch.Size, dtype: torch.dtype, *, by_name: bool = False) -> torch.Tensor:
        found = known.get(("state_dict", *path[1:]), known.get(path[:4]))
        if found is None or found.shape != shape:
            found = None if by_name else by_shape.get(shape)
        return torch.empty(shape, dtype=dtype) if found is None else torch.empty_like(found.detach(), dtype=dtype)

    return like


_IN_BATCHES: Final = (
    "resuming inside an epoch on another number of processes: the position in the data is right only if the global batch size "
    "is unchanged; TrainLoop(global_batch=), or a GlobalBatchSampler, counts samples"
)
_IN_A_STREAM: Final = (
    "resuming inside an epoch of a stream on another number of processes: samples of this epoch may come twice, or not at all; "
    "resume with the number that saved, or from the end of an epoch"
)


def state_of_rank(tree: Mapping[str, Any], rank: int, place: DataRank) -> Tree:
    """Upgrade and check the state of a run; return it with the random states of rank ``rank``, and its position in the data.

    A rank that the saved run did not have gets random states derived from rank 0's. Positions go by ``place``, which ranks of
    one copy of the model share.
    """
    tree = upgraded(tree, SavedState)
    saved = read(tree, SavedState)
    ranks = saved.ranks or [SavedRank(saved.rng, saved.data, saved.body_rng, saved.batch_rng)]
    position = None if saved.data is None else saved.data.train
    numbers = [rank if one.data_rank is UNSET else one.data_rank for rank, one in enumerate(ranks)]
    # Of 0.2, whose ranks of one copy each have its position.
    old = len(ranks) == world_size() and all(one.data_rank is UNSET for one in ranks)
    count = place.size if old else len({*numbers})
    if count != place.size and position is not None and position.used and position.samples is None:
        log.warning(
            _IN_A_STREAM if position.length is None else _IN_BATCHES, id="world-size-changed", saved=count, now=place.size
        )
    data = ranks[rank if old else numbers.index(place.rank) if place.rank in numbers else 0].data
    own = replace(ranks[rank] if rank < len(ranks) else SavedRank(None, data), data=data, data_rank=UNSET)
    if own.rng is None:
        own = SavedRank(other_rng_state(ranks[0].rng, rank), data)
    return {**tree, **as_tree(own)}


@contextmanager
def resumed_with(way: str) -> Iterator[None]:
    """Let runs in a ``with`` block tell that ``way``, such as a command's arguments, continues them."""
    token = _way.set(way)
    try:
        yield
    finally:
        _way.reset(token)


def resume_line(path: AnyPath | None, way: str) -> str:
    """Return the line that tells to continue from the checkpoint ``path`` with ``way``; empty if it is None, or was removed."""
    if path is None or not (isinstance(path, RemotePath) or path.exists()):
        return ""
    return f"continue from {path} with {_way.get() or way}"
