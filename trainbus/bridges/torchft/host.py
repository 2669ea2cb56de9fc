"""``Run(bus, replicas=manager)``: one replica group of a training that a ``torchft.Manager`` leads.

The manager averages gradients between the groups and decides whether a step counts. A group that was killed, or that fell
behind, gets the state of one that went on, through the manager's state functions: the sender's :meth:`ManagedReplicas.hand_out`
on a thread of the manager during a forward pass, the receiver's :meth:`ManagedReplicas.heal` on the training thread within
``optimizer.step()``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Self

from trainbus.bridges.copies import replaced
from trainbus.bridges.torchft import privates
from trainbus.bridges.torchft.buffers import Buffers
from trainbus.bridges.torchft.lookout import Lookout
from trainbus.eventloop import events as ev
from trainbus.eventloop.checkpoint import is_sharded
from trainbus.eventloop.device import synchronize
from trainbus.eventloop.errors import ConfigurationError, TrainingError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training import Driver, Run
from trainbus.eventloop.training.machine import ITERATION, TRAIN
from trainbus.eventloop.training.saves.contents import as_tree, gather_state, restore_state
from trainbus.eventloop.training.saves.restore import publish_loaded
from trainbus.eventloop.training.schema import SavedCounts, SavedRank, SavedState, read

log = get_logger()

KEY: Final = "trainbus"
"""Key of the run among the manager's state functions."""
MANAGER: Final = "torchft"
"""Key of the manager among the ``stateful`` objects of a run, and of the position in the data in a state that is handed out."""


