"""Every adapter that the probe can print: it imports, names nothing that is not there, and is right.

One kernel is right for any signature that can be built: parameters are called like the roles they take.
"""

import builtins
import itertools
import math
import random
import sys
import types
from dataclasses import replace

import pytest
import torch

from mla_ref.pages import gather
from oracles import conventions
from oracles.adapter_text import BOTTOM_RIGHT, NAMES_TAKEN, ORDERS, TOP_LEFT, Manner, source
from oracles.call_spec import ROLES, Spec, specs
from oracles.conventions import case_of, loaded
from oracles.verdict import PASS, UNSUPPORTED
from oracles.verify import judge

QUERIES = (
    ("query",), ("query_batched",), ("query_heads_first",), ("ql_nope", "q_pe"),
    ("ql_nope_batched", "q_pe_batched"),
)  # fmt: skip
PAGED = (
    ("kv_cache",), ("kv_cache_one_head",), ("latent_cache", "rope_cache"),
    ("latent_cache_one_head", "rope_cache_one_head"),
)  # fmt: skip
CONTIGUOUS = (
    ("entries",), ("latent_entries_one_head", "rope_entries_one_head"),
    ("key_heads_first", "value_heads_first"),
)  # fmt: skip
# (the parameter that masks, what the kernel does without an explicit mask, what the flag is given)
MASKS = (
    ("", BOTTOM_RIGHT, "True"),
    ("causal", BOTTOM_RIGHT, "True"),
    ("causal", TOP_LEFT, "max_seqlen_q > 1"),
    ("mask", BOTTOM_RIGHT, "True"),
)
LSES = (None, "", " * math.log(2.0)", " * softmax_scale", " * -1.0")
SMALL = conventions.Geometry(32, 16, 4, 16, "bfloat16", "bf16")
TARGET = "universal:Kernels.kernel"


def spec_of(query, cache, mask) -> Spec:
    taken = [*query, *cache, "cache_seqlens", "cu_seqlens_q", *(["block_table"] if cache in PAGED else [])]
    return Spec(
        {name: ROLES[name] for name in taken},
        scale="scale",
        causal="causal" if mask == "causal" else None,
        mask="mask" if mask == "mask" else None,
        splits="splits",
    )


def keys_of(given) -> list[torch.Tensor]:
    """Each request's entries [j c+r]."""
    lengths = given["cache_seqlens"].tolist()
    if "key_heads_first" in given:
        both = given["key_heads_first"][:, 0]
        assert torch.equal(given["value_heads_first"][:, 0].nan_to_num(), both[..., :32].nan_to_num())
    elif "entries" in given:
        both = given["entries"]
    else:
        parts = [x for name, x in given.items() if name.startswith(("kv_cache", "latent", "rope"))]
        both = torch.cat([x.squeeze(2) if x.dim() == 4 else x for x in parts], dim=-1)
    if "block_table" in given:
        return [gather(both, row, 0, n) for row, n in zip(given["block_table"], lengths, strict=True)]
    return [both[i, :n] for i, n in enumerate(lengths)]


def queries_of(given) -> torch.Tensor:
    """[t h c+r]"""
    if "query_heads_first" in given:
        return given["query_heads_first"].transpose(1, 2).flatten(0, 1)
    parts = [x for name, x in given.items() if name.startswith("q")]
    return torch.cat([x.flatten(0, 1) if x.dim() == 4 else x for x in parts], dim=-1)


