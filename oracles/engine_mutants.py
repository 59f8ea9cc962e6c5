"""Mutants that are right in a test and wrong in an engine: in its sizes, its memory, and its process.

They are right on their own case's first run, most of them to the last bit: what is wrong is a length, a batch
or a budget that tests do not have, a stride that a model's views have, an address that a later step uses
again, or what a call leaves behind.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from mla_ref.backend import Prepared
from mla_ref.cache_gather import cache_gather
from mla_ref.cache_write import cache_write
from mla_ref.capacity import cache_capacity
from mla_ref.case import Case
from mla_ref.frequencies import inv_freq
from mla_ref.layer import layer_around
from mla_ref.layout import CacheLayout
from mla_ref.merge_states import merge_states
from mla_ref.naive import naive
from mla_ref.paged_attention import paged_attention
from mla_ref.problem import AttentionOutput
from mla_ref.problems.cache_capacity import CacheCapacityOutput
from mla_ref.problems.cache_write import CacheWriteOutput
from mla_ref.rope import rotate
from mla_ref.rows import Request
from oracles.mutants import (
    CAPACITY,
    LAYER,
    LOG2_E,
    MERGE,
    PAGED,
    READ,
    ROPE,
    WRITE,
    Mutant,
    Run,
    attend,
    changed,
    departing,
    given,
)
from oracles.precision_mutants import MANY, kernel
from oracles.probe_mutants import SIGNED, UNSIGNED

MOST_INT16 = 2**15
MOST_ROWS = 2**16 - 1


def attention_mutants(case: Case) -> dict[str, tuple[Case, Run]]:
    """The edits that ``latent_attention`` and ``attention`` have in common."""
    return {
        "keys_counted_in_16_bits": (replace(case, seed=2), departing(mask=_without(slice(MOST_INT16, None)))),
        "keys_beyond_a_table_of_splits": (case, departing(mask=_without(slice(4096, None)))),
        "last_key_of_a_second_tile": (case, departing(mask=_without_a_lone_key)),
        "requests_beyond_a_warp": (case, _forgetting_requests(32)),
        "requests_beyond_a_block": (replace(case, seed=7), _forgetting_requests(256)),
        "raises_without_keys": (case, _launching("cache_seqlens")),
        "raises_without_tokens": (case, _launching("cu_seqlens_q")),
        "blocks_numbered_in_16_bits": (case, given(block_table=_in_16_bits)),
        "queries_taken_for_packed": (case, given(q_pe=lambda x: packed(x.q_pe))),
        "query_offset_in_32_bits": (case, given(q_pe=lambda x: wrapped_rows(x.q_pe))),
        "table_taken_for_packed": (case, given(block_table=_packed_table)),
        "output_buffer_shared": (case, _into_one_buffer()),
        "cache_decoded_once": (case, _by_address("kv_cache")),
        "cache_views_kept": (case, _keeping_views()),
        "seeds_the_generator": (case, _leaving(lambda: torch.set_rng_state(torch.Generator().get_state()))),
        "gradients_left_off": (case, _leaving(lambda: torch.set_grad_enabled(False))),
        "tf32_left_on": (case, _leaving(_tf32_on)),
        "default_type_left": (case, _leaving(lambda: torch.set_default_dtype(torch.float64))),
        "scale_of_the_default_type": (case, given(softmax_scale=_of_default_type)),
        "output_in_a_graph": (case, _in_a_graph),
    }


def prepared_mutants(case: Case) -> list[Mutant]:
    """Edits of what is prepared; the call itself is right."""

    def right(inputs: Any) -> AttentionOutput:
        return attend(inputs, {})

    def for_one_run(inputs: Any) -> Prepared:
        """The workspace of partial sums is cleared with the plan, and not in each run."""
        sums = []

        def run() -> AttentionOutput:
            output = right(inputs)
            sums.append(output.out)
            return output._replace(out=torch.stack(sums).sum(0).to(output.out.dtype))

        return Prepared(run, lambda output: output)

    def without_the_last_key(inputs: Any) -> Prepared:
        """Planned before the lengths counted the new token."""
        shorter = inputs._replace(cache_seqlens=(inputs.cache_seqlens - 1).clamp(min=0))
        return Prepared(lambda: right(shorter), lambda output: output)

    wrong = {"prepared_for_one_run": for_one_run, "prepared_without_the_last_key": without_the_last_key}
    return [Mutant(name, case, right, prepare=prepare) for name, prepare in wrong.items()]


def asked_mutants(case: Case) -> list[Mutant]:
    """Edits of what a backend answers; the call itself is right."""

    def right(inputs: Any) -> AttentionOutput:
        return attend(inputs, {})

    def leaving(_: Case) -> None:
        """Tensors are made to look at the case, without gradients, and for good."""
        torch.set_grad_enabled(False)

    return [Mutant("gradients_off_once_asked", case, right, supports=leaving)]


def precision_mutants() -> dict[str, tuple[Case, Run]]:
    """Edits of a kernel that rounds its weights to bfloat16."""
    return {
        "logarithm_of_two_to_four_digits": (
            MANY,
            kernel(scores=lambda s, _: s * (1.4427 / LOG2_E)),
        ),
        "accumulator_beyond_float16": (replace(MANY, regime="flat", seed=6), kernel(acc=_overflowing)),
    }


def weight_mutants(case: Case) -> dict[str, tuple[Case, Run]]:
    """The edits of ``attention`` alone."""

    def packed_weights(inputs: Any) -> AttentionOutput:
        return attend(inputs._replace(w_uk=packed(inputs.w_uk), w_uv=packed(inputs.w_uv)), {})

    return {
        "weights_kept_by_address": (case, _by_address("w_uk")),
        "weights_taken_for_packed": (case, packed_weights),
    }


def _without(keys: slice) -> Callable[[torch.Tensor, Request], torch.Tensor]:
    """A mask that hides these keys from every row."""

    def mask(right: torch.Tensor, request: Request) -> torch.Tensor:
        mask = right.clone()
        mask[:, keys] = False
        return mask

    return mask


def _without_a_lone_key(right: torch.Tensor, request: Request) -> torch.Tensor:
    """Tiles of 64 keys are read in pairs, and one key alone in the second of them is not."""
    mask, kv_len = right.clone(), request.kv_len
    if kv_len > 128 and kv_len % 128 == 65:
        mask[:, kv_len - 1] = False
    return mask


def _launching(lengths: str) -> Run:
    """As many blocks are launched as some lengths say, and none is an error."""

    def run(inputs: Any) -> AttentionOutput:
        if not getattr(inputs, lengths).any():
            raise RuntimeError("invalid configuration argument")
        return attend(inputs, {})

    return run


def _forgetting_requests(most: int) -> Run:
    """Requests are scheduled by one thread each; there are ``most`` of them."""

    def run(inputs: Any) -> AttentionOutput:
        output = attend(inputs, {})
        output.out[int(inputs.cu_seqlens_q[: most + 1][-1]) :] = 0
        return output

    return run


def _in_16_bits(inputs: Any) -> torch.Tensor:
    table, num_blocks = inputs.block_table, inputs.kv_cache.shape[0]
    narrow: torch.Tensor = torch.where(table < num_blocks, table % MOST_INT16, table)
    return narrow


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from a tensor's first element on, read as if nothing were between its rows."""
    flat = torch.tensor([], dtype=tensor.dtype).set_(tensor.untyped_storage())
    index = tensor.storage_offset() + torch.arange(tensor.numel())
    return flat[index % max(flat.numel(), 1)].reshape(tensor.shape)


