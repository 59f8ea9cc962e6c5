"""Bytes, blocks and budgets: the published figures, and the planner against what an allocator takes."""

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from mla_ref.capacity import (
    GIB,
    PREFILLS,
    CacheSpec,
    Device,
    Interval,
    Setting,
    budgets,
    common_budgets,
    latent_spec,
    plan,
    prefill_parts,
    printed,
)
from mla_ref.chunk_plan import CAP, EARLIER_CAP, workspace_rows
from mla_ref.formats import cache_format, formats
from mla_ref.layout import CacheLayout
from mla_ref.layout_algebra import KV_ORDERS, round_up
from mla_ref.presets import preset

R1 = preset("deepseek-r1")
ALIGNED, PACKED = CacheLayout(entry_align=256), CacheLayout()
MAX_LEN = 163_840

many = settings(max_examples=4 * settings.default.max_examples)


def spec(name: str = "bf16", align: int = 1, block_size: int = 64) -> CacheSpec:
    return latent_spec(R1, cache_format(name), block_size, CacheLayout(entry_align=align))


@pytest.mark.parametrize(
    ("align", "block_size", "block_bytes", "host_blocks"),
    [
        (256, 64, 4_997_120, 859),
        (1, 64, 4_497_408, 954),
        (256, 16, 1_249_280, 3437),
        (1, 16, 1_124_352, 3819),
    ],
)
def test_blocks_of_four_gib_of_host_memory(align: int, block_size: int, block_bytes: int, host_blocks: int):
    """859 and 954 were printed, so the block size was 64."""
    cache = spec(align=align, block_size=block_size)
    assert cache.block_bytes == block_bytes
    assert cache.num_blocks(4 * GIB) == host_blocks


def test_one_budget_explains_both_published_block_counts():
    """4739 blocks before, 5266 after: every budget in an interval of 3 MB gives both, and no other does."""
    before, after = spec(align=256), spec()
    interval = common_budgets([(before.block_bytes, 4739), (after.block_bytes, 5266)])
    assert interval == range(23_683_350_528, 23_686_348_800)
    for budget in (interval.start, interval.stop - 1):
        assert (before.num_blocks(budget), after.num_blocks(budget)) == (4739, 5266)
    assert (before.num_blocks(interval.start - 1), after.num_blocks(interval.start - 1)) == (4739, 5265)
    assert (before.num_blocks(interval.stop), after.num_blocks(interval.stop)) == (4740, 5266)


def test_tokens_concurrency_and_padding_of_the_published_pair():
    tokens = {4739: 303_296, 5266: 337_024}
    for blocks, count in tokens.items():
        assert blocks * 64 == count
    assert printed("1.85").low <= Fraction(303_296, MAX_LEN) <= printed("1.85").high
    assert printed("2.06").low <= Fraction(337_024, MAX_LEN) <= printed("2.06").high
    assert Fraction(640, 576) == Fraction(10, 9)
    padding = 4739 * spec(align=256).block_padding
    assert padding == 303_296 * 61 * 128
    assert f"{padding / GIB:.3f}" == "2.205"
    assert spec().block_padding == 0


def planned_with_the_models_dtype(cache: CacheSpec, itemsize: int = 2) -> int:
    """The planner of vLLM 0.7.3: elements rounded up by the model's element size, times the cache's."""
    elements = round_up(cache.widths[0], cache.layout.entry_align // itemsize)
    return cache.num_layers * cache.block_size * elements * cache.dtype.itemsize


def test_the_planner_that_aligned_by_the_models_dtype():
    """fp8: it counted 640 bytes an entry where the allocator took 768, a fifth more than there was."""
    cache = spec("fp8_e4m3", 256)
    budget = common_budgets([(spec(align=256).block_bytes, 4739), (spec().block_bytes, 5266)]).start
    wrong = planned_with_the_models_dtype(cache)
    assert (wrong, cache.block_bytes) == (61 * 64 * 640, 61 * 64 * 768)
    assert Fraction(cache.block_bytes, wrong) == Fraction(6, 5)
    planned = budget // wrong
    assert planned == 9478
    assert f"{cache.pool_bytes(planned) / GIB:.2f}" == "26.47"
    assert f"{(cache.pool_bytes(planned) - budget) / GIB:.2f}" == "4.41"
    assert cache.num_blocks(budget) == 7899
    assert spec("fp8_e4m3").num_blocks(budget) == 10_532


def allocated_bytes(cache: CacheSpec, num_blocks: int) -> int:
    """Bytes of the storages that the allocator really takes."""
    fields = [tensor for pool in cache.allocate(num_blocks) for tensor in pool]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in fields}
    return sum(storages.values())


