from pathlib import Path

import pytest

from trainbus.observe import assets, curves
from trainbus.observe.curves import stage_and_name


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("loss", ("train", "loss")),
        ("train/loss", ("train", "loss")),
        ("training_loss", ("train", "loss")),
        ("val_accuracy", ("val", "accuracy")),
        ("valid.f1", ("val", "f1")),
        ("validation-loss", ("val", "loss")),
        ("eval_loss", ("val", "loss")),
        ("test/top_1", ("test", "top_1")),
        ("train/val_loss", ("val", "loss")),  # reported in a training iteration
        ("value", ("train", "value")),
        ("evaluation", ("train", "evaluation")),
        ("contest/score", ("train", "contest/score")),
        ("val", ("train", "val")),
        ("val/", ("train", "val/")),
    ],
)
def test_scalars_of_one_name_belong_together_in_all_stages(name, found):
    assert stage_and_name(name) == found


def test_a_name_without_a_stage_is_of_the_stage_in_which_it_was_reported():
    assert stage_and_name("accuracy", "val") == ("val", "accuracy")
    assert stage_and_name("test_accuracy", "val") == ("test", "accuracy")


def test_the_dashboard_has_the_same_rule():
    script = Path(assets.__file__).with_name("curves.js").read_text()
    pattern = curves._STAGE.pattern
    assert f"const STAGE = /^{pattern}$/;" in script
