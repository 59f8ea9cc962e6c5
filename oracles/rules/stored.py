"""What is written into the cache, and what is not.

Claim: each new token's slot holds its channels as the format stores them, every code a nearest one; every
    other byte of the pool, gaps and padding included, is what it was; and the cache returned is the one
    given.
Why: a token in the wrong slot, or a byte of a neighbour, is read by another request.
Exact or bounded: codes are exact up to the roundings before them, bytes outside are exact. Of a format that
    another package brings, entries are what its ``encode`` makes of the same channels, bit for bit, and are
    not judged where channels are rounded or rotated first.
Kills: slots off by one, a negative slot that wraps around, missing saturation, a foreign scale.
"""

from dataclasses import replace

from oracles.bounds import Ball, Part, is_known, new_entries, stored_parts
from oracles.compare import identical, place, within, worst_of
from oracles.oracle import Oracle, Trial, private_copy, storage_bytes
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Bytes outside of the slots, then the entries in them."""
    inputs, after = trial.inputs, trial.left().kv_cache
    returned = trial.run(inputs).kv_cache
    if (returned.data_ptr(), returned.stride()) != (after.data_ptr(), after.stride()):
        return Finding(ok=False, detail="kv_cache: is other memory than was given")
    tokens = (inputs.slot_mapping >= 0).nonzero().flatten()
    slot, block_size = inputs.slot_mapping[tokens], after.shape[1]
    block, offset = slot // block_size, slot % block_size
    stored = after[block, offset]
    want = private_copy(inputs).kv_cache
    want[block, offset] = stored
    outside = [
        identical("kv_cache", after, want, "n k e", inputs),
        identical("kv_cache's storage", storage_bytes(after), storage_bytes(want)),
    ]
    if not all(finding.ok for finding in outside) or not len(tokens):
        return worst_of(outside)
    if not is_known(inputs.cache_format):
        if not hasattr(inputs, "kv_c") or hasattr(inputs, "rope"):
            left_open = "the roundings before a stranger's format leave its codes open"
            return replace(worst_of(outside), detail=left_open)
        encoded = inputs.cache_format.encode(inputs.kv_c[tokens], inputs.k_pe[tokens], inputs.kv_scale)
        return identical("kv_cache's entry", stored, encoded)
    kv_c, k_pe = (Ball(x.mid[tokens], x.radius[tokens]) for x in new_entries(inputs, trial.backend.numerics))

    def judge(part: Part) -> Finding:
        step = part.got.element_size() // after.element_size()

        def where(index: tuple[int, ...]) -> str:
            row, column = index
            element = int(block[row]), int(offset[row]), part.first + column * step
            return place("n k e", element, inputs)

        return within(f"kv_cache's {part.name}", part.got, part.want, where)

    return worst_of(
        [judge(part) for part in stored_parts(inputs.cache_format, stored, kv_c, k_pe, inputs.kv_scale)]
    )


ORACLE = Oracle(
    name="stored",
    check=check,
    problems=("cache_write", "rope_cache_write", "layer"),
    kills=(
        "write_next_slot",
        "write_negative_slot",
        "write_slot_in_32_bits",
        "write_unsaturated",
        "write_truncated",
        "write_multiplies_by_scale",
        "write_by_another_rule",
        "write_rope_first",
        "write_in_a_copy",
        "write_into_padding",
        "layer_latent_gain_forgotten",
        "layer_positions_from_zero",
        "layer_caches_unrotated",
        "layer_caches_next_position",
        "layer_caches_rotated_twice",
        "layer_rotates_by_a_table_in_bf16",
        "layer_rotates_by_frequencies_in_bf16",
        "write_returns_a_copy",
        "fused_keys_half_split",
        "fused_keys_moved",
        "fused_keys_not_rotated",
        "fused_keys_rotated_twice",
        "fused_keys_late",
        "fused_positions_of_slots",
        "fused_positions_of_written_tokens",
        "fused_magnitude_of_queries_alone",
        "fused_table_in_bf16",
        "fused_products_in_bf16",
        "fused_quantised_before_rotation",
        "fused_rounded_before_quantising",
        "fused_keys_unscaled",
        "fused_padding_written",
    ),
)
