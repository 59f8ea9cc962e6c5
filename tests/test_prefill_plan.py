"""What ``mla_fast.gluon_prefill`` decides on the host: chunks, tiles, heads side by side, copies, memory."""

import json
from pathlib import Path

import pytest
import torch

from mla_fast.gluon_prefill import (
    FEWEST_HEADS,
    KEYS,
    L2_BYTES,
    TILE_FIELDS,
    TILE_ROWS,
    _group,
    by_heads,
    gluon_prefill,
    joined,
    plan,
    supports,
)
from mla_ref.capacity import prefill_parts
from mla_ref.case import Case
from mla_ref.presets import preset
from mla_ref.problem import problem
from mla_ref.values import bell

BATCHES = {
    "prefill": ((300, 128, 1), (300, 128, 1), 1000),
    "chunks": ((130, 5, 200), (700, 333, 201), 192),
    "without_queries": ((0, 40), (90, 400), 64),
    "without_keys": ((3, 40), (0, 50), 64),
    "more_queries_than_keys": ((200, 7), (60, 3), 64),
    "one_key_of_a_chunk": ((255,), (256,), 128),
    "nothing": ((), (), 64),
}


def planned(name: str):
    q_lens, kv_lens, rows = BATCHES[name]
    offsets = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
    return plan(offsets, torch.tensor(kv_lens, dtype=torch.int32), 16, rows), q_lens, kv_lens


@pytest.mark.parametrize("name", BATCHES)
def test_every_visible_key_is_attended_to_once(name: str) -> None:
    step, q_lens, kv_lens = planned(name)
    seen = torch.zeros(sum(q_lens), len(kv_lens), max(kv_lens, default=0), dtype=torch.int64)
    written: set[int] = set()
    assert sum(launch.num_keys for launch in step.launches) == sum(
        kv_len for q_len, kv_len in zip(q_lens, kv_lens, strict=True) if q_len
    )
    for launch in step.launches:
        assert launch.num_keys == launch.ends[-1]
        owners = [i for i in range(len(kv_lens)) for _ in range(launch.ends[i], launch.ends[i + 1])]
        for row, num_rows, key, num_keys, visible, _ in launch.tiles.tolist():
            assert 0 < num_rows <= TILE_ROWS
            assert len(set(owners[key : key + num_keys])) == 1
            i = owners[key]
            start = int(launch.starts[i]) + key - int(launch.ends[i])
            written |= set(range(row, row + num_rows))
            for r in range(num_rows):
                seen[row + r, i, start : start + max(0, min(num_keys, visible + r))] += 1
    row = 0
    for i, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        for s in range(q_len):
            want = torch.zeros_like(seen[row])
            want[i, : max(0, kv_len - q_len + 1 + s)] = 1
            assert torch.equal(seen[row], want)
            assert (row in written) == (kv_len > 0), "a row that sees no key is written all the same"
            row += 1


