"""The one name that is meant by a misspelt name, or by what another library calls the same thing."""

import pytest

import trainbus
from trainbus.eventloop import Bus, ConfigurationError, SubscribeError, TrainLoop
from trainbus.eventloop.events import AfterValIter
from trainbus.eventloop.spelling import did_you_mean, nearest
from trainbus.hooks import CheckpointHook, EarlyStoppingHook, EvaluateHook, LoggerHook


@pytest.mark.parametrize(
    ("make", "meant"),
    [
        (lambda: LoggerHook(every=5), "interval="),
        (lambda: EvaluateHook(every=5, function=print), "interval="),
        (lambda: EarlyStoppingHook("speed", mode="min"), 'rule="less"'),
        (lambda: EarlyStoppingHook("speed", rule="min"), 'rule="less"'),
        (lambda: CheckpointHook(rule="max"), 'rule="greater"'),
        (lambda: CheckpointHook(monitor="acc"), "save_best="),
        (lambda: TrainLoop(epochs=3), "max_epochs="),
        (lambda: Bus().on("after_train_iter", print, interval=5), "every="),
        (lambda: Bus().stream("after_train_iter", interval=5), "every="),
        (lambda: Bus().keep("after_train_iter", interval=5), "every="),
    ],
)
def test_an_option_of_another_library_is_answered_with_the_one_name(make, meant):
    with pytest.raises((ConfigurationError, SubscribeError)) as caught:
        make()
    assert str(caught.value).endswith(f"did you mean {meant}?")


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_mount_points_is_answered_with_several_arguments(kind):
    with pytest.raises(TypeError, match=r"bus\.on\('after_train_iter', AfterValIter, \.\.\.\)"):
        Bus().on(kind(["after_train_iter", AfterValIter]), print)


def test_a_class_of_another_library_is_answered_with_ours():
    with pytest.raises(AttributeError, match="'TrainLoop'"):
        _ = trainbus.Trainer


def test_a_misspelt_or_prefixed_name_is_answered_with_the_nearest_in_its_own_spelling():
    assert nearest("momentun", ["Momentum", "monitor"], most=1) == ["Momentum"]
    assert nearest("validation/loss", ["accuracy", "loss"]) == ["loss"]
    assert did_you_mean("nothing like it", ["a", "b"]) == ""
