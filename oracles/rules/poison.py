"""Memory that belongs to no token.

Claim: slots past each length, spare blocks, gaps, padding, dead block-table entries and the scale of a format
    that has none do not reach the output, whatever they hold: NaN, zeros, huge numbers, plausible keys.
Why: a pool is never cleared, and 0 · NaN is NaN.
Exact or bounded: exact where the backend repeats itself bit for bit, else within the bounds.
Kills: an unmasked tail, a foreign page, an index that runs past the table, a read of an unused scale.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

from mla_ref.values import integers
from oracles.compare import identical, within
from oracles.oracle import Oracle, Trial, naming, private_copy, storage_bytes
from oracles.probes import repeats
from oracles.verdict import Finding

# Bytes of noise before it comes again; a prime, so that no stride of a cache meets the same ones.
PERIOD = 1_000_003


def check(trial: Trial) -> Finding:
    """Run again with the dead bytes changed, two ways."""
    output, inputs, findings = trial.run(trial.inputs), trial.inputs, []
    judged = {name: trial.problem.output_shapes[name] for name in trial.expected()}
    for fill, dead_block in (("zeros", 0), ("noise", -1)):
        what = f"with {fill} in dead memory"
        with naming(what):
            again = trial.run(changed(trial, fill, dead_block))
        for name, letters in judged.items():
            got = getattr(again, name)
            finding = identical(name, got, getattr(output, name), letters, inputs)
            if not finding.ok and not repeats(trial):
                finding = within(name, got, trial.expected()[name], letters, inputs)
            if not finding.ok:
                return replace(finding, detail=f"{what}, {finding.detail}")
            findings.append(finding)
    return Finding(ok=True, num_checked=sum(finding.num_checked for finding in findings))


def changed(trial: Trial, fill: str, dead_block: int) -> Any:
    """The inputs with other garbage wherever no token lives."""
    inputs, other = trial.inputs, private_copy(trial.inputs)
    caches = [name for name, letters in trial.problem.shapes.items() if letters.startswith("n k")]
    for name in caches:
        pool = storage_bytes(getattr(other, name))
        if fill == "noise":
            noise = integers(trial.case.seed, "poison", 256, min(pool.numel(), PERIOD)).to(pool)
            pool.copy_(noise.repeat(-(-pool.numel() // PERIOD))[: pool.numel()])
        else:
            pool.zero_()
    for i, (start, stop) in enumerate(_live(inputs)):
        block_size = getattr(inputs, caches[0]).shape[1]
        live = range(start // block_size, -(-stop // block_size)) if stop > start else range(0)
        for j in range(inputs.block_table.shape[1]):
            block = int(inputs.block_table[i, j])
            if j not in live:
                other.block_table[i, j] = dead_block
                continue
            slots = slice(max(start - j * block_size, 0), min(stop - j * block_size, block_size))
            for name in caches:
                getattr(other, name)[block, slots] = getattr(inputs, name)[block, slots]
    if hasattr(inputs, "cache_format") and not inputs.cache_format.per_tensor_scale:
        other.kv_scale.fill_(2.0)
    return other


def _live(inputs: Any) -> list[tuple[int, int]]:
    """First token and end of what each request reads."""
    if hasattr(inputs, "cache_seqlens"):
        return [(0, length) for length in inputs.cache_seqlens.tolist()]
    lengths = [b - a for a, b in pairwise(inputs.cu_seqlens.tolist())]
    starts = inputs.seq_starts.tolist()
    return [(start, start + length) for start, length in zip(starts, lengths, strict=True)]


ORACLE = Oracle(
    name="poison",
    check=check,
    problems=("latent_attention", "attention", "paged_attention", "cache_gather", "layer"),
    kills=(
        "tail_unmasked",
        "nan_times_zero",
        "pages_swapped",
        "paged_tail_unmasked",
        "read_from_a_blocks_start",
        "read_unused_scale",
        "dead_slots_known_by_nan",
    ),
)
