"""Writing into the cache: exact bytes at exact addresses, and nothing anywhere else."""

import pytest
import torch

from mla_ref.cache_write import cache_write
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.formats import CacheFormat, cache_format, formats
from mla_ref.layout import CacheLayout, allocate
from mla_ref.problems.cache_write import CacheWriteInputs, materialize

CPU = torch.device("cpu")
NAN = float("nan")
TINY = MLAConfig(
    name="tiny",
    hidden_size=64,
    num_heads=2,
    q_lora_rank=None,
    kv_lora_rank=128,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
)


def pool(kv_cache: torch.Tensor) -> torch.Tensor:
    """All bytes behind a cache: gaps between entries and blocks, and what precedes block 0, included."""
    storage = kv_cache.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def test_two_tokens_and_one_that_is_skipped() -> None:
    # Blocks of 2 slots of 3 channels, each entry padded to 8 bytes, each block followed by 4, all after 2.
    # Slot 5 is block 2, offset 1: byte 2 + 2 · (2 · 8 + 4) + 8 = 50. Slot 0 is at byte 2.
    layout = CacheLayout(entry_align=8, block_gap=4, offset=2)
    kv_cache = allocate(layout, num_blocks=3, block_size=2, entry_width=3, dtype=torch.bfloat16)
    out = cache_write(
        kv_c=torch.tensor([[1.0, -2.0], [NAN, NAN], [0.5, 3.0]]),
        k_pe=torch.tensor([[4.0], [NAN], [-1.0]]),
        kv_cache=kv_cache,
        slot_mapping=torch.tensor([5, -1, 0]),
        cache_format=cache_format("bf16"),
        kv_scale=torch.tensor(NAN),
    )
    want = bytearray([0xFF] * 62)
    want[50:56] = bytes.fromhex("803f 00c0 8040")  # 1, -2, 4
    want[2:8] = bytes.fromhex("003f 4040 80bf")  # 0.5, 3, -1
    assert bytes(pool(kv_cache).tolist()) == bytes(want)
    assert out.kv_cache is kv_cache


def test_a_scaled_token() -> None:
    # 3 / 2 = 1.5 is code 3c, -448 / 2 = -224 is exponent 14, mantissa 6: f6; 1e6 saturates at 7e.
    kv_cache = torch.zeros(1, 1, 3).to(torch.float8_e4m3fn)
    cache_write(
        torch.tensor([[3.0, -448.0]]),
        torch.tensor([[1e6]]),
        kv_cache,
        torch.tensor([0]),
        cache_format("fp8_e4m3"),
        torch.tensor(2.0),
    )
    assert kv_cache.view(torch.uint8).flatten().tolist() == [0x3C, 0xF6, 0x7E]


@pytest.mark.parametrize("fmt", formats().values(), ids=str)
@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [
        ((), ()),
        ((0, 0), (0, 5)),
        ((1,), (1,)),
        ((3, 0, 9, 4), (8, 5, 9, 13)),
        ((6, 2), (2, 0)),
        ((17,), (17,)),
    ],
    ids=str,
)
def test_every_byte_of_the_pool(fmt: CacheFormat, q_lens, kv_lens, seed: int) -> None:
    layout = CacheLayout(entry_align=32, block_gap=8, offset=16)
    case = Case(
        problem="cache_write",
        config=TINY,
        q_lens=q_lens,
        kv_lens=kv_lens,
        block_size=4,
        cache_format=fmt.name,
        layout=layout,
        kv_scale=0.25,
        seed=seed,
    )
    inputs = materialize(case, CPU)
    entry = fmt.entry_bytes(128, 8)
    want = pool(inputs.kv_cache).clone()
    for kv_c, k_pe, slot in zip(inputs.kv_c, inputs.k_pe, inputs.slot_mapping.tolist(), strict=True):
        if slot >= 0:
            start = 16 + slot // 4 * layout.block_stride(entry, 4) + slot % 4 * layout.entry_stride(entry)
            assert (want[start : start + entry] == 0xFF).all()
            want[start : start + entry] = fmt.encode(kv_c, k_pe, inputs.kv_scale).view(torch.uint8)
    cache_write(*inputs)
    assert torch.equal(pool(inputs.kv_cache), want)


def test_a_case_has_what_makes_writing_hard(seed: int) -> None:
    case = Case(
        problem="cache_write",
        config=TINY,
        q_lens=(40, 5, 0, 9),
        kv_lens=(60, 3, 7, 9),
        block_size=8,
        cache_format="fp32",
        dtype="float32",
        seed=seed,
    )
    inputs = materialize(case, CPU)
    slot = inputs.slot_mapping
    live = slot >= 0
    assert slot.shape == (54,)
    assert not live[[0, 27, 53]].any()
    assert live.sum() > 27
    assert len(set(slot[~live].tolist())) > 1
    assert (slot[live].diff() < 0).any()
    assert inputs.kv_c[live].isfinite().all()
    assert inputs.kv_c[~live].isnan().all()
    assert inputs.k_pe[~live].isnan().all()
    assert inputs.kv_c.stride(0) == inputs.k_pe.stride(0) == 136
    entries = inputs.kv_cache.flatten(0, 1)
    assert entries[slot[live]].isnan().all()
    assert entries.isfinite().all(-1).sum() == 20 + 0 + 7 + 0  # the older tokens of each request


GOOD = CacheWriteInputs(
    kv_c=torch.zeros(3, 128),
    k_pe=torch.zeros(3, 8),
    kv_cache=torch.zeros(2, 4, 136, dtype=torch.bfloat16),
    slot_mapping=torch.tensor([7, -1, 2]),
    cache_format=cache_format("bf16"),
    kv_scale=torch.tensor(NAN),
)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"slot_mapping": torch.tensor([7, 8, 2])}, r"slot_mapping\[1\]: is 8, but kv_cache has 8 slots"),
        ({"slot_mapping": torch.tensor([7, 2, 7])}, r"slot_mapping\[2\]: is 7, as is slot_mapping\[0\]"),
        ({"slot_mapping": torch.tensor([7, 2])}, r"slot_mapping: t=2, but t=3 elsewhere"),
        ({"slot_mapping": torch.tensor([7, 2, 1]).int()}, r"slot_mapping: dtype is int32, must be int64"),
        ({"k_pe": torch.zeros(3, 8).half()}, r"k_pe: dtype is float16, must be float32"),
        ({"k_pe": torch.zeros(3, 4)}, r"kv_cache: e=136, but bf16 stores c=128, r=4 in 132"),
        ({"cache_format": cache_format("fp16")}, r"kv_cache: dtype is bfloat16, must be float16"),
        (
            {
                "cache_format": cache_format("fp8_e4m3"),
                "kv_cache": torch.zeros(2, 4, 136).to(torch.float8_e4m3fn),
            },
            r"kv_scale: is nan, must be finite and positive for fp8_e4m3",
        ),
        (
            {"cache_format": cache_format("fp8_ds_mla"), "kv_c": torch.zeros(3, 64)},
            r"kv_cache: fp8_ds_mla needs c to be a multiple of 128, got 64",
        ),
    ],
)
def test_bad_input_is_named(edit, message: str) -> None:
    cache_write(*GOOD)
    with pytest.raises(ValueError, match=message):
        cache_write(*GOOD._replace(**edit))
