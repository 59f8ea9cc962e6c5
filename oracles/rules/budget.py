"""The memory of real machines.

Claim: in the bytes that the pools of N blocks take there is room for N blocks, and in one byte less for N -
    1, whatever N; the bytes of a block do not depend on the budget.
Why: budgets are a hundred gigabytes, and what a test allocates is kilobytes: a count in 32 bits, a quotient
    in floating point, a budget in whole megabytes are right on the small ones.
Exact or bounded: exact, by integers; nothing is allocated. Budgets go from the offsets alone to 2⁶².
Kills: narrow integers, quotients in floating point, limits that are built in, a block that is always there.
"""

from oracles.oracle import Oracle, Trial
from oracles.verdict import Finding

# Bytes: nothing, a little beyond 2³¹ and 2³², two GPUs, where float64 has no odd numbers, what int64 holds.
BUDGETS = (0, 2**31, 2**32, 80 * 2**30, 141 * 10**9, 2**53, 2**62)


def check(trial: Trial) -> Finding:
    """Plan for budgets that are just enough, and for a byte less."""
    inputs = trial.inputs
    entry = inputs.entry_width * inputs.cache_dtype.itemsize
    nothing, one = (inputs.num_layers * inputs.layout.pool_bytes(entry, inputs.block_size, n) for n in (0, 1))
    block_bytes = one - nothing
    for budget in BUDGETS:
        count = max(budget - nothing, 0) // block_bytes + 1
        enough = nothing + count * block_bytes
        for given, fits in ((enough, count), (enough - 1, count - 1)):
            planned = trial.run(inputs._replace(budget=given))
            got = int(planned.block_bytes), int(planned.num_blocks)
            if got != (block_bytes, fits):
                return Finding(
                    ok=False,
                    detail=f"in {given} bytes there is room for {_blocks(fits)} of {block_bytes} bytes, "
                    f"not {got[1]} of {got[0]}",
                    num_bad=1,
                    num_checked=2 * len(BUDGETS),
                )
    return Finding(ok=True, num_checked=2 * len(BUDGETS))


def _blocks(count: int) -> str:
    """So many, in words."""
    return f"{count} block{'s' * (count != 1)}"


ORACLE = Oracle(
    name="budget",
    check=check,
    problems=("cache_capacity",),
    kills=(
        "capacity_divided_in_floating_point",
        "capacity_budget_in_32_bits",
        "capacity_always_a_block",
    ),
)