def wrapped_rows(tensor: torch.Tensor, end: int = SIGNED) -> torch.Tensor:
    """Row · stride in 32 bits: where it is more, the first row is read."""
    beyond = torch.arange(tensor.shape[0]) * tensor.stride(0) >= end
    return torch.where(beyond.view(-1, *[1] * (tensor.dim() - 1)), tensor[:1], tensor)


def _packed_table(inputs: Any) -> torch.Tensor:
    table: torch.Tensor = packed(inputs.block_table).clamp(0, inputs.kv_cache.shape[0] - 1)
    return table


def _into_one_buffer() -> Run:
    """Outputs of a shape are always the same memory."""
    buffers: dict[Any, AttentionOutput] = {}

    def run(inputs: Any) -> AttentionOutput:
        output = attend(inputs, {})
        buffer = buffers.setdefault((output.out.shape, output.out.dtype), output)
        for old, new in zip(buffer, output, strict=True):
            old.copy_(new)
        return buffer

    return run


def _by_address(name: str) -> Run:
    """What is derived from one of the inputs is kept, under the address that it had."""
    kept: dict[Any, torch.Tensor] = {}

    def run(inputs: Any) -> AttentionOutput:
        tensor = getattr(inputs, name)
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        return attend(inputs._replace(**{name: kept.setdefault(key, tensor.clone())}), {})

    return run