# Where elements rounded up by the model's sixteen-bit type are not the bytes that the allocator takes.
MISTAKES = {
    ("fp8_e4m3", 128),
    ("fp8_e4m3", 256),
    ("fp8_ds_mla", 128),
    ("fp8_ds_mla", 576),
    ("fp8_ds_mla_pow2", 128),
    ("fp8_ds_mla_pow2", 576),
    ("fp32", 256),
}


@pytest.mark.parametrize("name", formats())
@pytest.mark.parametrize("align", [1, 128, 256, 576])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_planned_bytes_are_allocated_bytes(name: str, align: int, block_size: int):
    """Every format, alignment and block size; and the old planner is caught where it was wrong."""
    small = replace(R1, num_layers=3)
    layouts = (
        CacheLayout(entry_align=align),
        CacheLayout(entry_align=align, block_align=64, block_gap=192, offset=256),
    )
    for layout in layouts:
        cache = latent_spec(small, cache_format(name), block_size, layout)
        assert cache.pool_bytes(5) == allocated_bytes(cache, 5)
        assert cache.pool_bytes(5) - cache.pool_bytes(4) == cache.block_bytes
    if (name, align) in MISTAKES:
        plain = latent_spec(small, cache_format(name), block_size, layouts[0])
        assert planned_with_the_models_dtype(plain) * 5 != allocated_bytes(plain, 5)


@st.composite
def specs(draw: st.DrawFn) -> CacheSpec:
    """Caches of keys and values in any order, with alignments, gaps and offsets."""
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float8_e4m3fn, torch.float32]))
    pad = st.integers(0, 5).map(lambda n: n * dtype.itemsize)
    return CacheSpec(
        order="".join(draw(st.permutations("l2nkg"))) + "x",
        num_layers=draw(st.integers(1, 3)),
        num_kv_heads=draw(st.integers(1, 3)),
        widths=(draw(st.integers(1, 6)), draw(st.integers(1, 6))),
        dtype=dtype,
        block_size=draw(st.integers(1, 4)),
        layout=CacheLayout(
            entry_align=dtype.itemsize * draw(st.integers(1, 5)),
            block_align=dtype.itemsize * draw(st.integers(1, 5)),
            block_gap=draw(pad),
            offset=draw(pad),
        ),
    )


@many
@given(cache=specs(), num_blocks=st.integers(0, 5), budget=st.integers(0, 20_000))
def test_a_budget_holds_the_blocks_that_are_planned_and_not_one_more(
    cache: CacheSpec, num_blocks: int, budget: int
):
    assert cache.pool_bytes(num_blocks) == allocated_bytes(cache, num_blocks)
    planned = cache.num_blocks(budget)
    assert cache.pool_bytes(planned) <= budget or planned == 0
    assert cache.pool_bytes(planned + 1) > budget
    assert cache.token_bytes * cache.block_size + cache.block_padding == cache.block_bytes


@pytest.mark.parametrize("name", KV_ORDERS)
def test_the_order_of_the_axes_costs_nothing(name: str):
    """ "This should not change the memory usage": a pool of keys and values is as large in every order."""
    cache = CacheSpec(
        order=KV_ORDERS[name],
        num_layers=4,
        num_kv_heads=8,
        widths=(64, 64),
        dtype=torch.bfloat16,
        block_size=16,
    )
    assert cache.pool_bytes(7) == 4 * 7 * 16 * 8 * 128 * 2 == 7 * cache.block_bytes


def test_an_aligned_block_of_latents_is_one_token_of_expanded_keys_and_values():
    """R1: 61 layers · 64 slots · 1280 B = 61 layers · 128 heads · (192 + 128) · 2 B."""
    expanded = CacheSpec(
        order="l2nkgx", num_layers=61, num_kv_heads=128, widths=(192, 128), dtype=torch.bfloat16, block_size=1
    )
    assert spec(align=256).block_bytes == expanded.token_bytes == 4_997_120
    assert f"{expanded.token_bytes / spec().token_bytes:.2f}" == "71.11"


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_tensor_parallelism_does_not_divide_the_latent(tp: int):
    cache = latent_spec(R1.shard(tp), cache_format("bf16"), 64, PACKED)
    assert cache.token_bytes == 61 * (512 + 64) * 2 == 70_272


MIB = 2**20


def setting(**changes: object) -> Setting:
    """R1 on eight ranks, as the published pair was measured, with a budget that explains it."""
    return replace(
        Setting(
            config=R1,
            tp=8,
            cache_format=cache_format("bf16"),
            layout=PACKED,
            block_size=64,
            budget=23_685_000_000,
            host_budget=4 * GIB,
            max_model_len=MAX_LEN,
            max_num_seqs=256,
            workspace_cap=EARLIER_CAP,
            prefill="profile",
            step_tokens=2048,
        ),
        **changes,
    )


