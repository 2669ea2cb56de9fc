"""``TrainLoop``: epochs, iterations, validation and test around the user's step, on top of :class:`Run`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, cast

import torch
from msgspec import Meta

from trainbus.eventloop.bus import Bus
from trainbus.eventloop.checks import check_options
from trainbus.eventloop.device import handed_over
from trainbus.eventloop.errors import BusStateError, ConfigurationError, RunCancelled, TrainingError, stopped
from trainbus.eventloop.events import AfterForward, BeforeForward
from trainbus.eventloop.media import without_media
from trainbus.eventloop.notebook import Named, shorten
from trainbus.eventloop.offload import in_thread
from trainbus.eventloop.plain import numbers_in
from trainbus.eventloop.training.arguments import (
    Config,
    Data,
    Fraction,
    Limit,
    Models,
    OnBus,
    Optimizers,
    Resume,
    Stateful,
    Step,
    check_step,
    named,
)
from trainbus.eventloop.training.calls import LoopCall, LoopCalls, tell_if_it_blocks
from trainbus.eventloop.training.check import CheckResult, Job, check
from trainbus.eventloop.training.distributed.launch import divided
from trainbus.eventloop.training.distributed.layout import data_rank
from trainbus.eventloop.training.distributed.samples import GlobalBatchSampler
from trainbus.eventloop.training.facts import carded, described, facts
from trainbus.eventloop.training.host import OwnLoop
from trainbus.eventloop.training.iterators import EvaluationBatches
from trainbus.eventloop.training.limits import limited, limited_to
from trainbus.eventloop.training.loaders import has_one_pass
from trainbus.eventloop.training.machine import ITERATION, Counters
from trainbus.eventloop.training.metrics import Metrics, NamedMetrics
from trainbus.eventloop.training.preflight import check_first_batches
from trainbus.eventloop.training.run import Run
from trainbus.eventloop.training.saves.best import Best, best_of
from trainbus.eventloop.training.schema import SavedData
from trainbus.eventloop.training.state import ValidationPlan
from trainbus.eventloop.training.update import Update
from trainbus.eventloop.user_errors import contextmanager

_REMEMBERED: Final = 10_000
"""Rows of :attr:`TrainLoop.history`."""


class TrainLoop:
    """Train, validate and test ``model``, and publish every mount point on ``bus``.

    Args:
        model: a module, or several by name (``step`` then gets the mapping).
        optimizer: an optimizer, or several by name; not needed for ``validate()`` and ``test()`` alone.
        step: ``step(model, batch)`` returns the loss, or a mapping with ``"loss"`` (a scalar tensor) and more.
        train_data: training batches; an iterable that can be iterated again (a generator only for one epoch).
        val_data: validation batches.
        test_data: test batches.
        val_step: ``val_step(model, batch)`` returns a mapping with the entries that the metrics need; its scalars are
            averaged. ``step`` by default.
        test_step: like ``val_step``, and ``val_step`` by default.
        metrics: name → metric with ``update``, ``compute`` and ``reset``, such as those of many libraries.
        bus: the bus with the hooks. The loop adds an optimizer update (``trainbus.hooks.OptimizerHook``) if the bus has none.
        max_epochs: epochs to train, or else
        max_iters: iterations to train (iteration-based training: one long epoch).
        val_interval: epochs (default 1) or iterations (default 1000) between validations. The last one always validates.
        global_batch: samples per optimizer step of all processes together. ``train_data`` must be a plain ``DataLoader``, whose
            batch size is the most that a process holds at once; micro-batches are accumulated as needed. Each start divides
            the global batch among its processes, and a resumed run takes exactly the samples that are left of its epoch;
            see :class:`GlobalBatchSampler`. By default each process takes its loader's batches.
        val_begin: first epoch (or iteration) to validate after, 1-based.
        limit_train_batches: train on that many batches of an epoch, or on that fraction of them (a float of at most 1.0).
        limit_val_batches: validate on that many batches, or on that fraction of them; 0 validates never.
        overfit_batches: like both limits, and not shuffled: the same batches in each epoch. Finds out if the model can learn.
        sanity: validation batches to look at before a training, so that an error in ``val_step`` or the name of a metric is
            found at once; 0 for none. The look changes nothing. :meth:`check` tries more.
        work_dir, device, seed, stateful, name, config, data_mesh: see :class:`Run`.

    Raises:
        ConfigurationError: an argument is missing or does not fit, with the way out.
    """

    @check_options
    def __init__(
        self,
        model: Models,
        optimizer: Optimizers | None = None,
        *,
        step: Step,
        train_data: Data | None = None,
        val_data: Data | None = None,
        test_data: Data | None = None,
        val_step: Step | None = None,
        test_step: Step | None = None,
        metrics: NamedMetrics | None = None,
        bus: OnBus | None = None,
        max_epochs: Limit | None = None,
        max_iters: Limit | None = None,
        global_batch: Limit | None = None,
        val_interval: Limit | None = None,
        val_begin: Limit = 1,
        limit_train_batches: Limit | Fraction | None = None,
        limit_val_batches: Annotated[int, Meta(ge=0)] | Fraction | None = None,
        overfit_batches: Limit | Fraction | None = None,
        sanity: Annotated[int, Meta(ge=0)] = 2,
        work_dir: str | Path | None = None,
        device: str | torch.device | None = None,
        seed: int | None = None,
        stateful: Stateful | None = None,
        name: str | None = None,
        config: Config | None = None,
        data_mesh: Any = None,
    ) -> None:
        if max_epochs is not None and max_iters is not None:
            raise ConfigurationError(
                f"max_epochs={max_epochs} and max_iters={max_iters}: give one of them; max_epochs counts passes over "
                "train_data, max_iters counts batches"
            )
        if train_data is not None and max_epochs is None and max_iters is None:
            raise ConfigurationError("the training has no length: give max_epochs=, or max_iters= for iteration-based training")
        for label, function in (("step", step), ("val_step", val_step), ("test_step", test_step)):
            if function is not None:
                check_step(label, function)
        Metrics(metrics)  # checks them
        self.model = model
        self.bus = bus if bus is not None else Bus()
        self.max_epochs = max_epochs
        self.max_iters = max_iters
        self.global_batch = global_batch
        self.val_interval = val_interval or (1 if max_iters is None else 1000)
        self.val_begin = val_begin
        self.sanity = sanity
        self.counters = Counters()
        self._step = step
        self._val_step = val_step or step
        self._test_step = test_step or self._val_step
        limits = {"limit_train_batches": limit_train_batches, "limit_val_batches": limit_val_batches}
        data, self._limits = limited(
            {"train": train_data, "val": val_data}, limits, overfit_batches, divides=global_batch is not None
        )
        self._data = {**data, "test": test_data}
        self._check_passes()
        self._metrics = dict(metrics or {})
        self._optimizer = optimizer
        self._calls = LoopCalls()
        self._options: dict[str, Any] = {"work_dir": work_dir, "device": device, "seed": seed}
        self._options |= {"stateful": stateful, "name": name, "config": config}
        self._data_mesh = data_mesh
        self._position: SavedData | None = None  # where the last run has left its data, if in an epoch
        self._folder: Path | None = None  # of the first run of this loop; later ones continue in it
        self._history: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED)
        self._given = self._new_run().work_dir  # checks the options
        if optimizer is not None and not any(isinstance(hook, Update) for hook in self.bus.hooks):
            self.bus.add(Update())

    def __repr__(self) -> str:
        return described("TrainLoop", self._facts())

    def _repr_html_(self) -> str:
        return carded("TrainLoop", self._facts(), self.bus)

    def _facts(self) -> dict[str, Any]:
        counters = self.counters
        if self._running is None:
            counters = copy(counters)
            counters.limit(self.max_epochs, self.max_iters)
        optimizers = named("optimizer", self._optimizer or {}, torch.optim.Optimizer)
        return facts(named("model", self.model, torch.nn.Module), optimizers, counters.snapshot(), self.work_dir)

    @property
    def _running(self) -> Run | None:
        return self._calls.run

    @property
    def work_dir(self) -> Path | None:
        """The directory of the run: the one that it has chosen (``first-2``) once it has begun, before that the given one."""
        return self._folder or self._given

    @property
    def best(self) -> Best | None:
        """The best checkpoint so far: path, score and metric; see ``run.checkpoints.best``. It stays when the run has ended."""
        return best_of(self.bus)

    @property
    def history(self) -> list[dict[str, Any]]:
        """The metrics of the epochs and validations of this loop's trainings, oldest first: rows of a table.

        Each row has ``stage``, ``epoch`` and ``iter`` (how many are done). A row ``"val"`` has the numbers of a validation. A
        row ``"train"`` has those that the last iteration of an epoch reported, so its loss is that of one batch.

        The newest 10,000 rows stay. A loop that resumes has the rows since then, and replaces those that it trains again;
        ``RunRecordHook`` records all processes of a run.
        """
        return [{"stage": row["stage"], **numbers_in(row)} for row in self._history]

    def _remember(self, stage: str, run: Run, values: Mapping[str, Any]) -> None:
        where = {"stage": stage, "epoch": run.counters.epoch, "iter": run.counters.iter}
        while self._history and (last := self._history[-1]) and (last["iter"] > where["iter"] or where.items() <= last.items()):
            self._history.pop()
        # Numbers on a device are copied there: to fetch them would wait for it.
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor) and value.numel() == 1}
        row = where | numbers_in({name: value for name, value in values.items() if not isinstance(value, torch.Tensor)})
        self._history.append(row | {name: value.detach().clone() for name, value in tensors.items()} | where)

    @check_options
    def run(
        self,
        *,
        resume: Resume | None = None,
        strict: bool = True,
        max_epochs: Limit | None = None,
        max_iters: Limit | None = None,
    ) -> dict[str, Any]:
        """Train and validate; return the metrics of the last validation.

        A second call trains on, if ``max_epochs`` or ``max_iters`` is larger than what is done. It goes on in the data where
        the last one was stopped, has failed, or has reached its limit of iterations.

        Args:
            resume: the checkpoint to continue from; see :class:`Run`.
            strict: False loads only the matching part of a checkpoint of another model or optimizer.
            max_epochs: another length of the whole training, from now on, if the loop counts epochs.
            max_iters: the same, if it counts iterations.

        Raises:
            ConfigurationError: the loop has no ``train_data`` or no optimizer, or its length is of the other kind.
            Exception: the unchanged error of a step, a loader or a hook.
        """
        with self._calls.exclusive() as call:
            return self._train(call, resume, strict, max_epochs, max_iters)

    def _train(
        self, call: LoopCall, resume: Resume | None, strict: bool, max_epochs: Limit | None, max_iters: Limit | None
    ) -> dict[str, Any]:
        if self._optimizer is None:
            raise ConfigurationError("run() needs an optimizer: give TrainLoop optimizer=")
        self._lengthen(max_epochs, max_iters)
        self._check_passes()
        if self.global_batch is not None:
            self._divide(self.global_batch)
        data, by_iter = self._need("train"), self.max_iters is not None
        metrics: dict[str, Any] = {}

        def validate() -> None:
            nonlocal metrics
            before = run.counters.validations
            found = self._validate(run)
            metrics = found or metrics
            if run.counters.validations > before:
                self._remember("val", run, found)

        with self._begun(call, trains=True, resume=resume, strict=strict) as run:
            plan = ValidationPlan(validate, self._validation_due if by_iter else None) if run.validates else None
            run.state.validate_by(plan)
            self._look(run)
            for _ in run.epochs(self.max_epochs, max_iters=self.max_iters):
                if run.validates and run.counters.phase == "val" and (by_iter or run.counters.batches):
                    validate()  # resumed just before a validation inside an epoch
                reported, epoch = run.outputs, run.counters.epoch
                for batch in run.train(data, endless=by_iter):
                    if run.wants(BeforeForward):
                        run.publish(BeforeForward, batch=batch)
                    outputs = _called("step", self._step, self.model, batch)
                    is_loss = type(outputs) is torch.Tensor and outputs.dim() == 0  # the usual case
                    reported = run.state.outputs
                    reported.update({"loss": outputs} if is_loss else without_media(run, _checked_outputs(outputs)))
                    if run.wants(AfterForward):
                        run.publish(AfterForward, outputs=run.outputs)
                if run.counters.epoch > epoch:
                    self._remember("train", run, reported)
                if not by_iter and (self._validation_due() or (plan is not None and plan.asked)):
                    validate()
        return Named(metrics)

    def _lengthen(self, max_epochs: int | None, max_iters: int | None) -> None:
        by_iter = self.max_iters is not None
        if (max_epochs if by_iter else max_iters) is not None:
            counts, option = ("iterations", "max_iters") if by_iter else ("epochs", "max_epochs")
            raise ConfigurationError(f"this loop counts {counts}: give run() {option}=")
        self.max_epochs, self.max_iters = max_epochs or self.max_epochs, max_iters or self.max_iters

    def _check_passes(self) -> None:
        """Raise ConfigurationError if the training passes more than once over data that yields its batches once."""
        passes = {"train_data": self.max_epochs or 1, "val_data": self._validations()}
        for name, number in passes.items():
            data = self._data[name.removesuffix("_data")]
            if number > 1 and has_one_pass(data):
                raise ConfigurationError(
                    f"{name} is a {type(data).__name__}, which yields its batches once, and this training passes over it "
                    f"{number} times: give a DataLoader, a list, or an object whose __iter__ begins anew"
                )

    def _validations(self) -> int:
        last, begin, interval = self.max_iters or self.max_epochs or 0, self.val_begin, self.val_interval
        regular = last // interval - (begin - 1) // interval
        return max(0, regular) + (last % interval > 0 or last < begin)

    def check(self) -> CheckResult:
        """Try this loop on copies: two batches of training and validation with all hooks, a save, and a resume.

        Print the result: errors, warnings, the names of the metrics, and estimates of time and size. It takes seconds.

        Nothing stays behind: the copies write to a temporary directory, their output is not shown, and model, optimizer,
        hooks, loaders and random states are as before. Hooks that act outside of a run (:meth:`Hook.in_check`) are left out,
        and so are functions on the bus, which may change anything. The step functions are called with the copies.

        Raises:
            ConfigurationError: the loop has no ``train_data`` or no optimizer, or there are several processes.
        """
        if self._optimizer is None:
            raise ConfigurationError("check() needs an optimizer: give TrainLoop optimizer=")
        self._need("train")
        return check(
            Job(
                kind=TrainLoop,
                model=self.model,
                optimizer=self._optimizer,
                steps={"step": self._step, "val_step": self._val_step},
                data={stage: self._data[stage] for stage in ("train", "val")},
                limits=self._limits,
                metrics=self._metrics,
                bus=self.bus,
                options=self._options | {"sanity": self.sanity},
                max_epochs=self.max_epochs,
                max_iters=self.max_iters,
                validations=self._validations(),
            )
        )

    async def arun(
        self,
        *,
        resume: Resume | None = None,
        strict: bool = True,
        max_epochs: Limit | None = None,
        max_iters: Limit | None = None,
    ) -> dict[str, Any]:
        """Train like :meth:`run` on a separate thread, while the caller's event loop (asyncio or trio) keeps running.

        Opens an idle bus with ``async with bus:``, so that async handlers are tasks of the caller's loop. If the caller is
        cancelled, the run ends at the next safe mount point (see :meth:`Run.cancel`). Lanes then drain for at most the bus's
        ``abort_timeout`` seconds.
        """
        take_device = handed_over()

        def train() -> dict[str, Any]:
            take_device()
            try:
                return self._train(call, resume, strict, max_epochs, max_iters)
            except RunCancelled:
                if not call.cancelled:
                    raise  # by run.cancel(), not by the host
                return {}  # in_thread() raises the host's own cancellation

        with self._calls.exclusive() as call:
            opened = await self.bus.internal.ajoin()
            try:
                metrics = await in_thread(train, "trainbus training", cancelled=call.cancel)
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError):
                    shorten(error, f"the run was interrupted after iteration {self.counters.iter}; loop.arun() trains on")
                if opened:
                    await self.bus.aclose(abort=True)
                raise
            if opened:
                await self.bus.aclose()
            return metrics

    def validate(self) -> dict[str, Any]:
        """Validate once, as a separate run; return the metrics."""
        with self._calls.exclusive() as call, self._begun(call) as run:
            return self._validate(run)

    def test(self) -> dict[str, Any]:
        """Test once, as a separate run; return the metrics."""
        with self._calls.exclusive() as call, self._begun(call) as run:
            return self._evaluate(run, run.test(self._need("test"), self._metrics), self._test_step)

    def stop(self, reason: str = "") -> None:
        """End the run at its next safe mount point; from any thread and from signal handlers.

        Raises:
            TrainingError: the loop is not running. This holds for the requests below, too, and in a signal handler the error
                is raised in whatever the main thread does. A run can be asked as it begins: ``event.run.stop()`` in a
                handler of ``before_run``.
        """
        self._calls.ask("stop", reason)

    def pause(self) -> None:
        """Pause the run at its next safe mount point; see :meth:`Run.pause`."""
        self._calls.ask("pause")

    def unpause(self) -> None:
        """Continue the run if it is paused; from any thread."""
        self._calls.ask("unpause")

    def set_lr(self, lr: float, optimizer: str | int | None = None) -> None:
        """Set the learning rate of the run; see :meth:`Run.set_lr`."""
        self._calls.ask("set_lr", lr, optimizer)

    def save(self) -> None:
        """Save a checkpoint at the next safe mount point of the run; from any thread."""
        self._calls.ask("checkpoints.save")

    def _look(self, run: Run) -> None:
        data = self._data["val"]
        if data is None or not self.sanity or run.state.stops:
            return
        name = "step" if self._val_step is self._step else "val_step"
        count = min(self.sanity, limited_to(data, self._limits.get("val_data")) or self.sanity)
        check_first_batches(run, data, name, partial(_called, name, self._val_step, self.model), self._metrics, count)

    def _validate(self, run: Run) -> dict[str, Any]:
        return self._evaluate(run, run.validate(self._need("val"), self._metrics), self._val_step)

    def _evaluate(self, run: Run, batches: EvaluationBatches, step: Step) -> dict[str, Any]:
        body = iter(batches)  # an exception's frame keeps it alive, so on_exception precedes the validation's end
        for batch in body:
            outputs = _called(f"{run.progress.stage}_step", step, self.model, batch)
            run.state.outputs.update(without_media(run, outputs) if isinstance(outputs, Mapping) else {"loss": outputs})
        return Named(batches.metrics)

    def _validation_due(self, done: int | None = None) -> bool:
        """Return True if a validation follows the epoch or iteration that was counted last, or number ``done``."""
        last = self.max_epochs if self.max_iters is None else self.max_iters
        if done is None:
            done = self.counters.epoch if self.max_iters is None else self.counters.iter
        due = done == last or (done >= self.val_begin and done % self.val_interval == 0)
        return due and self._data["val"] is not None

    def _new_run(self, **resume: Any) -> Run:
        options = self._options | ({} if self._folder is None else {"work_dir": self._folder})
        host = OwnLoop(**resume, data_mesh=self._data_mesh, update_steps=True, chooses_folder=self._folder is None)
        return Run(self.bus, model=self.model, optimizer=self._optimizer, counters=self.counters, host=host, **options)

    @contextmanager
    def _begun(self, call: LoopCall, *, trains: bool = False, **options: Any) -> Iterator[Run]:
        if self.bus.internal.hosted_here:
            raise BusStateError("loop.run() would block the event loop of this bus: use `await loop.arun()`")
        tell_if_it_blocks()
        run = self._new_run(**options)
        if not trains:
            run.state.only_evaluate()
        try:
            self.bus.internal.steps = {"step": self._step, "val_step": self._val_step, "test_step": self._test_step}
            call.begin(run)
            self._expect(run)
            with run:
                self._folder = run.work_dir
                if trains and not run.state.resumed:
                    run.feeds.restore(self._position)
                try:
                    yield run
                finally:
                    if trains:
                        self._position = self._left_at(run)
        finally:
            self.bus.internal.steps = {}

    def _left_at(self, run: Run) -> SavedData | None:
        """Return the place in the data of a training that has not come to the end of its epoch."""
        unfinished, feed = run.counters.batches or run.counters.cut, run.feeds.train
        return SavedData(feed.saved(repeats=ITERATION in run.state.machine), []) if unfinished and feed else None

    def _expect(self, run: Run) -> None:
        run.validates = self._data["val"] is not None
        run.feeds.limits = self._limits
        if run.state.trains:
            run.feeds.expected = self._need("train")  # hooks may ask for it and the limits before the first epoch
            run.counters.limit(self.max_epochs, self.max_iters)

    def _divide(self, global_batch: int) -> None:
        """Divide each global batch among the processes of this start, and into micro-batches."""
        place = data_rank(named("model", self.model, torch.nn.Module), self._data_mesh)
        data = self._data["train"] = divided(self._need("train"), global_batch, self._options["seed"] or 0, place)
        wanted = cast("GlobalBatchSampler", data.batch_sampler).accumulate
        update = next(hook for hook in self.bus.hooks if isinstance(hook, Update))
        if update.accumulate not in (1, wanted):
            raise ConfigurationError(
                f"accumulate={update.accumulate} beside global_batch={global_batch}, which takes {wanted} micro-batches per "
                "step: leave out accumulate="
            )
        update.accumulate = wanted

    def _need(self, stage: str) -> Iterable[Any]:
        data = self._data[stage]
        if data is None:
            raise ConfigurationError(f"TrainLoop has no {stage}_data: give it {stage}_data=")
        return data


def _called(name: str, step: Step, model: Any, batch: Any) -> Any:
    """Call a step; turn StopIteration, which would end the loop around it, into an error."""
    try:
        return step(model, batch)
    except StopIteration as error:
        raise stopped(error, f"{name}()") from error


def _checked_outputs(outputs: Any) -> dict[str, Any]:
    """Return the outputs of a training step as a dict with a scalar ``"loss"``."""
    if not isinstance(outputs, Mapping):
        outputs = {"loss": outputs}
    if "loss" not in outputs:
        raise TrainingError(
            f"step() returned no 'loss', only {', '.join(map(repr, outputs)) or 'an empty dict'}; the update needs a loss"
        )
    loss = outputs["loss"]
    if not isinstance(loss, torch.Tensor):
        raise TrainingError(f"step() returned a loss of type {type(loss).__name__}; return a scalar tensor")
    if loss.numel() != 1:
        raise TrainingError(
            f"step() returned a loss of shape {tuple(loss.shape)}; return a scalar: reduce it, for example with .mean()"
        )
    return {**outputs, "loss": loss if loss.dim() == 0 else loss.reshape(())}
