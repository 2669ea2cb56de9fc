"""Processes that hold one copy of a model together are one to the data: samplers, validations and norms of gradients."""

import math
from itertools import chain

import pytest
import torch

from . import data_ranks, meshes

PLACES = {
    "FSDP2": [(0, 4), (1, 4), (2, 4), (3, 4)],
    "HSDP": [(0, 4), (1, 4), (2, 4), (3, 4)],
    "TP": [(0, 1)] * 4,
    "TP, copied": [(0, 2), (0, 2), (1, 2), (1, 2)],
    "TP x FSDP2": [(0, 2), (0, 2), (1, 2), (1, 2)],
    "CP x FSDP2": [(0, 2), (0, 2), (1, 2), (1, 2)],
    "PP x FSDP2": [(0, 2), (1, 2), (0, 2), (1, 2)],
    "grouped experts x FSDP2": [(0, 4), (1, 4), (2, 4), (3, 4)],
}
CANNOT_BE_TOLD = ["PP", "experts", "experts on meshes"]
WHOLE = [*PLACES, *CANNOT_BE_TOLD]


def places_of_all(kinds, given):
    return [data_ranks.places(kind, given) for kind in kinds]


@pytest.mark.long
def test_who_trains_on_different_batches_is_found_from_the_model_or_told(outcomes, ranks):
    assert [*zip(*ranks(places_of_all, [*PLACES], False, size=4), strict=True)] == [*map(tuple, PLACES.values())]
    ended = outcomes(places_of_all, [*CANNOT_BE_TOLD, *PLACES], False, size=4)
    assert [outcome.value[: len(CANNOT_BE_TOLD)] for outcome in ended] == [[(rank, 4)] * 3 for rank in range(4)]
    assert ended[0].output.count("cannot be told from") == 3
    assert 'data_mesh=mesh["dp"]' in ended[0].output
    assert ranks(places_of_all, ["PP", "TP"], True, size=4) == [[(rank // 2, 2)] * 2 for rank in range(4)]


def validated_by_all(kinds):
    return [data_ranks.validated(kind) for kind in kinds]


@pytest.mark.long
def test_a_validation_counts_each_sample_once_whoever_has_the_outputs(ranks):
    ((whole,),) = ranks(validated_by_all, [""], size=1)
    assert whole["seen/count"] == data_ranks.ROWS
    kinds = ["FSDP2", "TP", "TP, copied", "TP x FSDP2", "PP x FSDP2"]
    for found in ranks(validated_by_all, kinds, size=4):
        assert found == [pytest.approx(whole, rel=1e-5)] * len(kinds)


def clipped_by_all(kinds, norm_type):
    return [data_ranks.clipped(kind, norm_type) for kind in kinds]


@pytest.mark.long
@meshes.AVERAGES
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(ranks, norm_type):
    singles = [kind if "grouped" in kind else "" for kind in WHOLE]
    (single,) = ranks(clipped_by_all, singles, norm_type, size=1)
    for everyone in ranks(clipped_by_all, WHOLE, norm_type, size=4):
        for kind, (norm, expected), (own, found) in zip(WHOLE, single, everyone, strict=True):
            assert norm > 0.1
            assert own == pytest.approx(norm, rel=1e-4), kind
            for name, gradient in found.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)


def clipped_with_nan(kinds, norm_type, rank):
    return [data_ranks.clipped(kind, norm_type, rank)[0] for kind in kinds]


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_a_norm_is_nan_on_all_ranks_if_a_gradient_of_one_is(ranks, norm_type, rank):
    kinds = ["FSDP2", "TP", "TP x FSDP2", "PP x FSDP2"]  # in which each rank has a part of its own
    found = ranks(clipped_with_nan, kinds, norm_type, rank, size=4)
    assert [kind for kind, *norms in zip(kinds, *found, strict=True) if not all(map(math.isnan, norms))] == []


def refused_by_all(kinds, given):
    return [data_ranks.refused(kind, data_ranks.all_ranks_divide, given=given) for kind in kinds]


@pytest.mark.long
def test_a_sampler_that_divides_the_data_within_a_copy_of_the_model_is_refused(ranks):
    for rank, (sharded, parallel) in enumerate(ranks(refused_by_all, ["FSDP2", "TP x FSDP2"], False, size=4)):
        assert sharded == "trained"
        assert f"among 4 processes (this one is number {rank})" in parallel
        assert f"2 copies (this process is a part of number {rank // 2})" in parallel
        assert 'num_replicas=mesh["dp"].size()' in parallel
    assert ranks(refused_by_all, ["CP x FSDP2"], True, size=4) == [["trained"]] * 4


def trained_by_all(kinds, clip):
    return [data_ranks.trained(kind, clip) for kind in kinds]


@pytest.mark.long
@meshes.AVERAGES
def test_a_global_batch_is_divided_among_the_copies_of_the_model(ranks):
    ((batches, losses, norms),) = ranks(trained_by_all, [""], 0.1, size=1)[0]
    everyones = ranks(trained_by_all, ["FSDP2", "TP x FSDP2", "TP"], 0.1, size=4)
    for kind, copies in enumerate([4, 2, 1]):
        own = [one[kind] for one in everyones]
        firsts = own[:: 4 // copies]
        assert [[*chain(*some)] for some in zip(*[one[0] for one in firsts], strict=True)] == batches
        assert all(one[0] == firsts[rank * copies // 4][0] for rank, one in enumerate(own))
        assert all(one[2] == pytest.approx(norms, rel=1e-3) for one in own)
        means = [sum(some) / copies for some in zip(*[one[1] for one in firsts], strict=True)]
        assert means == pytest.approx(losses, rel=1e-3)


def test_a_function_clips_gradients(ranks):
    ((_, _, norms),) = ranks(trained_by_all, [""], data_ranks.halve, size=1)[0]
    assert norms == [-1] * 4


def trained_from_all(kind, folder, resume, stops):
    return data_ranks.trained_from(kind, folder, resume, stops=stops)


@pytest.mark.long
@pytest.mark.parametrize(("saved", "resumed"), [("TP x FSDP2", "FSDP2"), ("FSDP2", "TP x FSDP2")])
def test_the_position_in_the_data_is_that_of_the_copy_of_the_model(outcomes, ranks, tmp_path, saved, resumed):
    sizes = {"TP x FSDP2": 4, "FSDP2": 2}
    whole = ranks(trained_from_all, saved, str(tmp_path / "whole"), None, False, size=sizes[saved])[:: sizes[saved] // 2]
    begun = ranks(trained_from_all, saved, str(tmp_path / "run"), None, True, size=sizes[saved])[:: sizes[saved] // 2]
    file = str(tmp_path / "run" / "second.safetensors")
    rest = outcomes(trained_from_all, resumed, str(tmp_path / "rest"), file, False, size=sizes[resumed])
    assert [one + two.value for one, two in zip(begun, rest[:: sizes[resumed] // 2], strict=True)] == whole
    assert "another number of processes" not in rest[0].output


@pytest.mark.long
def test_a_pipeline_whose_loss_is_not_on_rank_0_is_told_so_once(outcomes):
    ended = outcomes(data_ranks.reports, "PP x FSDP2", size=4)
    assert [one.output.count("rank 0 has reported nothing in the first iteration") for one in ended] == [1, 0, 0, 0]
    ended = outcomes(data_ranks.reports, "TP", size=4)
    assert not any("has reported nothing" in one.output for one in ended)


@pytest.mark.long
def test_samplers_that_shuffle_by_different_seeds_are_told_once(outcomes):
    for seeds, told in (([1, 1], 0), ([1, None], 0), ([1, 2], 1)):
        ended = outcomes(data_ranks.trained_with_seeds, seeds, size=2)
        assert sum(one.output.count("the samplers of the ranks have different seeds") for one in ended) == told


@pytest.mark.long
def test_a_place_that_the_user_has_given_stays_when_a_save_compares_the_ranks(ranks, tmp_path):
    for kind in ("PP", "experts"):
        found = ranks(data_ranks.places_after_a_save, kind, str(tmp_path / kind.replace(" ", "_")), size=4)
        assert found == [(rank // 2, 2) for rank in range(4)]


def test_norms_of_stages_in_half_precision_do_not_overflow(ranks):
    for norm, clipped in ranks(data_ranks.half_precision):
        assert norm == pytest.approx(480, rel=1e-3)
        assert clipped == pytest.approx(1 / 12, rel=1e-2)


def test_all_ranks_take_the_same_view_of_data_ranks_also_if_only_some_are_wrapped(ranks):
    assert ranks(data_ranks.wrapped_in_part, size=4) == [((rank, 4), 1.0) for rank in range(4)]


def test_in_another_trainer_each_rank_has_data_of_its_own(ranks):
    assert ranks(data_ranks.hosted) == [(0, 2), (1, 2)]
