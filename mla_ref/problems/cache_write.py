"""New tokens into the paged latent cache: what ``concat_and_cache_mla`` does."""

from typing import NamedTuple

import torch

from mla_ref.case import Case
from mla_ref.formats import CacheFormat
from mla_ref.layout import poison
from mla_ref.pages import scatter, slots
from mla_ref.problem import Problem, bind_shapes
from mla_ref.problems._paged import (
    QUERY_DTYPES,
    check_cache,
    check_device,
    check_dtype,
    check_scale,
    paged,
    raw_values,
)
from mla_ref.values import integers, permutation


class CacheWriteInputs(NamedTuple):
    """What every implementation of ``cache_write`` is called with, in this order.

    kv_c: [t c]. Normalised latents; any row stride. Rows whose slot is negative may hold anything, NaN
        included.
    k_pe: [t r]. Rotated rope parts, same dtype, likewise.
    kv_cache: [n k e]. Changed in place, in the slots named and nowhere else; any strides but the last, which
        is 1.
    slot_mapping: [t] int64. Where each token goes, block · k + offset, no two to the same slot; a token with
        a negative slot is not written.
    cache_format: how entries are stored.
    kv_scale: [] float32. Read only by formats with a per-tensor scale.
    """

    kv_c: torch.Tensor
    k_pe: torch.Tensor
    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor
    cache_format: CacheFormat
    kv_scale: torch.Tensor


class CacheWriteOutput(NamedTuple):
    """kv_cache: [n k e]. The very tensor that was given, written in place."""

    kv_cache: torch.Tensor


SHAPES = {
    "kv_c": "t c",
    "k_pe": "t r",
    "kv_cache": "n k e",
    "slot_mapping": "t",
    "kv_scale": "",
}

# What stands for "not written". Kept in 32 bits, the last one would be slot 0.
SKIPPED_SLOTS = (-1, -64, -(2**32))


def check(inputs: CacheWriteInputs) -> None:
    """Raises: ValueError on a shape, dtype or device that breaks the contract."""
    sizes = bind_shapes(SHAPES, inputs._asdict())
    check_dtype("kv_c", inputs.kv_c, *QUERY_DTYPES)
    check_dtype("k_pe", inputs.k_pe, inputs.kv_c.dtype)
    check_cache(inputs.kv_cache, inputs.cache_format, sizes["c"], sizes["r"])
    check_dtype("slot_mapping", inputs.slot_mapping, torch.int64)
    check_dtype("kv_scale", inputs.kv_scale, torch.float32)
    check_device(inputs)


def check_values(inputs: CacheWriteInputs) -> None:
    """Raises: ValueError on a slot outside the cache, two tokens for one slot, and a scale of no use."""
    check_slots(inputs.slot_mapping, inputs.kv_cache)
    check_scale(inputs.cache_format, inputs.kv_scale)


def check_slots(slot_mapping: torch.Tensor, kv_cache: torch.Tensor) -> None:
    """Raises: ValueError on a slot outside the cache, and on two tokens for one slot."""
    num_slots = kv_cache.shape[0] * kv_cache.shape[1]
    writer: dict[int, int] = {}
    for i, slot in enumerate(slot_mapping.tolist()):
        if slot >= num_slots:
            raise ValueError(f"slot_mapping[{i}]: is {slot}, but kv_cache has {num_slots} slots")
        if slot >= 0 and writer.setdefault(slot, i) != i:
            raise ValueError(f"slot_mapping[{i}]: is {slot}, as is slot_mapping[{writer[slot]}]")


def materialize(case: Case, device: torch.device) -> CacheWriteInputs:
    """The tensors of a case: the last q_lens[i] of the kv_lens[i] tokens of request i are written.

    Its older tokens are in the cache already; every other slot is NaN. Tokens come in random order. Some have
    a negative slot and hold NaN: the q_lens[i] - kv_lens[i] of a request with more new tokens than tokens, an
    eighth at random, and of four tokens or more the first, the middle one and the last.
    """
    config, dtype = case.config, getattr(torch, case.dtype)
    raw = raw_values(case, 0)
    cache = paged(case, raw, device)
    key, slot_mapping = _new_tokens(case, cache.block_table.cpu())
    scatter(cache.kv_cache, slot_mapping.to(device), poison(slot_mapping.shape[0], cache.kv_cache))
    skipped = _skipped(case.seed, slot_mapping)
    latent = torch.full((len(key), config.entry_width), torch.nan, dtype=torch.float64)
    latent[~skipped] = torch.cat([raw.kv_c, raw.k_pe], dim=-1)[key[~skipped]]
    latent = latent.to(dtype).to(device)
    fill = torch.tensor(SKIPPED_SLOTS)[integers(case.seed, "negative", len(SKIPPED_SLOTS), len(key))]
    return CacheWriteInputs(
        # Both are views of one projection's rows, as in a model.
        kv_c=latent[:, : config.kv_lora_rank],
        k_pe=latent[:, config.kv_lora_rank :],
        kv_cache=cache.kv_cache,
        slot_mapping=torch.where(skipped, fill, slot_mapping).to(device),
        cache_format=cache.cache_format,
        kv_scale=cache.kv_scale,
    )


def _new_tokens(case: Case, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(index among all keys, slot) of each new token, in random order; -1 for tokens that have neither."""
    keys, where, first = [], [], 0
    for i, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        start = max(kv_len - q_len, 0)
        none = torch.full((max(q_len - kv_len, 0),), -1)
        keys += [none, torch.arange(first + start, first + kv_len)]
        where += [none, slots(table[i], start, kv_len, case.block_size)]
        first += kv_len
    order = permutation(case.seed, "tokens", sum(case.q_lens))
    empty = [torch.empty(0, dtype=torch.int64)]
    return torch.cat(empty + keys)[order], torch.cat(empty + where)[order]


def _skipped(seed: int, slot_mapping: torch.Tensor) -> torch.Tensor:
    """[t], True where a token is not written."""
    t = slot_mapping.shape[0]
    skipped = (slot_mapping < 0) | (integers(seed, "skipped", 8, t) == 0)
    if t >= 4:
        skipped[[0, t // 2, t - 1]] = True
    return skipped


PROBLEM = Problem(
    name="cache_write",
    inputs=CacheWriteInputs,
    output=CacheWriteOutput,
    shapes=SHAPES,
    output_shapes={"kv_cache": "n k e"},
    check=check,
    check_values=check_values,
    materialize=materialize,
    writes=("kv_cache",),
)
