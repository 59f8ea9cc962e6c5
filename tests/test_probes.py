"""Rules without a truth: no alarm on right kernels, exact payloads, edits that keep their promises."""

import mmap
import random
import re
import resource
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from random_trials import random_kernel

from mla_ref.backend import Backend
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.formats import formats
from mla_ref.latent import BACKEND as LATENT_BACKEND
from mla_ref.merge_states import BACKEND as MERGE_BACKEND
from mla_ref.numerics import Numerics
from mla_ref.problem import AttentionOutput, problem
from oracles.bounds import Admissible, merge_of
from oracles.coverage import draw
from oracles.matrix import OF_ONE_RUN
from oracles.memory import NO_RESERVE, counted_again
from oracles.mutants import LATENT, MERGE, mutants
from oracles.oracle import named_tensors, rules, storage_bytes
from oracles.probes import (
    ATTENTION,
    KV_SCALE,
    V_SCALE,
    alone,
    batch,
    cached_anew,
    decoded,
    exactly_scaled,
    first_keys,
    lengths,
    live,
    materialized,
    payload,
    planted,
    restored,
    rows_of,
    stored,
    value_channels,
    whole,
)
from oracles.rules.graded import plant_deep
from oracles.rules.guard_bands import BAND, guarded
from oracles.rules.index_range import REACHES
from oracles.rules.many_requests import BEGINNING, CROWDS
from oracles.rules.needle import OF_NARROW_RANGE, candidates, plant_far
from oracles.verdict import ERROR, FAIL, PASS, UNSUPPORTED
from oracles.verify import backends, find_backend, judge

AGAIN = [name for name in rules() if name not in OF_ONE_RUN]
CPU = "cpu"


@pytest.mark.parametrize("name", AGAIN)
def test_right_kernels_raise_no_alarm(name, seed):
    """Whatever they round, split, pair or walk backwards."""
    draws, rule = random.Random(seed), rules()[name]
    for i in range(12):
        contract = draws.choice(rule.problems)
        case = draw(contract, seed, i)
        if contract in ("latent_attention", "attention"):
            backend = random_kernel(draws, contract)
        else:
            right = [
                b for b in backends().values() if b.problem == contract and b.name.startswith("mla_ref.")
            ]
            backend = draws.choice(right)
        bad = [v for v in judge(backend, case, oracles=[name]) if v.status not in (PASS, UNSUPPORTED)]
        assert bad == [], bad[0].detail


@pytest.mark.parametrize("name", AGAIN)
def test_a_batch_of_nobody_is_no_case_to_fail(name):
    for contract in set(rules()[name].problems) & set(ATTENTION):
        case = replace(LATENT, problem=contract, q_lens=(), kv_lens=())
        backend = next(b for b in backends().values() if b.problem == contract)
        assert {v.status for v in judge(backend, case, oracles=[name])} == {PASS}


@pytest.mark.parametrize("fmt", formats())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_every_format_and_type_holds_a_payload_exactly(fmt, dtype, seed):
    config = replace(LATENT.config, kv_lora_rank=256)
    case = exactly_scaled(replace(LATENT, config=config, cache_format=fmt, seed=seed))
    inputs = materialized(case, CPU)
    values = payload(case, sum(case.kv_lens), value_channels(inputs), CPU)
    key = torch.ones(len(values), case.config.qk_rope_head_dim, dtype=torch.float64)
    assert torch.equal(decoded(planted(inputs, key, values)[0], dtype)[0].double(), values)


@pytest.mark.parametrize(
    ("contract", "fmt"),
    # Pages of keys and values have no tiles.
    [
        (of, fmt)
        for of in ATTENTION
        for fmt in formats()
        if of != "paged_attention" or "fp8_ds_mla" not in fmt
    ],
)
def test_a_format_without_a_scale_has_the_inputs_of_any(contract, fmt):
    case = replace(
        LATENT, problem=contract, config=replace(LATENT.config, kv_lora_rank=128), cache_format=fmt
    )
    scaled = replace(case, kv_scale=KV_SCALE, v_scale=V_SCALE)
    assert exactly_scaled(case) == (scaled if "fp8_e4m3" in fmt else case)
    there, here = (named_tensors(materialized(x, CPU)) for x in (scaled, exactly_scaled(case)))
    for name, x in there.items():
        assert torch.equal(storage_bytes(x), storage_bytes(here[name])), name


