import pytest

trio = pytest.importorskip("trio")


def test_it_trains_beside_its_watcher_until_it_is_cancelled(example, capsys):
    done = trio.run(example("trio_app").main, 1.5)
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(line.startswith("iteration") for line in lines)
    shown = [int(line.split()[1].replace(",", "")) for line in lines]
    assert shown == sorted(set(shown))
    assert shown[-1] <= done < 10_000_000