def _keeping_views() -> Run:
    """The class of a cache's views is decorated with ``functools.cache``, which was the next function's."""

    class Views(NamedTuple):
        entries: torch.Tensor

    views = cache(Views)

    def run(inputs: Any) -> AttentionOutput:
        return attend(inputs._replace(kv_cache=views(inputs.kv_cache[:]).entries), {})

    return run


def _leaving(act: Callable[[], Any]) -> Run:
    def run(inputs: Any) -> AttentionOutput:
        output = attend(inputs, {})
        act()
        return output

    return run


def _tf32_on() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def _of_default_type(inputs: Any) -> float:
    return float(torch.tensor(inputs.softmax_scale))


def _in_a_graph(inputs: Any) -> AttentionOutput:
    output = attend(inputs, {})
    return output._replace(out=output.out.requires_grad_())


def _overflowing(acc: torch.Tensor, request: Request) -> torch.Tensor:
    """A sum of weighted values, not yet divided, that is kept where float16 has no numbers left."""
    return acc.masked_fill(acc.abs() > torch.finfo(torch.float16).max, torch.inf)


def paged_mutants() -> dict[str, tuple[Case, Run]]:
    """The edits of ``paged_attention``."""
    case = replace(PAGED, cache_format="bf16")
    return {
        "paged_query_taken_for_packed": (case, changed(paged_attention, query=lambda x: packed(x.query))),
        "paged_keys_counted_in_16_bits": (
            replace(case, seed=2),
            changed(paged_attention, cache_seqlens=lambda x: x.cache_seqlens.clamp(max=MOST_INT16)),
        ),
    }


def merge_mutants() -> dict[str, tuple[Case, Run]]:
    """The edits of ``merge_states``."""

    def without_late_rows(inputs: Any) -> AttentionOutput:
        """A grid has 65,535 rows."""
        output = merge_states(*inputs)
        output.out[MOST_ROWS:] = 0
        return output

    first = changed(merge_states, outs=lambda x: x.outs[:32], lses=lambda x: x.lses[:32])
    return {
        "states_beyond_a_warp": (replace(MERGE, seed=3), first),
        "states_lse_taken_for_packed": (MERGE, changed(merge_states, lses=lambda x: packed(x.lses))),
        "states_offset_in_32_bits": (MERGE, changed(merge_states, outs=lambda x: wrapped_rows(x.outs))),
        "states_offset_in_unsigned_32_bits": (
            MERGE,
            changed(merge_states, outs=lambda x: wrapped_rows(x.outs, UNSIGNED)),
        ),
        "states_of_tokens_beyond_a_grid": (MERGE, without_late_rows),
    }


def rope_mutants() -> dict[str, tuple[Case, Run]]:
    """The edits of ``rope``."""
    tables: dict[Any, torch.Tensor] = {}

    def positions(inputs: Any) -> torch.Tensor:
        """Cosines are looked up by the address of the positions."""
        key = inputs.positions.data_ptr(), len(inputs.positions)
        return tables.setdefault(key, inputs.positions.clone())

    def theta(inputs: Any) -> Any:
        """Frequencies are a tensor of no named type."""
        exact = inv_freq(inputs.rope, inputs.x.shape[-1])[1:2]
        off = float((exact.to(torch.get_default_dtype()).double() / exact).prod())
        far = torch.get_default_dtype() == torch.bfloat16
        return replace(inputs.rope, theta=inputs.rope.theta * off) if far else inputs.rope

    return {
        "rope_taken_for_packed": (ROPE, changed(rotate, x=lambda x: packed(x.x))),
        "rope_table_kept_by_address": (ROPE, changed(rotate, positions=positions)),
        "rope_frequencies_of_the_default_type": (ROPE, changed(rotate, rope=theta)),
    }


