"""Mutants of kernels that rotate and write in one call: of ``rope_cache_write``.

Each is the same simulated kernel, which encodes what it rotated in float32 with no rounding between, and
departs from it in one step. What goes wrong in a fusion is mostly an order, or a thing that both halves
believe to be the other's: who rotates, whose position, which tokens, which type in between.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mla_ref.case import Case
from mla_ref.config import RopeConfig
from mla_ref.pages import scatter
from mla_ref.problem import problem
from mla_ref.problems.rope_cache_write import RopeCacheWriteOutput
from mla_ref.rope import rotate
from mla_ref.rows import compute_dtype
from oracles.engine_mutants import MOST_ROWS, wrapped_rows
from oracles.mutants import ROPE_YARN, WRITE, WRITE_PER_TENSOR, Run, Tables, bf16_table, by_angle

FUSED = replace(WRITE, problem="rope_cache_write")
FUSED_PER_TENSOR = replace(WRITE_PER_TENSOR, problem="rope_cache_write", kv_scale=0.02)
FUSED_YARN = replace(FUSED, config=ROPE_YARN.config)

Step = Callable[[Any, Any], Any]  # (what is right, inputs) -> what the mutant has in its place


def fused(**steps: Step) -> Run:
    """The simulated kernel. Any step may differ: it is given what is right, and the inputs.

    queries, keys: what is rotated. key_positions, query_positions, key_rope: how. rotated: the keys after it.
    turned: the queries returned. slots, entries: what is written where.
    """

    def run(inputs: Any) -> RopeCacheWriteOutput:
        def step(name: str, value: Any) -> Any:
            return steps[name](value, inputs) if name in steps else value

        wide = compute_dtype(inputs.q_pe)
        queries, keys = step("queries", inputs.q_pe.to(wide)), step("keys", inputs.k_pe.to(wide))
        query_positions = step("query_positions", inputs.positions)
        turned = step("turned", rotated(queries, query_positions, inputs.rope).to(inputs.q_pe.dtype))
        key_positions, key_rope = step("key_positions", inputs.positions), step("key_rope", inputs.rope)
        keys = step("rotated", rotated(keys[:, None], key_positions, key_rope)[:, 0])
        entries = inputs.cache_format.encode(inputs.kv_c.to(wide), keys, inputs.kv_scale)
        scatter(inputs.kv_cache, step("slots", inputs.slot_mapping), step("entries", entries))
        return RopeCacheWriteOutput(turned, inputs.kv_cache)

    return run


def rotated(x: torch.Tensor, positions: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """[t h r] in the type of ``x``."""
    return rotate(x, positions, rope).x


def fused_mutants() -> dict[str, tuple[Case, Run]]:
    """The edits of ``rope_cache_write``."""

    def rope(**changes: Any) -> Step:
        return lambda right, _: replace(right, **changes)

    def twice(keys: torch.Tensor, inputs: Any) -> torch.Tensor:
        """The caller had rotated them, or believed that he should."""
        return rotated(keys[:, None], inputs.positions, inputs.rope)[:, 0]

    def wrapped(slots: torch.Tensor, inputs: Any) -> torch.Tensor:
        """An index of -1 is the last slot of the pool."""
        num_blocks, block_size = inputs.kv_cache.shape[:2]
        return slots.remainder(num_blocks * block_size)

    def half_split(turned: torch.Tensor, inputs: Any) -> torch.Tensor:
        return rotated(inputs.q_pe, inputs.positions, replace(inputs.rope, interleaved=False))

    def in_place(turned: torch.Tensor, inputs: Any) -> torch.Tensor:
        queries: torch.Tensor = inputs.q_pe.copy_(turned)
        return queries

    def of_slots(positions: torch.Tensor, inputs: Any) -> torch.Tensor:
        slots: torch.Tensor = inputs.slot_mapping.clamp(min=0)
        return slots

    def of_written(positions: torch.Tensor, inputs: Any) -> torch.Tensor:
        """The i-th token that has a slot takes the position of the i-th token."""
        live = inputs.slot_mapping >= 0
        return positions.masked_scatter(live, positions[: int(live.sum())])

    def left_early(turned: torch.Tensor, inputs: Any) -> torch.Tensor:
        """A token without a slot is done before anything is rotated."""
        return torch.where((inputs.slot_mapping >= 0)[:, None, None], turned, inputs.q_pe)

    def quantised(keys: torch.Tensor, inputs: Any) -> torch.Tensor:
        """Codes are made first, and rotated by way of what they decode to."""
        entries = inputs.cache_format.encode(inputs.kv_c, keys, inputs.kv_scale)
        widths = inputs.kv_c.shape[1], inputs.k_pe.shape[1]
        _, decoded = inputs.cache_format.decode(entries, *widths, inputs.kv_scale, keys.dtype)
        return torch.as_tensor(decoded)

    def rounded(keys: torch.Tensor, inputs: Any) -> torch.Tensor:
        return keys.to(inputs.k_pe.dtype).to(keys.dtype)

    def unscaled(entries: torch.Tensor, inputs: Any) -> torch.Tensor:
        """The scale is the latent's, and the rotated part is cast as it is."""
        keys = rotated(inputs.k_pe.float()[:, None], inputs.positions, inputs.rope)[:, 0]
        c = inputs.kv_c.shape[1]
        return torch.cat([entries[:, :c], keys.clamp(-448.0, 448.0).to(entries.dtype)], dim=-1)

    def moved(keys: torch.Tensor, inputs: Any) -> torch.Tensor:
        """Interleaved pairs are read, and their channels written half the width apart."""
        return torch.cat([keys[:, 0::2], keys[:, 1::2]], dim=-1)

    def narrow(keys: torch.Tensor, inputs: Any) -> torch.Tensor:
        """Products in the model's type, as where tables and channels are both of it."""
        a, b = inputs.k_pe[:, 0::2], inputs.k_pe[:, 1::2]
        still = torch.tensor([1.0, 0.0]).repeat(inputs.k_pe.shape[1] // 2).expand(len(keys), 1, -1)
        turn = rotated(still, inputs.positions, inputs.rope)[:, 0].to(inputs.k_pe.dtype)
        cos, sin = turn[:, 0::2], turn[:, 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2).to(keys.dtype)

    def by_a_heads_stride(keys: torch.Tensor, inputs: Any) -> torch.Tensor:
        """One stride between heads for both: a key has but one, and none of its own."""
        (t, r), flat = inputs.k_pe.shape, torch.tensor([], dtype=inputs.k_pe.dtype)
        flat.set_(inputs.k_pe.untyped_storage())
        step = inputs.k_pe.stride(0) if inputs.q_pe.is_contiguous() else inputs.q_pe.stride(1)
        index = inputs.k_pe.storage_offset() + torch.arange(t)[:, None] * step + torch.arange(r)
        return flat[index % max(flat.numel(), 1)].to(keys.dtype)

    def far_queries(queries: torch.Tensor, inputs: Any) -> torch.Tensor:
        return wrapped_rows(inputs.q_pe).to(queries.dtype)

    def within_a_grid(turned: torch.Tensor, inputs: Any) -> torch.Tensor:
        turned[MOST_ROWS:] = inputs.q_pe[MOST_ROWS:]
        return turned

    def by_table(tables: Tables) -> Step:
        def keys(right: torch.Tensor, inputs: Any) -> torch.Tensor:
            given = problem("rope").inputs(
                inputs.k_pe[:, None].to(right.dtype), inputs.positions, inputs.rope
            )
            turned: torch.Tensor = by_angle(tables)(given).x
            return turned[:, 0]

        return keys

    return {
        "fused_keys_half_split": (FUSED, fused(key_rope=rope(interleaved=False))),
        "fused_queries_half_split": (FUSED, fused(turned=half_split)),
        "fused_keys_moved": (FUSED, fused(rotated=moved)),
        "fused_keys_not_rotated": (FUSED, fused(key_rope=rope(rotate=False))),
        "fused_keys_rotated_twice": (FUSED, fused(rotated=twice)),
        "fused_keys_late": (FUSED, fused(key_positions=lambda x, _: x + 1)),
        "fused_positions_of_slots": (FUSED, fused(key_positions=of_slots)),
        "fused_positions_of_written_tokens": (FUSED, fused(key_positions=of_written)),
        "fused_positions_in_16_bits": (FUSED, fused(query_positions=lambda x, _: x % 2**16)),
        "fused_queries_in_place": (FUSED, fused(turned=in_place)),
        "fused_queries_without_slots_not_rotated": (FUSED, fused(turned=left_early)),
        "fused_magnitude_of_queries_alone": (FUSED_YARN, fused(key_rope=rope(attention_factor=1.0))),
        "fused_table_in_bf16": (FUSED, fused(rotated=by_table(bf16_table))),
        "fused_products_in_bf16": (FUSED, fused(rotated=narrow)),
        "fused_quantised_before_rotation": (FUSED_PER_TENSOR, fused(keys=quantised)),
        "fused_rounded_before_quantising": (FUSED_PER_TENSOR, fused(rotated=rounded)),
        "fused_keys_unscaled": (FUSED_PER_TENSOR, fused(entries=unscaled)),
        "fused_keys_by_the_stride_of_a_head": (FUSED, fused(keys=by_a_heads_stride)),
        "fused_padding_written": (FUSED, fused(slots=wrapped)),
        "fused_query_offset_in_32_bits": (FUSED, fused(queries=far_queries)),
        "fused_queries_beyond_a_grid": (FUSED, fused(turned=within_a_grid)),
    }
