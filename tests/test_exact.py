"""The truth against fifty-digit arithmetic, written out as loops from the definitions."""

from dataclasses import replace

import mpmath
import pytest
import torch

from mla_ref.case import Case
from mla_ref.config import YARN, MLAConfig, RopeConfig
from mla_ref.numerics import Numerics
from mla_ref.problem import problem
from oracles import exact
from oracles.bounds import ADMISSIBLE

mpmath.mp.dps = 50

CPU = torch.device("cpu")

# Units in the last place of float64 at 1: what sums of a few dozen terms lose, and 1e-14 with room to spare.
ULPS = 16 * torch.finfo(torch.float64).eps

# Scores of hundreds: their own rounding is one of the exponent.
LARGE_SCORES = ("huge", "negative", "outlier")

TINY = MLAConfig(
    name="tiny",
    hidden_size=8,
    num_heads=2,
    q_lora_rank=None,
    kv_lora_rank=4,
    qk_nope_head_dim=3,
    qk_rope_head_dim=2,
    v_head_dim=3,
)
CASE = Case(
    problem="latent_attention",
    config=TINY,
    q_lens=(1, 2, 1, 3),
    kv_lens=(5, 3, 0, 2),
    dtype="float64",
    cache_format="fp32",
    block_size=2,
)


def numbers(tensor):
    """A tensor as nested lists of mpf."""
    if tensor.dim():
        return [numbers(x) for x in tensor]
    return mpmath.mpf(tensor.double().item())


def dot(a, b):
    return mpmath.fsum(x * y for x, y in zip(a, b, strict=True))


def attended(scores, values):
    """Softmax-weighted sum and log-sum-exp of one row, by definition."""
    if not scores:
        return None, mpmath.mpf("-inf")
    weights = [mpmath.exp(s) for s in scores]
    total = mpmath.fsum(weights)
    return [dot(weights, column) / total for column in zip(*values, strict=True)], mpmath.log(total)