def test_a_payload_tells_tiles_and_tokens_apart(seed):
    values = payload(replace(LATENT, cache_format="fp8_ds_mla", seed=seed), 32, 256, CPU)
    scales = values.abs().unflatten(1, (2, 128)).amax(-1) / 448.0
    assert (scales[:, 0] != scales[:, 1]).any()
    assert len(values.unique(dim=0)) == 32


@pytest.mark.parametrize("contract", ATTENTION)
def test_entries_survive_other_pages(contract):
    case = replace(LATENT, problem=contract)
    inputs = materialized(case, CPU)
    other = cached_anew(inputs, replace(case, block_size=8, seed=9), stored(inputs))
    for name, entries in stored(inputs).items():
        assert torch.equal(stored(other)[name].view(torch.uint8), entries.view(torch.uint8))
    problem(contract).check(other)
    problem(contract).check_values(other)


def test_restored_changes_the_entries_and_nothing_else():
    inputs = materialized(LATENT, CPU)
    other = restored(inputs, {"kv_cache": torch.zeros_like(stored(inputs)["kv_cache"])})
    assert not stored(other)["kv_cache"].any()
    dead = torch.ones(inputs.kv_cache.shape[:2], dtype=torch.bool)
    dead.view(-1)[live(inputs)] = False
    assert torch.equal(other.kv_cache[dead].view(torch.uint8), inputs.kv_cache[dead].view(torch.uint8))
    assert stored(inputs)["kv_cache"].any()


def test_rows_alone_see_what_they_saw():
    inputs = materialized(LATENT, CPU)
    parts = alone(inputs, range)
    assert lengths(batch(inputs, parts)) == [(1, 37), (1, 3), (1, 4), (1, 5), (1, 69), (1, 70)]
    assert rows_of(inputs, parts).tolist() == list(range(6))
    again = batch(inputs, whole(inputs, range(4)))
    assert all(torch.equal(x, y) for x, y in zip(again[:2], inputs[:2], strict=True))
    assert first_keys(inputs) == [0, 37, 42, 112, 121]


