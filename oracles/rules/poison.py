"""Memory that belongs to no token.

Claim: slots past each length, spare blocks, gaps, padding, dead block-table entries and the scale of a format
    that has none do not reach the output, whatever they hold: NaN, zeros, huge numbers, plausible keys.
Why: a pool is never cleared, and 0 · NaN is NaN.
Exact or bounded: exact where the backend repeats itself bit for bit, else within the bounds.
Kills: an unmasked tail, a foreign page, an index that runs past the table, a read of an unused scale.
"""

from typing import Any

import torch

from mla_ref.values import integers
from oracles.compare import identical, within
from oracles.oracle import Oracle, Trial
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run again with the dead bytes changed, three ways."""
    output, checked = trial.run(trial.inputs), 0
    for fill, dead_block in (("zero", 0), ("huge", -1), ("noise", 2**31 - 1)):
        changed = _changed(trial.inputs, fill, dead_block, trial.case.seed)
        again = trial.run(changed)
        for (name, letters), got, want in zip(
            trial.problem.output_shapes.items(), again, output, strict=True
        ):
            finding = identical(name, got, want, letters, trial.inputs)
            if not finding.ok and not _repeats(trial, output):
                finding = within(name, got, trial.expected()[name], letters, trial.inputs)
            if not finding.ok:
                return Finding(
                    ok=False,
                    detail=f"with {fill} in dead memory, {finding.detail}",
                    worst=finding.worst,
                    num_bad=finding.num_bad,
                    num_checked=finding.num_checked,
                )
            checked += finding.num_checked
    return Finding(ok=True, num_checked=checked)


def _repeats(trial: Trial, output: Any) -> bool:
    """Whether a second run on the same bytes gives the same bytes."""
    again = trial.run(trial.inputs._replace())
    return all(identical("", got, want).ok for got, want in zip(again, output, strict=True))


def _changed(inputs: Any, fill: str, dead_block: int, seed: int) -> Any:
    """The inputs with other garbage wherever no token lives."""
    cache, table = inputs.kv_cache, inputs.block_table.clone()
    size = cache.untyped_storage().nbytes()
    if fill == "noise":
        pool = integers(seed, "poison", 256, size).to(torch.uint8).to(cache.device)
    else:
        pool = torch.full((size,), 0 if fill == "zero" else 0x7B, dtype=torch.uint8, device=cache.device)
    other = torch.tensor([], dtype=cache.dtype, device=cache.device).set_(
        pool.untyped_storage(), cache.storage_offset(), cache.shape, cache.stride()
    )
    block_size = cache.shape[1]
    for i, length in enumerate(inputs.cache_seqlens.tolist()):
        used = -(-length // block_size)
        for j, block in enumerate(table[i, :used].tolist()):
            live = min(block_size, length - j * block_size)
            other[block, :live] = cache[block, :live]
        table[i, used:] = dead_block
    scale = inputs.kv_scale if inputs.cache_format.per_tensor_scale else torch.full_like(inputs.kv_scale, 2.0)
    return inputs._replace(kv_cache=other, block_table=table, kv_scale=scale)


ORACLE = Oracle(name="poison", check=check, problems=("latent_attention", "attention"), kills=())
