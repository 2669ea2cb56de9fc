import pytest

from trainbus.eventloop import ConfigurationError, Hook
from trainbus.eventloop.errors import RegistrationError, UnknownNameError
from trainbus.eventloop.registry import find, register, registered, registrable
from trainbus.hooks import EMAHook, ExponentialMovingAverage, Writer


def make(called, base=Hook, module=__name__, **options):
    cls = type(called, (base,), {"__module__": module, "after_train_iter": lambda self, event: None})
    return register(**options)(cls) if options else register(cls)


def test_a_hook_is_found_by_the_name_of_its_class_or_by_a_registered_name_and_its_aliases():
    assert make("FoundByName") is find("hook", "FoundByName")
    cls = make("Named", name="named_hook", aliases=("NamedHook", "named"))
    assert {find("hook", name) for name in ("named_hook", "NamedHook", "named")} == {cls}
    with pytest.raises(UnknownNameError):
        find("hook", "Named")
    assert [entry.name for entry in registered("hook") if entry.cls is cls] == ["named_hook"]


@pytest.mark.parametrize(("base", "kind"), [(Writer, "writer"), (ExponentialMovingAverage, "average"), (EMAHook, "hook")])
def test_the_base_class_determines_the_kind(base, kind):
    assert find(kind, make(f"Mine{kind}", base).__name__).__mro__[1] is base


def test_registering_a_class_of_the_same_module_and_name_again_replaces_it():
    """A notebook cell that is run twice, or a class in two functions."""
    first = make("Again", aliases=("OldAlias",))
    second = make("Again", aliases=("NewAlias",))
    assert find("hook", "Again") is find("hook", "NewAlias") is second is not first
    with pytest.raises(UnknownNameError):
        find("hook", "OldAlias")

    @register
    class Again(Hook):
        pass

    assert find("hook", "Again") is Again


@pytest.mark.parametrize("taken", ["TakenName", "TakenAlias"])
def test_a_class_of_another_module_cannot_replace_a_name_or_alias(taken):
    first = make("TakenName", aliases=("TakenAlias",))
    with pytest.raises(RegistrationError, match=rf"'{taken}'.*{__name__}\.TakenName.*elsewhere\.Thief"):
        make("Thief", module="elsewhere", name=taken)
    assert find("hook", taken) is first
    with pytest.raises(UnknownNameError):
        find("hook", "Thief")


@pytest.mark.parametrize("name", ["a:b", ""])
def test_names_with_a_colon_and_classes_without_a_declared_base_are_refused(name):
    with pytest.raises(RegistrationError, match="Colon"):
        make("Colon", name=name, aliases=("Colons",)) if name else make("Colon", aliases=("",))
    with pytest.raises(RegistrationError, match="<class 'int'>"):
        register(int)


@pytest.mark.parametrize(
    ("kind", "name", "nearest"),
    [
        ("hook", "EMAHok", "EMAHook"),
        ("average", "Momentum", "MomentumAnnealingEMA"),
        ("writer", "zzz", "JSONLinesWriter"),  # far from all: those that are registered
        ("kind_of_these_tests", "x", "from trainbus.hooks import"),
        ("hooks", "EMAHook", "'hook'"),
    ],
)
def test_an_unknown_name_or_kind_lists_the_nearest_ones(kind, name, nearest):
    registrable("kind_of_these_tests")(type("Base", (), {}))
    with pytest.raises(UnknownNameError, match=rf"{name if kind != 'hooks' else kind}.*{nearest}") as caught:
        find(kind, name)
    assert isinstance(caught.value, ConfigurationError)


def test_a_user_defined_kind():
    @registrable("sampler_for_a_test")
    class Sampler:
        pass

    @register
    class Mine(Sampler):
        pass

    assert find("sampler_for_a_test", "Mine") is Mine


def test_every_public_hook_and_writer_is_registered():
    from trainbus import hooks

    public = {value for name in hooks.__all__ if isinstance(value := getattr(hooks, name), type)}
    known = {entry.cls for kind in ("hook", "writer", "average") for entry in registered(kind)}
    bases = {"Hook", "Writer", "WeightAverage"}
    wanted = {one for one in public if issubclass(one, Hook | Writer | hooks.WeightAverage)}
    assert {one.__name__ for one in wanted - known} - bases == set()
