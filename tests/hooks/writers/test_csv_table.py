import csv
import math

import pytest

from hooks import CSVWriter
from hooks.writers import RunFacts, Where
from hooks.writers.outbox import add_rows, send


def rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(work_dir, *moments):
    writer = CSVWriter()
    writer.open(RunFacts("digits", work_dir))
    for step, scalars in moments:
        writer.write_scalars(scalars, step, Where("train", epoch=1, iter=step))
    writer.close()


def test_scalars_of_a_run_are_readable_by_the_csv_module(logged, tmp_path):
    logged.loop(CSVWriter(), work_dir=tmp_path).run()
    found = rows(tmp_path / "scalars.csv")
    assert list(found[0]) == ["step", "epoch", "iter", "train/loss", "val/accuracy"]
    assert [(row["step"], row["train/loss"]) for row in found if row["train/loss"]] == [
        (str(step), f"{step}.0") for step in range(1, 7)
    ]
    assert [(row["step"], row["iter"], row["val/accuracy"]) for row in found if row["val/accuracy"]] == [
        ("1", "3", "0.75"),
        ("2", "6", "1.0"),
    ]


def test_a_new_name_adds_a_column_with_empty_cells_in_earlier_rows(tmp_path):
    write(tmp_path, (1, {"a": 1.0}), (2, {"a": 2.0, "b,\n": 3.0}), (3, {"c": 4.0}), (4, {"a": 5.0}))
    found = rows(tmp_path / "scalars.csv")
    assert [(row["a"], row["b,\n"], row["c"]) for row in found] == [
        ("1.0", "", ""),
        ("2.0", "3.0", ""),
        ("", "", "4.0"),
        ("5.0", "", ""),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["scalars.csv"]


def test_a_resumed_run_writes_no_second_header(tmp_path):
    write(tmp_path, (1, {"a": 1.0}))
    write(tmp_path, (2, {"b": 2.0}), (3, {"a": 3.0}))
    found = rows(tmp_path / "scalars.csv")
    assert [(row["step"], row["a"], row["b"]) for row in found] == [("1", "1.0", ""), ("2", "", "2.0"), ("3", "3.0", "")]


def test_an_incomplete_last_row_is_cut_off(tmp_path):
    write(tmp_path, (1, {"a": 1.0}))
    with (tmp_path / "scalars.csv").open("a") as file:
        file.write("2,1,2,12" + "9" * 5000)
    write(tmp_path, (2, {"a": 2.0}))
    assert [row["a"] for row in rows(tmp_path / "scalars.csv")] == ["1.0", "2.0"]


def test_a_file_without_a_complete_line_is_overwritten(tmp_path):
    (tmp_path / "scalars.csv").write_text("step,ep")
    write(tmp_path, (1, {"a": 1.0}))
    assert [row["a"] for row in rows(tmp_path / "scalars.csv")] == ["1.0"]


def test_nan_infinities_and_all_digits_are_kept(tmp_path):
    values = [math.nan, math.inf, -math.inf, 1 / 3, 1e300, 10**20, True]
    write(tmp_path, *((step, {"a": value}) for step, value in enumerate(values)))
    found = [row["a"] for row in rows(tmp_path / "scalars.csv")]
    assert math.isnan(float(found[0]))
    assert [float(text) for text in found[1:]] == values[1:]
    assert found[-1] == "1"


def test_rows_are_readable_after_a_flush(tmp_path):
    writer = CSVWriter("made/here.csv", interval=3)
    writer.open(RunFacts("digits", tmp_path))
    writer.write_scalar("train/loss", 0.5, 7)
    writer.flush()
    assert rows(tmp_path / "made" / "here.csv") == [{"step": "7", "epoch": "0", "iter": "7", "train/loss": "0.5"}]
    writer.close()


def test_rows_of_a_later_run_are_appended_to_the_copy_when_local_files_are_deleted(tmp_path):
    for step, name in ((1, "a"), (2, "b")):
        write(tmp_path / "run", (step, {name: float(step)}))
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
