import math
import os
import re
import socket

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainbus.cli import main
from trainbus.cli.runs import best_metric
from trainbus.eventloop import Bus
from trainbus.observe import Damage, RunDamagedError, RunFolder, RunFolderError, encode_line, find_runs, last_lines
from trainbus.observe.environment import this_process
from trainbus.observe.report import ReportedRun, build_report, verdict

from .folders import BEGAN, GONE, HERE, loss_lines, session, write_record, write_run, write_scalars


def test_a_folder_with_scalars_only_has_the_name_of_the_folder_and_an_empty_one_is_an_error(tmp_path):
    with pytest.raises(RunFolderError, match=r"run\.json.*scalars\.jsonl"):
        RunFolder(tmp_path)
    write_scalars(tmp_path, *loss_lines(2), {"step": 3, "a": math.nan, "b": math.inf})
    run = RunFolder(tmp_path)
    assert run.manifest().name == tmp_path.name
    *lines, last = run.scalars()
    assert [line["step"] for line in lines] == [1, 2]
    assert math.isnan(last["a"])
    assert last["b"] == math.inf
    assert list(run.record()) == []
    assert run.story().seconds == 0


@pytest.mark.parametrize("cut", [b'{"step": 4, "tra', b"\0\0\0"])
def test_an_incomplete_last_line_is_no_damage(tmp_path, cut):
    write_scalars(tmp_path, *loss_lines(3))
    with (tmp_path / "scalars.jsonl").open("ab") as file:
        file.write(cut)
    run = RunFolder(tmp_path)
    assert len(list(run.scalars())) == 3
    assert run.damaged == {}


@pytest.mark.parametrize("bad", [b"{]\n", b"\0\0\0\n", b"\n", b"[1, 2]\n", b"3\n", b'{"a": "\xff"}\n', b"[" * 100_000 + b"\n"])
def test_damaged_lines_are_left_out_and_counted(tmp_path, bad):
    write_scalars(tmp_path, *loss_lines(3))
    with (tmp_path / "scalars.jsonl").open("ab") as file:
        file.write(bad * 2)
    write_scalars(tmp_path, *loss_lines(2, begin=4))
    run = RunFolder(tmp_path)
    for _ in range(2):  # each reading counts anew
        assert [line["step"] for line in run.scalars()] == [1, 2, 3, 4, 5]
        assert run.damaged == {"scalars.jsonl": Damage(lines=2, first=4)}


def test_a_line_of_the_record_holds_anything():
    line = msgspec.json.decode(encode_line({"a": math.nan, "b": [math.inf], "c": {1: object}, "d": (1, 2)}))
    assert line == {"a": "nan", "b": ["inf"], "c": {"1": "<class 'object'>"}, "d": [1, 2]}


NESTED = b"[" * 5_000 + b"]" * 5_000


@pytest.mark.parametrize(
    "content",
    [
        *(b"{", b"[]", b'{"name": 3}', b"", b'{"name": "\xff"}', b'{"x": %s, "name": 3}' % NESTED),
        *(b'{"name": "", "config": {"x": %s}}' % (b"[" * 200 + b"]" * 200), b'{"name": "a", "format": 2}'),
    ],
)
def test_a_damaged_run_json_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(RunDamagedError, match=r"run\.json"):
        RunFolder(tmp_path).manifest()


@pytest.mark.parametrize("name", ["run.json", "record.jsonl", "scalars.jsonl"])
@pytest.mark.parametrize("put", [os.mkdir, os.mkfifo])
def test_a_file_that_is_not_a_file_is_an_error_that_names_it(tmp_path, name, put):
    write_run(tmp_path)
    (tmp_path / name).unlink()
    put(tmp_path / name)
    with pytest.raises(RunDamagedError, match=re.escape(name)):
        ReportedRun(tmp_path)


