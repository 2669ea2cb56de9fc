import csv

import pytest

from trainbus.hooks import CSVWriter
from trainbus.hooks.writers import RunFacts
from trainbus.hooks.writers.outbox import add_rows, send

from .conftest import logging_loop, write


def rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table(work_dir, *lines):
    """Write lines, and return the rows of the table."""
    write(CSVWriter(), work_dir, *lines)
    return rows(work_dir / "scalars.csv")


def test_a_row_has_step_epoch_iter_and_a_cell_for_each_scalar(tmp_path):
    logging_loop(CSVWriter(), work_dir=tmp_path).run()
    found = rows(tmp_path / "scalars.csv")
    assert list(found[0]) == ["step", "epoch", "iter", "train/loss", "val/accuracy"]
    assert [(row["step"], row["iter"]) for row in found if row["val/accuracy"]] == [("1", "3"), ("2", "6")]


def test_a_new_name_adds_a_column_with_empty_cells_in_earlier_rows(tmp_path):
    found = table(tmp_path, (1, {"a": 1.0}), (2, {"a": 2.0, "b,\n": 3.0}), (3, {"c": 4.0}), (4, {"a": 5.0}))
    cells = [(row["a"], row["b,\n"], row["c"]) for row in found]
    assert cells == [("1.0", "", ""), ("2.0", "3.0", ""), ("", "", "4.0"), ("5.0", "", "")]
    assert [path.name for path in tmp_path.iterdir()] == ["scalars.csv"]


def test_an_incomplete_last_row_is_cut_off(tmp_path):
    (tmp_path / "scalars.csv").write_text("step,ep")
    assert [row["a"] for row in table(tmp_path, (1, {"a": 1.0}))] == ["1.0"]
    with (tmp_path / "scalars.csv").open("a") as file:
        file.write("2,1,2,12" + "9" * 5000)
    assert [row["a"] for row in table(tmp_path, (2, {"a": 2.0}))] == ["1.0", "2.0"]


def test_rows_are_readable_after_a_flush(tmp_path):
    writer = CSVWriter("made/here.csv", interval=3)
    writer.open(RunFacts("digits", tmp_path))
    writer.write_scalar("train/loss", 0.5, 7)
    writer.flush()
    assert rows(tmp_path / "made" / "here.csv") == [{"step": "7", "epoch": "0", "iter": "7", "train/loss": "0.5"}]
    writer.close()


def test_rows_of_a_later_run_are_appended_to_the_copy_when_local_files_are_deleted(tmp_path):
    for step, name in ((1, "a"), (2, "b")):
        table(tmp_path / "run", (step, {name: float(step)}))
        (copy,) = send(tmp_path / "run", tmp_path / "out", (".csv",), moved=[tmp_path / "run" / "scalars.csv"])
        assert not (tmp_path / "run" / "scalars.csv").exists()
    assert [(row["step"], row["a"], row["b"]) for row in rows(copy)] == [("1", "1.0", ""), ("2", "", "2.0")]


def test_a_missing_source_table_leaves_the_target_closed(tmp_path):
    with pytest.raises(FileNotFoundError):
        add_rows(tmp_path / "none.csv", tmp_path / "target.csv")
    writer = CSVWriter("target.csv")
    writer.open(RunFacts("digits", tmp_path))
    writer.write_row({"a": 1})
    writer.close()
    assert rows(tmp_path / "target.csv") == [{"a": "1"}]
