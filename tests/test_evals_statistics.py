import math

import numpy as np
import pytest

pytest.importorskip("scipy", reason="the statistics of the gate need scipy")

from scipy import optimize, stats

from evals.statistics import (
    FAIL,
    INCONCLUSIVE,
    PASS,
    PUBLISHED,
    Paired,
    Published,
    _score,
    decide,
    loss_bound,
    mcnemar,
    mcnemar_power,
    most_losses,
    non_inferiority_power,
    paired_detectable_loss,
    published_table,
    shown_smaller,
    stderr,
    unpaired_detectable_loss,
    unpaired_interval,
)


@pytest.mark.parametrize("churn", [-0.1, 1.1, math.nan])
def test_churn_is_a_share(churn: float):
    with pytest.raises(ValueError, match=f"churn: is {churn}, must be from 0 to 1"):
        published_table(churn)


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.change}-{row.accuracy}")
def test_the_published_stderr_is_reproduced(row: Published):
    assert round(stderr(row.exact, row.n), 4) == row.printed_stderr


def test_what_the_published_runs_could_see():
    seen = {
        (row.accuracy, row.n): (
            round(100 * unpaired_interval(row.accuracy, row.n), 1),
            round(100 * unpaired_detectable_loss(row.accuracy, row.n), 1),
            round(100 * paired_detectable_loss(row.n, 0.05), 1),
        )
        for row in PUBLISHED
    }
    assert seen[0.96, 100] == (5.4, 6.9, 10.0)
    assert seen[0.66, 100] == (13.1, 16.7, 10.0)
    assert seen[0.6702, 1319] == (3.6, 4.6, 1.9)
    assert seen[0.792, 500] == (5.0, 6.4, 3.3)


def test_real_losses_against_the_published_sizes():
    # A chunked-prefill bug took 0.93 to 0.6467: any run sees it. A merge bug took 3 points: n = 100 does not.
    assert unpaired_detectable_loss(0.93, 100) < 0.93 - 0.6467
    assert paired_detectable_loss(1319, 0.05) < 0.03 < paired_detectable_loss(100, 0.0)
    # The gap that the decode change showed on strict-match is a quarter of an unpaired deviation.
    gap = (0.6619 - 0.6573) / math.hypot(stderr(0.6619, 1319), stderr(0.6573, 1319))
    assert round(gap, 2) == 0.25


def test_published_table_has_a_row_for_each_figure():
    lines = published_table().splitlines()
    assert len(lines) == 2 + len(PUBLISHED)
    assert lines[3] == "| chunked prefill | 100 | 0.66 | ±0.0476 | ±13.1% | 16.7% | 10.0% |"


def test_mcnemar_agrees_with_the_library():
    for lost, won in ((0, 0), (1, 0), (8, 0), (5, 5), (3, 9), (30, 12)):
        want = stats.binomtest(lost, lost + won, alternative="greater").pvalue if lost + won else 1.0
        assert round(mcnemar(lost, won), 12) == round(want, 12)
    assert mcnemar(8, 0) == 2.0**-8


def test_mcnemar_power_is_the_share_of_significant_tables():
    n, churn, loss = 30, 0.2, 0.1
    p_lost, p_won = churn / 2 + loss, churn / 2
    power = sum(
        stats.multinomial.pmf((lost, won, n - lost - won), n, (p_lost, p_won, 1 - p_lost - p_won))
        for lost in range(n + 1)
        for won in range(n + 1 - lost)
        if mcnemar(lost, won) <= 0.05
    )
    assert round(mcnemar_power(n, churn, loss), 10) == round(float(power), 10)


def test_detectable_loss_at_the_usual_sizes():
    got = [[round(100 * paired_detectable_loss(n, c), 1) for c in (0, 0.02, 0.1)] for n in (100, 500, 1319)]
    assert got == [[6.6, 8.3, 12.1], [1.3, 2.4, 4.4], [0.5, 1.3, 2.5]]


def test_so_few_questions_show_no_loss():
    assert [paired_detectable_loss(n, 0.0) for n in (1, 4)] == [1.0, 1.0]
    assert 0.5 < paired_detectable_loss(6, 0.0) < 1.0


def _log_likelihood(p_won, lost, won, n, loss):
    p_lost = p_won + loss
    rest = 1.0 - p_lost - p_won
    return sum(k * math.log(p) for k, p in ((lost, p_lost), (won, p_won), (n - lost - won, rest)) if k)


@pytest.mark.parametrize(
    ("lost", "won", "n", "loss"), [(7, 3, 50, 0.04), (1, 6, 40, 0.1), (20, 20, 200, 0.02)]
)
def test_score_uses_the_restricted_maximum_of_the_likelihood(lost, won, n, loss):
    best = optimize.minimize_scalar(
        lambda p: -_log_likelihood(p, lost, won, n, loss),
        bounds=(1e-12, (1 - loss) / 2 - 1e-12),
        method="bounded",
        options={"xatol": 1e-12},
    ).x
    want = (lost - won - n * loss) / math.sqrt(n * (2 * best + loss * (1 - loss)))
    assert round(float(_score(lost, won, n, loss)), 6) == round(want, 6)