def token(cache, table, k, j):
    """The cached token j of a request, by its block and slot."""
    return numbers(cache[int(table[j // k]), j % k])


def rows(inputs):
    """(row, request, visible length) of every query row, from the contract's words."""
    row = 0
    for i, length in enumerate(inputs.cache_seqlens.tolist()):
        q_len = int(inputs.cu_seqlens_q[i + 1] - inputs.cu_seqlens_q[i])
        for s in range(q_len):
            yield row, i, max(length - q_len + s + 1, 0)
            row += 1


def defined(inputs):
    """out and lse of every row and head of a paged attention problem, in fifty digits."""
    found = {}
    for row, i, seen in rows(inputs):
        for h in range(inputs[0].shape[1]):
            keys, values, query = [], [], numbers(inputs[0][row, h])
            for j in range(seen):
                if hasattr(inputs, "key_cache"):
                    g, k = h // (inputs[0].shape[1] // inputs.key_cache.shape[2]), inputs.key_cache.shape[1]
                    block, slot = int(inputs.block_table[i, j // k]), j % k
                    keys.append(numbers(inputs.key_cache[block, slot, g]))
                    values.append(numbers(inputs.value_cache[block, slot, g]))
                    continue
                entry = token(inputs.kv_cache, inputs.block_table[i], inputs.kv_cache.shape[1], j)
                latent, k_pe = entry[: TINY.kv_lora_rank], entry[TINY.kv_lora_rank :]
                if hasattr(inputs, "w_uk"):
                    keys.append([dot(w, latent) for w in numbers(inputs.w_uk[h])] + k_pe)
                    values.append([dot(w, latent) for w in numbers(inputs.w_uv[h])])
                else:
                    keys.append(latent + k_pe)
                    values.append(latent)
            if hasattr(inputs, "q_pe"):
                query = query + numbers(inputs.q_pe[row, h])
            scores = [mpmath.mpf(inputs.softmax_scale) * dot(query, key) for key in keys]
            found[row, h] = attended(scores, values)
    return found


def error(got: torch.Tensor, want) -> float:
    """The largest error, relative where the value is above 1."""
    pairs = zip(got.flatten().tolist(), want, strict=True)
    return max(float(abs(mpmath.mpf(g) - w) / max(1, abs(w))) for g, w in pairs)


@pytest.mark.parametrize("regime", ["plain", "peaky", "huge", "negative", "outlier", "tiny", "ties"])
@pytest.mark.parametrize("name", ["latent_attention", "attention", "paged_attention"])
def test_attention_is_its_definition(name, regime, seed):
    case = replace(CASE, problem=name, regime=regime, seed=seed, num_kv_heads=1)
    inputs = problem(name).materialize(case, CPU)
    out, lse = exact.attention(inputs)
    bound = ADMISSIBLE[name](inputs, Numerics(form="expanded" if name == "attention" else "latent"))
    for (row, head), (want, want_lse) in defined(inputs).items():
        if want is None:
            assert torch.equal(out[row, head], torch.zeros_like(out[row, head]))
            assert lse[row, head].item() == -torch.inf
            continue
        for got, exactly, radius in (
            (out[row, head], want, bound["out"].radius[row, head]),
            (lse[row, head], [want_lse], bound["lse"].radius[row, head]),
        ):
            off = [abs(mpmath.mpf(g) - w) for g, w in zip(got.flatten().tolist(), exactly, strict=True)]
            assert all(x <= r for x, r in zip(off, radius.flatten().tolist(), strict=True))
            assert regime in LARGE_SCORES or error(got, exactly) < ULPS


def test_chunks_change_nothing(monkeypatch, seed):
    case = replace(CASE, seed=seed, q_lens=(7, 2), kv_lens=(9, 9))
    inputs = problem(case.problem).materialize(case, CPU)
    whole = exact.attention(inputs)
    monkeypatch.setattr(exact, "CHUNK_ELEMENTS", 20)
    parts = list(exact.attention_rows(inputs))
    assert len(parts) > 4
    for got, want in zip(exact.attention(inputs), whole, strict=True):
        assert error(got, numbers(want.flatten())) < ULPS


def test_merged_states_are_one_softmax(seed):
    case = replace(CASE, problem="merge_states", q_lens=(3,), kv_lens=(4,), seed=seed)
    inputs = problem("merge_states").materialize(replace(case, q_lens=(3, 0, 0), kv_lens=(4, 9, 0)), CPU)
    found = exact.merged(inputs.outs, inputs.lses)
    heads = inputs.lses.shape[2]
    for index in range(len(found.out)):
        t, h = divmod(index, heads)
        states = [s for s in range(len(inputs.lses)) if not inputs.lses[s, t, h].isneginf()]
        scores = [numbers(inputs.lses[s, t, h]) for s in states]
        out, lse = attended(scores, [numbers(inputs.outs[s, t, h]) for s in states])
        if out is None:
            assert not found.out[index].any()
            assert found.lse[index].item() == -torch.inf
            continue
        assert error(found.out[index], out) < ULPS
        assert error(found.lse[index], [lse]) < ULPS


YARNS = [
    RopeConfig(),
    RopeConfig(theta=50000.0, interleaved=False),
    RopeConfig(scaling=YARN, factor=40.0),
    RopeConfig(scaling=YARN, factor=32.0, beta_fast=1.0, theta=50000.0),
    RopeConfig(scaling=YARN, factor=4.0, truncate=False, original_max_position=512),
]


@pytest.mark.parametrize("rope", YARNS, ids=range(len(YARNS)))
def test_frequencies_are_their_definition(rope):
    r = 64
    got = exact.frequencies(rope, r)
    for i, frequency in enumerate(got):
        plain = mpmath.power(rope.theta, mpmath.mpf(-2 * i) / r)
        if rope.scaling != YARN:
            assert float(abs(frequency - plain) / plain) < ULPS
            continue

        def pair(turns, rope=rope):
            ratio = rope.original_max_position / (turns * 2 * mpmath.pi)
            return r * mpmath.log(ratio) / (2 * mpmath.log(rope.theta))

        low, high = pair(rope.beta_fast), pair(rope.beta_slow)
        if rope.truncate:
            low, high = mpmath.floor(low), mpmath.ceil(high)
        low, high = max(low, 0), min(high, r - 1)
        ramp = min(max((i - low) / (high - low), 0), 1)
        want = plain * (1 - ramp) + plain / rope.factor * ramp
        assert float(abs(frequency - want) / want) < ULPS


@pytest.mark.parametrize("interleaved", [True, False])
def test_pairs_come_back_where_they_were(interleaved):
    x = torch.arange(24.0).reshape(2, 12)
    a, b = exact.pairs(x, interleaved)
    assert torch.equal(exact.unpaired(a, b, interleaved), x)
    assert (b - a).unique().tolist() == [1.0 if interleaved else 6.0]


def test_gathered_ranges_are_the_tokens_named(seed):
    case = replace(CASE, problem="cache_gather", seed=seed, q_lens=(4, 2, 0, 2), kv_lens=(9, 3, 0, 2))
    inputs = problem("cache_gather").materialize(case, CPU)
    kv_c, k_pe = exact.gathered(inputs)
    row = 0
    for i, start in enumerate(inputs.seq_starts.tolist()):
        for j in range(int(inputs.cu_seqlens[i + 1] - inputs.cu_seqlens[i])):
            entry = token(inputs.kv_cache, inputs.block_table[i], case.block_size, start + j)
            assert [*kv_c[row].tolist(), *k_pe[row].tolist()] == entry
            row += 1
    assert row == len(kv_c) > 0


def test_e4m3_pages_are_code_times_scale():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.tensor(0.037)
    value = exact.channels(codes, scale, torch.float64)
    assert torch.equal(value.nan_to_num(nan=7.0), (codes.double() * scale.double()).nan_to_num(nan=7.0))
    narrow = exact.channels(codes, scale, torch.bfloat16)
    assert torch.equal(narrow.nan_to_num(7.0), value.float().bfloat16().double().nan_to_num(7.0))


@pytest.mark.parametrize("size", [1, 3, 16])
def test_entries_are_those_of_their_slots(size):
    cache, blocks = torch.arange(5 * size * 2).reshape(5, size, 2), [3, 0, 4, 1]
    slots = [cache[block, offset] for block in blocks for offset in range(size)]
    for start in range(4 * size + 1):
        for stop in range(start, 4 * size + 1):
            want = torch.stack([*slots, slots[0]])[start:stop]
            assert torch.equal(exact.entries(cache, [*blocks, 2**31], start, stop), want)
