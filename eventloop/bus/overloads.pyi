# Written from the events by .ci/write_overloads.py. What the functions do is in overloads.py.
# mypy: disable-error-code="overload-overlap"
# An event class is callable, and so a handler as mypy sees it; but it takes its fields by name only, and no event.

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar, Unpack, overload

from trainbus.eventloop import events as ev
from trainbus.eventloop.bus.handler import HandlerOptions, StreamOptions
from trainbus.eventloop.bus.stream import Stream
from trainbus.eventloop.bus.subscription import Subscription
from trainbus.observe import Costs

_E = TypeVar("_E", bound=ev.Event)
_T = TypeVar("_T")
_R = TypeVar("_R")
_Heard = TypeVar("_Heard")

# The decorator that `bus.on(...)` returns; it returns the function unchanged.
class Listens(Protocol[_Heard]):
    def __call__(self, handler: Callable[[_Heard], _R], /) -> Callable[[_Heard], _R]: ...

def decorates(event: Any) -> None: ...

class TypedOn:
    _recorder: Any

    def costs(self) -> Costs: ...

    # What capture= returns, or a list of that or of events, is what the handler takes.
    @overload
    def on(
        self, event: type[_E], /, *, capture: Callable[[_E], _T], batch: int, **options: Unpack[HandlerOptions]
    ) -> Listens[list[_T]]: ...
    @overload
    def on(
        self,
        event: type[_E],
        handler: Callable[[list[_T]], object],
        /,
        *,
        capture: Callable[[_E], _T],
        batch: int,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(
        self, event: str, /, *, capture: Callable[[Any], _T], batch: int, **options: Unpack[HandlerOptions]
    ) -> Listens[list[_T]]: ...
    @overload
    def on(
        self,
        event: str,
        handler: Callable[[list[_T]], object],
        /,
        *,
        capture: Callable[[Any], _T],
        batch: int,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: type[_E], /, *, capture: Callable[[_E], _T], **options: Unpack[HandlerOptions]) -> Listens[_T]: ...
    @overload
    def on(
        self,
        event: type[_E],
        handler: Callable[[_T], object],
        /,
        *,
        capture: Callable[[_E], _T],
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: str, /, *, capture: Callable[[Any], _T], **options: Unpack[HandlerOptions]) -> Listens[_T]: ...
    @overload
    def on(
        self, event: str, handler: Callable[[_T], object], /, *, capture: Callable[[Any], _T], **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(self, event: type[_E], /, *, batch: int, **options: Unpack[HandlerOptions]) -> Listens[list[_E]]: ...
    @overload
    def on(
        self, event: type[_E], handler: Callable[[list[_E]], object], /, *, batch: int, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(self, event: str, /, *, batch: int, **options: Unpack[HandlerOptions]) -> Listens[list[Any]]: ...
    @overload
    def on(
        self, event: str, handler: Callable[[list[Any]], object], /, *, batch: int, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(self, event: type[_E], /, **options: Unpack[HandlerOptions]) -> Listens[_E]: ...
    @overload
    def on(self, event: type[_E], handler: Callable[[_E], object], /, **options: Unpack[HandlerOptions]) -> Subscription: ...
    @overload
    def on(self, event: Literal["run_event"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.RunEvent]: ...
    @overload
    def on(
        self, event: Literal["run_event"], handler: Callable[[ev.RunEvent], object], /, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_epoch"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.BeforeEpoch]: ...
    @overload
    def on(
        self, event: Literal["before_epoch"], handler: Callable[[ev.BeforeEpoch], object], /, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_epoch"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.AfterEpoch]: ...
    @overload
    def on(
        self, event: Literal["after_epoch"], handler: Callable[[ev.AfterEpoch], object], /, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_iter"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.BeforeIter]: ...
    @overload
    def on(
        self, event: Literal["before_iter"], handler: Callable[[ev.BeforeIter], object], /, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_iter"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.AfterIter]: ...
    @overload
    def on(
        self, event: Literal["after_iter"], handler: Callable[[ev.AfterIter], object], /, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_run"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.BeforeRun]: ...
    @overload
    def on(
        self, event: Literal["before_run"], handler: Callable[[ev.BeforeRun], object], /, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(
        self, event: Literal["after_load_checkpoint"], /, **options: Unpack[HandlerOptions]
    ) -> Listens[ev.AfterLoadCheckpoint]: ...
    @overload
    def on(
        self,
        event: Literal["after_load_checkpoint"],
        handler: Callable[[ev.AfterLoadCheckpoint], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_train"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.BeforeTrain]: ...
    @overload
    def on(
        self, event: Literal["before_train"], handler: Callable[[ev.BeforeTrain], object], /, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(
        self, event: Literal["before_train_epoch"], /, **options: Unpack[HandlerOptions]
    ) -> Listens[ev.BeforeTrainEpoch]: ...
    @overload
    def on(
        self,
        event: Literal["before_train_epoch"],
        handler: Callable[[ev.BeforeTrainEpoch], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_train_iter"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.BeforeTrainIter]: ...
    @overload
    def on(
        self,
        event: Literal["before_train_iter"],
        handler: Callable[[ev.BeforeTrainIter], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_forward"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.BeforeForward]: ...
    @overload
    def on(
        self,
        event: Literal["before_forward"],
        handler: Callable[[ev.BeforeForward], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_forward"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.AfterForward]: ...
    @overload
    def on(
        self,
        event: Literal["after_forward"],
        handler: Callable[[ev.AfterForward], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_train_iter"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.AfterTrainIter]: ...
    @overload
    def on(
        self,
        event: Literal["after_train_iter"],
        handler: Callable[[ev.AfterTrainIter], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_backward"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.BeforeBackward]: ...
    @overload
    def on(
        self,
        event: Literal["before_backward"],
        handler: Callable[[ev.BeforeBackward], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_backward"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.AfterBackward]: ...
    @overload
    def on(
        self,
        event: Literal["after_backward"],
        handler: Callable[[ev.AfterBackward], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(
        self, event: Literal["before_optimizer_step"], /, **options: Unpack[HandlerOptions]
    ) -> Listens[ev.BeforeOptimizerStep]: ...
    @overload
    def on(
        self,
        event: Literal["before_optimizer_step"],
        handler: Callable[[ev.BeforeOptimizerStep], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(
        self, event: Literal["after_optimizer_step"], /, **options: Unpack[HandlerOptions]
    ) -> Listens[ev.AfterOptimizerStep]: ...
    @overload
    def on(
        self,
        event: Literal["after_optimizer_step"],
        handler: Callable[[ev.AfterOptimizerStep], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_train_epoch"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.AfterTrainEpoch]: ...
    @overload
    def on(
        self,
        event: Literal["after_train_epoch"],
        handler: Callable[[ev.AfterTrainEpoch], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_val"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.BeforeVal]: ...
    @overload
    def on(
        self, event: Literal["before_val"], handler: Callable[[ev.BeforeVal], object], /, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_val_epoch"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.BeforeValEpoch]: ...
    @overload
    def on(
        self,
        event: Literal["before_val_epoch"],
        handler: Callable[[ev.BeforeValEpoch], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_val_iter"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.BeforeValIter]: ...
    @overload
    def on(
        self,
        event: Literal["before_val_iter"],
        handler: Callable[[ev.BeforeValIter], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_val_iter"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.AfterValIter]: ...
    @overload
    def on(
        self,
        event: Literal["after_val_iter"],
        handler: Callable[[ev.AfterValIter], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_val_epoch"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.AfterValEpoch]: ...
    @overload
    def on(
        self,
        event: Literal["after_val_epoch"],
        handler: Callable[[ev.AfterValEpoch], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_val"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.AfterVal]: ...
    @overload
    def on(
        self, event: Literal["after_val"], handler: Callable[[ev.AfterVal], object], /, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["image_reported"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.ImageReported]: ...
    @overload
    def on(
        self,
        event: Literal["image_reported"],
        handler: Callable[[ev.ImageReported], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(
        self, event: Literal["histogram_reported"], /, **options: Unpack[HandlerOptions]
    ) -> Listens[ev.HistogramReported]: ...
    @overload
    def on(
        self,
        event: Literal["histogram_reported"],
        handler: Callable[[ev.HistogramReported], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["text_reported"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.TextReported]: ...
    @overload
    def on(
        self,
        event: Literal["text_reported"],
        handler: Callable[[ev.TextReported], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(
        self, event: Literal["before_save_checkpoint"], /, **options: Unpack[HandlerOptions]
    ) -> Listens[ev.BeforeSaveCheckpoint]: ...
    @overload
    def on(
        self,
        event: Literal["before_save_checkpoint"],
        handler: Callable[[ev.BeforeSaveCheckpoint], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["checkpoint_staged"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.CheckpointStaged]: ...
    @overload
    def on(
        self,
        event: Literal["checkpoint_staged"],
        handler: Callable[[ev.CheckpointStaged], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["costs_measured"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.CostsMeasured]: ...
    @overload
    def on(
        self,
        event: Literal["costs_measured"],
        handler: Callable[[ev.CostsMeasured], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["run_paused"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.RunPaused]: ...
    @overload
    def on(
        self, event: Literal["run_paused"], handler: Callable[[ev.RunPaused], object], /, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["run_resumed"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.RunResumed]: ...
    @overload
    def on(
        self, event: Literal["run_resumed"], handler: Callable[[ev.RunResumed], object], /, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["learning_rate_set"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.LearningRateSet]: ...
    @overload
    def on(
        self,
        event: Literal["learning_rate_set"],
        handler: Callable[[ev.LearningRateSet], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["ranks_measured"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.RanksMeasured]: ...
    @overload
    def on(
        self,
        event: Literal["ranks_measured"],
        handler: Callable[[ev.RanksMeasured], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(
        self, event: Literal["checkpoint_committed"], /, **options: Unpack[HandlerOptions]
    ) -> Listens[ev.CheckpointCommitted]: ...
    @overload
    def on(
        self,
        event: Literal["checkpoint_committed"],
        handler: Callable[[ev.CheckpointCommitted], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(
        self, event: Literal["checkpoint_uploaded"], /, **options: Unpack[HandlerOptions]
    ) -> Listens[ev.CheckpointUploaded]: ...
    @overload
    def on(
        self,
        event: Literal["checkpoint_uploaded"],
        handler: Callable[[ev.CheckpointUploaded], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["checkpoint_failed"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.CheckpointFailed]: ...
    @overload
    def on(
        self,
        event: Literal["checkpoint_failed"],
        handler: Callable[[ev.CheckpointFailed], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(
        self, event: Literal["checkpoint_skipped"], /, **options: Unpack[HandlerOptions]
    ) -> Listens[ev.CheckpointSkipped]: ...
    @overload
    def on(
        self,
        event: Literal["checkpoint_skipped"],
        handler: Callable[[ev.CheckpointSkipped], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_train"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.AfterTrain]: ...
    @overload
    def on(
        self, event: Literal["after_train"], handler: Callable[[ev.AfterTrain], object], /, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_test"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.BeforeTest]: ...
    @overload
    def on(
        self, event: Literal["before_test"], handler: Callable[[ev.BeforeTest], object], /, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_test_epoch"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.BeforeTestEpoch]: ...
    @overload
    def on(
        self,
        event: Literal["before_test_epoch"],
        handler: Callable[[ev.BeforeTestEpoch], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_test_iter"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.BeforeTestIter]: ...
    @overload
    def on(
        self,
        event: Literal["before_test_iter"],
        handler: Callable[[ev.BeforeTestIter], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_test_iter"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.AfterTestIter]: ...
    @overload
    def on(
        self,
        event: Literal["after_test_iter"],
        handler: Callable[[ev.AfterTestIter], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_test_epoch"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.AfterTestEpoch]: ...
    @overload
    def on(
        self,
        event: Literal["after_test_epoch"],
        handler: Callable[[ev.AfterTestEpoch], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_test"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.AfterTest]: ...
    @overload
    def on(
        self, event: Literal["after_test"], handler: Callable[[ev.AfterTest], object], /, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["on_exception"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.OnException]: ...
    @overload
    def on(
        self, event: Literal["on_exception"], handler: Callable[[ev.OnException], object], /, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_run"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.AfterRun]: ...
    @overload
    def on(
        self, event: Literal["after_run"], handler: Callable[[ev.AfterRun], object], /, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["module_event"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.ModuleEvent]: ...
    @overload
    def on(
        self, event: Literal["module_event"], handler: Callable[[ev.ModuleEvent], object], /, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(
        self, event: Literal["before_module_forward"], /, **options: Unpack[HandlerOptions]
    ) -> Listens[ev.BeforeModuleForward]: ...
    @overload
    def on(
        self,
        event: Literal["before_module_forward"],
        handler: Callable[[ev.BeforeModuleForward], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(
        self, event: Literal["after_module_forward"], /, **options: Unpack[HandlerOptions]
    ) -> Listens[ev.AfterModuleForward]: ...
    @overload
    def on(
        self,
        event: Literal["after_module_forward"],
        handler: Callable[[ev.AfterModuleForward], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(
        self, event: Literal["before_module_backward"], /, **options: Unpack[HandlerOptions]
    ) -> Listens[ev.BeforeModuleBackward]: ...
    @overload
    def on(
        self,
        event: Literal["before_module_backward"],
        handler: Callable[[ev.BeforeModuleBackward], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(
        self, event: Literal["after_module_backward"], /, **options: Unpack[HandlerOptions]
    ) -> Listens[ev.AfterModuleBackward]: ...
    @overload
    def on(
        self,
        event: Literal["after_module_backward"],
        handler: Callable[[ev.AfterModuleBackward], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["event"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.Event]: ...
    @overload
    def on(
        self, event: Literal["event"], handler: Callable[[ev.Event], object], /, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...

    # A mount point of the user's own, by name: the checker cannot know its class, so the decorator takes any handler.
    # As a call it takes one of plain Event (or Any): were any allowed, a wrong handler for a name above would fit here.
    @overload
    def on(self, event: str, /, **options: Unpack[HandlerOptions]) -> Listens[Any]: ...
    @overload
    def on(self, event: str, handler: Callable[[ev.Event], object], /, **options: Unpack[HandlerOptions]) -> Subscription: ...
    # Of several classes, the event is of their nearest common base: match tells them apart.
    @overload
    def on(self, event: type[_E], second: type[_E], /, *more: type[_E], **options: Unpack[HandlerOptions]) -> Listens[_E]: ...
    @overload
    def on(
        self, event: type[_E], second: type[_E], handler: Callable[[_E], object], /, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(
        self,
        event: type[_E],
        second: type[_E],
        third: type[_E],
        handler: Callable[[_E], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    # Names, capture= or batch= of several: the decorator takes any handler, and a call has two or three mount points.
    @overload
    def on(
        self,
        event: type[ev.Event] | str,
        second: type[ev.Event] | str,
        /,
        *more: type[ev.Event] | str,
        capture: Callable[[Any], Any] = ...,
        batch: int = ...,
        **options: Unpack[HandlerOptions],
    ) -> Listens[Any]: ...
    @overload
    def on(
        self,
        event: type[ev.Event] | str,
        second: type[ev.Event] | str,
        handler: Callable[[Any], object],
        /,
        *,
        capture: Callable[[Any], Any] = ...,
        batch: int = ...,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(
        self,
        event: type[ev.Event] | str,
        second: type[ev.Event] | str,
        third: type[ev.Event] | str,
        handler: Callable[[Any], object],
        /,
        *,
        capture: Callable[[Any], Any] = ...,
        batch: int = ...,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def stream(
        self, event: type[_E], /, *more: type[_E], capture: Callable[[_E], _T], **options: Unpack[StreamOptions]
    ) -> Stream[_T]: ...
    @overload
    def stream(
        self,
        event: type[ev.Event] | str,
        /,
        *more: type[ev.Event] | str,
        capture: Callable[[Any], _T],
        **options: Unpack[StreamOptions],
    ) -> Stream[_T]: ...
    @overload
    def stream(self, event: type[_E], /, *more: type[_E], **options: Unpack[StreamOptions]) -> Stream[_E]: ...
    @overload
    def stream(self, event: Literal["run_event"], /, **options: Unpack[StreamOptions]) -> Stream[ev.RunEvent]: ...
    @overload
    def stream(self, event: Literal["before_epoch"], /, **options: Unpack[StreamOptions]) -> Stream[ev.BeforeEpoch]: ...
    @overload
    def stream(self, event: Literal["after_epoch"], /, **options: Unpack[StreamOptions]) -> Stream[ev.AfterEpoch]: ...
    @overload
    def stream(self, event: Literal["before_iter"], /, **options: Unpack[StreamOptions]) -> Stream[ev.BeforeIter]: ...
    @overload
    def stream(self, event: Literal["after_iter"], /, **options: Unpack[StreamOptions]) -> Stream[ev.AfterIter]: ...
    @overload
    def stream(self, event: Literal["before_run"], /, **options: Unpack[StreamOptions]) -> Stream[ev.BeforeRun]: ...
    @overload
    def stream(
        self, event: Literal["after_load_checkpoint"], /, **options: Unpack[StreamOptions]
    ) -> Stream[ev.AfterLoadCheckpoint]: ...
    @overload
    def stream(self, event: Literal["before_train"], /, **options: Unpack[StreamOptions]) -> Stream[ev.BeforeTrain]: ...
    @overload
    def stream(
        self, event: Literal["before_train_epoch"], /, **options: Unpack[StreamOptions]
    ) -> Stream[ev.BeforeTrainEpoch]: ...
    @overload
    def stream(
        self, event: Literal["before_train_iter"], /, **options: Unpack[StreamOptions]
    ) -> Stream[ev.BeforeTrainIter]: ...
    @overload
    def stream(self, event: Literal["before_forward"], /, **options: Unpack[StreamOptions]) -> Stream[ev.BeforeForward]: ...
    @overload
    def stream(self, event: Literal["after_forward"], /, **options: Unpack[StreamOptions]) -> Stream[ev.AfterForward]: ...
    @overload
    def stream(self, event: Literal["after_train_iter"], /, **options: Unpack[StreamOptions]) -> Stream[ev.AfterTrainIter]: ...
    @overload
    def stream(self, event: Literal["before_backward"], /, **options: Unpack[StreamOptions]) -> Stream[ev.BeforeBackward]: ...
    @overload
    def stream(self, event: Literal["after_backward"], /, **options: Unpack[StreamOptions]) -> Stream[ev.AfterBackward]: ...
    @overload
    def stream(
        self, event: Literal["before_optimizer_step"], /, **options: Unpack[StreamOptions]
    ) -> Stream[ev.BeforeOptimizerStep]: ...
    @overload
    def stream(
        self, event: Literal["after_optimizer_step"], /, **options: Unpack[StreamOptions]
    ) -> Stream[ev.AfterOptimizerStep]: ...
    @overload
    def stream(
        self, event: Literal["after_train_epoch"], /, **options: Unpack[StreamOptions]
    ) -> Stream[ev.AfterTrainEpoch]: ...
    @overload
    def stream(self, event: Literal["before_val"], /, **options: Unpack[StreamOptions]) -> Stream[ev.BeforeVal]: ...
    @overload
    def stream(self, event: Literal["before_val_epoch"], /, **options: Unpack[StreamOptions]) -> Stream[ev.BeforeValEpoch]: ...
    @overload
    def stream(self, event: Literal["before_val_iter"], /, **options: Unpack[StreamOptions]) -> Stream[ev.BeforeValIter]: ...
    @overload
    def stream(self, event: Literal["after_val_iter"], /, **options: Unpack[StreamOptions]) -> Stream[ev.AfterValIter]: ...
    @overload
    def stream(self, event: Literal["after_val_epoch"], /, **options: Unpack[StreamOptions]) -> Stream[ev.AfterValEpoch]: ...
    @overload
    def stream(self, event: Literal["after_val"], /, **options: Unpack[StreamOptions]) -> Stream[ev.AfterVal]: ...
    @overload
    def stream(self, event: Literal["image_reported"], /, **options: Unpack[StreamOptions]) -> Stream[ev.ImageReported]: ...
    @overload
    def stream(
        self, event: Literal["histogram_reported"], /, **options: Unpack[StreamOptions]
    ) -> Stream[ev.HistogramReported]: ...
    @overload
    def stream(self, event: Literal["text_reported"], /, **options: Unpack[StreamOptions]) -> Stream[ev.TextReported]: ...
    @overload
    def stream(
        self, event: Literal["before_save_checkpoint"], /, **options: Unpack[StreamOptions]
    ) -> Stream[ev.BeforeSaveCheckpoint]: ...
    @overload
    def stream(
        self, event: Literal["checkpoint_staged"], /, **options: Unpack[StreamOptions]
    ) -> Stream[ev.CheckpointStaged]: ...
    @overload
    def stream(self, event: Literal["costs_measured"], /, **options: Unpack[StreamOptions]) -> Stream[ev.CostsMeasured]: ...
    @overload
    def stream(self, event: Literal["run_paused"], /, **options: Unpack[StreamOptions]) -> Stream[ev.RunPaused]: ...
    @overload
    def stream(self, event: Literal["run_resumed"], /, **options: Unpack[StreamOptions]) -> Stream[ev.RunResumed]: ...
    @overload
    def stream(
        self, event: Literal["learning_rate_set"], /, **options: Unpack[StreamOptions]
    ) -> Stream[ev.LearningRateSet]: ...
    @overload
    def stream(self, event: Literal["ranks_measured"], /, **options: Unpack[StreamOptions]) -> Stream[ev.RanksMeasured]: ...
    @overload
    def stream(
        self, event: Literal["checkpoint_committed"], /, **options: Unpack[StreamOptions]
    ) -> Stream[ev.CheckpointCommitted]: ...
    @overload
    def stream(
        self, event: Literal["checkpoint_uploaded"], /, **options: Unpack[StreamOptions]
    ) -> Stream[ev.CheckpointUploaded]: ...
    @overload
    def stream(
        self, event: Literal["checkpoint_failed"], /, **options: Unpack[StreamOptions]
    ) -> Stream[ev.CheckpointFailed]: ...
    @overload
    def stream(
        self, event: Literal["checkpoint_skipped"], /, **options: Unpack[StreamOptions]
    ) -> Stream[ev.CheckpointSkipped]: ...
    @overload
    def stream(self, event: Literal["after_train"], /, **options: Unpack[StreamOptions]) -> Stream[ev.AfterTrain]: ...
    @overload
    def stream(self, event: Literal["before_test"], /, **options: Unpack[StreamOptions]) -> Stream[ev.BeforeTest]: ...
    @overload
    def stream(
        self, event: Literal["before_test_epoch"], /, **options: Unpack[StreamOptions]
    ) -> Stream[ev.BeforeTestEpoch]: ...
    @overload
    def stream(self, event: Literal["before_test_iter"], /, **options: Unpack[StreamOptions]) -> Stream[ev.BeforeTestIter]: ...
    @overload
    def stream(self, event: Literal["after_test_iter"], /, **options: Unpack[StreamOptions]) -> Stream[ev.AfterTestIter]: ...
    @overload
    def stream(self, event: Literal["after_test_epoch"], /, **options: Unpack[StreamOptions]) -> Stream[ev.AfterTestEpoch]: ...
    @overload
    def stream(self, event: Literal["after_test"], /, **options: Unpack[StreamOptions]) -> Stream[ev.AfterTest]: ...
    @overload
    def stream(self, event: Literal["on_exception"], /, **options: Unpack[StreamOptions]) -> Stream[ev.OnException]: ...
    @overload
    def stream(self, event: Literal["after_run"], /, **options: Unpack[StreamOptions]) -> Stream[ev.AfterRun]: ...
    @overload
    def stream(self, event: Literal["module_event"], /, **options: Unpack[StreamOptions]) -> Stream[ev.ModuleEvent]: ...
    @overload
    def stream(
        self, event: Literal["before_module_forward"], /, **options: Unpack[StreamOptions]
    ) -> Stream[ev.BeforeModuleForward]: ...
    @overload
    def stream(
        self, event: Literal["after_module_forward"], /, **options: Unpack[StreamOptions]
    ) -> Stream[ev.AfterModuleForward]: ...
    @overload
    def stream(
        self, event: Literal["before_module_backward"], /, **options: Unpack[StreamOptions]
    ) -> Stream[ev.BeforeModuleBackward]: ...
    @overload
    def stream(
        self, event: Literal["after_module_backward"], /, **options: Unpack[StreamOptions]
    ) -> Stream[ev.AfterModuleBackward]: ...
    @overload
    def stream(self, event: Literal["event"], /, **options: Unpack[StreamOptions]) -> Stream[ev.Event]: ...
    @overload
    def stream(
        self, event: type[ev.Event] | str, /, *more: type[ev.Event] | str, **options: Unpack[StreamOptions]
    ) -> Stream[Any]: ...
