"""The baselines and numbers of `dspark evaluate`, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspark import SamplingParams
from dspark.checkpoint.calibration import Regime
from dspark.core import Noise, accept
from dspark.evaluate.answers import Answer, Estimate, by_prompt, ratio
from dspark.evaluate.head import Head
from dspark.evaluate.ngram import Lookup, lookup_rounds
from dspark.evaluate.numbers import measure
from dspark.evaluate.plots import bars, positions
from dspark.evaluate.report import main_rows, tables
from dspark.evaluate.run import Evaluated
from dspark.result import Round


def test_lookup_proposes_what_followed_the_longest_run():
    text = Lookup([1, 2, 3, 4, 9, 3, 5, 1, 2, 3])
    # 1 2 3 was followed by 4 9 3 5; its shorter ends 2 3 and 3 (followed by 5 later) give way to it.
    assert text.propose(4) == [4, 9, 3, 5]
    assert text.propose(2) == [4, 9]
    text.push(7)
    assert text.propose(4) == []  # 7 is new
    text.push(3)
    assert text.propose(3) == [7, 3]  # after the latest 3 that something follows, up to the end of the text


def test_lookup_goes_by_the_latest_occurrence_and_not_by_itself():
    text = Lookup([1, 2, 5, 1, 2, 6, 1, 2])
    assert text.propose(1) == [6]
    assert Lookup([4]).propose(3) == [] and Lookup([]).propose(3) == []
    assert Lookup([4, 4]).propose(3) == [4]


def test_lookup_rounds_by_hand():
    #        prompt            the prefill's token 1, then 2 3 4 8, then 1 2 3
    rounds = lookup_rounds([1, 2, 3, 4], [1, 2, 3, 4, 8, 1, 2, 3], 3, max_tokens=8)
    shown = [(r.drafted, r.verified, r.accepted, r.committed) for r in rounds]
    # 2 3 4 is proposed and kept, 8 the bonus; nothing is known after 8; 2 alone, as there is room for two.
    assert shown == [(3, 3, 3, 4), (0, 0, 0, 1), (1, 1, 1, 2)]
    assert 1 + sum(r.committed for r in rounds) == 8


def test_lookup_rounds_end_with_the_text():
    # The text ends by its own token 3 although there would be room: nothing is committed after it.
    rounds = lookup_rounds([1, 2, 3, 4], [1, 2, 3], 3, max_tokens=50)
    assert [(r.drafted, r.accepted, r.committed) for r in rounds] == [(3, 2, 2)]
    assert lookup_rounds([1], [5], 3, max_tokens=50) == ()


def test_a_certain_proposal_is_accepted_as_often_as_the_target_draws_it():
    """What the lookup drafter's rounds rest on, by the acceptance rule itself."""
    p = np.array([0.5, 0.3, 0.2])
    certain = np.full((1, 3), -np.inf)
    certain[0, 1] = 0.0
    rows, params = np.log(np.tile(p, (2, 1))), SamplingParams(temperature=1.0)
    outcomes = [accept(rows, [1], certain, "rejection", params, Noise(seed, 1)) for seed in range(6000)]
    first = np.array([1 if accepted else token for accepted, token in outcomes])
    counts = np.bincount(first, minlength=3)
    assert (((counts - 6000 * p) ** 2) / (6000 * p)).sum() < 13.8  # chi-square, 2 degrees, 1 in 1000
    assert sum(accepted for accepted, _ in outcomes) == counts[1]


def an_answer(prompt, rounds, tokens=10, seconds=1.0, looping=False):
    rounds = tuple(Round(3, v, a, (), c) for v, a, c in rounds)
    return Answer(prompt, tokens, rounds, seconds, looping)