class ManagedReplicas:
    """Lead the run of one replica group by a ``torchft.Manager``: commit, repeat, hand out and heal."""

    first = False
    healed = False
    committed = False

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._run: Run
        self._drive: Driver
        self._buffers: Buffers
        self._asked = False
        """True once this iteration has asked the manager to commit."""
        self._counts: SavedCounts | None = None
        """The counts at the beginning of the step that is under way."""
        self._starting = False
        self._failure: BaseException | None = None
        """The error of a state that could not be handed out."""
        manager.register_state_dict_fn(KEY, self.heal, self.hand_out)

    @classmethod
    def of(cls, manager: Any) -> Self:
        """Return the bridge of a manager, which has one for all its runs: a state function cannot be registered again."""
        privates.check(manager)
        known = privates.load_functions(manager).get(KEY)
        return cls(manager) if known is None else known.__self__  # type: ignore[attr-defined]  # the method above

    @property
    def name(self) -> str:
        """The ``replica_id`` of the manager, or the environment's ``REPLICA_GROUP_ID``.

        Raises:
            ConfigurationError: there is neither.
        """
        name = privates.replica_id(self._manager) or os.environ.get("REPLICA_GROUP_ID")
        if not name or os.sep in name or name in (".", ".."):
            raise ConfigurationError(
                f"the replica group has {f'the name {name!r}, which is no' if name else 'no name for its'} folder in the work "
                'dir: give torchft.Manager(replica_id="..."), the same name after each restart'
            )
        return name

    @property
    def size(self) -> int:
        """Number of processes in this group."""
        return privates.group_size(self._manager)

    def join(self, run: Run, drive: Driver) -> None:
        """Lead a run."""
        self._run, self._drive = run, drive
        run.stateful = {**run.stateful, MANAGER: self._manager}

    def begin(self) -> None:
        """Listen to the manager until the run ends.

        Raises:
            ConfigurationError: the run is at another step than the manager, or a model is sharded.
        """
        run, manager = self._run, self._manager
        if not run.state.trains:
            return
        if sharded := [name for name, model in run.models.items() if is_sharded(model)]:
            raise ConfigurationError(
                f"replicas= cannot hand the state of a sharded model to another replica group: {', '.join(sharded)}"
            )
        done = run.counters.iter
        if not manager.current_step() and done:  # the checkpoint of a run without replica groups
            manager.load_state_dict({"step": done, "batches_committed": done})
        if manager.current_step() != done:
            raise ConfigurationError(
                f"the manager is at step {manager.current_step()}, and the run at iteration {done}: make the torchft.Manager "
                "anew for each run, and let the run restore it (resume=)"
            )
        if failing := [name for name, model in run.models.items() if privates.fails_with_others(model)]:
            log.warning(
                "the DistributedDataParallel of this torchft ends a replica group when another one dies during its backward "
                "pass: install torchft-nightly, or average the gradients after the backward pass by manager.allreduce()",
                id="torchft-ddp-ends-group",
                models=", ".join(failing),
            )
        self.first = self.healed = self.committed = self._asked = False
        self._counts = self._failure = None
        self._buffers = Buffers(run.models.values())
        for name, call in (("start_quorum", self._start_quorum), ("should_commit", self._should_commit)):
            run.defer(replaced(manager, name, partial(call, getattr(manager, name))))
        run.defer(Lookout(manager).close)

    def iteration_counts(self, *, complete: bool = True) -> bool:
        """Return True if the iteration that ends here counts. Unless it is ``complete``, its body was left early.

        Raises:
            TrainingError: its body has not asked the manager to commit.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if complete and not self._asked:
            raise TrainingError(
                "with replicas= each iteration is one step of the torchft.Manager, and this one has not asked it: call "
                "zero_grad() at the beginning of the body and step() at its end, on torchft's Optimizer; to accumulate "
                "gradients, divide the batch within the body. LocalSGD and DiLoCo ask it once in several iterations: use "
                "them in a run without replicas="
            )
        committed, self.committed, self._asked, self._counts = self.committed, False, False, None
        if not committed:
            self._buffers.put_back()
            log.info("this step was not committed; its batch comes again", iter=self._run.counters.iter)
        elif self.healed:
            self._run.state.drop_outputs()  # of the weights before
        return committed

    # ---------------------------------------------------------------------------------------- called by the manager

    def _start_quorum(self, start: Callable[..., None], *args: Any, **options: Any) -> None:
        """Begin a step. From here on the manager may ask for the state."""
        state = self._run.state
        if state.machine.innermost is not ITERATION or self._asked or self._counts is not None:
            where = "twice in an iteration" if state.machine.innermost is ITERATION else "outside the body of run.train()"
            raise TrainingError(
                f"zero_grad() of torchft's Optimizer, or manager.start_quorum(), was called {where}: call it once, at the "
                "beginning of the body"
            )
        self.healed = False
        self._counts = self._run.counters.saved()
        self._buffers.keep_copies()
        self._starting = True
        try:
            start(*args, **options)
        finally:
            self._starting = False

    def _should_commit(self, decide: Callable[..., bool], *args: Any, **options: Any) -> bool:
        self._asked = True
        self.committed = decide(*args, **options)
        if self.committed:
            first = self._manager.participating_rank() == 0
            if first and not self.first:
                self._take_over()
            self.first = first
        return self.committed

    def _take_over(self) -> None:
        """Save from here on. The group that did so until now is gone, or another one begins to be the first."""
        if lost := self._run.checkpointer.left_to_others():
            log.warning(
                "files that another replica group was to write are not there; the state is saved once more",
                id="torchft-files-missing",
                names=lost,
            )
            self._run.checkpoints.save()
        # What the other group has saved is there, but the hooks of this one were not told.
        self._run.bus.load_state_dict(self._run.bus.state_dict())

    def hand_out(self) -> dict[str, Any]:
        """Return the state at the beginning of the step, on the manager's thread, perhaps during the forward pass.

        Until the step is committed nothing else changes the weights, the optimizers and the hooks; the manager waits for those
        who read the tensors. What a forward pass changes was copied before.
        """
        try:
            return self._gather()
        except BaseException as error:
            self._failure = error  # the manager logs it, and would try again for ever
            raise

    def _gather(self) -> dict[str, Any]:
        run, counts, feed = self._run, self._counts, self._drive.feed
        if counts is None:
            raise TrainingError("a replica group asks for the state of a run that is not within a step")
        synchronize(run.device)  # the training thread's stream may still be making the last step
        state = gather_state(run, SavedRank(None, None), ())
        # Not by run.publish(), which is for the training thread.
        run.bus.publish(ev.BeforeSaveCheckpoint(run=run, progress=run.progress, path="", checkpoint=state))
        place = {} if feed is None else feed.place()
        handed: dict[str, Any] = self._buffers.put_in({**state, "progress": as_tree(counts), MANAGER: place})
        return handed

    def heal(self, state: dict[str, Any]) -> None:
        """Continue from the state of another group, in the middle of an iteration, as a resumed run does.

        The iteration becomes the one that the other group is in, and its batch the one that belongs to these weights. The
        other groups take the step without this batch.
        """
        run, before, counts = self._run, self._run.counters.iter, read(state, SavedState).progress
        # Functions of the user's that come first have replaced weights already.
        first = next(iter(privates.load_functions(self._manager)))
        saver: Any = run.host.saver
        saver.end_copies("" if first == KEY else "a healing replaced the weights while they were being copied")
        if counts.iter == before:
            # At step 0 the ranks of a group may heal at different groups, or not at all: none of them may wait for another.
            self._take_state(state, counts)
        else:
            self._jump(state, counts)
        self._counts = run.counters.saved()
        self._buffers = Buffers(run.models.values())
        self._buffers.keep_copies()
        self.healed = True
        log.info(
            "this replica group has taken over the state of another; it does not train its own data of these iterations",
            first=before,
            last=run.counters.iter,
        )
        if self._starting:  # use_async_quorum=False
            log.warning(
                "the body trains the batch that it has, which belongs to another iteration",
                id="torchft-batch-of-another-iteration",
                iter=before,
            )

    def _take_state(self, state: dict[str, Any], counts: SavedCounts) -> None:
        publish_loaded(self._run, "", state, counts)
        restore_state(self._run, state, strict=True)

    def _jump(self, state: dict[str, Any], counts: SavedCounts) -> None:
        """Take a state, and begin its epoch and iteration."""
        run, drive, feed, place = self._run, self._drive, self._drive.feed, state[MANAGER]
        endless, epochs, iters = feed is not None and feed.endless, run.counters.max_epochs, run.counters.max_iters
        run.state.machine.leave(TRAIN)
        self._take_state(state, counts)
        drive.begin_train(max_epochs=epochs, max_iters=iters)
        if feed is not None:
            feed.go_to_place(place)
        drive.begin_epoch(feed, endless=endless)
        batch = None if feed is None else feed.next()
        drive.begin_iteration(None if batch is None else batch[0])