def test_the_published_pair_as_plans():
    before, after = plan(setting(layout=ALIGNED)), plan(setting())
    assert (before.num_host_blocks, after.num_host_blocks) == (859, 954)
    assert (before.num_blocks, after.num_blocks) == (4739, 5266)
    assert (before.num_tokens, after.num_tokens) == (303_296, 337_024)
    assert f"{before.concurrency:.2f}x {after.concurrency:.2f}x" == "1.85x 2.06x"
    assert before.padding_bytes == 303_296 * 61 * 128
    assert after.padding_bytes == 0
    for planned in (before, after):
        assert planned.pool_bytes + planned.unused_bytes == planned.budget
        assert 0 <= planned.unused_bytes < planned.block_bytes


def test_the_peak_of_chunked_prefill():
    """131,072 rows: 1.000 GiB of kv_b output, 0.1406 of workspace, one hidden state of 2048 tokens: 1.17."""
    planned = plan(setting())
    assert planned.workspace_rows == 131_072
    assert planned.prefill["kv_b output"] == GIB
    assert f"{planned.prefill['workspace'] / GIB:.4f}" == "0.1406"
    assert printed("1.17").low <= Fraction(planned.prefill_bytes, GIB) <= printed("1.17").high
    later = plan(setting(workspace_cap=CAP))
    assert later.workspace_rows == 65_536
    assert f"{later.prefill_bytes / GIB:.2f}" == "0.60"


def test_the_memory_that_the_peak_took_from_the_cache():
    """Printed before and after the profile run saw it: weights, other, activations, cache, of one H200."""
    before, after = (
        [printed(text) for text in row.split(" + ")]
        for row in ("84.11 + 5.13 + 0.19 + 36.41", "84.11 + 5.13 + 1.17 + 35.42")
    )
    totals = [Interval(sum(x.low for x in row), sum(x.high for x in row)) for row in (before, after)]
    assert totals[0].meets(totals[1])
    taken = Interval(before[3].low - after[3].high, before[3].high - after[3].low)
    grown = Interval(after[2].low - before[2].high, after[2].high - before[2].low)
    assert taken.meets(grown)
    expanded = Fraction(plan(setting()).prefill["kv_b output"], GIB)
    assert taken.low <= expanded <= taken.high
    assert grown.low <= expanded - Fraction(1, 50) <= grown.high


def test_a_device_shared_with_weights_and_prefill():
    card = Device(
        total=int(Fraction("139.81") * GIB),
        utilization=Fraction("0.9"),
        weights=int(Fraction("84.11") * GIB),
        other=int(Fraction("5.13") * GIB),
    )
    planned = plan(setting(budget=card))
    assert planned.budget == card.budget(planned.prefill_bytes)
    assert printed("35.42").scaled(GIB).meets(Interval(*[Fraction(planned.budget)] * 2))
    with pytest.raises(ValueError, match=r"budget: \d+ · 0\.9 less \d+ for weights.* must be positive"):
        plan(setting(budget=replace(card, weights=card.total)))
    whole = Device(total=3 * GIB, utilization=Fraction(1), weights=GIB, other=GIB)
    assert whole.budget(GIB - 1) == 1
    with pytest.raises(ValueError, match="for prefill is 0, must be positive"):
        whole.budget(GIB)


V2_LITE = preset("deepseek-v2-lite")


@pytest.mark.parametrize(
    ("tp", "cap", "mebibytes"),
    [
        (1, EARLIER_CAP, (144, 1024, 768, 768)),
        (2, EARLIER_CAP, (144, 512, 384, 384)),
        (1, CAP, (72, 512, 384, 384)),
        (2, CAP, (72, 256, 192, 192)),
    ],
)
def test_v2_lite_by_part(tp: int, cap: int, mebibytes: tuple[int, ...]):
    """16 heads and 16,384 tokens of context, whose eightfold is the earlier cap exactly."""
    assert EARLIER_CAP == 8 * 16_384
    rows = workspace_rows(16_384, 256, 64, cap)
    parts = prefill_parts(V2_LITE.shard(tp), rows, 2048, 2, "padded")
    assert tuple(parts.values())[:4] == tuple(size * MIB for size in mebibytes)
    assert tuple(parts) == PREFILLS["padded"][0]


def test_values_wider_than_keys_stay_as_wide():
    parts = prefill_parts(replace(V2_LITE, num_heads=1, v_head_dim=320), 64, 1, 2, "padded")
    assert parts["padded values"] == 64 * 320 * 2


