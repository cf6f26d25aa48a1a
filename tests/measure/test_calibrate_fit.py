"""Metrics against numbers worked out by hand, and temperatures recovered from data made with known ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspark.calibrate.fit import calibrated, fit_temperatures, logits, reached_often, that_hold
from dspark.calibrate.metrics import auroc, brier, calibration_error, reliability
from dspark.calibrate.rounds import JudgedRounds, judged_rounds, parts
from dspark.calibrate.run import fit_regime
from dspark.calibrate.scores import score
from dspark.checkpoint.calibration import Regime
from dspark.errors import RequestError
from dspark.result import Round
from results import result_of

SIZE = 8_000


def yes(*values):
    return np.array(values, dtype=np.bool_)


def synthetic(factors, size=SIZE, seed=0, mean=1.5, each=10):
    """Rounds of a head whose logits are the right ones times `factors`, one factor for each position; `each`
    of a prompt."""
    generator = np.random.default_rng(seed)
    right = generator.normal(mean, 1.5, (size, len(factors)))
    happens = generator.random(right.shape) < 1 / (1 + np.exp(-right))
    accepted = np.cumprod(happens, axis=1).sum(axis=1)
    said = 1 / (1 + np.exp(-right * np.asarray(factors)))
    return JudgedRounds(said, np.full(size, len(factors)), accepted, np.arange(size) // each)


def test_metrics_by_hand():
    predicted, happened = np.array([0.1, 0.2, 0.6, 0.9]), yes(False, True, False, True)
    two = reliability(predicted, happened, bins=2)
    assert [(b.count, b.happened) for b in two] == [(2, 0.5), (2, 0.5)]
    assert [b.predicted for b in two] == pytest.approx([0.15, 0.75])
    assert calibration_error(predicted, happened, bins=2) == pytest.approx((0.35 + 0.25) / 2)
    assert brier(predicted, happened) == pytest.approx((0.01 + 0.64 + 0.36 + 0.01) / 4)
    # Of the pairs (true, false): 0.2 over 0.1, not over 0.6; 0.9 over both.
    assert auroc(predicted, happened) == pytest.approx(3 / 4)


def test_ties_count_half_and_share_a_bin():
    predicted, happened = np.array([0.5, 0.5, 0.5, 0.7]), yes(True, False, False, True)
    assert auroc(predicted, happened) == pytest.approx((0.5 + 0.5 + 1 + 1) / 4)
    bins = reliability(predicted, happened, bins=4)
    assert [(b.count, b.predicted) for b in bins] == [(3, 0.5), (1, 0.7)]
    shuffled = calibration_error(predicted[::-1], happened[::-1], bins=4)
    assert calibration_error(predicted, happened, bins=4) == shuffled


def test_without_data_there_is_no_score():
    nothing = np.array([])
    assert (calibration_error(nothing, yes()), auroc(nothing, yes()), brier(nothing, yes())) == (None,) * 3
    assert auroc(np.array([0.2, 0.4]), yes(True, True)) is None


def test_temperatures_are_recovered_position_by_position():
    factors = [2.0, 0.5, 1.0, 3.0]
    assert fit_temperatures(synthetic(factors), 4) == pytest.approx(factors, rel=0.25)


def test_only_temperatures_that_help_elsewhere_too_are_kept():
    factors = [2.0, 0.5, 1.0, 3.0]
    assert that_hold([2.0, 0.5, 4.0, 3.0], synthetic(factors, seed=1)) == [2.0, 0.5, 1.0, 3.0]
    assert that_hold([1.0, 1.0], synthetic([2.0, 2.0])) == [1.0, 1.0]


def test_what_is_calibrated_stays_as_it_is():
    for seed in range(3):
        found = fit_temperatures(synthetic([1.0] * 7, size=2000, seed=seed), 7)
        assert max(abs(np.log(found))) < np.log(1.35)


def test_an_overconfident_head_scores_better_afterwards_in_the_same_order():
    rounds = synthetic([2.5] * 5, size=2 * SIZE)
    fitted = fit_regime(Regime(acceptance="rejection", temperature=0.7), rounds)
    before, after = fitted.before, fitted.after
    assert before.overall.ece > 0.05 and after.overall.ece < 0.015
    assert after.overall.brier < before.overall.brier
    for b, a in zip(before.survival, after.survival, strict=True):
        assert a.ece < b.ece
    for b, a in zip(before.confidence, after.confidence, strict=True):
        assert a.auroc == pytest.approx(b.auroc, abs=1e-9)  # one temperature keeps the order


def test_certain_confidences_are_finite():
    assert np.isfinite(logits(np.array([0.0, 1.0]))).all()
    assert calibrated(np.array([[0.9, 0.8]]), np.array([2.0, 0.5])) == pytest.approx(
        np.array([[3 / 4, 16 / 17]])
    )


def test_a_position_that_is_reached_too_rarely_is_left_alone():
    rounds = synthetic([3.0] * 7, size=800, mean=-1.0)
    reached = [int((rounds.accepted >= k).sum()) for k in range(7)]
    often = reached_often(rounds, 30)
    assert 0 < often < 7 and reached[often - 1] >= 30 > reached[often]
    fitted = fit_regime(Regime(acceptance="rejection", temperature=0.7), rounds)
    assert 0 < fitted.positions <= often and fitted.to_json()["fitted_positions"] == fitted.positions
    kept = [(rounds.accepted > k).sum() / reached[k] for k in range(fitted.positions)]
    assert fitted.acceptance == pytest.approx(kept, abs=1e-4)
    assert fitted.temperatures[0] > 1.5 and fitted.temperatures[fitted.positions :] == [1.0] * (
        7 - fitted.positions
    )


@pytest.mark.parametrize(("temperature", "more"), [(0.0, "prompts or --tokens$"), (0.7, "or --samples$")])
def test_too_little_data_says_how_much_there_is_and_what_gives_more(temperature, more):
    rounds = synthetic([1.0] * 7, size=40)
    with pytest.raises(RequestError, match=f"20 rounds to fit to and 10 to choose by .*: 30 .*{more}"):
        fit_regime(Regime(acceptance="rejection", temperature=temperature), rounds)


def test_what_a_round_says():
    def a_round(verified, accepted, committed, confidence):
        return Round(len(confidence), verified, accepted, confidence, committed)

    results = [
        result_of([1], [2], [a_round(3, 1, 2, (0.9, 0.8, 0.7)), a_round(0, 0, 1, ())]),
        # The second accepted token ended the text: of the third nothing is known.
        result_of([1], [2], [a_round(3, 2, 2, (0.6, 0.5, 0.4)), a_round(2, 2, 3, (0.3, 0.2))]),
    ]
    rounds = judged_rounds(results, [4, 7], 3)
    assert rounds.prompt.tolist() == [4, 7, 7] and rounds.judged.tolist() == [3, 2, 2]
    assert rounds.accepted.tolist() == [1, 2, 2]
    assert rounds.is_judged(2).tolist() == [True, False, False]
    assert rounds.is_reached(1).tolist() == [True, True, True]
    assert rounds.is_reached(2).tolist() == [False, False, False]
    assert rounds.survived(1).tolist() == [False, True, True]
    scores = score(rounds)
    assert [s.count for s in scores.survival] == [3, 3, 1]
    assert [s.count for s in scores.confidence] == [3, 3, 0]
    assert scores.survival[1].brier == pytest.approx((0.72**2 + 0.7**2 + 0.94**2) / 3)
    assert [set(part.prompt) for part in parts(rounds)] == [{4}, set(), {7}]


def test_no_prompt_is_in_two_parts():
    rounds = synthetic([1.0], size=100)
    assert [sorted(set(part.prompt.tolist())) for part in parts(rounds)] == [
        [0, 2, 4, 6, 8],
        [1, 5, 9],
        [3, 7],
    ]


def test_what_chose_the_temperatures_does_not_judge_them():
    """The last prompts, for which the temperatures are wrong, have no say and say that they are wrong."""
    said, right = synthetic([2.5] * 2), synthetic([1.0] * 2)
    scored = said.prompt % 4 == 3
    mixed = replace(said, confidences=np.where(scored[:, None], right.confidences, said.confidences))
    fitted = fit_regime(Regime(acceptance="rejection", temperature=0.7), mixed)
    assert fitted.temperatures == pytest.approx([2.5, 2.5], rel=0.25)
    assert set(fitted.prompts) == set(said.prompt[~scored].tolist())
    assert fitted.held_out_rounds == scored.sum() == fitted.choosing_rounds == fitted.rounds / 2
    assert fitted.after.overall.ece > fitted.before.overall.ece + 0.02


def test_with_two_prompts_there_is_a_fit_and_no_score():
    fitted = fit_regime(
        Regime(acceptance="rejection", temperature=0.7), synthetic([2.5] * 3, size=400, each=200)
    )
    assert fitted.temperatures[0] > 1 and fitted.prompts == (0, 1) and fitted.held_out_rounds == 0
    assert fitted.before.overall.ece is fitted.after.overall.ece is None
    assert fitted.to_json()["held_out_rounds"] == 0
