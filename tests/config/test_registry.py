import pytest

from eventloop import ConfigurationError, Hook, register
from eventloop.config import find, registered, registrable
from eventloop.errors import RegistrationError, UnknownNameError
from hooks import EMAHook, ExponentialMovingAverage, Writer


def make(called, base=Hook, module=__name__, **options):
    cls = type(called, (base,), {"__module__": module, "after_train_iter": lambda self, event: None})
    return register(**options)(cls) if options else register(cls)


def test_a_registered_hook_is_found_by_the_name_of_its_class():
    cls = make("FoundByName")
    assert find("hook", "FoundByName") is cls
    assert next(entry for entry in registered("hook") if entry.cls is cls).name == "FoundByName"


def test_a_registered_name_and_its_aliases():
    cls = make("Named", name="named_hook", aliases=("NamedHook", "named"))
    assert {find("hook", name) for name in ("named_hook", "NamedHook", "named")} == {cls}
    with pytest.raises(UnknownNameError):
        find("hook", "Named")
    assert sum(entry.cls is cls for entry in registered("hook")) == 1


@pytest.mark.parametrize(("base", "kind"), [(Writer, "writer"), (ExponentialMovingAverage, "average"), (EMAHook, "hook")])
def test_the_base_class_determines_the_kind(base, kind):
    assert find(kind, make(f"Mine{kind}", base).__name__).__mro__[1] is base


def test_registering_a_class_of_the_same_module_and_name_again_replaces_it():
    """A notebook cell that is run twice."""
    first = make("Again", aliases=("OldAlias",))
    second = make("Again", aliases=("NewAlias",))
    assert find("hook", "Again") is find("hook", "NewAlias") is second is not first
    with pytest.raises(UnknownNameError):
        find("hook", "OldAlias")


@pytest.mark.parametrize("taken", ["TakenName", "TakenAlias"])
def test_a_class_of_another_module_cannot_replace_a_name_or_alias(taken):
    first = make("TakenName", aliases=("TakenAlias",))
    message = rf"the hook '{taken}' is already registered by {__name__}.TakenName; give elsewhere.Thief another name"
    with pytest.raises(RegistrationError, match=message):
        make("Thief", module="elsewhere", name=taken)
    assert find("hook", taken) is first
    with pytest.raises(UnknownNameError):
        find("hook", "Thief")


def test_only_classes_with_a_declared_base_can_be_registered():
    with pytest.raises(RegistrationError, match=r"classes derived from Hook or .*Writer.*, not <class 'int'>"):
        register(int)


@pytest.mark.parametrize("name", ["a:b", ""])
def test_names_with_a_colon_are_refused(name):
    with pytest.raises(RegistrationError, match="without a colon"):
        make("Colon", name=name, aliases=("Colons",)) if name else make("Colon", aliases=("",))


def test_an_unknown_name_lists_the_nearest_ones():
    with pytest.raises(UnknownNameError, match=r"'EMAHok' is not a registered hook \(did you mean 'EMAHook'"):
        find("hook", "EMAHok")
    with pytest.raises(
        UnknownNameError, match=r"'Momentum' is not a registered average \(did you mean 'MomentumAnnealingEMA'\?\)"
    ):
        find("average", "Momentum")


def test_a_name_far_from_all_others_lists_what_is_registered():
    with pytest.raises(UnknownNameError, match=r"'zzz' is not a registered writer; registered: .*JSONLinesWriter"):
        find("writer", "zzz")


def test_the_error_without_registered_names_says_what_to_import():
    @registrable("kind_of_these_tests")
    class Base:
        pass

    with pytest.raises(UnknownNameError, match=r"registered: none \(`import hooks` registers the built-in ones\)"):
        find("kind_of_these_tests", "x")
    assert Base not in [entry.cls for entry in registered("hook")]


def test_an_unknown_kind_is_an_error():
    with pytest.raises(UnknownNameError, match=r"'hooks' is not a kind \(did you mean 'hook'\?\)"):
        registered("hooks")


def test_a_user_defined_kind():
    @registrable("sampler_for_a_test")
    class Sampler:
        pass

    @register
    class Mine(Sampler):
        pass

    assert find("sampler_for_a_test", "Mine") is Mine


def test_errors_of_names_are_configuration_errors():
    with pytest.raises(ConfigurationError):
        find("hook", "nothing like it")


def test_every_public_hook_and_writer_is_registered():
    import hooks

    public = {value for name in hooks.__all__ if isinstance(value := getattr(hooks, name), type)}
    known = {entry.cls for kind in ("hook", "writer", "average") for entry in registered(kind)}
    bases = {"Hook", "Writer", "WeightAverage"}
    wanted = {one for one in public if issubclass(one, Hook | Writer | hooks.WeightAverage)}
    assert {one.__name__ for one in wanted - known} - bases == set()


def test_a_class_redefined_in_another_function_replaces_the_first():
    def one():
        @register
        class MadeAnew(Hook):
            pass

    def other():
        @register
        class MadeAnew(Hook):
            pass

        return MadeAnew

    one()
    assert other() is find("hook", "MadeAnew")
