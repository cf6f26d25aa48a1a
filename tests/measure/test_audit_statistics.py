"""The audit's statistics against scipy, and its tests on texts of known law, without a model."""

import numpy as np
import pytest
import torch
from scipy import stats

from dspark.audit import statistics as st
from dspark.audit.reference import law
from dspark.audit.sampled import KINDS, Law, check_sampled
from dspark.result import Round
from results import result_of

LEVEL = 1e-6
VOCABULARY = 50


@pytest.mark.parametrize("count", [1, 2, 17, 1000])
def test_ks_agrees_with_scipy(count):
    numbers = np.random.default_rng(count).random(count) ** 1.2
    expected = stats.kstest(numbers, "uniform")
    distance = st.ks_distance(numbers)
    assert distance == pytest.approx(expected.statistic, abs=1e-12)
    assert st.ks_p_value(distance, count) >= expected.pvalue - 1e-12  # a bound from above


def test_ks_bound_is_close_in_the_tail():
    count = 5000
    exact = stats.kstwo.sf(st.ks_limit(count, LEVEL), count)
    assert 0.7 * LEVEL < exact <= LEVEL
    assert st.ks_p_value(st.ks_limit(count, LEVEL), count) == pytest.approx(LEVEL)


def test_ks_catches_what_it_says_it_detects():
    count = 2000
    shift = st.ks_detectable(count, LEVEL)
    generator = np.random.default_rng(0)
    caught = 0
    for _ in range(200):
        # Mass `shift` is moved from the lower half to the upper one: the distribution is off by it at 1/2.
        numbers = generator.random(count)
        low = numbers < 0.5
        numbers[low & (generator.random(count) < 2 * shift)] += 0.5
        caught += st.ks_p_value(st.ks_distance(numbers), count) < LEVEL
    assert caught >= 198


def test_lag_correlation():
    generator = np.random.default_rng(1)
    numbers = generator.random(20000)
    pairs = np.stack([numbers[:-1], numbers[1:]], axis=1)
    assert st.lag_p_value(st.lag_correlation(pairs), len(pairs)) > 1e-3
    # Every fifth number is the one before it again: correlation 0.2.
    again = numbers.copy()
    again[4::5] = again[3::5]
    pairs = np.stack([again[:-1], again[1:]], axis=1)
    correlation = st.lag_correlation(pairs)
    assert correlation == pytest.approx(0.2, abs=0.03)
    assert st.lag_p_value(correlation, len(pairs)) < 1e-9
    assert st.lag_p_value(0.02, 2500) == pytest.approx(2 * stats.norm.sf(1.0))


def test_smallest_caught_share():
    generator = np.random.default_rng(2)
    planted = np.zeros(4000)
    limit = st.ks_limit(4000, LEVEL)
    share = st.smallest_caught_share(planted, lambda u: st.ks_distance(u) > limit, generator)
    assert limit < share < 2 * limit + 1 / 128  # zeros shift the distribution function at 0 by their share
    assert st.smallest_caught_share(planted, lambda u: False, generator) is None


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.9), (0.8, 0.3), (1.0, 1e-6)]
)
def test_law_follows_the_definition(temperature, top_p):
    rows = torch.randn(20, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 2
    found = law(rows, temperature, top_p)
    for row, given in zip(rows, found, strict=True):
        weights = np.exp(row.numpy() / temperature)
        weights /= weights.sum()
        expected, mass = np.zeros(12), 0.0
        for token in np.argsort(-weights, kind="stable"):
            if mass >= top_p:
                break
            expected[token] = weights[token]
            mass += weights[token]
        np.testing.assert_allclose(given.numpy(), expected / expected.sum(), atol=1e-12)


class ToyReference:
    """Logits that are a function of the last token alone."""

    def __init__(self):
        generator = torch.Generator().manual_seed(4)
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64) * 2

    def rows(self, prompt, output):
        return self.table[[prompt[-1], *output[:-1]]]

    def bound(self, row):
        return 1e-10


def toy_results(reference, wrong=None, share=0.0, count=40, length=100):
    """Texts of the toy's laws, a share of the tokens from `wrong(p)`; every second round ends in a bonus."""
    generator = np.random.default_rng(5)
    results = []
    for number in range(count):
        tokens = [number % VOCABULARY]
        for _ in range(length):
            p = law(reference.table[tokens[-1:]], 1.0, 1.0)[0].numpy()
            if wrong is not None and generator.random() < share:
                p = wrong(p)
            tokens.append(int(generator.choice(VOCABULARY, p=p / p.sum())))
        rounds = [Round(1, 1, i % 2, (), 1 + i % 2) for i in range(66)]  # 99 tokens
        results.append(result_of(tokens[:1], tokens[1:], rounds))
    return results


def check(results, reference):
    generator = np.random.default_rng(6)
    return check_sampled(results, reference, Law("toy"), (), LEVEL, generator, lambda *_: None)


def argmax(p):
    return (p == p.max()).astype(float)


WRONG = {KINDS[0]: argmax, KINDS[1]: np.sqrt}


@pytest.fixture(scope="module")
def toy():
    reference = ToyReference()
    return reference, check(toy_results(reference), reference)


def test_right_texts_pass(toy):
    _, found = toy
    assert found.failures() == []
    assert len(found.tests) == 6
    assert all(test.p_value > 1e-3 for test in found.tests)
    bonus = next(test for test in found.tests if "bonus" in test.name)
    assert bonus.count == 40 * 33
    assert "too sharp" in found.power()


@pytest.mark.parametrize("kind", KINDS)
def test_the_stated_power_is_true(toy, kind):
    reference, found = toy
    planted = next(p for p in found.planted if p.kind == kind)
    assert 0.01 < planted.total_variation < planted.share < 0.5
    biased = check(toy_results(reference, WRONG[kind], planted.share * 1.1), reference)
    assert any("distance, all tokens, by falling probability" in line for line in biased.failures())


def test_biased_bonus_is_found_among_many_right_tokens(toy):
    reference, _ = toy
    results = toy_results(reference)
    changed = []
    for result in results:
        tokens, end = list(result.token_ids), 1
        for r in result.rounds:
            end += r.committed
            if r.accepted:
                tokens[end - 1] = int(reference.table[tokens[end - 2]].argmax())
                # What follows was drawn after another token: only the bonus tokens are looked at here.
        changed.append(result_of(result.prompt_token_ids, tokens, result.rounds))
    failures = check(changed, reference).failures()
    assert any("bonus tokens" in line for line in failures)


@pytest.mark.parametrize("bound", [None, 0.15])
def test_an_impossible_token_fails(toy, bound, monkeypatch):
    reference, _ = toy
    if bound is not None:  # as of a target in bfloat16
        monkeypatch.setattr(reference, "bound", lambda row: bound)
    result = toy_results(reference, count=1)[0]
    tokens = list(result.token_ids)
    tokens[50] = int(reference.table[tokens[49]].argmin())
    generator = np.random.default_rng(7)
    changed = [result_of(result.prompt_token_ids, tokens, result.rounds)]
    found = check_sampled(changed, reference, Law("toy", 1.0, 0.5), (), LEVEL, generator, lambda *_: None)
    assert found.impossible >= 1
    assert any("probability 0" in line for line in found.failures())


def test_few_tokens_are_not_tested_and_it_is_said(toy):
    reference, _ = toy
    found = check(toy_results(reference, count=1, length=10), reference)
    assert found.tests == () and found.planted == ()
    assert found.power() == "too few tokens to catch even a distribution that is entirely wrong"
