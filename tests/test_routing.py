"""Routing: the table is what was measured, and between its entries nothing jumps."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from mla_fast.routing import MEASURED, break_even, crossover, equal_time, prefer
from mla_ref.presets import preset

H200 = "NVIDIA H200"
V3 = preset("deepseek-v3")
RECORD = Path(__file__).parent.parent / "docs/results/prefill-h200.json"


def operations(config, q_len: int, kv_len: int, path: str) -> int:
    """Multiplications of one head, the projections of queries and outputs left out, which cost the same."""
    c, p, r, v = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    if path == "decode":
        return q_len * kv_len * (2 * c + r)
    return q_len * kv_len * (p + r + v) + kv_len * c * (p + v)


@pytest.mark.parametrize("name", ["deepseek-v3", "minicpm3-4b", "glm-4.7-flash", "mistral-small-4"])
def test_the_break_even_is_where_operations_are_equal(name: str) -> None:
    config = preset(name)
    even = break_even(config)
    for kv_len in (1, 4096):
        assert operations(config, even, kv_len, "prefill") <= operations(config, even, kv_len, "decode")
        assert operations(config, even - 1, kv_len, "prefill") > operations(
            config, even - 1, kv_len, "decode"
        )


def test_break_even_of_deepseek() -> None:
    assert break_even(V3) == 171


def test_heads_wider_than_the_latent_never_break_even() -> None:
    with pytest.raises(ValueError, match="deepseek-v3: expanded heads of 320 channels save nothing over 128"):
        break_even(replace(V3, kv_lora_rank=32))


def test_the_table_is_the_record() -> None:
    """Every entry follows from its measured points, and every measured series is in the table."""
    series: dict[tuple[int, int], list[tuple[int, float, float]]] = {}
    for row in json.loads(RECORD.read_text())["routing"]:
        series.setdefault((row["heads"], row["kv"]), []).append(
            (row["q"], row["decode_us"], row["prefill_us"])
        )
    table = {(heads, kv): q for heads, row in MEASURED[H200].items() for kv, q in row}
    assert table == {key: equal_time(sorted(points)) for key, points in series.items()}


def test_points_of_the_table_and_what_lies_beyond() -> None:
    for heads, row in MEASURED[H200].items():
        config = replace(V3, num_heads=heads)
        for kv_len, q_len in row:
            assert crossover(config, kv_len, H200) == q_len
            assert prefer(config, q_len - 1, kv_len, H200) == "decode"
            assert prefer(config, q_len, kv_len, H200) == "prefill"
        assert crossover(config, 1, H200) == row[0][1]
        assert crossover(config, 10**9, H200) == row[-1][1]
    least, most = min(MEASURED[H200]), max(MEASURED[H200])
    for inside, outside in ((least, 1), (most, 4 * most)):
        assert crossover(replace(V3, num_heads=outside), 4096, H200) == crossover(
            replace(V3, num_heads=inside), 4096, H200
        )


def test_between_lengths_it_is_linear_in_their_logarithm() -> None:
    (short, least), (long, most), *_ = MEASURED[H200][16]
    middle = math.isqrt(short * long)
    assert middle**2 == short * long
    assert crossover(replace(V3, num_heads=16), middle, H200) == round((least + most) / 2)


def test_nothing_jumps_between_entries() -> None:
    for heads in range(8, 200, 8):
        found = [
            crossover(replace(V3, num_heads=heads), round(2**x), H200)
            for x in [i / 64 for i in range(9 * 64, 18 * 64)]
        ]
        assert all(abs(a - b) <= 4 for a, b in pairwise(found))


def test_elsewhere_operations_decide() -> None:
    assert crossover(V3, 4096, "NVIDIA A100-SXM4-80GB") == break_even(V3)
    other = preset("minicpm3-4b")
    assert crossover(other, 4096, H200) == break_even(other)


def test_equal_time() -> None:
    assert equal_time([(64, 1.0, 4.0), (256, 4.0, 4.0), (512, 8.0, 4.0)]) == 256
    assert equal_time([(100, 1.0, math.e), (400, math.e, 1.0)]) == 200
    assert equal_time([(16, 3.0, 2.0), (32, 1.0, 2.0), (128, 4.0, 2.0)]) == 64
    for points in ([(1, 1.0, 2.0), (2, 1.0, 2.0)], [(1, 2.0, 1.0), (2, 2.0, 1.0)]):
        with pytest.raises(ValueError, match="points: the paths do not cross at 1, 2 queries"):
            equal_time(points)
