"""A long context.

Claim: one query over tens of thousands of keys, and tens of thousands of tokens at once where there are no
    queries, give what they may give like any other.
Why: tests stop at a thousand tokens. Beyond it are counters of 16 bits, grids of 65,535 rows, workspaces and
    split counts that were sized for less, and schedules that nobody has run.
    One key of thousands may weigh next to nothing, so a second query is close to the newest one alone.
Exact or bounded: within the bounds of the truth. Of a few lengths, of which a case's seed leaves out some,
    the longest is tried whose inputs are no more than some millions of elements, with one head, in the
    smallest of a few models that the backend takes.
Kills: keys and tokens that are lost beyond a number or at an end that no short length has, accumulators that
    overflow.
"""

from collections.abc import Iterator
from dataclasses import replace

from mla_ref.case import Case
from mla_ref.problem import problem
from oracles.compare import told
from oracles.dimensions import MODELS, elements
from oracles.oracle import Oracle, Trial
from oracles.probes import ATTENTION, made, materialized, nothing, runnable
from oracles.rejudge import admitted_instead
from oracles.rules import needle
from oracles.verdict import Finding

# Beyond 2¹⁶, 2¹⁵, 2¹³, 2¹², no multiple of any tile. The first and the last end with a single key in the
# second of two tiles of 64, the third with one in the first of two.
LENGTHS = (65_601, 33_001, 8_321, 4_161)

# Kernels that are interpreted take seconds for the longest: which one the search begins with, by the seed.
BEGINNING = (2, 3, 1, 3, 2, 3, 0, 3)

# Of ``dimensions.elements``: some hundred milliseconds of the truth.
MOST = 3_000_000


def check(trial: Trial) -> Finding:
    """Run the longest of the cases that the backend takes."""
    case = next((case for case in longer(trial.case) if runnable(trial, case)), None)
    if case is None:
        return nothing("the backend takes no long request of one head")
    inputs, what = made(materialized, case, trial.device), f"with {max(*case.q_lens, *case.kv_lens)} tokens"
    finding = admitted_instead(trial, inputs, what)
    if not finding.ok or case.problem not in ATTENTION:
        return finding
    return told(what, needle.check(replace(trial, case=case, inputs=inputs)))


def longer(case: Case) -> Iterator[Case]:
    """One long request, the longest first; in small models before that of the case itself."""
    own = case.config
    dims = own.kv_lora_rank, own.qk_nope_head_dim, own.qk_rope_head_dim, own.v_head_dim
    first = BEGINNING[case.seed % len(BEGINNING)] if case.problem in ATTENTION else 0
    for length in LENGTHS[first:]:
        for c, p, r, v in (*sorted(MODELS, key=sum), dims):
            config = replace(
                own, num_heads=1, kv_lora_rank=c, qk_nope_head_dim=p, qk_rope_head_dim=r, v_head_dim=v
            )
            q_lens, kv_lens = _lengths(case.problem, length)
            long = replace(case, config=config, q_lens=q_lens, kv_lens=kv_lens, num_kv_heads=1)
            if elements(long) <= MOST and problem(case.problem).why_not(long) is None:
                yield long


def _lengths(name: str, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """q_lens and kv_lens; of states there are two."""
    if name == "merge_states":
        return (length, 0), (5, 7)
    return (1 if name in ATTENTION else length,), (length,)


ORACLE = Oracle(
    name="long_request",
    check=check,
    problems=(*ATTENTION, "merge_states", "rope", "cache_write", "rope_cache_write", "cache_gather"),
    kills=(
        "keys_counted_in_16_bits",
        "keys_beyond_a_table_of_splits",
        "accumulator_beyond_float16",
        "last_key_of_a_second_tile",
        "paged_keys_counted_in_16_bits",
        "states_of_tokens_beyond_a_grid",
        "write_tokens_beyond_a_grid",
        "fused_queries_beyond_a_grid",
        "read_beyond_a_workspace",
    ),
)