def kernel_of(manner: Manner, alignment: str):
    """Right, and answers in this manner."""

    def kernel(**given):
        query, entries = queries_of(given).double(), keys_of(given)
        (t, h, _), offsets = query.shape, given["cu_seqlens_q"].tolist()
        out, lse = query.new_zeros(t, h, 32), query.new_full((t, h), -math.inf)
        for i, found in enumerate(entries):
            rows = slice(offsets[i], offsets[i + 1])
            s, n = rows.stop - rows.start, len(found)
            key, row = torch.arange(n), torch.arange(s)[:, None]
            seen = key <= row + (0 if alignment == TOP_LEFT else n - s)
            if manner.spec.mask:
                seen = given["mask"][i, 0, :, :n]
                assert given["mask"].shape[3] == max(map(len, entries))
            elif manner.spec.causal and not given["causal"]:
                seen = torch.ones(s, n, dtype=torch.bool)
            scores = given["scale"] * torch.einsum("she,je->hsj", query[rows], found.double())
            scores = scores.masked_fill(~seen, -math.inf)
            lse[rows] = (scores.logsumexp(-1) if n else scores.new_full((h, s), -math.inf)).T
            weights = (scores - lse[rows].T[..., None].clamp(min=-1e300)).exp()
            out[rows] = torch.einsum("hsj,jc->shc", weights, found[:, :32].double())
        if manner.empties:
            lse, out = (
                lse.masked_fill(lse == -math.inf, math.inf),
                out.masked_fill(lse[..., None] == -math.inf, 7.0),
            )
        for name in manner.written:
            if name in given:
                given[name].zero_()
        factor = eval(f"1.0{manner.lse_factor}", {"math": math, "softmax_scale": given["scale"]})
        b = len(entries)
        given_out = arranged(out.to(torch.bfloat16), manner.out_order, b)
        given_lse = arranged((lse / factor).float(), manner.lse_order, b)
        if manner.out_at is None:
            return given_out
        return tuple({manner.lse_at: given_lse, manner.out_at: given_out}.get(at) for at in range(3))

    return kernel


def arranged(x: torch.Tensor, order: str, b: int) -> torch.Tensor:
    if order == "h t":
        return x.transpose(0, 1).contiguous()
    return x.unflatten(0, (b, -1)).transpose(1, 2).contiguous() if order == "b h s" else x


def manner_of(signature, chance: random.Random, with_lse: bool) -> tuple[Manner, str]:
    """A manner of this signature, the rest of it as chance has it, and what the kernel masks by itself."""
    query, cache, (mask, alignment, flag) = signature
    spec = spec_of(query, cache, mask)
    uniform = spec.uniform or mask == "mask" or chance.random() < 0.5
    orders = tuple(ORDERS) if uniform else ("t h", "h t")
    out_at, lse_at = chance.choice([(0, 1), (1, 2), (2, 0)]) if with_lse else (chance.choice([None, 0]), None)
    fields = ("ql_nope", "q_pe", "kv_cache", "block_table", "cache_seqlens", "cu_seqlens_q")
    manner = Manner(
        target=TARGET,
        spec=spec,
        out_at=out_at,
        lse_at=lse_at,
        out_order=chance.choice(orders),
        lse_order=chance.choice(orders),
        lse_factor=chance.choice(LSES[1:]),
        flag=flag,
        masked=mask == "mask",
        alignment=alignment,
        splits=chance.choice([None, 1, 5]),
        zeroed=chance.random() < 0.5,
        clamped=chance.random() < 0.5,
        written=tuple(name for name in fields if chance.random() < 0.3),
        empties=with_lse and chance.random() < 0.5,
        uniform=uniform,
        dtypes=(("bfloat16", "bf16"),),
        widths=chance.choice([None, ((32, 16),)]),
        block_sizes=chance.choice([None, (16,)]),
        heads=chance.choice([None, (4,)]),
        declined=chance.choice([(), ("offset",), ("entry stride", "block stride")]),
    )
    return manner, alignment


def install(monkeypatch: pytest.MonkeyPatch, kernel) -> None:
    module = types.ModuleType("universal")
    module.__spec__ = types.SimpleNamespace(name="universal")
    module.Kernels = types.SimpleNamespace(kernel=kernel)
    monkeypatch.setitem(sys.modules, "universal", module)


CASES = (
    ((2, 2), (19, 5)),
    ((1, 1, 1), (16, 0, 33)),
    ((1, 0, 3), (7, 4, 2)),
    ((4,), (4,)),
)


