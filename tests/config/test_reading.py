"""Files and changes of the command line."""

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainbus.config import override, read
from trainbus.config.make import Maker
from trainbus.config.names import Imports
from trainbus.config.read import all_parsed
from trainbus.eventloop.annotations import Signature

from ..failing import said

CONFIG = {"loop": {"max_epochs": 3}, "custom_hooks": [{"type": "EMAHook"}, {"type": "LoggerHook"}], "model": "mine:net"}

TEXTS = {
    "toml": 'model = "a:b"\n[loop]\nlr = 1e-3\nlist = [1, 2]\noff = false\n',
    "yaml": "model: 'a:b'\nloop:\n  lr: 1e-3\n  list: [1, 2]\n  'off': false\n",
    "json": '{"model": "a:b", "loop": {"lr": 1e-3, "list": [1, 2], "off": false}}',
}


DEEP = [
    ("toml", f"a = {'[' * 5000}"),
    ("toml", f"{'.'.join('a' * 101)} = 1"),
    ("json", "[" * 100_000),
    ("json", f"{'[' * 101}{']' * 101}"),
    ("yaml", "[" * 1000),
    ("yaml", f"a: {'[' * 101}{']' * 101}"),
]
BOMB = "a0: &a0 {{k: 1}}\n" + "".join(f"a{i}: &a{i} {{0}}{', '.join([f'*a{i - 1}'] * 10)}{{1}}\n" for i in range(1, 10))


@pytest.fixture
def file(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


# ---------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("suffix", ["toml", "yaml", "yml", "json", "TOML"])
def test_toml_yaml_and_json_are_read_equally(file, suffix):
    text = TEXTS[{"yml": "yaml"}.get(suffix, suffix.lower())]
    found = read(file(f"config.{suffix}", text))
    assert found["loop"]["lr"] == 0.001  # YAML 1.1 would take it for text
    assert found["loop"]["off"] is False
    assert (found["model"], found["loop"]["list"]) == ("a:b", [1, 2])


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "1.e-3", "-2e5", ".5e1", "1.5e+3"])
def test_a_number_with_an_exponent_is_a_number_in_yaml(file, number):
    assert read(file("config.yaml", f"lr: {number}"))["lr"] == float(number)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.toml", "a = ]", "(at line 1, column 5)"),
        ("c.json", '{"a": 1,}', "(at line 1, column "),
        ("c.yaml", "a: [1\nb: 2", "(at line 2, column 2)"),
        ("c.yaml", "a: !!python/object/apply:os.system ['true']", "could not determine a constructor for the tag"),
        ("c.yaml", "- a", "expected a table with model, data, optimizer …, got a list"),
        ("c.yaml", "", "expected a table with model, data, optimizer …, got nothing"),
        ("c.py", "", "must be a .toml, .yaml or .json file; run a Python script with python"),
        ("c.ini", "", "a configuration must be a .toml, .yaml or .json file"),
        *((f"c.{suffix}", text, "is nested too deeply") for suffix, text in DEEP),
        ("c.toml", f"a = {'9' * 5000}", "an integer has thousands of digits"),
        ("c.json", f'{{"a": {"9" * 5000}}}', "an integer has thousands of digits"),
        ("c.yaml", f"a: {'9' * 5000}", "an integer has thousands of digits"),
        ("c.yaml", BOMB.format("[", "]"), "aliases expand to more than 1,000,000 values (at line 7, column 5)"),
        ("c.yaml", BOMB.format("{<<: [", "]}"), "aliases expand to more than 1,000,000 values (at line 7, column 14)"),
        ("c.yaml", "a: &a [*a]", "an alias contains itself (at line 1, column 4)"),
        ("c.yaml", "a: 2026-13-01", "a value does not match its type: month must be in 1..12"),
        ("c.yaml", "a: !!bool maybe", "a value does not match its type: 'maybe'"),
        ("c.yaml", "on: 1", "the key True is not text (YAML reads on, off, yes and no as booleans); put it in quotes"),
        ("c.yaml", "a:\n  b: 1\n  b: 2", "the key 'b' appears twice in one table (at line 2, column 3)"),
        ("c.json", '{"a": 1, "a": 2}', "the key 'a' appears twice in one table"),
        ("c.toml", "#" * 10_000_001, "is too large for a configuration: 10,000,001 bytes, at most 10,000,000"),
    ],
    ids=lambda value: value[:30],
)
def test_the_error_for_an_unreadable_file_names_file_and_cause(file, name, text, message):
    path = file(name, text)
    assert said(read, path).startswith(f"{path}: ")
    assert message in said(read, path)