@pytest.mark.parametrize(("name", "key"), [("run.json", b"began"), ("record.jsonl", b"iter")])
@pytest.mark.parametrize("number", [b"1e300", b"1" + b"0" * 400], ids=["1e300", "10**400"])
def test_a_number_beyond_all_bounds_spoils_no_other_run(tmp_path, capsys, name, key, number):
    path = write_run(tmp_path / "a", session(epoch=5, iter=50)) / name
    write_run(tmp_path / "other")
    content, count = re.subn(rb'("%s": ?)[\d.]+' % key, rb"\g<1>" + number, path.read_bytes())
    assert count
    path.write_bytes(content)
    assert main(["runs", str(tmp_path)]) in (0, 1)
    assert "other" in capsys.readouterr().out


HOSTILE = [*rb'1e300 -1 null true "nan" "\ud800" {} [] 9007199254740993'.split(), b"1" + b"0" * 400, NESTED]
TOKEN = re.compile(rb'-?\d[\d.e+-]*|"[^"]*"(?!:)|null')


@settings(max_examples=30)
@given(st.sampled_from(["run.json", "record.jsonl", "scalars.jsonl"]), st.data())
def test_any_damage_is_read_around_or_told(tmp_path_factory, name, data):
    folder = tmp_path_factory.mktemp("runs")
    path = write_run(folder / "a", session(epoch=5, iter=50), session(BEGAN + 200, lasted=None)) / name
    write_run(folder / "b")
    content = path.read_bytes()
    if data.draw(st.booleans()):
        token = data.draw(st.sampled_from(list(TOKEN.finditer(content))))
        content = content[: token.start()] + data.draw(st.sampled_from(HOSTILE)) + content[token.end() :]
    else:
        place = data.draw(st.integers(0, len(content) - 1))
        content = content[:place] + bytes([content[place] ^ data.draw(st.integers(1, 255))]) + content[place + 1 :]
    path.write_bytes(content)
    assert main(["runs", str(folder)]) in (0, 1)
    str(last_lines(folder / "a", Bus()))
    try:
        history = ReportedRun(folder / "a")
    except RunDamagedError as error:
        assert "run.json" in str(error)
    else:
        assert verdict(history, best_metric)
        assert build_report([history], best_metric)


def test_runs_are_found_in_subfolders_but_not_in_other_runs_hidden_folders_or_links(tmp_path):
    for name in ("b", "a/one", "a/two", "b/inner", ".hidden"):
        write_run(tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / "b")
    (tmp_path / "empty").mkdir()
    assert [str(one.relative_to(tmp_path)) for one in find_runs(tmp_path)] == ["a/one", "a/two", "b"]


def test_a_killed_session_ends_with_its_last_sign_of_life_and_pauses_do_not_count(tmp_path):
    write_run(tmp_path, session(lasted=None), session(BEGAN + 1000, lasted=None))
    write_record(tmp_path, {"time": BEGAN + 1020, "kind": "test", "epoch": 1, "iter": 1})
    write_scalars(tmp_path, *loss_lines(3, begin=101, began=BEGAN + 1000 - 100), {"time": "no number"})
    story = RunFolder(tmp_path).story()
    assert (story.ends, story.seconds) == ([BEGAN + 100, BEGAN + 1020], 120)
    write_run(long := tmp_path / "long", session(lasted=None))
    write_scalars(long, *loss_lines(5000, begin=101))
    assert RunFolder(long).story().seconds == 5100  # found at the end of its scalars


@pytest.mark.parametrize(
    ("process", "state"),
    [
        (GONE, "unknown"),
        (msgspec.structs.replace(GONE, host=socket.gethostname()), "killed"),
        (this_process(), "running"),
        (msgspec.structs.replace(this_process(), began="before"), "killed"),  # the number belongs to another process now
    ],
)
def test_the_state_of_a_session_that_has_not_ended_tells_whether_its_process_lives(process, state):
    one = session(lasted=None, environment=msgspec.structs.replace(HERE, process=process))
    assert one.state_now == state
    assert os.getpid() == this_process().pid
