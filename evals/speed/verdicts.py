"""Whether what was timed is right, at the shape that was timed: the oracles on rows of the real output.

The truth of a whole decode or prefill would take longer than the race, so for attention and merges it is
that of some rows, and exact for these: of the first, the middle and the last request, and where they have
many new tokens, of the first, the middle and the last of them. A row's truth needs its own keys alone: rows
a … a+m of a request are the whole of one that has m new tokens and kv_len - q_len + a + m cached ones. Writes
and gathers are judged whole.
"""

from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from mla_ref.backend import Backend
from mla_ref.case import Case
from mla_ref.numerics import Numerics
from mla_ref.problem import problem
from oracles.bounds import ADMISSIBLE, Admissible
from oracles.oracle import Trial, rules
from oracles.verdict import FAIL, PASS, Finding

ORACLES = {
    "latent_attention": ("value", "lse"),
    "attention": ("value", "lse"),
    "merge_states": ("value", "lse"),
    "cache_gather": ("value",),
    "cache_write": ("stored",),
    "rope_cache_write": ("stored", "value"),
}
FEW = 8  # new tokens of a request that are judged at one place
MANY = 64  # rows of a merge


class Judged(NamedTuple):
    """status: of the verdict. oracles: that judged. rows: how many of the output they saw.

    ratio: the worst error over its bound.
    """

    status: str
    detail: str
    oracles: tuple[str, ...]
    rows: int
    ratio: float


class Sample(NamedTuple):
    """Some rows of an output, and inputs of which they are the whole output."""

    rows: torch.Tensor
    inputs: Any


def places(length: int, few: int) -> list[range]:
    """First, middle and last ``few`` of ``length``; all of them where they would overlap."""
    if length <= 3 * few:
        return [range(length)] if length else []
    middle = (length - few) // 2
    return [range(few), range(middle, middle + few), range(length - few, length)]


def sample(name: str, inputs: Any) -> Sample:
    """The rows that are judged."""
    if name == "merge_states":
        found = [i for part in places(inputs.outs.shape[1], MANY) for i in part]
        rows = torch.tensor(found, dtype=torch.int64, device=inputs.outs.device)
        return Sample(rows, inputs._replace(outs=inputs.outs[:, rows], lses=inputs.lses[:, rows]))
    if name in ("latent_attention", "attention"):
        return _queries(inputs)
    return Sample(torch.empty(0, dtype=torch.int64), inputs)


def _queries(inputs: Any) -> Sample:
    offsets, kv_lens = inputs.cu_seqlens_q.tolist(), inputs.cache_seqlens.tolist()
    q_lens = [b - a for a, b in pairwise(offsets)]
    asked = [i for i, q_len in enumerate(q_lens) if q_len]
    rows: list[int] = []
    requests, lengths, counts = [], [], [0]
    for i in sorted({asked[0], asked[len(asked) // 2], asked[-1]} if asked else ()):
        for part in places(q_lens[i], FEW):
            rows += [offsets[i] + s for s in part]
            requests.append(i)
            lengths.append(max(kv_lens[i] - q_lens[i] + part.stop, 0))
            counts.append(counts[-1] + len(part))
    device, queries = inputs.block_table.device, inputs._fields[:2]
    index = torch.tensor(rows, dtype=torch.int64, device=device)
    return Sample(
        index,
        inputs._replace(
            **{field: getattr(inputs, field)[index] for field in queries},
            block_table=inputs.block_table[torch.tensor(requests, dtype=torch.int64, device=device)],
            cu_seqlens_q=torch.tensor(counts, dtype=torch.int32, device=device),
            cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=device),
            max_seqlen_q=max((b - a for a, b in pairwise(counts)), default=0),
        ),
    )


def jury(case: Case, inputs: Any) -> Callable[..., Judged]:
    """(backend, output, left=…) -> the worst verdict. What is admissible is found once a declared numerics.

    left: the inputs as the call left them, where it writes.
    """
    contract, part = problem(case.problem), sample(case.problem, inputs)

    @cache
    def admissible(numerics: Numerics) -> Mapping[str, Admissible]:
        known = ADMISSIBLE.get(case.problem)
        return known(part.inputs, numerics) if known else {}

    def judge(backend: Backend, output: Any, left: Any = None) -> Judged:
        seen = contract.output(*(x[part.rows] if len(part.rows) else x for x in output))
        trial = Trial(
            run=lambda _: seen,
            call=lambda _: seen,
            inputs=part.inputs,
            case=case,
            backend=backend,
            problem=contract,
            left=lambda: left,
            expected=lambda: admissible(backend.numerics),
            device=str(part.rows.device),
        )
        findings: list[Finding] = [rules()[name].check(trial) for name in ORACLES[case.problem]]
        bad = [finding.detail for finding in findings if not finding.ok]
        ratio = max((finding.worst.ratio for finding in findings if finding.worst), default=0.0)
        return Judged(
            FAIL if bad else PASS, bad[0] if bad else "", ORACLES[case.problem], len(seen[0]), ratio
        )

    return judge
