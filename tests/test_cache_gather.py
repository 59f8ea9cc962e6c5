"""Gathering from the cache: the right token in every row, through a shuffled table, and no other slot."""

import pytest
import torch

from mla_ref.cache_gather import cache_gather
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.formats import CacheFormat, cache_format, formats
from mla_ref.layout import CacheLayout
from mla_ref.pages import DEAD_BLOCK
from mla_ref.problems.cache_gather import CacheGatherInputs, materialize

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

# Three blocks of two slots; the entry in block n, slot k is (10 n + k, -1, 100 + 10 n + k): c=2, r=1.
PAGES = torch.tensor([[[10.0 * n + k, -1.0, 100 + 10 * n + k] for k in range(2)] for n in range(3)])

# Request 0 is blocks 2, 0; request 1 reads nothing; request 2 is block 1.
GOOD = CacheGatherInputs(
    kv_cache=PAGES,
    block_table=torch.tensor(
        [[2, 0, DEAD_BLOCK], [DEAD_BLOCK] * 3, [1, DEAD_BLOCK, DEAD_BLOCK]], dtype=torch.int32
    ),
    cu_seqlens=torch.tensor([0, 2, 2, 3], dtype=torch.int32),
    seq_starts=torch.tensor([1, DEAD_BLOCK, 0], dtype=torch.int32),
    num_tokens=3,
    kv_lora_rank=2,
    qk_rope_head_dim=1,
    dtype=torch.float64,
    cache_format=cache_format("fp32"),
    kv_scale=torch.tensor(NAN),
)


def test_three_tokens_of_two_requests() -> None:
    # Token 1 of request 0 is block 2, slot 1; its token 2 is block 0, slot 0; request 2 starts in block 1.
    kv_c, k_pe = cache_gather(*GOOD)
    assert torch.equal(kv_c, torch.tensor([[21.0, -1.0], [0.0, -1.0], [10.0, -1.0]]).double())
    assert torch.equal(k_pe, torch.tensor([[121.0], [100.0], [110.0]]).double())


def test_the_last_slot_of_a_block_and_the_first_of_the_next() -> None:
    # A range that ends with its block needs no further column: token 3 of request 0 is block 0, slot 1.
    kv_c, _ = cache_gather(
        *GOOD._replace(
            seq_starts=torch.tensor([2, 0, 1], dtype=torch.int32), block_table=GOOD.block_table[:, :2]
        )
    )
    assert kv_c[:, 0].tolist() == [0.0, 1.0, 11.0]


def test_a_scaled_token_is_rounded_to_float32_first() -> None:
    # Code 39 is 1.125; times 14971336 · 2⁻²⁴ it is 257/256 + 2⁻²⁴, exact in float64. In float32, whose steps
    # are 2⁻²³ here, that ties to 257/256, which is halfway between two bf16 numbers and ties to 1. Without a
    # stop in float32 the result would be the upper one, 1 + 2⁻⁷.
    scale = torch.tensor(14971336 * 2.0**-24)
    want = {torch.float64: 257 / 256 + 2.0**-24, torch.float32: 257 / 256, torch.bfloat16: 1.0}
    for dtype, value in want.items():
        kv_c, k_pe = cache_gather(
            kv_cache=torch.tensor([[[0x39, 0xB9]]], dtype=torch.uint8).view(torch.float8_e4m3fn),
            block_table=torch.zeros(1, 1, dtype=torch.int32),
            cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
            seq_starts=torch.zeros(1, dtype=torch.int32),
            num_tokens=1,
            kv_lora_rank=1,
            qk_rope_head_dim=1,
            dtype=dtype,
            cache_format=cache_format("fp8_e4m3"),
            kv_scale=scale,
        )
        assert (kv_c.dtype, k_pe.dtype) == (dtype, dtype)
        assert (float(kv_c), float(k_pe)) == (value, -value)


@pytest.mark.parametrize("fmt", formats().values(), ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_what_was_written_comes_back(fmt: CacheFormat, dtype: str, seed: int) -> None:
    case = Case(
        problem="cache_gather",
        config=TINY,
        q_lens=(5, 0, 30, 1, 8),
        kv_lens=(23, 9, 17, 1, 8),
        block_size=4,
        cache_format=fmt.name,
        dtype=dtype,
        layout=CacheLayout(entry_align=32, block_gap=8, offset=16),
        kv_scale=0.25,
        seed=seed,
    )
    inputs = materialize(case, CPU)
    assert inputs.num_tokens == 5 + 0 + 17 + 1 + 8
    kv_c, k_pe = cache_gather(*inputs)
    row = 0
    for i, length in enumerate((5, 0, 17, 1, 8)):
        for token in range(int(inputs.seq_starts[i]), int(inputs.seq_starts[i]) + length):
            entry = inputs.kv_cache[int(inputs.block_table[i, token // 4]), token % 4]
            want = fmt.decode(entry, 128, 8, inputs.kv_scale, inputs.dtype)
            assert torch.equal(kv_c[row], want[0])
            assert torch.equal(k_pe[row], want[1])
            row += 1
    assert row == inputs.num_tokens
    assert kv_c.isfinite().all()


def test_a_case_starts_inside_blocks_and_hides_the_rest_of_the_table(seed: int) -> None:
    case = Case(
        problem="cache_gather",
        config=TINY,
        q_lens=(5,) * 8 + (0,),
        kv_lens=(40,) * 9,
        block_size=8,
        seed=seed,
    )
    inputs = materialize(case, CPU)
    starts = inputs.seq_starts[:8]
    assert (starts % 8 != 0).any()
    assert (starts + 5 <= 40).all()
    assert int(inputs.seq_starts[8]) == DEAD_BLOCK
    live = (inputs.block_table != DEAD_BLOCK).sum(1)
    assert torch.equal(live[:8], (starts + 4) // 8 - starts // 8 + 1)
    assert int(live[8]) == 0


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 3, 2, 3]).int()}, r"cu_seqlens\[2\]: is 2, must not be below"),
        ({"num_tokens": 4}, r"cu_seqlens\[3\]: is 3, but there are 4 tokens"),
        ({"seq_starts": torch.tensor([-1, 0, 0]).int()}, r"seq_starts\[0\]: is -1, must not be negative"),
        ({"seq_starts": torch.tensor([5, 0, 0]).int()}, r"block_table: has 3 columns, but 7 tokens .* 4"),
        (
            {"seq_starts": torch.tensor([3, 0, 0]).int()},
            r"block_table\[0, 2\]: is 2147480000, but .* 3 blocks",
        ),
        ({"dtype": torch.int8}, r"dtype: is torch.int8, must be one of torch.bfloat16, "),
        ({"kv_lora_rank": 3}, r"kv_cache: e=3, but fp32 stores c=3, r=1 in 4"),
        ({"block_table": GOOD.block_table.long()}, r"block_table: dtype is int64, must be int32"),
        ({"seq_starts": GOOD.seq_starts[:2]}, r"seq_starts: b=2, but b=3 elsewhere"),
    ],
)
def test_bad_input_is_named(edit, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cache_gather(*GOOD._replace(**edit))
