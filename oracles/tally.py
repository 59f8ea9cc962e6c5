"""What is known of a campaign: counts for each backend, and kinds of failure."""

import json
from dataclasses import dataclass, field

from mla_ref.case import Case
from oracles.matrix import stage_of
from oracles.run_directory import Record
from oracles.verdict import BROKEN, HELD, NOT_RUN, Verdict, claims_something

Kind = tuple[str, ...]

# Shares of the elements looked at that are wrong.
EVERYWHERE, IN_PLACES = 0.5, 0.01


@dataclass
class Count:
    """Of one backend. ran, failed: cases of which something was claimed, with a claim that broke.

    worst: the largest error over its bound, and the oracle.
    """

    cases: int = 0
    ran: int = 0
    failed: int = 0
    held: int = 0
    broken: int = 0
    not_run: int = 0
    worst: tuple[float, str] = (0.0, "")


@dataclass
class Tally:
    """Counts by backend, and how often each kind of failure was found.

    first: a verdict of each kind, on a small case where one was found. reasons: of backends not tried.
    small: kinds for which one was looked for before. resumed: cases known when the campaign went on.
    """

    counts: dict[str, Count]
    found: dict[Kind, int] = field(default_factory=dict)
    first: dict[Kind, Verdict] = field(default_factory=dict)
    small: set[Kind] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)
    resumed: int = 0

    def add(self, backend: str, record: Record) -> list[Kind]:
        """Count one number in, and return the kinds of failure that are new."""
        count, new = self.counts[backend], []
        broken, claims = count.broken, False
        for plain in record.verdicts:
            count.held += plain["status"] in HELD
            count.not_run += plain["status"] in NOT_RUN
            claims = claims or claims_something(plain["status"], plain["num_checked"])
            if plain["worst"] is not None:
                count.worst = max(count.worst, (float(plain["worst"]["ratio"]), plain["oracle"]))
            if plain["status"] in BROKEN:
                count.broken += 1
                verdict = Verdict.on(Case.from_json(json.dumps(record.case)), plain)
                kind = kind_of(verdict)
                if kind not in self.found:
                    self.first.setdefault(kind, verdict)
                    new.append(kind)
                self.found[kind] = self.found.get(kind, 0) + 1
        count.cases += 1
        count.failed += count.broken > broken
        count.ran += claims
        return new

    def total(self, name: str) -> int:
        """One count, of all backends."""
        return sum(getattr(count, name) for count in self.counts.values())


def kind_of(verdict: Verdict) -> Kind:
    """Failures of one kind are taken for one failure.

    Backend, variant, oracle and status; which tensor is wrong, and whether everywhere, in places or hardly
    anywhere; decode, MTP, prefill or chunked prefill.
    """
    tensor = spread = ""
    if verdict.worst is not None:
        share = verdict.num_bad / max(verdict.num_checked, 1)
        tensor = verdict.worst.tensor
        spread = "everywhere" if share > EVERYWHERE else "in places" if share > IN_PLACES else "in few places"
    stage = stage_of(verdict.case)
    return verdict.backend, verdict.variant, verdict.oracle, verdict.status, tensor, spread, stage