@pytest.mark.parametrize("name", BATCHES)
def test_long_tiles_come_first_and_later_chunks_merge(name: str) -> None:
    step, *_ = planned(name)
    written: set[int] = set()
    for launch in step.launches:
        tiles = launch.tiles.tolist()
        blocks = [-(-min(keys, seen + rows - 1) // KEYS) for _, rows, _, keys, seen, _ in tiles]
        assert blocks == sorted(blocks, reverse=True)
        for tile, num_blocks in zip(tiles, blocks, strict=True):
            rows = set(range(tile[0], tile[0] + tile[1]))
            assert tile[5] == bool(written & rows)
            assert num_blocks > 0 or not tile[5]
        for tile in tiles:
            written |= set(range(tile[0], tile[0] + tile[1]))
    assert step.counters.tolist() == [0, 0]
    assert all(launch.tiles.shape[1] == TILE_FIELDS for launch in step.launches)


def test_only_requests_without_keys_are_blind() -> None:
    assert [name for name in BATCHES if planned(name)[0].blind] == ["without_keys"]


def test_heads_side_by_side() -> None:
    assert _group(128, 1) == 128
    assert _group(128, L2_BYTES // 8) == 8
    assert _group(128, L2_BYTES // 7) == 4
    assert _group(128, 10 * L2_BYTES) == FEWEST_HEADS
    assert _group(2, 10 * L2_BYTES) == 2


def test_projections_of_one_matrix_are_not_copied(seed: int) -> None:
    h, p, v, c = 3, 64, 128, 256
    whole = bell(seed, "kv_b", h, p + v, c)
    w_uk, w_uv = whole[:, :p], whole[:, p:]
    assert joined(w_uk, w_uv).data_ptr() == whole.data_ptr()
    assert torch.equal(joined(w_uk, w_uv), whole.reshape(h * (p + v), c).T)
    assert torch.equal(joined(w_uk.clone(), w_uv), whole.reshape(h * (p + v), c).T)
    assert torch.equal(joined(w_uk, w_uv.clone()), whole.reshape(h * (p + v), c).T)


@pytest.mark.parametrize("turned", [False, True])
def test_projections_that_only_lie_side_by_side_are_copied(turned: bool) -> None:
    """In two tensors of their own, or the second one with its axes in another order."""
    p, v, c = 4, 8, 16
    whole = torch.arange((p + v) * c, dtype=torch.float32)
    apart = [
        torch.frombuffer(whole.numpy(), dtype=torch.float32, count=n * c, offset=at * c * 4)
        for n, at in ((p, 0), (v, p))
    ]
    steps = (p + v) * c, c, 1
    w_uk = (whole if turned else apart[0]).as_strided((1, p, c), steps)
    w_uv = (
        whole[p * c :].as_strided((1, v, c), (steps[0], 1, v))
        if turned
        else apart[1].as_strided((1, v, c), steps)
    )
    assert w_uv.data_ptr() - w_uk.data_ptr() == p * c * 4
    assert torch.equal(joined(w_uk, w_uv), torch.cat([w_uk, w_uv], dim=1)[0].T)


def test_no_more_chunks_than_the_numerics_declare() -> None:
    """A fortieth of the longest request at a time: forty chunks of it, and those of the other one."""
    for other, told in ((2400, None), (2500, "65 chunks, at most 64")):
        case = Case(
            problem="attention", config=preset("deepseek-v3").shard(128), q_lens=(1, 1),
            kv_lens=(4000, other), block_size=1,
        )  # fmt: skip
        assert supports(case) == told


def test_queries_are_read_where_they_are_if_aligned(seed: int) -> None:
    whole = bell(seed, "query", 5, 3, 192).to(torch.bfloat16)
    for query in (whole[..., :128], whole[..., 128:], whole[:1, :, :128], whole[:, 1:2, 128:]):
        assert by_heads(query).data_ptr() == query.data_ptr()
        assert torch.equal(by_heads(query), query.transpose(0, 1))
        assert all(step * query.itemsize % 16 == 0 for step in by_heads(query).stride()[:2])
    odd = bell(seed, "odd", 5, 3, 196).to(torch.bfloat16)
    packed_but_unaligned = odd.flatten()[1 : 1 + 5 * 3 * 128].view(5, 3, 128)
    for query in (odd[..., :128], odd[..., 4:132], whole[..., 4:132], packed_but_unaligned):
        assert by_heads(query).data_ptr() != query.data_ptr()
        assert by_heads(query).data_ptr() % 16 == 0
        assert torch.equal(by_heads(query), query.transpose(0, 1))


REFUSED = [
    ("longcat-flash", "bfloat16", {"softmax_scale": -1.0}, "softmax_scale: is -1.0, must be positive"),
    ("deepseek-v2-lite", "float32", {}, "queries are float32, needs bfloat16 or float16"),
    (
        "glm-4.7-flash",
        "bfloat16",
        {},
        "nope/rope/value widths 192/64/256, has 128/64/128, 64/64/128, 64/32/64",
    ),
]


@pytest.mark.parametrize(("model", "dtype", "change", "message"), REFUSED)
def test_what_it_refuses(model: str, dtype: str, change: dict[str, float], message: str) -> None:
    fmt = "fp32" if dtype == "float32" else "bf16"
    case = Case(
        problem="attention", config=preset(model).shard(4), q_lens=(2,), kv_lens=(3,), block_size=16,
        cache_format=fmt, dtype=dtype,
    )  # fmt: skip
    inputs = problem("attention").materialize(case, torch.device("cpu"))._replace(**change)
    with pytest.raises(ValueError, match=message):
        gluon_prefill(*inputs)


def test_its_peak_was_measured_as_planned() -> None:
    """torch's peak on an H200 is the plan: under a mebibyte more, far under 2 %."""
    record = json.loads((Path(__file__).parent.parent / "docs/results/prefill-h200.json").read_text())
    assert len(record["peaks"]) >= 6
    for peak in record["peaks"]:
        shard = preset(peak["model"]).shard(peak["tp"])
        planned = sum(prefill_parts(shard, peak["rows"], peak["tokens"], 2, "fused").values())
        assert 0 <= peak["measured"] - planned < 2**20
        assert (peak["measured"] - planned) * 50 <= planned