@pytest.mark.parametrize("kv_len", [0, 1, 15, 16, 17, 64, 129, 1000])
def test_needles_stand_at_the_edges(kv_len, seed):
    found = candidates(kv_len, 16, 64, seed)
    assert len(found) == len(set(found)) == min(kv_len, 64)
    assert {0, kv_len - 1, 15, 16, 17, kv_len // 2} & set(range(kv_len)) <= set(found)


def test_bands_surround_every_storage():
    inputs, storages = guarded(materialized(LATENT, CPU))
    for name in ("ql_nope", "q_pe", "kv_cache", "block_table", "cache_seqlens"):
        tensor = getattr(inputs, name)
        assert tensor.storage_offset() * tensor.element_size() >= BAND
        assert torch.equal(
            tensor.contiguous().view(torch.uint8),
            getattr(materialized(LATENT, CPU), name).contiguous().view(torch.uint8),
        )
    assert all((x[:BAND] == 0xFF).all() and (x[-BAND:] == 0xFF).all() for x in storages)


class Far(NamedTuple):
    """A right kernel, and of each of its calls how far in its first page and its last row were."""

    backend: Backend
    pages: list[int]
    rows: list[int]


def far_watched() -> Far:
    pages, rows = [], []

    def fn(*args):
        query, cache, table = args[0], args[2], args[3]
        pages.append(int(table[table < cache.shape[0]].min()) * cache.stride(0))
        rows.append((query.shape[0] - 1) * query.stride(0))
        # Whatever wraps is at the beginning.
        assert pages[-1] < min(REACHES) or cache[: 1 + LATENT.layout.spare_blocks].isnan().all()
        return LATENT_BACKEND.fn(*args)

    return Far(Backend("far", "latent_attention", fn), pages, rows)


def test_pages_really_are_out_of_reach_of_32_bits():
    try:  # by the system itself: what is judged may not excuse itself
        mmap.mmap(-1, 2**35, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE).close()
    except OSError as error:
        pytest.skip(f"32 GiB of addresses: {error}")
    far = far_watched()
    (verdict,) = judge(far.backend, LATENT, oracles=["index_range"])
    assert (verdict.status, verdict.detail) == (PASS, "")
    assert verdict.num_checked
    assert max(far.pages) >= 2**32
    assert max(far.rows) >= 2**32


LACKING = r"that takes \d+\.\d GiB in one piece, more than this process may have on cpu"


def test_what_there_is_no_memory_for_is_told(monkeypatch):
    mapped = mmap.mmap

    def refused(*args, made=[], **flags):  # noqa: B006 (one list for all calls)
        made.append(args)
        if len(made) > 1:
            raise OSError(12, "Cannot allocate memory")
        return mapped(*args, **flags)

    monkeypatch.setattr("oracles.memory.mmap.mmap", refused)
    (verdict,) = judge(LATENT_BACKEND, LATENT, oracles=["index_range"])
    assert verdict.status == PASS
    assert verdict.num_checked
    assert re.fullmatch(f"not judged with rows beyond 2³¹ elements: {LACKING}", verdict.detail)


def test_what_there_is_half_the_memory_for_is_judged_half_as_far(monkeypatch):
    mapped = mmap.mmap

    def refused(where, size, **flags):
        if size >= 2**33:
            raise OSError(12, "Cannot allocate memory")
        return mapped(where, size, **flags)

    monkeypatch.setattr("oracles.memory.mmap.mmap", refused)
    far = far_watched()
    (verdict,) = judge(far.backend, LATENT, oracles=["index_range"])
    assert verdict.status == PASS
    assert verdict.num_checked
    told = "; ".join(f"not judged with {what} beyond 2³² elements: {LACKING}" for what in ("pages", "rows"))
    assert re.fullmatch(told, verdict.detail)
    for reached in (far.pages, far.rows):
        assert 2**31 <= max(reached) < 2**32
    wrong = {mutant.name: mutant for mutant in mutants() if mutant.case == LATENT}
    for name, status in (("read_in_32_bits", FAIL), ("read_in_unsigned_32_bits", PASS)):
        (verdict,) = judge(wrong[name].backend, LATENT, oracles=["index_range"])
        assert verdict.status == status


def test_wrong_pages_stay_so_whatever_far_rows_do():
    (wrong,) = (x for x in mutants() if x.name == "read_in_32_bits" and x.case.problem == LATENT.problem)

    def fn(*given):
        if given[0].stride(0) > 2**24:
            raise KeyError("rows")
        return wrong.backend.fn(*given)

    (verdict,) = judge(replace(wrong.backend, fn=fn), LATENT, oracles=["index_range"])
    assert verdict.status == FAIL
    assert verdict.detail.startswith("with pages beyond")


@pytest.fixture
def little():
    """This process may have another 1 GiB of addresses."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, limits[1]))
    yield lambda: resource.getrlimit(resource.RLIMIT_AS)[0] - used
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.skipif(sys.platform != "linux", reason="addresses are not counted here")
def test_a_process_that_may_have_little_memory_judges_what_is_far_all_the_same(little):
    """Addresses of memory that nobody touches cost nothing, and are no part of what a call may take."""
    (verdict,) = judge(LATENT_BACKEND, LATENT, oracles=["index_range"])
    assert (verdict.status, verdict.detail) == (PASS, "")

    def greedy(*args):
        if args[2].shape[0] > 1000:
            torch.empty(2**31, dtype=torch.uint8)
        return LATENT_BACKEND.fn(*args)

    (verdict,) = judge(Backend("greedy", "latent_attention", greedy), LATENT, oracles=["index_range"])
    assert verdict.detail.startswith("not judged with pages beyond 2³¹ elements: no memory in the call: ")
    assert little() == 2**30


@pytest.mark.skipif(sys.platform != "linux", reason="addresses are not counted here")
def test_far_memory_that_a_call_keeps_is_no_part_of_what_others_may_take(little):
    kept = []

    def keeping(*args):
        kept.append(args)
        kept[-1][2].cycle = kept[-1]
        return LATENT_BACKEND.fn(*args)

    (verdict,) = judge(Backend("keeping", "latent_attention", keeping), LATENT, oracles=["index_range"])
    assert (verdict.status, verdict.detail) == (PASS, "")
    assert little() > 2**33
    kept.clear()
    counted_again()
    assert little() == 2**30


def test_far_memory_is_given_back_before_more_is_asked_for(monkeypatch):
    mapped, made = mmap.mmap, []

    def watched(*args, **flags):
        assert not any(memory() for memory in made)
        memory = mapped(*args, **flags)
        made.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr("oracles.memory.mmap.mmap", watched)
    (verdict,) = judge(LATENT_BACKEND, LATENT, oracles=["index_range"])
    assert verdict.status == PASS
    assert len(made) == 2


def test_a_right_call_that_takes_the_whole_pool_is_not_blamed_and_does_not_fill_the_machine():
    def fn(query, rope, cache, *rest):
        cache.double()
        return LATENT_BACKEND.fn(query, rope, cache, *rest)

    (verdict,) = judge(Backend("wasteful", "latent_attention", fn), LATENT, oracles=["index_range"])
    assert verdict.status == PASS
    assert verdict.detail.startswith("not judged with pages beyond 2³¹ elements: no memory in the call: ")
    assert verdict.num_checked  # rows are far apart without a large pool


def test_what_a_backend_declines_is_not_tried():
    calls = []

    def fn(*args):
        calls.append(tuple(args[5].tolist()))
        return LATENT_BACKEND.fn(*args)

    def supports(case: Case) -> str | None:
        return None if case.kv_lens == LATENT.kv_lens else "only these lengths"

    picky = Backend("picky", "latent_attention", fn, supports=supports)
    for name in AGAIN:
        if "latent_attention" in rules()[name].problems:
            (verdict,) = judge(picky, LATENT, oracles=[name])
            assert verdict.status == PASS, verdict.detail
    assert set(calls) == {LATENT.kv_lens}


def test_a_rule_that_claims_nothing_says_why():
    (verdict,) = judge(LATENT_BACKEND, replace(LATENT, q_lens=(1,), kv_lens=(9,)), oracles=["batch_mates"])
    assert (verdict.status, verdict.detail) == (PASS, "one request has no mates")


def test_merges_of_uncertain_states_hold_every_right_merge(seed):
    """States moved to the ends of what they may be, merged, are within the radius of the merge as it is."""
    contract, case = problem("merge_states"), replace(MERGE, seed=seed % 1000)
    inputs = contract.materialize(case, torch.device(CPU))
    draw = torch.Generator().manual_seed(seed)
    outs, lses = inputs.outs.double().nan_to_num(nan=0.0), inputs.lses.double()
    radius = 2.0**-6 * torch.rand(outs.shape, generator=draw, dtype=torch.float64)
    doubt = 2.0**-8 * torch.rand(lses.shape, generator=draw, dtype=torch.float64)
    out = Admissible(outs, radius, torch.float64)
    lse = Admissible(lses, doubt.masked_fill(lses.isneginf(), 0.0), torch.float64)
    right = merge_of(outs, lses, out, lse)
    used = 0.0
    for _ in range(20):
        signs = [torch.randint(0, 2, x.shape, generator=draw).double() * 2.0 - 1.0 for x in (outs, lses)]
        moved = merge_of(outs + signs[0] * radius, lses + signs[1] * lse.radius, out, lse)
        for got, want in ((right.out, moved.out), (right.lse, moved.lse)):
            off = (got.mid - want.mid).abs().nan_to_num(nan=0.0)
            assert bool((off <= want.radius).all())
            used = max(used, float((off / want.radius.clamp(min=1e-300)).max()))
    assert used > 0.5


def test_a_rule_asked_of_a_wrong_kernel_names_what_was_different():
    wrong = next(m for m in mutants() if m.name == "page_size_built_in")
    (verdict,) = judge(wrong.backend, wrong.case, oracles=["page_size"])
    assert verdict.status == FAIL
    assert verdict.detail.startswith("with pages of 32 tokens: ")


@pytest.mark.parametrize(
    ("oracle", "call", "words"),
    [
        ("surroundings", 2, "with bfloat16 as the default type"),
        ("surroundings", 3, "without gradients, with other random numbers to come"),
        ("call_sequence", 2, "with the requests in reverse order"),
        ("call_sequence", 4, "where nobody has a key"),
        ("call_sequence", 6, "after other calls"),
        ("poison", 3, "with noise in dead memory"),
        ("page_size", 2, "with pages of 32 tokens"),
        ("batch_mates", 3, "without the other requests"),
        ("layout", 2, "with the cache as"),
        ("many_requests", 2, "in a batch of"),
        ("index_range", 2, "with pages beyond 2³² elements"),
    ],
)
def test_an_error_says_in_which_of_the_calls_it_was(oracle, call, words):
    calls = []

    def fn(*args):
        calls.append(None)
        if len(calls) == call:
            raise KeyError("planted")
        return LATENT_BACKEND.fn(*args)

    (verdict,) = judge(Backend("falls", "latent_attention", fn), LATENT, oracles=[oracle])
    assert verdict.status == ERROR
    assert re.match(rf"{re.escape(words)}.*: KeyError: 'planted'", verdict.detail)


def test_one_block_is_no_blocks():
    case = next(mutant.case for mutant in mutants() if mutant.case.problem == "cache_capacity")
    right = find_backend("mla_ref.capacity").fn

    def generous(*args):
        output = right(*args)
        return output._replace(num_blocks=output.num_blocks + 1)

    (verdict,) = judge(Backend("generous", "cache_capacity", generous), case, oracles=["budget"])
    assert re.fullmatch(r"in \d+ bytes there is room for 1 block of (\d+) bytes, not 2 of \1", verdict.detail)


def test_the_sign_of_a_zero_is_nobody_s_claim():
    """A row without a key is a sum of values times 0, and some kernels leave it the sign of their sum."""

    def fn(*args):
        out, lse = LATENT_BACKEND.fn(*args)
        newest = args[2][args[3][0, 0], 0, 0]
        return AttentionOutput(torch.where(out == 0.0, torch.copysign(out, newest), out), lse)

    backend = Backend("signed", "latent_attention", fn)
    case = replace(LATENT, q_lens=(5, 2), kv_lens=(1, 9), regime="ties")
    for seed in range(4):
        (verdict,) = judge(backend, replace(case, seed=seed), oracles=["causal"])
        assert verdict.status == PASS, verdict.detail


def test_configs_of_one_head_and_narrow_ropes_are_probed():
    config = MLAConfig(
        name="narrow",
        hidden_size=32,
        num_heads=1,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=2,
        v_head_dim=8,
    )
    case = replace(LATENT, config=config, q_lens=(1, 4), kv_lens=(300, 7))
    assert {v.status for v in judge(LATENT_BACKEND, case, oracles=["needle", "census", "single"])} == {PASS}


@pytest.mark.parametrize("contract", ATTENTION)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_low_scores_are_lower_than_any_of_float16(contract, dtype, seed):
    """Whatever the widths, and in the narrowest of formats."""
    for c, p, r, v in ((16, 8, 4, 12), (128, 32, 16, 48), (512, 128, 64, 128)):
        config = replace(LATENT.config, kv_lora_rank=c, qk_nope_head_dim=p, qk_rope_head_dim=r, v_head_dim=v)
        for fmt in ("bf16", "fp8_e4m3"):
            case = replace(LATENT, problem=contract, config=config, dtype=dtype, cache_format=fmt, seed=seed)
            inputs, want = plant_deep(exactly_scaled(case), CPU)
            seen = want["lse"].isfinite()
            assert seen.any()
            assert want["lse"][seen].max() < torch.finfo(torch.float16).min
            assert all(x.isfinite().all() for x in inputs[:2] if isinstance(x, torch.Tensor) and x.dim() == 3)


@pytest.mark.parametrize("fmt", sorted(formats().keys() - OF_NARROW_RANGE))
def test_far_values_are_beyond_float16_and_held_exactly(fmt, seed):
    config = replace(LATENT.config, kv_lora_rank=256)
    case = exactly_scaled(replace(LATENT, config=config, cache_format=fmt, seed=seed))
    inputs, want = plant_far(case, CPU)
    assert want["out"].abs().max() > torch.finfo(torch.float16).max
    picked_values = set(want["out"].abs().unique().tolist()) - {0.0}
    assert picked_values <= set(decoded(inputs)[0].abs().unique().tolist())


def met_by(rule: str, case: Case) -> list:
    """The inputs of every run that a rule makes."""
    met = []

    def fn(*given):
        met.append(problem(case.problem).inputs(*given))
        return LATENT_BACKEND.fn(*given)

    verdicts = judge(replace(LATENT_BACKEND, fn=fn, variants={}), case, oracles=[rule])
    assert {v.status for v in verdicts} == {PASS}
    return met


def test_a_crowd_is_as_large_as_its_seed_says_whatever_the_case():
    long = replace(LATENT, q_lens=(1, 1), kv_lens=(1031, 1025))
    for seed, beginning in enumerate(BEGINNING):
        sizes = [len(inputs.cache_seqlens) for inputs in met_by("many_requests", replace(long, seed=seed))]
        assert max(sizes) == CROWDS[beginning]


def test_pages_of_no_power_of_two_are_among_those_tried():
    assert [x.kv_cache.shape[1] for x in met_by("page_size", LATENT)] == [16, 32, 24]


def test_calls_of_other_sizes_have_nobody_with_a_key_and_nobody_with_a_token():
    met = met_by("call_sequence", LATENT)
    assert any(len(x.ql_nope) and not x.cache_seqlens.any() for x in met)
    assert any(not len(x.ql_nope) and x.cache_seqlens.any() for x in met)


def test_a_type_that_ends_before_the_products_of_a_needle_is_not_asked_for_them():
    case = replace(
        LATENT, dtype="float64", config=replace(LATENT.config, qk_nope_head_dim=128, qk_rope_head_dim=64)
    )
    overflowing = Backend("narrow", "latent_attention", LATENT_BACKEND.fn, Numerics(accumulate="float16"))
    (verdict,) = judge(overflowing, case, oracles=["needle"])
    assert (verdict.status, verdict.detail) == (PASS, "float16 ends before the products of this probe")


class Rounding(NamedTuple):
    """What a test's format makes of a latent: codes of one type under one scale for a token or for all.

    rope: whether it does so of the rope channels, too.
    """

    name: str
    base: str
    levels: int = 0
    rope: bool = False

    def made(self):
        fmt = formats()[self.base]

        def encode(kv_c, k_pe, kv_scale):
            return fmt.encode(self.coded(kv_c), self.coded(k_pe) if self.rope else k_pe, kv_scale)

        return replace(fmt, name=self.name, encode=encode if self.levels else fmt.encode)

    def coded(self, kv_c):
        step = kv_c.abs().amax(-1, keepdim=True).clamp(min=1e-30) / self.levels
        return (kv_c / step).round() * step


STRANGE = (
    Rounding("int8_token", "fp32", 127),
    Rounding("int8_entry", "fp32", 127, rope=True),
    Rounding("halves", "fp16"),
    Rounding("codes", "fp8_e4m3"),
)


@pytest.mark.parametrize("kv", ["exact", "bfloat16"])
@pytest.mark.parametrize("strange", STRANGE, ids=lambda strange: strange.name)
def test_a_strangers_format_that_does_not_hold_what_is_planted_is_no_alarm(strange, kv, monkeypatch):
    fmt = strange.made()
    monkeypatch.setitem(formats(), fmt.name, fmt)

    def decode(entries, c, r, kv_scale, dtype):
        return tuple(x.to(dtype) for x in fmt.decode(entries, c, r, kv_scale, torch.bfloat16))

    def fn(*given):
        inputs = problem("latent_attention").inputs(*given)
        rounded = inputs._replace(cache_format=replace(fmt, decode=decode))
        return LATENT_BACKEND.fn(*(inputs if kv == "exact" else rounded))

    right = replace(LATENT_BACKEND, fn=fn, variants={}, numerics=replace(LATENT_BACKEND.numerics, kv=kv))
    for dtype, number in (("bfloat16", 1), ("float32", 3)):
        case = replace(LATENT, cache_format=fmt.name, dtype=dtype, seed=number)
        verdicts = judge(right, case, oracles=["single", "needle", "census", "graded", "shift"])
        assert {(v.status, v.oracle) for v in verdicts if v.detail} <= {(PASS, "shift")}
        assert {v.status for v in verdicts} == {PASS}
        assert any(v.detail for v in verdicts) == strange.rope


def test_empty_states_are_no_more_than_the_backend_takes():
    met = []

    def fn(outs, lses):
        met.append(len(outs))
        return MERGE_BACKEND.fn(outs, lses)

    def at_most(limit):
        def supports(case):
            return f"more than {limit} states" if len(case.kv_lens) > limit else None

        return supports

    case, most = replace(MERGE, seed=3), []
    for limit in (300, 16, 4):
        met.clear()
        backend = Backend("few", "merge_states", fn, MERGE_BACKEND.numerics, supports=at_most(limit))
        (verdict,) = judge(backend, case, oracles=["merge_algebra"])
        assert (verdict.status, verdict.detail) == (PASS, "")
        most.append(max(met))
    assert most == [4 + 258 + 1, 4 + 2, 4]
