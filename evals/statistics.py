"""What two accuracies can and cannot say about each other.

A question that both runs answer alike carries no information about their difference, so everything here but
``stderr`` and ``unpaired_…`` works on the discordant ones: ``lost`` (the baseline is right, the candidate
wrong) and ``won`` (the reverse), out of ``n``. The loss is (lost - won) / n. ``churn`` is the share of
questions that flip without any loss, half of them each way: what two equally good kernels do to each other.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

Counts = NDArray[Any]

CONFIDENCE = 0.95  # one-sided, of the bound on the loss that decides PASS
HARM = 0.01  # McNemar's p below which a loss counts as shown
POWER = 0.80

PASS = "PASS"
FAIL = "FAIL"
INCONCLUSIVE = "INCONCLUSIVE"


def stderr(accuracy: float, n: int) -> float:
    """The standard error that lm_eval prints: sample deviation over sqrt(n), so n-1 under the root.

    NaN of one question, for which lm_eval prints N/A.
    """
    return math.nan if n == 1 else math.sqrt(accuracy * (1.0 - accuracy) / (n - 1))


def unpaired_interval(accuracy: float, n: int) -> float:
    """Half width of the 95 % interval of a difference of two accuracies that are treated as independent."""
    return float(stats.norm.ppf(0.975)) * math.sqrt(2.0 * accuracy * (1.0 - accuracy) / n)


def unpaired_detectable_loss(accuracy: float, n: int) -> float:
    """The smallest loss that two independent runs show with 80 % power at one-sided 5 %.

    (z_0.95 + z_0.80) · sqrt(2 p (1-p) / n), both accuracies near p.
    """
    z = float(stats.norm.ppf(CONFIDENCE) + stats.norm.ppf(POWER))
    return z * math.sqrt(2.0 * accuracy * (1.0 - accuracy) / n)


def mcnemar(lost: int, won: int) -> float:
    """One-sided exact p: the chance of at least ``lost`` losses among lost + won fair coin flips."""
    return float(stats.binom.sf(lost - 1, lost + won, 0.5)) if lost + won else 1.0


def mcnemar_power(n: int, churn: float, loss: float) -> float:
    """The chance that ``mcnemar`` comes out below 5 % when the true loss is ``loss``."""
    discordant = churn + loss
    if discordant <= 0.0:
        return 0.0
    flips = np.arange(n + 1)
    chance = stats.binom.pmf(flips, n, min(discordant, 1.0))
    critical = _fewest_significant(n)
    return float(np.sum(chance * stats.binom.sf(critical - 1, flips, (churn / 2 + loss) / discordant)))


@functools.cache
def _fewest_significant(n: int) -> Counts:
    """[n+1]: the fewest losses among 0 … n flips that are significant; one more than all where none is."""
    flips = np.arange(n + 1)
    # sf(k-1) < α first holds at k = isf(α) + 1: isf is the least k with P(X > k) ≤ α.
    return np.asarray(stats.binom.isf(1.0 - CONFIDENCE, flips, 0.5).astype(int) + 1)


def paired_detectable_loss(n: int, churn: float) -> float:
    """The smallest true loss that the exact paired test shows with 80 % power at one-sided 5 %.

    1 where it shows none: four questions, all lost, are no evidence yet.

    Raises: ValueError if ``churn`` is no share, or NaN.
    """
    if not 0.0 <= churn <= 1.0:
        raise ValueError(f"churn: is {churn}, must be from 0 to 1")
    if mcnemar_power(n, churn, 1.0 - churn) < POWER:
        return 1.0
    return float(
        optimize.brentq(
            lambda loss: mcnemar_power(n, churn, loss) - POWER, 0.0, 1.0 - churn, xtol=1.0 / (100 * n)
        )
    )


def loss_bound(lost: int, won: int, n: int) -> float:
    """Upper one-sided 95 % bound on the loss, by inverting Tango's score test.

    Source: Tango, Statistics in Medicine 17 (1998) 891-908, equations for the constrained estimate of
    the nuisance probability. Unlike Wald's it does not collapse to a point at lost = won = 0, where it is
    z² / (n + z²).
    """
    z = float(stats.norm.ppf(CONFIDENCE))
    at = (lost - won) / n
    highest = 1.0 - 1e-12
    if float(_score(lost, won, n, highest)) > -z:
        return 1.0
    return float(optimize.brentq(lambda loss: float(_score(lost, won, n, loss)) + z, at, highest))


def _score(lost: Counts | int, won: Counts | int, n: int, loss: float) -> Counts:
    """Tango's statistic: (lost - won - n·loss) over its deviation where the true loss is ``loss``.

    The nuisance, P(won), is at its maximum likelihood under that restriction: the root of a quadratic.
    """
    lost, won = np.asarray(lost, dtype=float), np.asarray(won, dtype=float)
    a = 2.0 * n
    b = -lost - won + (2.0 * n - lost + won) * loss
    c = -won * loss * (1.0 - loss)
    p_won = (np.sqrt(np.maximum(b * b - 4.0 * a * c, 0.0)) - b) / (2.0 * a)
    variance = n * (2.0 * p_won + loss * (1.0 - loss))
    difference = lost - won - n * loss
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(difference == 0.0, 0.0, difference / np.sqrt(np.maximum(variance, 0.0)))


def shown_smaller(lost: Counts | int, won: Counts | int, n: int, margin: float) -> Counts:
    """Whether ``loss_bound`` is below ``margin``, for many tables at once and without finding the bound."""
    return np.asarray(_score(lost, won, n, margin) < -stats.norm.ppf(CONFIDENCE))


def most_losses(n: int, won: int, margin: float) -> int:
    """The most losses with which a run of ``n`` still passes; -1 where even none would not."""
    lost = np.arange(n - won + 1)
    return int(np.flatnonzero(np.append(shown_smaller(lost, won, n, margin), False)).max(initial=-1))


def non_inferiority_power(n: int, churn: float, margin: float, loss: float = 0.0) -> float:
    """The chance that a candidate whose true loss is ``loss`` is shown to lose less than ``margin``."""
    discordant = churn + loss
    if discordant <= 0.0:
        return float(bool(shown_smaller(0, 0, n, margin)))
    flips = np.arange(n + 1)
    # For a fixed number of flips the score rises with the losses, so the passing tables are 0 … most.
    most = np.array([_most_of_flips(int(m), n, margin) for m in flips])
    chance = stats.binom.pmf(flips, n, discordant)
    return float(np.sum(chance * stats.binom.cdf(most, flips, (churn / 2 + loss) / discordant)))


def _most_of_flips(flips: int, n: int, margin: float) -> int:
    lost = np.arange(flips + 1)
    return int(np.flatnonzero(shown_smaller(lost, flips - lost, n, margin)).max(initial=-1))


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Two runs over the same ``n`` questions.

    both, neither: questions that both, or neither, answered rightly.
    lost, won: questions that only the baseline, or only the candidate, answered rightly.
    """

    both: int
    lost: int
    won: int
    neither: int

    @property
    def n(self) -> int:
        """Questions."""
        return self.both + self.lost + self.won + self.neither

    @property
    def baseline(self) -> float:
        """The baseline's accuracy."""
        return (self.both + self.lost) / self.n

    @property
    def candidate(self) -> float:
        """The candidate's accuracy."""
        return (self.both + self.won) / self.n

    @property
    def loss(self) -> float:
        """Baseline minus candidate."""
        return (self.lost - self.won) / self.n

    @property
    def churn(self) -> float:
        """Flips in excess of the loss, as a share of the questions."""
        return (self.lost + self.won - abs(self.lost - self.won)) / self.n


