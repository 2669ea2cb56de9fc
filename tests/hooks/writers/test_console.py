import io
import math

import pytest
from rich.console import Console

from trainbus.hooks import ConsoleWriter
from trainbus.hooks.writers import Where
from trainbus.hooks.writers.console import format_number

SCALARS = {
    "train/loss": 0.1234,
    "train/time": 0.0021,
    "train/eta": 12.4,
    "train/data_time": 0.0003,
    "train/lr": 1.2e-3,
    "train/grad_norm": 2.5,
}


@pytest.mark.parametrize(
    ("scalars", "where", "line"),
    [
        (
            SCALARS,
            Where("train", epoch=3, iter=154, batch=40, epoch_length=57, max_epochs=20),
            "epoch  3/20  iter 40/57  lr 1.2e-03  loss 0.1234  grad_norm 2.5000  time 0.0021  data_time 0.0003  eta 0:00:12",
        ),
        ({"train/loss": 1.0}, Where("train", epoch=1, iter=400, batch=400, max_iters=5000), "iter  400/5000  loss 1.0000"),
        ({"train/loss": 1.0}, Where("train", epoch=1, iter=40, batch=40, max_epochs=2), "epoch 1/2  iter 40  loss 1.0000"),
        ({"val/accuracy": 0.9722}, Where("val", epoch=3, iter=171, max_epochs=20), "epoch  3/20  val  accuracy 0.9722"),
        ({"test/accuracy": 0.9722}, Where("test", epoch=0, iter=0), "test  accuracy 0.9722"),
        ({"val/[red]": 1.0, "val/:smile:": 1.0}, Where("val", epoch=0, iter=0), "val  [red] 1.0000  :smile: 1.0000"),
    ],
)
def test_a_line_is_for_a_reader(scalars, where, line):
    """It has the places that the run knows, names without their stage, and no markup."""
    output = io.StringIO()
    ConsoleWriter(Console(file=output, width=40)).write_scalars(scalars, 1, where)
    assert output.getvalue() == f"{line}\n"


def test_a_terminal_breaks_a_long_line_between_two_values():
    scalars = {"train/loss": 0.25, "train/accuracy": 0.5, "train/grad_norm": 1.5}
    file = io.StringIO()
    narrow = ConsoleWriter(Console(file=file, width=40, force_terminal=True, color_system=None))
    narrow.write_scalars(scalars, 1, Where("train", epoch=1, iter=1, max_epochs=3, batch=1, epoch_length=4))
    assert file.getvalue() == "epoch 1/3  iter 1/4  loss 0.2500\n    accuracy 0.5000  grad_norm 1.5000\n"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("loss", 0.0, "0.0000"),
        ("loss", -0.5, "-0.5000"),
        ("loss", 3.2e-6, "3.2e-06"),
        ("loss", 1.5e9, "1.5e+09"),
        ("loss", math.nan, "nan"),
        ("loss", math.inf, "inf"),
        ("count", 1234567, "1234567"),
        ("lr", 0.5, "5.0e-01"),
        ("net/lr", 0.5, "5.0e-01"),
        ("lr/group1", 0.5, "5.0e-01"),
        ("eta", 90061.0, "1 day, 1:01:01"),
        ("eta", math.nan, "nan"),
    ],
)
def test_numbers_are_formatted_compactly(name, value, text):
    assert format_number(name, value) == text


def test_the_shared_console_is_used_by_default(capsys):
    ConsoleWriter().write_scalars({"val/accuracy": 1.0}, 0, Where("val", epoch=0, iter=0))
    assert capsys.readouterr().out == "val  accuracy 1.0000\n"
