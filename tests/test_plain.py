import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from eventloop.plain import HIDDEN, as_json, command_without_secrets, plain, without_secrets


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
    assert plain([1] * 5000) == [1] * 1000


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