@dataclass(frozen=True, kw_only=True)
class Decision:
    """PASS, FAIL or INCONCLUSIVE, why in one line, and the figures that decided."""

    outcome: str
    reason: str
    p: float
    bound: float
    detectable: float


def check_margin(margin: float) -> float:
    """The margin. Raises: ValueError if it is no share, or NaN."""
    if not 0.0 < margin < 1.0:
        raise ValueError(f"margin: is {margin}, must be between 0 and 1")
    return margin


def decide(pair: Paired, margin: float) -> Decision:
    """The paired decision.

    PASS: the loss is below ``margin`` with 95 % confidence (Tango). FAIL: a loss is there (exact McNemar
    p < 0.01) and it is not shown to be below ``margin``. INCONCLUSIVE: neither. Absence of evidence is
    never a pass, and a baseline that answers too little to lose ``margin`` cannot be passed against.
    """
    check_margin(margin)
    if not pair.n:
        raise ValueError("questions: there are 0, a decision needs at least 1")
    p, bound = mcnemar(pair.lost, pair.won), loss_bound(pair.lost, pair.won, pair.n)
    detectable = paired_detectable_loss(pair.n, pair.churn)
    below, least = f"{bound:.2%} < {margin:.2%}", loss_bound(0, 0, pair.n)
    if pair.baseline <= margin:
        outcome = INCONCLUSIVE
        reason = f"the baseline solves {pair.baseline:.2%}, so no loss of {margin:.2%} could show"
    elif bound < margin:
        outcome, reason = PASS, f"95 % bound on the loss {below}"
        if p < HARM:
            reason += f"; there is a loss (p = {p:.2g}), shown to be smaller than the margin"
    elif p < HARM:
        outcome = FAIL
        reason = f"{pair.lost} questions lost, {pair.won} won: p = {p:.2g}, and the loss may be {bound:.2%}"
    elif least >= margin:
        outcome = INCONCLUSIVE
        reason = f"{pair.n} questions bound a loss to no less than {least:.2%}; the margin is {margin:.2%}"
    else:
        outcome = INCONCLUSIVE
        reason = f"95 % bound on the loss {bound:.2%} ≥ {margin:.2%}, and p = {p:.2g} shows none"
    return Decision(outcome=outcome, reason=reason, p=p, bound=bound, detectable=detectable)