@pytest.mark.parametrize("query", QUERIES, ids="+".join)
@pytest.mark.parametrize("cache", PAGED + CONTIGUOUS, ids="+".join)
def test_every_adapter_of_a_right_kernel_is_right(query, cache, monkeypatch, seed):
    chance = random.Random(seed)
    for mask, with_lse in itertools.product(MASKS, (True, False)):
        manner, alignment = manner_of((query, cache, mask), chance, with_lse)
        install(monkeypatch, kernel_of(manner, alignment))
        backend = loaded(manner)["BACKEND"]
        statuses = []
        for lengths in CASES:
            case = case_of(SMALL, *lengths)
            verdicts = judge(backend, case, oracles=("value", "lse", "empty_rows", "inputs_unchanged"))
            assert {v.status for v in verdicts} in ({PASS}, {UNSUPPORTED}), (verdicts[0].detail, manner)
            statuses += [v.status for v in verdicts]
        assert PASS in statuses, manner


def undefined(text: str) -> set[str]:
    """Names that some function of a module looks up and that are nowhere."""
    code = compile(text, "adapter", "exec")
    functions = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    looked_up = {name for f in functions for name in globals_of(f)}
    return looked_up - set(code.co_names) - set(dir(builtins)) - {"__name__"}


def globals_of(code: types.CodeType) -> set[str]:
    import dis

    found = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return found.union(*(globals_of(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def test_no_adapter_names_what_is_not_there(seed):
    """Over all signatures, with the rest drawn more often than anybody could run."""
    chance = random.Random(seed)
    texts = {
        source(manner_of(signature, chance, with_lse)[0])
        for signature in itertools.product(QUERIES, PAGED + CONTIGUOUS, MASKS)
        for with_lse in (True, False)
        for _ in range(3)
    }
    assert len(texts) > 700
    assert not set().union(*map(undefined, texts))
    assert undefined("def f():\n    return [nowhere for x in y]") == {"nowhere", "y"}


@pytest.mark.parametrize("name", [*NAMES_TAKEN, "plain"])
def test_a_module_may_be_called_like_anything_the_adapter_uses(name, monkeypatch):
    signature = ("query_batched",), ("entries",), MASKS[3]
    manner = replace(manner_of(signature, random.Random(0), True)[0], target=f"{name}:kernel", zeroed=True)
    module = types.ModuleType(name)
    module.kernel = kernel_of(manner, BOTTOM_RIGHT)
    monkeypatch.setitem(sys.modules, name, module)
    inputs = conventions.inputs_of(conventions.Bench("cpu", SMALL), (2, 2), (19, 5))
    assert conventions.holds(manner, inputs).holds


def paged_with_mask(q, kv_cache, block_table, cache_seqlens, softmax_scale, causal=True, attn_mask=None):
    """Top-left where nobody gives a mask [b 1 s j]."""
    (s, h, e), outs, lses = q.shape[1:], [], []
    for i, n in enumerate(cache_seqlens.tolist()):
        entries = gather(kv_cache, block_table[i], 0, n).float()
        seen = torch.arange(n) <= torch.arange(s)[:, None]
        seen = seen if attn_mask is None and causal else torch.ones(s, n, dtype=torch.bool)
        seen = seen if attn_mask is None else attn_mask[i, 0, :, :n]
        scores = softmax_scale * torch.einsum("she,je->hsj", q[i].float(), entries)
        scores = scores.masked_fill(~seen, -math.inf)
        lses.append(scores.logsumexp(-1) if n else scores.new_full((h, s), -math.inf))
        outs.append(torch.einsum("hsj,jc->shc", scores.softmax(-1).nan_to_num(), entries[:, : e - e // 3]))
    return torch.stack(outs).to(q.dtype), torch.stack(lses)


def test_a_paged_kernel_with_a_mask_is_probed_and_its_adapter_is_right():
    target = f"{__name__}:paged_with_mask"
    answers, manner = conventions.probe(target, specs(paged_with_mask), "cpu", SMALL)
    told = {answer.question: answer.value for answer in answers}
    assert told["explicit mask"] == "honoured by attn_mask"
    assert told["adapter"] == "holds"
    assert "visible[:, None]" in source(manner)
    backend = loaded(manner)["BACKEND"]
    assert {v.status for v in judge(backend, case_of(SMALL, (3, 3), (20, 7)))} == {PASS}