def test_numbers_by_hand():
    draft = [
        an_answer(0, [(3, 3, 4), (3, 0, 1), (2, 1, 2)], tokens=8, seconds=2.0),
        an_answer(1, [(3, 2, 2)], tokens=3, seconds=1.0, looping=True),
    ]
    plain = [an_answer(0, [], tokens=8, seconds=4.0), an_answer(1, [], tokens=3, seconds=1.5)]
    measured = measure(draft, plain, 3)
    n = measured.every
    assert n.acceptance_length_pooled.value == pytest.approx(9 / 4)
    assert n.acceptance_length_mean_of_requests.value == pytest.approx((7 / 3 + 2) / 2)
    assert n.verified_per_round.value == pytest.approx(11 / 4)
    assert n.verify_rate.value == pytest.approx(11 / 4 / 3)
    # The last round ended its text at its second token: its third is not judged.
    assert n.acceptance_rate.value == pytest.approx(6 / 10)
    assert [(p.reached, p.accepted) for p in n.positions] == [(4, 3), (3, 2), (1, 1)]
    assert [p.rate.value for p in n.positions] == pytest.approx([3 / 4, 2 / 3, 1 / 1])
    assert [p.survival.value for p in n.positions] == pytest.approx([3 / 4, 2 / 4, 1 / 2])
    assert n.tokens_per_second.value == pytest.approx(11 / 3)
    assert n.over_plain.value == pytest.approx(5.5 / 3)
    assert measured.looping == 0.5
    straight, circling = measured.without_looping, measured.of_looping
    assert straight.acceptance_length_pooled.value == pytest.approx(7 / 3)
    assert straight.tokens_per_second.value == pytest.approx(4) and straight.over_plain.value == 2.0
    assert [(p.reached, p.accepted) for p in straight.positions] == [(3, 2), (2, 1), (1, 1)]
    assert circling.acceptance_length_pooled.value == pytest.approx(2.0) and circling.over_plain.value == 1.5
    alone = measure(plain, plain, 3)
    assert alone.of_looping is None and alone.without_looping.over_plain is None
    alone = alone.every
    assert alone.acceptance_length_pooled is None and alone.over_plain is None and alone.positions == ()


def test_rounds_without_a_draft_are_counted_and_told_apart():
    rounds = (Round(3, 2, 1, (), 2), Round(0, 0, 0, (), 1), Round(1, 1, 1, (), 2), Round(0, 0, 0, (), 1))
    answers = [Answer(0, 6, rounds, 1.0, False)]
    n = measure(answers, [an_answer(0, [])], 3).every
    assert (n.rounds, n.rounds_without_draft, n.share_without_draft) == (4, 2, 0.5)
    assert n.verified_per_round.value == pytest.approx(3 / 4)
    assert n.verify_rate.value == pytest.approx(3 / 12)
    assert n.acceptance_length_pooled.value == pytest.approx(6 / 4)


def test_gains_without_looping_are_of_requests_that_loop_on_neither_side():
    draft = [an_answer(p, [(3, 1, 2)], looping=p == 0) for p in range(3)]
    plain = [an_answer(p, [], seconds=2.0 + p, looping=p == 1) for p in range(3)]
    straight = measure(draft, plain, 3).without_looping
    assert straight.answers == 2 and straight.tokens_per_second.value == pytest.approx(10)
    assert straight.over_plain.value == pytest.approx(4.0)  # of the third alone
    every = [replace(answer, looping=True) for answer in draft]
    assert measure(every, plain, 3).without_looping is None


@pytest.mark.parametrize("prompts", [1, 2, 3])
def test_few_prompts_have_no_interval(prompts):
    answers = [an_answer(p, [(3, p, p + 1)] * 2) for p in range(prompts) for _ in range(2)]
    found = measure(answers, answers, 3)
    pooled = found.every.acceptance_length_pooled
    assert pooled.value == pytest.approx((prompts + 1) / 2)
    has_one = prompts >= 3
    assert (pooled.low is not None, pooled.high is not None) == (has_one, has_one)
    shown = Evaluated(Regime(acceptance="rejection", temperature=0.0), {"all": {"draft": found}}, NO_HEAD)
    assert ("[-]" in main_rows(shown)[1][4]) is not has_one
    bars(shown, "acceptance_length_pooled")


