import json
import os
from argparse import Namespace
from collections import UserDict, UserList
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trainbus.eventloop.plain import HIDDEN, as_json, command_without_secrets, plain, plain_config, without_secrets


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (np.float32(0.5), 0.5),
        (float("inf"), "inf"),
        (Path("data"), "data"),
        (torch.bfloat16, "torch.bfloat16"),
        ({1: (True, None)}, {"1": [True, None]}),
        (torch.nn.Linear(1, 1), "Linear"),
        (torch.nn.Linear, "Linear"),
        (torch.ones(3), "Tensor"),
        (len, "len"),
    ],
    ids=str,
)
def test_other_objects_are_stored_by_the_name_of_their_class(value, stored):
    assert plain(value) == stored


def test_of_long_and_deep_values_a_part_is_taken_and_no_data_are_loaded():
    class Loader(list):
        def __iter__(self):
            raise AssertionError("loads data")

    def count(value):
        return 1 + sum(map(count, value)) if isinstance(value, list) else 1

    deep = [[[[1] * 100] * 100] * 100] * 100
    endless: list[object] = []
    endless.append(endless)
    assert plain(Loader([1])) == "Loader"
    assert 900 < count(plain(deep)) < 1100
    assert count(plain(endless)) < 1100
    assert plain([1] * 5000) == [*[1] * 1000, "(4,000 more)"]


class Unreadable(UserDict[str, Any]):
    """A mapping like OmegaConf's, in which a value is missing."""

    def __getitem__(self, key: str) -> Any:
        if key == "missing":
            raise LookupError("no value for it")
        return super().__getitem__(key)


class Silent:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@dataclass
class Options:
    path: Path = Path("data")
    model: Any = None


class Color(Enum):
    RED = 1


class Mode(IntEnum):
    FAST = 2


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (Path("data"), "data"),
        (torch.device("cuda", 1), "cuda:1"),
        (torch.float16, "torch.float16"),
        (np.float32(0.5), 0.5),
        (np.arange(3), [0, 1, 2]),
        (torch.tensor(0.5), 0.5),
        (torch.ones(2, 1, device="meta"), "Tensor((2, 1), torch.float32, meta)"),
        (float("nan"), "nan"),
        (2**80, 2**80),
        (b"x", "b'x'"),
        (1j, "1j"),
        (len, "len"),
        (torch.nn.Linear(1, 1), "Linear(in_features=1, out_features=1, bias=True)"),
        (partial(max, 1), "functools.partial(<built-in function max>, 1)"),
        (object(), "<object object>"),
        (Silent(), "Silent"),
        ({"b", "a"}, ["a", "b"]),
        (UserList([1, (2,)]), [1, [2]]),
        ({(1, 2): 3, None: 4, 1: 5, "1": 6}, {"(1, 2)": 3, "None": 4, "1": 5, "'1'": 6}),
        (Namespace(lr=0.1), {"lr": 0.1}),
        (Options(model=Silent()), {"path": "data", "model": "Silent"}),
        (Color.RED, "Color.RED"),
        (Mode.FAST, 2),
        (Unreadable(lr=0.1, missing=1), {"lr": 0.1, "missing": "(cannot be read: LookupError: no value for it)"}),
        (SimpleNamespace(api_key="s3cr3t"), {"api_key": HIDDEN}),
        (partial(dict, api_key="s3cr3t", lr=1), f"functools.partial(<class 'dict'>, api_key={HIDDEN}, lr=1)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_value_of_a_configuration_is_stored_and_one_that_cannot_be_read_costs_only_itself(value, stored):
    made = without_secrets(plain_config({"before": 1, "value": [value], "after": 2}))
    assert made == {"before": 1, "value": [stored], "after": 2}
    assert type(made["value"][0]) in (int, float, str, list, dict)


def test_what_is_too_long_too_deep_or_a_cycle_in_a_configuration_is_cut_and_says_so():
    cyclic: dict[str, Any] = {"lr": 0.1}
    cyclic["self"] = [cyclic]
    assert plain_config(cyclic) == {"lr": 0.1, "self": ["..."]}
    deep: dict[str, Any] = {}
    for _ in range(2_000):
        deep = {"k": deep}
    assert len(as_json(plain_config(deep))) < 1_000
    many = plain_config({"text": "x" * 20_000, "many": [0] * 60_000, "late": 1})
    assert (many["text"][10_000:], many["many"][-1]) == ("... (10,000 more characters)", "(10,002 more)")
    assert many["..."] == "(1 more)"


@pytest.mark.parametrize("name", ["api_key", "wandbToken", "DB-PASSWORD", "hf_token", "client_secret", "aws.secret_access_key"])
def test_a_value_whose_name_says_that_it_is_a_secret_is_hidden(name):
    assert without_secrets({name: "s3cr3t", "list": [{name: ["s3cr3t"]}]}) == {name: HIDDEN, "list": [{name: [HIDDEN]}]}


@pytest.mark.parametrize("name", ["max_tokens", "tokenizer", "published_keys", "monkey", "key", "author"])
def test_other_names_are_not(name):
    assert without_secrets({name: "value"}) == {name: "value"}
    assert without_secrets({"api_token": 7}) == {"api_token": 7}


def test_urls_lose_their_credentials():
    urls = ["s3://ada:pw@bucket/x", "https://h/?sig=abc&page=2", "https://h/a@b"]
    assert without_secrets(urls) == ["s3://bucket/x", f"https://h/?sig={HIDDEN}&page=2", "https://h/a@b"]


def test_a_command_line_loses_its_secrets_only():
    command = [
        "train.py",
        "--token=a",
        "--api-key",
        "b",
        "--lr",
        "0.1",
        "db.password=c",
        "--use-auth",
        "--url",
        "https://u:p@h",
    ]
    hidden = ["train.py", f"--token={HIDDEN}", "--api-key", HIDDEN, "--lr", "0.1", f"db.password={HIDDEN}", "--use-auth"]
    assert command_without_secrets(command) == [*hidden, "--url", "https://h"]


def test_json_holds_names_that_are_not_utf_8_and_integers_of_any_size():
    one, other = os.fsdecode(b"caf\xe9"), os.fsdecode(b"caf\xea")
    numbers = [2**70, -(2**64), 2**64 - 1, True]
    assert json.loads(as_json({one: 1, other: numbers})) == {"caf\\udce9": 1, "caf\\udcea": numbers}
    with pytest.raises(TypeError):
        as_json({"model": torch.nn.Linear(1, 1)})
