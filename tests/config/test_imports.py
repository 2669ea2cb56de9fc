"""What a configuration can name, and what it cannot make run."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainbus.config import add_hooks
from trainbus.config.names import Imports
from trainbus.eventloop import Bus, ConfigurationError

from ..failing import said

MODULES = ("os", "subprocess", "torch.nn", "my_module", "builtins")


def resolve(reference, *modules):
    return Imports(modules).resolve(reference, "model")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that modules are found in; what was imported from it is forgotten again."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Imports(folders=[tmp_path])
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_a_listed_module_and_its_submodules_can_be_named():
    imports = Imports(["torch.nn"])
    assert imports.resolve("torch.nn.utils:clip_grad_norm_", "here") is torch.nn.utils.clip_grad_norm_
    assert imports.resolve("torch.nn:Module.eval", "here").__name__ == "eval"


def test_the_error_for_an_unlisted_module_names_the_list(folder):
    told = said(resolve, "torch.optim:AdamW", "torch.nn")
    assert told.startswith("model: 'torch.optim:AdamW'")
    assert told.endswith('imports = ["torch.nn", "torch.optim"]')
    assert 'imports = ["torch_other"]' in said(resolve, "torch_other:x")
    (folder / "listed_a.py").write_text("value = 1")
    assert "listed_ab" in said(resolve, "listed_ab:value", "listed_a")  # whose name begins like that of a listed one


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("torch.nn.Linear", "model: 'torch.nn.Linear' is not of the form module:attribute (did you mean 'torch.nn:Linear'?)"),
        ("Linar", "model: 'Linar' is not of the form module:attribute, such as \"my_module:MyClass\""),
        ("torch.nn", "model: 'torch.nn' is not of the form module:attribute, such as \"torch.nn:MyClass\""),
        ("Tanh", "model: 'Tanh' is not of the form module:attribute (did you mean 'torch.nn:Tanh'?)"),
        (
            "tourch.nn:Linear",
            "model: 'tourch.nn:Linear' is in a module that is not listed under imports (did you mean 'torch.nn'?)",
        ),
        ("torch.nn:Liner", "model: the module 'torch.nn' has no 'Liner' (did you mean 'Linear'"),
        ("torch.nn:Linear.forwrd", "model: the class 'Linear' has no 'forwrd' (did you mean 'forward'?)"),
        ("torch.nn:functional", "model: 'functional' is a module: name an object in it, as torch.nn.functional:attribute"),
        ("torch.nn:init.math.sqrt", "model: 'init' is a module"),
        ("torch.nn:Linear.__init__", "model: '__init__' is private"),
        ("torch.nn:Linear.forward.__globals__", "model: '__globals__' is private"),
        ("torch.nn:Linear.forward.x", "model: 'x' cannot be looked up in a function, only in a module or class"),
        ("torch.nn:Linear()", "model: 'torch.nn:Linear()' is not of the form module:attribute"),
        ("torch.nn.nope:x", "model: module 'torch.nn.nope' was not found"),
    ],
)
def test_invalid_references(reference, message):
    assert said(resolve, reference, "torch.nn").startswith(message)


def test_the_error_for_a_misspelt_module_or_a_file_suggests_the_module_and_names_the_folders(folder):
    (folder / "my_parts.py").touch()
    told = said(Imports, ["my_prats"], [folder])
    assert all(one in told for one in ("imports[0]: module 'my_prats'", "did you mean 'my_parts'?", str(folder)))
    with pytest.raises(ConfigurationError, match=r"imports\[0\]: 'my/parts\.py'.* 'my\.parts'"):
        Imports(["my/parts.py"])


def test_a_file_shadowed_by_an_installed_module_is_an_error(folder):
    (folder / "json.py").touch()
    with pytest.raises(ConfigurationError, match=r"imports\[0\]: 'json'.*json/__init__\.py.*json\.py"):
        Imports(["json"], [folder])


@pytest.mark.parametrize("source", ["import nothing_like_it_is_installed", "raise RuntimeError('boom')"])
def test_an_error_within_a_user_module_is_raised_with_a_note(folder, source):
    (folder / "broken_module.py").write_text(source)
    with pytest.raises((ImportError, RuntimeError)) as caught:
        Imports(["broken_module"], [folder])
    assert caught.value.__notes__ == ["while importing 'broken_module' for imports[0]"]


def test_only_listed_modules_are_imported(folder):
    (folder / "trap_module.py").write_text("raise SystemExit('it ran')")
    table = {"type": "ParamSchedulerHook", "by": "iter", "scheduler": {"type": "trap_module:x"}}
    with pytest.raises(ConfigurationError, match="trap_module"):
        add_hooks(Bus(), [table])
    with pytest.raises(ConfigurationError, match="trap_module"):
        add_hooks(Bus(), ["trap_module:Hook"])
    assert "trap_module" not in sys.modules


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text("ab:._", max_size=5)
    | st.sampled_from([f"{name}:system" for name in MODULES]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "interval", "writers", "scheduler", "optimizer", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(
    st.sampled_from(["LoggerHook", "ParamSchedulerHook", "EMAHook", "CheckpointHook", "OptimizerHook", "os:system"]),
    st.dictionaries(
        st.sampled_from(["writers", "scheduler", "by", "ema_type", "scaler", "interval", "custom_cfg", "priority"]), values
    ),
)
def test_no_configuration_reaches_names_of_unlisted_modules(name, options):
    """Whatever is in it: it is made without an import, or an error of ours."""
    before = set(sys.modules)
    try:
        add_hooks(Bus(), [{"type": name, **options}])
    except ConfigurationError:
        pass
    except (TypeError, ValueError, AttributeError) as error:  # of a constructor that does not check what it is given
        assert "while making" in "".join(getattr(error, "__notes__", ()))
    assert not {one for one in set(sys.modules) - before if one.split(".")[0] in MODULES}
