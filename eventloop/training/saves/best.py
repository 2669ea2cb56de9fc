"""The best checkpoint of a training, and its weights at the end of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, cast

from trainbus.eventloop.bus import Bus
from trainbus.eventloop.checkpoint import AnyPath, as_path, inspect, load, sharded_in, verify_shards
from trainbus.eventloop.errors import CheckpointError, ConfigurationError
from trainbus.eventloop.events import RunView
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training.host import OwnLoop
from trainbus.eventloop.training.saved_run import SavedRun
from trainbus.eventloop.training.saves.agreed import agreed
from trainbus.eventloop.training.saves.contents import by_model, loose_parameters
from trainbus.eventloop.training.saves.loose import SavedLoose
from trainbus.eventloop.training.saves.weights import load_weights
from trainbus.eventloop.training.schema import Tree

_LEFT_OUT: Final = frozenset({"optimizer", "stateful", "rng", "data", "ranks"})
"""Keys of a checkpoint that the weights do not need; of a sharded one they are not read."""

log = get_logger()


class Best(NamedTuple):
    """The best checkpoint so far: its durable file, its score, and the metric that it is the best by."""

    path: AnyPath
    score: float
    metric: str


def best_of(bus: Bus) -> Best | None:
    """Return the best checkpoint that a hook on the bus keeps, the first hook's if several do; None before the first."""
    found: Best | None = next(filter(None, (hook.best_checkpoint() for hook in bus.hooks)), None)
    return found


def load_best_at_end(run: RunView, subject: str, best: Callable[[], Best | None]) -> None:
    """Load the weights of the best checkpoint when the training has ended and its last state is saved.

    Models and averages of hooks are as in the file; optimizers, counts and the position in the data stay. The training may end
    early (``run.stop``), but not by an exception, nor to be continued by another process (an ``exit_code``).

    Args:
        run: the run, which trains from now on.
        subject: the hook and its option, for messages.
        best: returns the best checkpoint; rank 0's counts.

    Raises:
        ConfigurationError: another trainer writes the checkpoints, or there are replica groups.
        CheckpointError: at the end: the file is gone or damaged, or belongs to another model.
    """
    saved = cast("SavedRun", run)
    if not isinstance(saved.host, OwnLoop):
        raise ConfigurationError(
            f"{subject} reads trainbus's own checkpoints, but here another trainer writes them: use its own option"
        )
    if saved.host.replicas is not None:
        raise ConfigurationError(
            f"{subject} does not work with replica groups, of which one saves: load the weights after the run"
        )
    saved.state.end_by(partial(_load_best, saved, subject, best))


def _load_best(run: SavedRun, subject: str, best: Callable[[], Best | None]) -> None:
    state = run.state
    if state.stops and state.agreed.exit_code:
        log.info(f"{subject}: the best weights are not loaded, because this training goes on in another process")
        return
    run.checkpointer.wait()
    found = run.coordinator.from_first(lambda: _portable(best()))
    if found is None:
        log.warning(f"{subject}: there is no best checkpoint, so the model keeps its last weights", id="no-best-checkpoint")
        return
    path = as_path(found.path)
    tree = _read(run, path, subject)
    for hook in run.bus.hooks:
        hook.take_weights(tree)
    weights = by_model(run.models, tree["state_dict"])
    loose = SavedLoose(tree.get("loose", {}), loose_parameters(run), strict=True)
    for name, model in run.models.items():
        load_weights(model, weights[name])
    loose.load()
    state.note_change()
    log.info("loaded the best weights", path=str(path), metric=found.metric, score=found.score)


def _portable(best: Best | None) -> Best | None:
    return None if best is None else best._replace(path=cast("AnyPath", str(best.path)))


def _read(run: SavedRun, path: AnyPath, subject: str) -> Tree:
    """Read a checkpoint without what the weights do not need. A collective: a rank that has the file sends it to the others."""
    ranks = run.coordinator

    def digest() -> str:
        try:
            return inspect(path).digest
        except FileNotFoundError:
            raise CheckpointError(
                f"{subject}: the best checkpoint {path} is gone; the model has its last weights, which are saved. To "
                "load those of another file, call load_weights(model, load(path)['state_dict'])"
            ) from None

    def here() -> AnyPath | None:
        return path if path.exists() and inspect(path).digest == first else None

    first = ranks.from_first(digest)
    found = agreed(ranks, lambda: None if here() is None else (path, load(path)), here)
    if found is None:
        raise CheckpointError(f"{subject}: the best checkpoint {path} is gone")
    tree: Any = found[1]
    if ranks.size == 1:
        verify_shards(tree, path)
    state: Tree = {key: value for key, value in tree.items() if key not in _LEFT_OUT}
    if run.host.saver.sharded or sharded_in(state) is not None:
        return dict(run.checkpointer.restore.with_shards(state, path))
    return state
