"""The same cache somewhere else.

Claim: with every entry of the cache at another address (blocks and entries further apart, another first byte,
    and for keys and values another order of the pool's axes) the output is the same.
Why: a layout says where a value is, not what it is. Engines pad entries, interleave layers, keep keys and
    values in one block or in two halves of the pool, and hand a kernel a view.
Exact or bounded: exact where the backend repeats itself bit for bit, else within the bounds. Layouts that the
    backend declines are left out.
Kills: strides taken for packed, values looked for half a pool behind the keys, slots and heads confused, a
    storage offset that is not added.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mla_ref.case import Case
from mla_ref.layout import CacheLayout
from mla_ref.layout_algebra import KV_ORDERS
from oracles.compare import identical, within
from oracles.oracle import Oracle, Trial, naming
from oracles.probes import fresh_pages, nothing, pools, repeats, runnable
from oracles.verdict import Finding

# Multiples of what any copy engine asks for, and no strides that a packed cache could have.
SPREAD = CacheLayout(entry_align=512, block_gap=1024, offset=4096)
MOVED = CacheLayout(offset=512)

# Between them each pair of neighbours in the usual order is the other way round.
ORDERS = (KV_ORDERS["packed_bhlnc"], KV_ORDERS["blocks_first_nhd"], KV_ORDERS["kv_first_nhd"])


def check(trial: Trial) -> Finding:
    """Run again on copies of the cache in other layouts."""
    output, shapes, checked = trial.run(trial.inputs), trial.problem.output_shapes, 0
    for case in elsewhere(trial.case):
        if not runnable(trial, case):
            continue
        what = f"with the cache as {described(case)}"
        with naming(what):
            again = trial.run(moved(trial.inputs, case))
        for name, letters in shapes.items():
            got, want = getattr(again, name), getattr(output, name)
            finding = identical(name, got, want, letters, trial.inputs)
            if not finding.ok and name in trial.expected() and not repeats(trial):
                finding = within(name, got, trial.expected()[name], letters, trial.inputs)
            if not finding.ok:
                return replace(finding, detail=f"{what}, {finding.detail}")
            checked += finding.num_checked
    return Finding(ok=True, num_checked=checked) if checked else nothing("no other layout was judged")


def elsewhere(case: Case) -> Iterator[Case]:
    """The case in layouts that share no stride and no first byte with its own."""
    yield replace(case, layout=_like(SPREAD, case), kv_layout=ORDERS[case.kv_layout == ORDERS[0]])
    if case.problem == "paged_attention":
        yield replace(case, layout=_like(MOVED, case), kv_layout=ORDERS[1 + (case.kv_layout == ORDERS[1])])


def _like(layout: CacheLayout, case: Case) -> CacheLayout:
    """``layout`` with the case's own blocks."""
    return replace(layout, shuffled=case.layout.shuffled, spare_blocks=case.layout.spare_blocks)


def described(case: Case) -> str:
    """A layout in the words of a case."""
    layout = case.layout
    where = f"entries at {layout.entry_align}, gaps of {layout.block_gap}, offset {layout.offset}"
    return f"{case.kv_layout}, {where}" if case.problem == "paged_attention" else where


def moved(inputs: Any, case: Case) -> Any:
    """The inputs with their cache, dead entries included, in the case's layout."""
    fresh = fresh_pages(inputs, case, getattr(inputs, pools(inputs)[0]).shape[0])
    for name, cache in fresh.items():
        cache.copy_(getattr(inputs, name))
    return inputs._replace(**fresh)


ORACLE = Oracle(
    name="layout",
    check=check,
    problems=(
        "latent_attention",
        "attention",
        "paged_attention",
        "cache_gather",
        "cache_write",
        "rope_cache_write",
        "layer",
    ),
    kills=(
        "layout_block_stride_assumed",
        "layout_entry_stride_assumed",
        "layout_offset_assumed",
        "layout_values_half_a_pool_behind",
        "layout_unbound_along_the_other_axis",
        "layout_slots_before_heads_assumed",
    ),
)