def test_many_new_tokens_move_the_peak_to_the_attention():
    """Then the chunk's own state is larger than the up-projection's output, which is dead."""
    shard = R1.shard(8)
    tokens = 4096 * (128 + 128) * 2 // (192 * 2 + 4)
    assert "kv_b output" in prefill_parts(shard, 4096, tokens, 2, "padded")
    assert "chunk's state" in prefill_parts(shard, 4096, tokens + 1, 2, "padded")


def test_measured_on_an_h200():
    """torch's peak of ``mla_fast.chunked_sdpa`` is the plan and a copy of W_UK and W_UV: under 2 % more."""
    recorded = json.loads((Path(__file__).parent.parent / "docs/results/capacity-h200.json").read_text())
    assert len(recorded["peaks"]) >= 5
    for peak in recorded["peaks"]:
        shard = preset(peak["model"]).shard(peak["tp"])
        parts = prefill_parts(shard, peak["rows"], peak["tokens"], 2, "padded")
        planned = sum(parts.values())
        weights = shard.num_heads * (shard.qk_nope_head_dim + shard.v_head_dim) * shard.kv_lora_rank * 2
        assert 0 <= peak["measured"] - planned - weights < 2**20
        assert (peak["measured"] - planned) * 50 <= planned
    profile = recorded["profile"]
    assert profile["measured"] == sum(prefill_parts(R1.shard(8), EARLIER_CAP, 2048, 2, "profile").values())
    for pool in recorded["pools"].values():
        assert pool["requested"] == pool["planned"]


def test_two_figures_of_one_comment_that_cannot_both_hold():
    """144 MB of workspace is 131,072 rows, 3 GB of expanded keys and values of all 128 heads is 65,536."""
    one_head_set = R1.shard(1)
    by_rows = {rows: prefill_parts(one_head_set, rows, 0, 2, "padded") for rows in (CAP, EARLIER_CAP)}
    assert by_rows[EARLIER_CAP]["workspace"] == 144 * MIB
    assert by_rows[CAP]["workspace"] == 72 * MIB
    assert by_rows[CAP]["joined keys"] == 3 * GIB
    assert by_rows[EARLIER_CAP]["joined keys"] == 6 * GIB


def test_a_format_of_fewer_bytes_holds_more_tokens():
    plans = {
        name: plan(setting(cache_format=cache_format(name))) for name in ("bf16", "fp8_e4m3", "fp8_ds_mla")
    }
    assert [plans[name].entry_bytes for name in plans] == [1152, 576, 656]
    assert plans["fp8_e4m3"].num_tokens > plans["fp8_ds_mla"].num_tokens > plans["bf16"].num_tokens


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="num_heads=128 is not divisible by tp=3"):
        plan(setting(tp=3))
    with pytest.raises(
        ValueError, match="workspace_rows: is 65536, but 2048 requests need a block of 64 rows"
    ):
        plan(setting(workspace_cap=CAP, max_num_seqs=2048))
    with pytest.raises(ValueError, match="prefill 'lazy' is not one of profile, direct, joined, padded"):
        plan(setting(prefill="lazy"))


# Printed throughput of one run each: requests per second, tokens per request, tokens per second.
THROUGHPUT = [
    ("0.854", 1000, "854.2"),
    ("0.40", 9216, "3715.94"),
    ("0.40", 1024, "412.92"),
    ("0.37", 9216, "3381.36"),
]


@pytest.mark.parametrize(("requests", "tokens", "throughput"), THROUGHPUT)
def test_throughput_rows_agree_with_themselves(requests: str, tokens: int, throughput: str):
    assert printed(requests).scaled(tokens).meets(printed(throughput))
    assert not printed(requests).scaled(2 * tokens).meets(printed(throughput))


def test_throughput_rows_agree_with_one_another():
    """Total and output tokens of one run imply prompts of 8191.2 tokens; 8192 were asked for."""
    total, output = printed("3715.94"), printed("412.92").scaled(Fraction(1, 1024))
    shortest, longest = total.low / output.high - 1024, total.high / output.low - 1024
    assert 8191 < shortest < longest < 8192
    slower = printed("3381.36")
    assert Interval(total.low / slower.high, total.high / slower.low).meets(printed("1.099"))


def test_budgets_of_a_block_count():
    assert budgets(10, 3) == range(30, 40)
    assert not common_budgets([(10, 3), (10, 4)])


def test_printed_is_half_a_unit_either_way():
    assert printed("1.85") == Interval(Fraction(1845, 1000), Fraction(1855, 1000))
    assert printed("12") == Interval(Fraction(23, 2), Fraction(25, 2))