NO_HEAD = Head(None, None, "none")


def test_tables_without_looping_answers_are_there_where_some_loop():
    straight = [an_answer(p, [(3, 1, 2)]) for p in range(3)]
    for looping in (False, True):
        draft = [replace(straight[0], looping=looping), *straight[1:]]
        methods = {"plain": measure(straight, straight, 3), "draft": measure(draft, straight, 3)}
        shown = Evaluated(Regime(acceptance="rejection", temperature=0.0), {"all": methods}, NO_HEAD)
        found = dict(tables(shown))
        speed = found.get("Acceptance and speed, without looping answers")
        positions = found.get("Acceptance by position, without looping answers")
        assert (speed is not None, positions is not None) == (looping, looping)
    assert [row[2] for row in speed[1:]] == ["3", "2"]
    assert max(map(len, map("  ".join, [row for _, rows in found.items() for row in rows]))) < 170


def test_intervals_cover_the_truth_as_often_as_they_say():
    generator = np.random.default_rng(5)
    covered = 0
    for _ in range(200):
        below = generator.integers(5, 15, 60).astype(float)
        above = below * generator.normal(2.0, 0.5, 60)
        estimate = ratio([above], [below])
        assert estimate.low < estimate.value < estimate.high
        covered += estimate.low < 2.0 < estimate.high
    assert 178 <= covered <= 199  # 95 % of 200, within 4 standard errors


def test_shares_have_the_intervals_of_prompts_drawn_again():
    """Those of acceptance lengths: with one token drafted, a round commits 1 + what it accepted."""
    generator = np.random.default_rng(2)
    answers = [
        an_answer(p, [(1, a, 1 + a) for a in generator.random(9) < generator.random()]) for p in range(12)
    ]
    n = measure(answers, answers, 2).every
    length = n.acceptance_length_pooled
    for share in (n.acceptance_rate, n.positions[0].rate, n.positions[0].survival):
        assert 0 < share.low < share.value < share.high < 1
        for one, other in zip(share.to_json().values(), length.to_json().values(), strict=True):
            assert one == pytest.approx(other - 1)
    assert n.verify_rate == Estimate(0.5, 0.5, 0.5) and n.verified_per_round == Estimate(1.0, 1.0, 1.0)
    assert n.to_json()["acceptance_by_position"][0]["rate"] == n.positions[0].rate.to_json()
    assert n.positions[1].rate is None is n.positions[1].survival


def test_positions_are_shown_for_each_data_set_with_intervals():
    one = [an_answer(p, [(3, p % 4, p % 4 + 1)] * 2) for p in range(4)]
    two = [an_answer(p, [(2, 2, 3)]) for p in range(4, 7)]
    sets = {"one": one, "two": two, "all": one + two}
    measured = {
        name: {"plain": measure([replace(a, rounds=()) for a in s], s, 3), "draft": measure(s, s, 3)}
        for name, s in sets.items()
    }
    shown = Evaluated(Regime(acceptance="rejection", temperature=0.0), measured, NO_HEAD)
    head, *rows = dict(tables(shown))["Acceptance by position, all answers"]
    assert head == ("data set", "position", "draft given prefix", "draft whole prefix")
    assert [row[:2] for row in rows] == [(name, str(k)) for name in sets for k in (1, 2, 3)]
    cells = {row[:2]: row[2:] for row in rows}
    assert cells["one", "1"][0].startswith("75.0% [") and cells["one", "1"][0].endswith("]")
    assert cells["two", "2"] == ("100.0% [100.0, 100.0]",) * 2 and cells["two", "3"] == ("-", "-")
    assert main_rows(shown)[2][6].startswith("100.0% [100.0, ")
    positions(shown)


def test_sums_are_by_prompt():
    answers = [an_answer(4, []), an_answer(2, []), an_answer(4, [])]
    assert by_prompt(answers, [2, 4], lambda a: a.tokens).tolist() == [10, 20]
    assert ratio([np.zeros(0)], [np.zeros(0)]) is None