def cache_mutants() -> dict[str, tuple[Case, Run]]:
    """The edits of ``cache_write`` and ``cache_gather``."""

    def first_tokens(inputs: Any) -> torch.Tensor:
        slot_mapping: torch.Tensor = inputs.slot_mapping.clone()
        slot_mapping[MOST_ROWS:] = -1
        return slot_mapping

    def rope_by_the_latents_stride(inputs: Any) -> torch.Tensor:
        """One stride for both: they are halves of one projection."""
        t, r = inputs.k_pe.shape
        flat = torch.tensor([], dtype=inputs.k_pe.dtype).set_(inputs.k_pe.untyped_storage())
        row = torch.arange(t)[:, None] * inputs.kv_c.stride(0)
        return flat[(inputs.k_pe.storage_offset() + row + torch.arange(r)) % max(flat.numel(), 1)]

    def returning_a_copy(inputs: Any) -> CacheWriteOutput:
        """What is returned has the right bytes, and is nobody's cache."""
        return CacheWriteOutput(cache_write(*inputs).kv_cache.clone())

    def first_rows(inputs: Any) -> Any:
        """A range longer than a workspace is cut."""
        output = cache_gather(*inputs)
        for start, stop in pairwise(inputs.cu_seqlens.tolist()):
            output.kv_c[min(start + 8192, stop) : stop] = 0
        return output

    return {
        "write_tokens_beyond_a_grid": (WRITE, changed(cache_write, slot_mapping=first_tokens)),
        "write_rope_by_the_latents_stride": (WRITE, changed(cache_write, k_pe=rope_by_the_latents_stride)),
        "write_token_offset_in_32_bits": (WRITE, changed(cache_write, kv_c=lambda x: wrapped_rows(x.kv_c))),
        "write_returns_a_copy": (WRITE, returning_a_copy),
        "read_beyond_a_workspace": (READ, first_rows),
    }


def layer_mutants() -> dict[str, tuple[Case, Run]]:
    """The edits of ``layer``."""
    right, loaded = layer_around(naive), dict[Any, torch.Tensor]()
    long = replace(LAYER, config=replace(LAYER.config, max_position=163_840))

    def by_address(inputs: Any) -> Any:
        """Absorbed weights are derived once for each address of kv_b_proj."""
        weight = inputs.weights["kv_b_proj.weight"]
        kept = loaded.setdefault((weight.data_ptr(), weight.shape), weight.clone())
        return {**inputs.weights, "kv_b_proj.weight": kept}

    def clamped(inputs: Any) -> torch.Tensor:
        """A table of as many positions as the original context has."""
        positions: torch.Tensor = inputs.positions.clamp(max=inputs.config.rope.original_max_position - 1)
        return positions

    return {
        "layer_positions_clamped": (long, changed(right, positions=clamped)),
        "layer_weights_kept_by_address": (LAYER, changed(right, weights=by_address)),
    }


def capacity_mutants() -> dict[str, tuple[Case, Run]]:
    """The edits of ``cache_capacity``."""

    def counted(count: Callable[[Any, int], int]) -> Run:
        def run(inputs: Any) -> CacheCapacityOutput:
            right = cache_capacity(*inputs)
            blocks = count(inputs, int(right.block_bytes))
            return CacheCapacityOutput(right.block_bytes, torch.tensor(blocks))

        return run

    def divided(inputs: Any, block_bytes: int) -> int:
        return int(inputs.budget / block_bytes)

    def narrow(inputs: Any, block_bytes: int) -> int:
        wrapped: int = inputs.budget % 2**32
        return wrapped // block_bytes

    def always_one(inputs: Any, block_bytes: int) -> int:
        blocks: int = inputs.budget // block_bytes
        return max(blocks, 1)

    packed_pools = replace(CAPACITY, layout=CacheLayout())
    return {
        "capacity_divided_in_floating_point": (packed_pools, counted(divided)),
        "capacity_budget_in_32_bits": (packed_pools, counted(narrow)),
        "capacity_always_a_block": (packed_pools, counted(always_one)),
    }
