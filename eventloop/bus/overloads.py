"""``Bus.on`` and ``Bus.stream``, by mount-point name. Written from the events by .ci/write_overloads.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar, Unpack, overload

from eventloop import events as ev
from eventloop.bus.options import Options, StreamOptions, decorates
from eventloop.bus.stream import Stream
from eventloop.bus.subscription import Subscription

E = TypeVar("E", bound=ev.Event)
T = TypeVar("T")
R = TypeVar("R")
Heard = TypeVar("Heard")


class Listens(Protocol[Heard]):
    """The decorator that ``bus.on(...)`` returns; it returns the function unchanged."""

    def __call__(self, handler: Callable[[Heard], R], /) -> Callable[[Heard], R]:
        """Subscribe ``handler``."""


class TypedOn:
    """Carries the signatures of ``Bus.on`` and ``Bus.stream``, so that wrong annotations fail the type checker."""

    def _on(self, event: type[ev.Event] | str, handler: Callable[..., Any], options: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _stream(self, event: type[ev.Event] | str, options: dict[str, Any]) -> Any:
        raise NotImplementedError

    # What capture= returns, or a list of that or of events, is what the handler takes.
    @overload
    def on(
        self, event: type[E], /, *, capture: Callable[[E], T], batch: int, **options: Unpack[Options]
    ) -> Listens[list[T]]: ...
    @overload
    def on(
        self,
        event: type[E],
        handler: Callable[[list[T]], object],
        /,
        *,
        capture: Callable[[E], T],
        batch: int,
        **options: Unpack[Options],
    ) -> Subscription: ...
    @overload
    def on(self, event: str, /, *, capture: Callable[[Any], T], batch: int, **options: Unpack[Options]) -> Listens[list[T]]: ...
    @overload
    def on(
        self,
        event: str,
        handler: Callable[[list[T]], object],
        /,
        *,
        capture: Callable[[Any], T],
        batch: int,
        **options: Unpack[Options],
    ) -> Subscription: ...
    @overload
    def on(self, event: type[E], /, *, capture: Callable[[E], T], **options: Unpack[Options]) -> Listens[T]: ...
    @overload
    def on(
        self, event: type[E], handler: Callable[[T], object], /, *, capture: Callable[[E], T], **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: str, /, *, capture: Callable[[Any], T], **options: Unpack[Options]) -> Listens[T]: ...
    @overload
    def on(
        self, event: str, handler: Callable[[T], object], /, *, capture: Callable[[Any], T], **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: type[E], /, *, batch: int, **options: Unpack[Options]) -> Listens[list[E]]: ...
    @overload
    def on(
        self, event: type[E], handler: Callable[[list[E]], object], /, *, batch: int, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: str, /, *, batch: int, **options: Unpack[Options]) -> Listens[list[Any]]: ...
    @overload
    def on(
        self, event: str, handler: Callable[[list[Any]], object], /, *, batch: int, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: type[E], /, **options: Unpack[Options]) -> Listens[E]: ...
    @overload
    def on(self, event: type[E], handler: Callable[[E], object], /, **options: Unpack[Options]) -> Subscription: ...
    @overload
    def on(self, event: Literal["run_event"], /, **options: Unpack[Options]) -> Listens[ev.RunEvent]: ...
    @overload
    def on(
        self, event: Literal["run_event"], handler: Callable[[ev.RunEvent], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_epoch"], /, **options: Unpack[Options]) -> Listens[ev.BeforeEpoch]: ...
    @overload
    def on(
        self, event: Literal["before_epoch"], handler: Callable[[ev.BeforeEpoch], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_epoch"], /, **options: Unpack[Options]) -> Listens[ev.AfterEpoch]: ...
    @overload
    def on(
        self, event: Literal["after_epoch"], handler: Callable[[ev.AfterEpoch], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_iter"], /, **options: Unpack[Options]) -> Listens[ev.BeforeIter]: ...
    @overload
    def on(
        self, event: Literal["before_iter"], handler: Callable[[ev.BeforeIter], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_iter"], /, **options: Unpack[Options]) -> Listens[ev.AfterIter]: ...
    @overload
    def on(
        self, event: Literal["after_iter"], handler: Callable[[ev.AfterIter], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_run"], /, **options: Unpack[Options]) -> Listens[ev.BeforeRun]: ...
    @overload
    def on(
        self, event: Literal["before_run"], handler: Callable[[ev.BeforeRun], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_load_checkpoint"], /, **options: Unpack[Options]) -> Listens[ev.AfterLoadCheckpoint]: ...
    @overload
    def on(
        self,
        event: Literal["after_load_checkpoint"],
        handler: Callable[[ev.AfterLoadCheckpoint], object],
        /,
        **options: Unpack[Options],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_train"], /, **options: Unpack[Options]) -> Listens[ev.BeforeTrain]: ...
    @overload
    def on(
        self, event: Literal["before_train"], handler: Callable[[ev.BeforeTrain], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_train_epoch"], /, **options: Unpack[Options]) -> Listens[ev.BeforeTrainEpoch]: ...
    @overload
    def on(
        self,
        event: Literal["before_train_epoch"],
        handler: Callable[[ev.BeforeTrainEpoch], object],
        /,
        **options: Unpack[Options],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_train_iter"], /, **options: Unpack[Options]) -> Listens[ev.BeforeTrainIter]: ...
    @overload
    def on(
        self,
        event: Literal["before_train_iter"],
        handler: Callable[[ev.BeforeTrainIter], object],
        /,
        **options: Unpack[Options],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_forward"], /, **options: Unpack[Options]) -> Listens[ev.BeforeForward]: ...
    @overload
    def on(
        self, event: Literal["before_forward"], handler: Callable[[ev.BeforeForward], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_forward"], /, **options: Unpack[Options]) -> Listens[ev.AfterForward]: ...
    @overload
    def on(
        self, event: Literal["after_forward"], handler: Callable[[ev.AfterForward], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_train_iter"], /, **options: Unpack[Options]) -> Listens[ev.AfterTrainIter]: ...
    @overload
    def on(
        self, event: Literal["after_train_iter"], handler: Callable[[ev.AfterTrainIter], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_backward"], /, **options: Unpack[Options]) -> Listens[ev.BeforeBackward]: ...
    @overload
    def on(
        self, event: Literal["before_backward"], handler: Callable[[ev.BeforeBackward], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_backward"], /, **options: Unpack[Options]) -> Listens[ev.AfterBackward]: ...
    @overload
    def on(
        self, event: Literal["after_backward"], handler: Callable[[ev.AfterBackward], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_optimizer_step"], /, **options: Unpack[Options]) -> Listens[ev.BeforeOptimizerStep]: ...
    @overload
    def on(
        self,
        event: Literal["before_optimizer_step"],
        handler: Callable[[ev.BeforeOptimizerStep], object],
        /,
        **options: Unpack[Options],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_optimizer_step"], /, **options: Unpack[Options]) -> Listens[ev.AfterOptimizerStep]: ...
    @overload
    def on(
        self,
        event: Literal["after_optimizer_step"],
        handler: Callable[[ev.AfterOptimizerStep], object],
        /,
        **options: Unpack[Options],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_train_epoch"], /, **options: Unpack[Options]) -> Listens[ev.AfterTrainEpoch]: ...
    @overload
    def on(
        self,
        event: Literal["after_train_epoch"],
        handler: Callable[[ev.AfterTrainEpoch], object],
        /,
        **options: Unpack[Options],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_val"], /, **options: Unpack[Options]) -> Listens[ev.BeforeVal]: ...
    @overload
    def on(
        self, event: Literal["before_val"], handler: Callable[[ev.BeforeVal], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_val_epoch"], /, **options: Unpack[Options]) -> Listens[ev.BeforeValEpoch]: ...
    @overload
    def on(
        self, event: Literal["before_val_epoch"], handler: Callable[[ev.BeforeValEpoch], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_val_iter"], /, **options: Unpack[Options]) -> Listens[ev.BeforeValIter]: ...
    @overload
    def on(
        self, event: Literal["before_val_iter"], handler: Callable[[ev.BeforeValIter], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_val_iter"], /, **options: Unpack[Options]) -> Listens[ev.AfterValIter]: ...
    @overload
    def on(
        self, event: Literal["after_val_iter"], handler: Callable[[ev.AfterValIter], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_val_epoch"], /, **options: Unpack[Options]) -> Listens[ev.AfterValEpoch]: ...
    @overload
    def on(
        self, event: Literal["after_val_epoch"], handler: Callable[[ev.AfterValEpoch], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_val"], /, **options: Unpack[Options]) -> Listens[ev.AfterVal]: ...
    @overload
    def on(
        self, event: Literal["after_val"], handler: Callable[[ev.AfterVal], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["image_reported"], /, **options: Unpack[Options]) -> Listens[ev.ImageReported]: ...
    @overload
    def on(
        self, event: Literal["image_reported"], handler: Callable[[ev.ImageReported], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(
        self, event: Literal["before_save_checkpoint"], /, **options: Unpack[Options]
    ) -> Listens[ev.BeforeSaveCheckpoint]: ...
    @overload
    def on(
        self,
        event: Literal["before_save_checkpoint"],
        handler: Callable[[ev.BeforeSaveCheckpoint], object],
        /,
        **options: Unpack[Options],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["checkpoint_staged"], /, **options: Unpack[Options]) -> Listens[ev.CheckpointStaged]: ...
    @overload
    def on(
        self,
        event: Literal["checkpoint_staged"],
        handler: Callable[[ev.CheckpointStaged], object],
        /,
        **options: Unpack[Options],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["checkpoint_committed"], /, **options: Unpack[Options]) -> Listens[ev.CheckpointCommitted]: ...
    @overload
    def on(
        self,
        event: Literal["checkpoint_committed"],
        handler: Callable[[ev.CheckpointCommitted], object],
        /,
        **options: Unpack[Options],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["checkpoint_failed"], /, **options: Unpack[Options]) -> Listens[ev.CheckpointFailed]: ...
    @overload
    def on(
        self,
        event: Literal["checkpoint_failed"],
        handler: Callable[[ev.CheckpointFailed], object],
        /,
        **options: Unpack[Options],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["checkpoint_skipped"], /, **options: Unpack[Options]) -> Listens[ev.CheckpointSkipped]: ...
    @overload
    def on(
        self,
        event: Literal["checkpoint_skipped"],
        handler: Callable[[ev.CheckpointSkipped], object],
        /,
        **options: Unpack[Options],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_train"], /, **options: Unpack[Options]) -> Listens[ev.AfterTrain]: ...
    @overload
    def on(
        self, event: Literal["after_train"], handler: Callable[[ev.AfterTrain], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_test"], /, **options: Unpack[Options]) -> Listens[ev.BeforeTest]: ...
    @overload
    def on(
        self, event: Literal["before_test"], handler: Callable[[ev.BeforeTest], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_test_epoch"], /, **options: Unpack[Options]) -> Listens[ev.BeforeTestEpoch]: ...
    @overload
    def on(
        self,
        event: Literal["before_test_epoch"],
        handler: Callable[[ev.BeforeTestEpoch], object],
        /,
        **options: Unpack[Options],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_test_iter"], /, **options: Unpack[Options]) -> Listens[ev.BeforeTestIter]: ...
    @overload
    def on(
        self, event: Literal["before_test_iter"], handler: Callable[[ev.BeforeTestIter], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_test_iter"], /, **options: Unpack[Options]) -> Listens[ev.AfterTestIter]: ...
    @overload
    def on(
        self, event: Literal["after_test_iter"], handler: Callable[[ev.AfterTestIter], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_test_epoch"], /, **options: Unpack[Options]) -> Listens[ev.AfterTestEpoch]: ...
    @overload
    def on(
        self, event: Literal["after_test_epoch"], handler: Callable[[ev.AfterTestEpoch], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_test"], /, **options: Unpack[Options]) -> Listens[ev.AfterTest]: ...
    @overload
    def on(
        self, event: Literal["after_test"], handler: Callable[[ev.AfterTest], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["on_exception"], /, **options: Unpack[Options]) -> Listens[ev.OnException]: ...
    @overload
    def on(
        self, event: Literal["on_exception"], handler: Callable[[ev.OnException], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_run"], /, **options: Unpack[Options]) -> Listens[ev.AfterRun]: ...
    @overload
    def on(
        self, event: Literal["after_run"], handler: Callable[[ev.AfterRun], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["module_event"], /, **options: Unpack[Options]) -> Listens[ev.ModuleEvent]: ...
    @overload
    def on(
        self, event: Literal["module_event"], handler: Callable[[ev.ModuleEvent], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["before_module_forward"], /, **options: Unpack[Options]) -> Listens[ev.BeforeModuleForward]: ...
    @overload
    def on(
        self,
        event: Literal["before_module_forward"],
        handler: Callable[[ev.BeforeModuleForward], object],
        /,
        **options: Unpack[Options],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_module_forward"], /, **options: Unpack[Options]) -> Listens[ev.AfterModuleForward]: ...
    @overload
    def on(
        self,
        event: Literal["after_module_forward"],
        handler: Callable[[ev.AfterModuleForward], object],
        /,
        **options: Unpack[Options],
    ) -> Subscription: ...
    @overload
    def on(
        self, event: Literal["before_module_backward"], /, **options: Unpack[Options]
    ) -> Listens[ev.BeforeModuleBackward]: ...
    @overload
    def on(
        self,
        event: Literal["before_module_backward"],
        handler: Callable[[ev.BeforeModuleBackward], object],
        /,
        **options: Unpack[Options],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["after_module_backward"], /, **options: Unpack[Options]) -> Listens[ev.AfterModuleBackward]: ...
    @overload
    def on(
        self,
        event: Literal["after_module_backward"],
        handler: Callable[[ev.AfterModuleBackward], object],
        /,
        **options: Unpack[Options],
    ) -> Subscription: ...
    @overload
    def on(self, event: Literal["event"], /, **options: Unpack[Options]) -> Listens[ev.Event]: ...
    @overload
    def on(
        self, event: Literal["event"], handler: Callable[[ev.Event], object], /, **options: Unpack[Options]
    ) -> Subscription: ...

    # A mount point of the user's own, by name: the checker cannot know its class, so the decorator takes any handler.
    # As a call it takes one of plain Event (or Any): were any allowed, a wrong handler for a name above would fit here.
    @overload
    def on(self, event: str, /, **options: Unpack[Options]) -> Listens[Any]: ...
    @overload
    def on(self, event: str, handler: Callable[[ev.Event], object], /, **options: Unpack[Options]) -> Subscription: ...
    def on(self, event: type[ev.Event] | str, handler: Callable[..., Any] = decorates, /, **options: Any) -> Any:
        """Subscribe a handler to an event class or mount-point name.

        As a decorator (``@bus.on("after_train_iter", priority=50)``) it returns the function unchanged; called with a
        function it returns a :class:`Subscription`. Plain functions run inline, on the publisher's thread; async ones on
        the bus's event loop; ``offload="thread"`` gives blocking work a thread of its own, ``offload="process"`` a process.

        Args:
            event: the class or the name; ``Event`` hears everything, a group (``"after_iter"``) all its events.
            handler: takes one argument: the event, what ``capture`` returned, or with ``batch`` a list of either.
            **options: ``priority`` and filters, ``offload``, ``queue``, ``full``, ``linger``, ``max_bytes``, ``timeout``,
                ``on_error`` and ``disable_after`` (:class:`eventloop.Options`), and for offloaded handlers ``capture``, which
                picks on the publisher's thread what the handler gets a copy of, and ``batch``, the most events per call.

        Raises:
            UnknownEventError: no event declares the name.
            SubscribeError: an option that cannot work.
        """
        return self._on(event, handler, options)

    @overload
    def stream(self, event: type[E], /, *, capture: Callable[[E], T], **options: Unpack[StreamOptions]) -> Stream[T]: ...
    @overload
    def stream(self, event: str, /, *, capture: Callable[[Any], T], **options: Unpack[StreamOptions]) -> Stream[T]: ...
    @overload
    def stream(self, event: type[E], /, **options: Unpack[StreamOptions]) -> Stream[E]: ...
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
        self, event: Literal["before_save_checkpoint"], /, **options: Unpack[StreamOptions]
    ) -> Stream[ev.BeforeSaveCheckpoint]: ...
    @overload
    def stream(
        self, event: Literal["checkpoint_staged"], /, **options: Unpack[StreamOptions]
    ) -> Stream[ev.CheckpointStaged]: ...
    @overload
    def stream(
        self, event: Literal["checkpoint_committed"], /, **options: Unpack[StreamOptions]
    ) -> Stream[ev.CheckpointCommitted]: ...
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
    def stream(self, event: str, /, **options: Unpack[StreamOptions]) -> Stream[Any]: ...
    def stream(self, event: type[ev.Event] | str, /, **options: Any) -> Any:
        """Subscribe by iterating: ``async for event in bus.stream("after_train_iter", every=10)``, in asyncio or trio.

        The events are those that an offloaded handler gets. Heard from this call on until the bus closes, which ends the
        iteration, or the stream is left (:class:`eventloop.Stream`). The bus need not be open yet; one that has closed,
        and is not open again, has nothing more to say: the iteration ends at once. An application that reads
        slowly does not hold up the training: unlike a handler's lane, a full one drops its oldest events by default.

        Args:
            event: as for :meth:`on`.
            **options: filters, ``priority``, ``queue``, ``full``, ``linger``, ``max_bytes``
                (:class:`eventloop.StreamOptions`), and ``capture``.

        Raises:
            BusStateError: no event loop is running here.
            UnknownEventError: no event declares the name.
            SubscribeError: an option that cannot work.
        """
        return self._stream(event, options)