def test_the_error_for_a_missing_file_names_its_neighbours_and_for_what_is_no_text_file_comes_without_waiting(file, tmp_path):
    file("first.toml", "")
    file("notes.txt", "")
    missing = "cannot be read: No such file or directory (did you mean 'first.toml'?)"
    assert said(read, tmp_path / "frist.toml").endswith(missing)
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    for name, told in (("pipe", "is not a file"), ("folder", "is a directory"), ("binary", "UTF-8")):
        assert told in said(read, tmp_path / f"{name}.toml")


def test_aliases_and_merged_tables_of_yaml_are_read(file):
    assert read(file("c.yaml", "a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]")) == {
        "a": {"x": 1},
        "b": {"x": 1, "y": 2},
        "c": [{"x": 1}, {"x": 1}],
    }


def test_without_pyyaml_the_error_names_the_package(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert 'pip install "trainbus[yaml]"' in said(read, file("c.yaml", "a: 1"))


def test_an_import_error_within_an_installed_package_is_told_as_it_is(file, monkeypatch, tmp_path):
    (tmp_path / "yaml.py").write_text("from math import nothing_of_this_name")
    monkeypatch.delitem(sys.modules, "yaml", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    message = said(read, file("c.yaml", "a: 1"))
    assert "nothing_of_this_name" in message
    assert "pip install" not in message


@pytest.mark.parametrize("suffix", TEXTS)
def test_a_file_may_begin_with_a_byte_order_mark(file, suffix):
    assert read(file(f"c.{suffix}", "\ufeff" + TEXTS[suffix])) == read(file(f"d.{suffix}", TEXTS[suffix]))


# -------------------------------------------------------------------------------------------------------------- changes


def changed(*changes, config=CONFIG):
    return override(config, changes)


def test_an_override_replaces_adds_and_creates_tables():
    found = changed("loop.max_epochs=5", "loop.name=x", "default_hooks.logger.interval=3", "custom_hooks[1].interval=7")
    assert found["loop"] == {"max_epochs": "5", "name": "x"}
    assert found["default_hooks"] == {"logger": {"interval": "3"}}
    assert found["custom_hooks"] == [{"type": "EMAHook"}, {"type": "LoggerHook", "interval": "7"}]
    assert CONFIG["loop"] == {"max_epochs": 3}
    found = changed("model.width=3", 'metrics."a.b".k=1', "custom_hooks[-1].type=EMAHook")
    assert found["model"] == {"type": "mine:net", "width": "3"}  # a name becomes a table
    assert found["metrics"] == {"a.b": {"k": "1"}}
    assert found["custom_hooks"][1]["type"] == "EMAHook"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("loop", "'loop': changes are written as key=value, such as loop.max_epochs=3"),
        ("loop..x=1", "'loop..x' is not a configuration key"),
        ("[0].x=1", "'[0].x' is not a configuration key"),
        ("=1", "'' is not a configuration key"),
        ("custom_hooks[2].x=1", "custom_hooks[2]: custom_hooks has 2 entries, counted from 0"),
        ("custom_hooks.x=1", "custom_hooks.x: custom_hooks is a list, not a table; its first entry is custom_hooks[0]"),
        ("loop[0]=1", "loop[0]: loop is a table, not a list"),
        ("loop.max_epochs.x=1", "loop.max_epochs.x: loop.max_epochs is int 3, not a table"),
        ("nothing[0]=1", "nothing[0]: nothing is not in the configuration"),
        (f"a={'[' * 5000}", "a: is nested too deeply"),
        (f"a={'{a=' * 101}1{'}' * 101}", "a: is nested too deeply"),
        (f"{'.'.join('a' * 101)}=1", f"'{'a.' * 40}…' is not a configuration key"),
        (f"custom_hooks[{'9' * 5000}]=1", f"'custom_hooks[{'9' * 67}…' is not a configuration key"),
        (f"a=0x{'f' * 5000}", "a: an integer has thousands of digits"),
    ],
)
def test_the_error_for_an_invalid_override_has_its_position(change, message):
    assert said(changed, change).startswith(message), said(changed, change)


