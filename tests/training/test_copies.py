"""Copies of states: nothing in them changes with the original."""

import copy
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from trainbus.eventloop.training.copies import LARGE, copied, is_large


class Pair(NamedTuple):
    """A tuple with names."""

    first: Any
    second: int


class Rows(list):
    """A list of a class of its own."""


@pytest.mark.parametrize(
    "make",
    [
        lambda inner: [inner],
        lambda inner: (inner,),
        lambda inner: {"a": inner},
        lambda inner: OrderedDict(a=inner),
        lambda inner: deque([inner], maxlen=2),
        lambda inner: Pair(inner, 3),
        lambda inner: Rows([inner]),
        lambda inner: [{"a": (deque([inner]),)}],
    ],
)
def test_a_copy_has_the_same_classes_and_no_part_of_the_original(make):
    inner = [1]
    tree = make(inner)
    before, new = copy.deepcopy(tree), copied(tree)
    inner.append(2)
    assert new == before
    assert type(new) is type(tree)
    assert getattr(new, "maxlen", None) == getattr(tree, "maxlen", None)


@pytest.mark.parametrize(
    "value", [torch.zeros(2), torch.eye(2).to_sparse(), np.zeros(2), bytearray(2), {1, 2}, deque([1, 2]), [1, 2]]
)
def test_a_copy_of_a_leaf_is_another_object(value):
    assert copied(value) is not value
    assert type(copied(value)) is type(value)


@pytest.mark.parametrize(
    ("tree", "large"),
    [
        (1.5, False),
        ([*range(100_000)], False),
        ([*range(200_000)], True),
        ([*map(float, range(100_000))], False),
        (["a", None, np.float32(2), True] * 20_000, False),
        ([[0]] * 900, False),
        ([[0]] * 1_100, True),
        (deque((0, torch.zeros(0)) for _ in range(1_000)), True),
        (dict.fromkeys(range(100_000), 1), False),
        ({"a": np.zeros(LARGE, np.uint8)}, False),
        ({"a": np.zeros(LARGE, np.uint8), "b": torch.zeros(1)}, True),
    ],
)
def test_what_takes_more_than_some_milliseconds_is_large(tree, large):
    assert is_large(tree) is large