@dataclass(frozen=True, kw_only=True)
class Published:
    """A gsm8k figure that a change to MLA was merged on, as it was printed."""

    change: str
    accuracy: float
    printed_stderr: float
    n: int

    @property
    def exact(self) -> float:
        """The accuracy before it was rounded for print: a whole number of questions."""
        return round(self.accuracy * self.n) / self.n


PUBLISHED = (
    Published(change="cache alignment removed", accuracy=0.96, printed_stderr=0.0197, n=100),
    Published(change="chunked prefill", accuracy=0.66, printed_stderr=0.0476, n=100),
    Published(change="FlashAttention decode, flexible", accuracy=0.6702, printed_stderr=0.0129, n=1319),
    Published(change="before it, flexible", accuracy=0.6687, printed_stderr=0.0130, n=1319),
    Published(change="FlashAttention decode, strict", accuracy=0.6619, printed_stderr=0.0130, n=1319),
    Published(change="before it, strict", accuracy=0.6573, printed_stderr=0.0131, n=1319),
    Published(change="K and V side by side in a block", accuracy=0.792, printed_stderr=0.0182, n=500),
    Published(change="before it", accuracy=0.770, printed_stderr=0.0188, n=500),
)


def published_table(churn: float = 0.05) -> str:
    """Markdown: each published figure, and the losses that it could have shown, unpaired and paired."""
    lines = [
        "| change | n | accuracy | stderr | 95 % interval of a difference | smallest loss seen, unpaired "
        f"| smallest loss seen, paired ({churn:.0%} churn) |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in PUBLISHED:
        cells = (
            row.change,
            str(row.n),
            f"{row.accuracy:.4g}",
            f"±{stderr(row.exact, row.n):.4f}",
            f"±{unpaired_interval(row.exact, row.n):.1%}",
            f"{unpaired_detectable_loss(row.exact, row.n):.1%}",
            f"{paired_detectable_loss(row.n, churn):.1%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
