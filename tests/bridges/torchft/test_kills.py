"""Two replica groups in processes of their own, of which one is killed: the short form of ``python -m benchmarks torchft``."""

import pytest

from benchmarks import replicas

pytest.importorskip("torchft")


@pytest.mark.timeout(300)
def test_killed_groups_go_on_like_a_training_that_was_not_struck(tmp_path):
    """Counts, rates, weights, averages, lines, batches and files; the second kill comes within a save."""
    steps = 2 * replicas.STEPS
    smooth = replicas.undisturbed(steps, tmp_path / "alone")
    struck = replicas.run("trainbus", 2, tmp_path / "struck", seed=1)
    compared = replicas.check(struck, smooth)
    assert compared["steps"] == steps
    assert compared["healed"] == 2
    assert struck.strikes[1].first
    kept = replicas.saves(struck)
    assert not kept["damaged"]
    assert len(kept["missing"]) <= len(kept["made_up"])
    assert replicas.samples_again(struck) == 0