def typed(annotation, text):
    def target(option):
        return option

    target.__annotations__ = {"option": annotation}
    table = override({"x": {}}, [f"x.option={text}"])["x"]
    return Maker().decode(Signature(target), table, "x")["option"]


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        *((int, "3", 3), (float, "3", 3.0), (float, "1e-3", 0.001), (str, "3", "3"), (str, "true", "true")),
        *((bool, "true", True), (bool, "false", False), (int | None, "null", None)),
        *((str | list[str], "abc", "abc"), (str | list[str], '["a", "b"]', ["a", "b"]), (list[int], "[1, 2]", [1, 2])),
        *((dict[str, int], "{a = 1}", {"a": 1}), (dict[str, int], '{"a": 1}', {"a": 1})),
        (float | dict[str, float] | None, "2", 2.0),
        (float | dict[str, float] | None, "{max_norm = 2.0}", {"max_norm": 2.0}),
    ],
)
def test_an_override_has_the_type_of_its_option(annotation, text, value):
    found = typed(annotation, text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("annotation", "text", "message"),
    [
        (int, "1.5", "x.option: expected int, got str '1.5'"),
        (int, "9" * 5000, f"x.option: expected int, got str '{'9' * 80}…'"),
        (bool, "yes", "x.option: expected bool, got str 'yes'"),
        (list[int], '[1, "x"]', "x.option[1]: expected int, got str 'x'"),
    ],
)
def test_an_override_of_the_wrong_type_is_an_error_with_its_position(annotation, text, message):
    assert said(typed, annotation, text) == message


@given(st.recursive(st.booleans() | st.integers() | st.text("abc", max_size=3), lambda inner: st.lists(inner, max_size=3)))
def test_a_json_value_is_accepted_without_an_annotation(value):
    text = json.dumps(value)
    assert all_parsed(override({}, [f"a={text}"])) == {"a": value}


def without_annotations(shuffle=False, size=3, rate=0.1, name="a", other=None, needed=()):
    return locals()


@pytest.mark.parametrize(
    ("change", "value"),
    [
        *(
            ("shuffle=False", False),
            ("shuffle=True", True),
            ("shuffle=true", True),
            ("shuffle=0", False),
            ("shuffle=None", None),
        ),
        *(("size=5", 5), ("size=None", None), ("size=0.5", 0.5), ("rate=1e-3", 1e-3), ("rate=1", 1), ('size="auto"', "auto")),
        *(("name=5", "5"), ("name=True", "True"), ("name=b", "b"), ("name=None", None), ("name='5'", "5")),
        *(("other=False", False), ("other=None", None), ("other=word", "word"), ("other=5", 5)),
        *(("needed=(0.9, 0.99)", [0.9, 0.99]), ("needed=[True, None]", [True, None]), ("needed={'a': False}", {"a": False})),
    ],
)
def test_an_option_without_annotation_has_the_type_of_its_default(change, value):
    changed = override({"made": {"type": f"{__name__}:without_annotations"}}, [f"made.{change}"])
    made = Maker(Imports([__name__])).make(changed["made"], "made")[change.partition("=")[0]]
    assert made == value
    assert type(made) is type(value)


@pytest.mark.parametrize("change", ["shuffle=flase", "shuffle=2x", "size=many", "rate=fast"])
def test_a_word_for_a_number_or_boolean_without_annotation_is_an_error(change):
    name, _, word = change.partition("=")
    changed = override({"made": {"type": f"{__name__}:without_annotations"}}, [f"made.{change}"])
    message = said(Maker(Imports([__name__])).make, changed["made"], "made")
    assert message.startswith(f"made.{name}: ")
    assert repr(word) in message


@pytest.mark.parametrize("text", ["None", "null"])
@pytest.mark.parametrize("annotation", [int | None, str | None, Path | None, bool | None])
def test_none_on_the_command_line_is_none_where_the_option_takes_it(annotation, text):
    assert Maker().typed(override({}, [f"a={text}"])["a"], annotation, "a") is None