def test_bound_without_flips_is_wilsons():
    z2 = stats.norm.ppf(0.95) ** 2
    for n in (100, 200, 1319):
        assert round(loss_bound(0, 0, n), 12) == round(z2 / (n + z2), 12)
    assert [round(100 * loss_bound(0, 0, n), 2) for n in (100, 200, 500, 1319)] == [2.63, 1.33, 0.54, 0.2]


def test_bound_covers_the_true_loss_and_is_not_idle():
    generator = np.random.default_rng(7)
    for n, p_lost, p_won in ((100, 0.05, 0.02), (200, 0.02, 0.02), (1319, 0.03, 0.025)):
        tables = generator.multinomial(n, (p_lost, p_won, 1 - p_lost - p_won), size=4000)
        missed = float(np.mean(shown_smaller(tables[:, 0], tables[:, 1], n, p_lost - p_won + 1e-12)))
        assert 0.02 < missed < 0.06, (n, missed)


def test_bound_is_where_shown_smaller_turns():
    for lost, won, n in ((0, 0, 100), (5, 2, 200), (40, 33, 1319), (0, 9, 50), (100, 0, 100), (1, 0, 1)):
        bound = loss_bound(lost, won, n)
        assert bound <= 1.0
        if bound < 1.0:
            assert not shown_smaller(lost, won, n, bound - 1e-9)
            assert shown_smaller(lost, won, n, bound + 1e-9)


def test_most_losses_that_pass():
    assert [most_losses(200, won, 0.05) for won in (0, 5, 10)] == [4, 8, 11]
    assert [most_losses(1319, won, 0.02) for won in (0, 10, 20, 33, 66)] == [18, 25, 33, 44, 72]
    assert most_losses(100, 0, 0.02) == -1


@pytest.mark.parametrize("loss", [0.0, 0.04])
def test_non_inferiority_power_is_the_share_of_passing_tables(loss: float):
    n, churn, margin = 60, 0.1, 0.1
    lost, won = _tables(n)
    passing = _chance(lost, won, n, churn / 2 + loss, churn / 2)[shown_smaller(lost, won, n, margin)]
    assert round(non_inferiority_power(n, churn, margin, loss), 10) == round(float(passing.sum()), 10)


def test_non_inferiority_power_at_the_usual_size():
    assert [round(non_inferiority_power(1319, c, 0.02), 2) for c in (0, 0.05, 0.2)] == [1.0, 0.94, 0.49]


@pytest.mark.parametrize(
    ("pair", "margin", "outcome", "word"),
    [
        (Paired(both=900, lost=10, won=10, neither=399), 0.02, PASS, "bound on the loss"),
        (Paired(both=900, lost=9, won=0, neither=410), 0.02, PASS, "there is a loss"),
        (Paired(both=800, lost=60, won=10, neither=449), 0.02, FAIL, "60 questions lost, 10 won"),
        (Paired(both=900, lost=40, won=25, neither=354), 0.02, INCONCLUSIVE, "shows none"),
        (Paired(both=66, lost=0, won=0, neither=34), 0.02, INCONCLUSIVE, "no less than 2.63%"),
        (Paired(both=5, lost=1, won=0, neither=1313), 0.02, INCONCLUSIVE, "the baseline solves"),
        (Paired(both=25, lost=0, won=0, neither=975), 0.025, INCONCLUSIVE, "the baseline solves"),
    ],
)
def test_decision(pair: Paired, margin: float, outcome: str, word: str):
    decision = decide(pair, margin)
    assert decision.outcome == outcome
    assert word in decision.reason


def test_a_bound_that_is_the_margin_is_not_below_it():
    pair = Paired(both=900, lost=10, won=10, neither=399)
    bound = loss_bound(pair.lost, pair.won, pair.n)
    assert decide(pair, bound).outcome == INCONCLUSIVE
    assert decide(pair, math.nextafter(bound, 1.0)).outcome == PASS


def test_churn_is_what_flips_in_excess_of_the_loss():
    assert [Paired(both=80, lost=lost, won=won, neither=10).churn for lost, won in ((7, 3), (3, 7))] == [
        0.06
    ] * 2
    assert Paired(both=90, lost=10, won=0, neither=0).churn == 0.0


def test_decision_refuses_what_is_no_question():
    with pytest.raises(ValueError, match="margin: is 0"):
        decide(Paired(both=1, lost=0, won=0, neither=0), 0.0)
    with pytest.raises(ValueError, match="there are 0"):
        decide(Paired(both=0, lost=0, won=0, neither=0), 0.02)


