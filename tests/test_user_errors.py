"""Exceptions of every class reach the user as they were raised: those that refuse notes, attributes or ``str()``, too."""

import contextlib
import traceback
from dataclasses import dataclass

import pytest
import torch

from trainbus.config import add_hooks
from trainbus.eventloop import Bus, Hook, Run, TrainLoop
from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.user_errors import add_note, contextmanager, notes_of

from .failing import fails


@dataclass(frozen=True)
class FrozenError(Exception):
    code: int = 3


class RefusesNotesError(Exception):
    def add_note(self, note):
        raise RuntimeError("no notes")


class RefusesAttributesError(Exception):
    def __setattr__(self, name, value):
        raise RuntimeError("no attributes")


class OtherNotesError(Exception):
    __notes__ = None


class UnreadableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


class NotesRaiseError(Exception):
    @property
    def __notes__(self):
        raise RuntimeError("no notes")


ODD = [FrozenError, RefusesNotesError, RefusesAttributesError, OtherNotesError, UnreadableError, NotesRaiseError]
DATA = [torch.ones(2, 2)]


def train(error, where, bus):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fail = fails(error)
    options = {"step": lambda model, batch: model(batch).mean(), "val_step": lambda model, batch: {"a": 1.0}, "sanity": 0}
    if where == "own loop":
        with Run(bus, model=model, optimizer=optimizer) as run:
            for _ in run.epochs(1):
                for _ in run.train(DATA):
                    fail()
    elif where == "before the training":
        options["sanity"] = 1
        options["val_step"] = fail
    elif where in options:
        options[where] = fail
    elif where == "data":
        options["train_data"] = type("Data", (), {"__iter__": fail, "__len__": lambda self: 1})()
    else:
        bus.on("after_train_iter", fail, **({} if where == "hook" else {"offload": "thread"}))
    options = {"train_data": DATA, "val_data": DATA, "max_epochs": 1} | options
    TrainLoop(model, optimizer, bus=bus, **options).run()


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("where", ["step", "val_step", "before the training", "data", "hook", "thread", "own loop"])
def test_an_exception_of_any_class_is_what_the_user_sees(kind, where):
    error, bus = kind(), Bus()
    with pytest.raises(BaseException) as caught:
        train(error, where, bus)
    assert caught.value is error
    assert bus.state == "idle"


@pytest.mark.parametrize("kind", [kind for kind in ODD if kind is not NotesRaiseError])
def test_a_class_that_refuses_notes_gets_them_all_the_same(kind):
    error = kind()
    with pytest.raises(kind):
        train(error, "hook", Bus())
    assert any("at after_train_iter" in note for note in notes_of(error))


@pytest.mark.parametrize("kind", ODD)
def test_an_error_of_a_failing_handler_of_on_exception_does_not_replace_the_first(kind):
    bus, first = Bus(), ValueError("first")
    bus.on("on_exception", fails(kind()))
    with pytest.raises(ValueError, match="first") as caught:
        train(first, "step", bus)
    assert any(kind.__name__ in note for note in notes_of(caught.value))


class TakesTwoError(ConfigurationError):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class Hooked(Hook):
    def __init__(self):
        raise TakesTwoError(1, 2)


def test_an_error_of_a_hook_that_cannot_be_made_again_is_raised_with_a_note():
    with pytest.raises(TakesTwoError) as caught:
        add_hooks(Bus(), [{"type": f"{__name__}:Hooked"}], imports=[__name__])
    assert notes_of(caught.value) == ("while making Hooked for hooks[0]",)


def test_notes_that_are_no_list_are_kept_and_what_is_no_text_is_left_out():
    error = ValueError()
    error.__notes__ = ("one", 2)
    add_note(error, "two")
    assert error.__notes__ == ["one", "two"]


# ------------------------------------------------------------------------- the context manager, as contextlib's control


@contextmanager
def ours(does=None):
    try:
        yield "value"
    except BaseException:
        if does is None:
            raise
        if isinstance(does, BaseException):
            raise does from None


theirs = contextlib.contextmanager(ours.__wrapped__)


@pytest.mark.parametrize("does", [None, "swallow", KeyError("another")])
@pytest.mark.parametrize("kind", [None, ValueError, StopIteration, KeyboardInterrupt, RuntimeError])
def test_a_context_manager_of_ours_does_what_contextlibs_does(kind, does):
    error = None if kind is None else kind()

    def ends(manager):
        try:
            with manager(does) as value:
                assert value == "value"
                if error is not None:
                    fails(error)()
        except BaseException as raised:  # noqa: BLE001 - compared
            return raised
        return None

    assert ends(ours) is ends(theirs)
    names = [] if error is None else [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert does is not None or "ours" not in names


def test_a_frozen_exception_passes_through_a_context_manager_of_ours_only():
    with pytest.raises(FrozenError), ours():
        raise FrozenError
    with pytest.raises(AttributeError), theirs():  # FrozenInstanceError; when this passes, contextlib's can be used
        raise FrozenError