def _tables(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Every (lost, won) of ``n`` questions."""
    lost, won = np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij")
    possible = lost + won <= n
    return lost[possible], won[possible]


def _chance(lost: np.ndarray, won: np.ndarray, n: int, p_lost: float, p_won: float) -> np.ndarray:
    rest = max(0.0, 1.0 - p_lost - p_won)
    return stats.multinomial.pmf(np.stack([lost, won, n - lost - won], axis=1), n, (p_lost, p_won, rest))


def test_bound_is_the_published_one():
    """Airway reactivity of 21 children, 1 and 7 discordant pairs: Tango's 95 % interval is -0.517 … -0.026.

    Source: Fagerland, Lydersen and Laake, Statistics in Medicine 33 (2014) 2850-2875.
    """
    z = stats.norm.ppf(0.975)
    ends = [
        optimize.brentq(lambda loss, z=z: float(_score(1, 7, 21, loss)) - z, -0.999, -6 / 21),
        optimize.brentq(lambda loss, z=z: float(_score(1, 7, 21, loss)) + z, -6 / 21, 0.999),
    ]
    assert [round(end, 3) for end in ends] == [-0.517, -0.026]


@pytest.mark.parametrize(("n", "margin"), [(60, 0.10), (200, 0.05)])
def test_a_kernel_that_loses_the_margin_passes_in_five_runs_of_a_hundred(n: int, margin: float):
    """Every table of n questions by its exact chance, at every rate of flips: near 5 %, not exactly."""
    lost, won = _tables(n)
    passes = shown_smaller(lost, won, n, margin)
    worst = max(
        float(_chance(lost, won, n, churn / 2 + margin, churn / 2)[passes].sum())
        for churn in (0.0, *np.geomspace(0.002, 0.9 - margin, 20))
    )
    assert 0.045 < worst < 0.055, worst


def test_an_equal_kernel_fails_in_one_run_of_a_hundred_at_most():
    n = 80
    lost, won = _tables(n)
    fails = np.array([mcnemar(int(a), int(b)) < 0.01 for a, b in zip(lost, won, strict=True)])
    worst = max(float(_chance(lost, won, n, c / 2, c / 2)[fails].sum()) for c in np.linspace(0.01, 1.0, 34))
    assert 0.003 < worst <= 0.01, worst


def test_mcnemar_is_the_coins_that_can_be_counted():
    """All 2^k ways in which k flips can fall, each as likely as any other."""
    for flips in range(11):
        losses = np.array([bin(way).count("1") for way in range(2**flips)])
        for lost in range(flips + 1):
            assert round(mcnemar(lost, flips - lost), 12) == round(float(np.mean(losses >= lost)), 12)


def test_mcnemar_is_half_the_two_sided_one_of_statsmodels():
    tables = pytest.importorskip("statsmodels.stats.contingency_tables", reason="compares with statsmodels")
    for lost, won in ((1, 0), (8, 0), (9, 3), (30, 12), (200, 140), (1319, 0)):
        two_sided = tables.mcnemar([[50, lost], [won, 50]], exact=True).pvalue
        assert round(2 * mcnemar(lost, won), 12) == round(float(two_sided), 12)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 20])
def test_every_table_is_decided(n: int):
    """Tables of one question, of no flips and of flips alone included: figures are in their ranges."""
    for lost, won in zip(*_tables(n), strict=True):
        for both in {0, (n - lost - won) // 2, n - lost - won}:
            pair = Paired(both=int(both), lost=int(lost), won=int(won), neither=int(n - lost - won - both))
            decision = decide(pair, 0.1)
            assert 0.0 < decision.p <= 1.0
            assert pair.loss <= decision.bound <= 1.0
            assert 0.0 < decision.detectable <= 1.0
            assert -1.0 <= pair.loss <= 1.0
            assert 0.0 <= pair.churn <= 1.0
            assert (decision.outcome == PASS) <= (decision.bound < 0.1)
            assert (decision.outcome == FAIL) <= (decision.p < 0.01)


def test_more_losses_never_help_and_more_wins_never_hurt():
    n = 40
    bound = np.array(
        [[loss_bound(lost, won, n) if lost + won <= n else np.nan for won in range(21)] for lost in range(21)]
    )
    assert bool((np.diff(bound, axis=0) >= 0.0).all())
    assert bool((np.diff(bound, axis=1) <= 1e-12).all())


@pytest.mark.parametrize(("n", "churn"), [(12, 0.0), (20, 0.2), (40, 0.1)])
def test_the_detectable_loss_is_detected_in_four_runs_of_five(n: int, churn: float):
    lost, won = _tables(n)
    shown = np.array([mcnemar(int(a), int(b)) <= 0.05 for a, b in zip(lost, won, strict=True)])
    loss = paired_detectable_loss(n, churn)
    power = [
        float(_chance(lost, won, n, churn / 2 + loss * by, churn / 2)[shown].sum())
        for by in (0.98, 1.0, 1.02)
    ]
    assert power[0] < 0.8 < power[2], (loss, power)
    assert round(power[1], 2) == 0.8


def test_the_error_of_one_question_is_unknown():
    assert math.isnan(stderr(1.0, 1))
