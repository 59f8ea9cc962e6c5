"""Bad inputs as data: an edit to valid inputs, and the one line that it must raise."""

import json
import re
from dataclasses import replace

import pytest
import torch

from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.formats import cache_format
from mla_ref.layout import CacheLayout
from mla_ref.presets import preset
from mla_ref.problem import problems
from oracles.verify import backends

CONFIG = preset("a.x-k2").shard(8)
REFERENCES = {name: b for name, b in backends().items() if name.startswith("mla_ref.")}
CPU = torch.device("cpu")


def inputs_of(problem, **changes):
    recipe = {"q_lens": (1, 2), "kv_lens": (70, 5), "block_size": 64} | changes
    return problems()[problem].materialize(Case(problem=problem, config=CONFIG, **recipe), CPU)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def with_block(x, block):
    table = x.block_table.clone()
    table[0, 1] = block
    return {"block_table": table}


EDITS = [
    (lambda x: {"q_pe": x.q_pe[:, :2]}, r"q_pe: h=2, but h=4 elsewhere \(contract \[t h r\]\)"),
    (lambda x: {"q_pe": x.q_pe[:2]}, r"q_pe: t=2, but t=3 elsewhere \(contract \[t h r\]\)"),
    (lambda x: {"q_pe": x.q_pe[0]}, r"q_pe: shape \[4, 32\] has 2 axes \(contract \[t h r\]\)"),
    (
        lambda x: {"cache_seqlens": x.cache_seqlens[:1]},
        r"cache_seqlens: b=1, but b=2 elsewhere \(contract \[b\]\)",
    ),
    (
        lambda x: {"cu_seqlens_q": x.cu_seqlens_q[:2]},
        r"cu_seqlens_q: b=1, but b=2 elsewhere \(contract \[b\+1\]\)",
    ),
    (lambda x: {"kv_scale": x.kv_scale[None]}, r"kv_scale: shape \[1\] has 1 axes \(contract \[\]\)"),
    (lambda x: {"cache_seqlens": [70, 5]}, r"cache_seqlens: expected a tensor \[b\], got list"),
    (lambda x: {"kv_cache": x.kv_cache[..., :-1]}, r"kv_cache: e=159, but bf16 stores c=128, r=32 in 160"),
    (lambda x: {"kv_cache": x.kv_cache.half()}, r"kv_cache: dtype is float16, must be bfloat16"),
    (lambda x: {"cache_format": cache_format("fp16")}, r"kv_cache: dtype is bfloat16, must be float16"),
    (lambda x: {"q_pe": x.q_pe.half()}, r"q_pe: dtype is float16, must be bfloat16"),
    (lambda x: {"block_table": x.block_table.long()}, r"block_table: dtype is int64, must be int32"),
    (lambda x: {"cu_seqlens_q": x.cu_seqlens_q.long()}, r"cu_seqlens_q: dtype is int64, must be int32"),
    (lambda x: {"cache_seqlens": x.cache_seqlens.float()}, r"cache_seqlens: dtype is float32, must be int32"),
    (lambda x: {"kv_scale": x.kv_scale.double()}, r"kv_scale: dtype is float64, must be float32"),
    (lambda x: {"kv_cache": x.kv_cache.to("meta")}, r"kv_cache: on meta, but q\w*_nope is on cpu"),
    (lambda x: {"cu_seqlens_q": int32(1, 1, 3)}, r"cu_seqlens_q\[0\]: is 1, must be 0"),
    (
        lambda x: {"cu_seqlens_q": int32(0, 4, 3)},
        r"cu_seqlens_q\[2\]: is 3, must not be below cu_seqlens_q\[1\]=4",
    ),
    (lambda x: {"cu_seqlens_q": int32(0, 1, 2)}, r"cu_seqlens_q\[2\]: is 2, but there are 3 tokens"),
    (lambda x: {"max_seqlen_q": 1}, r"max_seqlen_q: 1, but the longest query has 2 tokens"),
    (lambda x: {"cache_seqlens": int32(70, -1)}, r"cache_seqlens\[1\]: is -1, must not be negative"),
    (
        lambda x: {"cache_seqlens": int32(570, 5)},
        r"block_table: has 3 columns, but cache_seqlens\[0\]=570 needs 9",
    ),
    (lambda x: with_block(x, 5), r"block_table\[0, 1\]: is 5, but the cache has 5 blocks"),
    (lambda x: with_block(x, -1), r"block_table\[0, 1\]: is -1, but the cache has 5 blocks"),
]

IMPLEMENTATIONS = [name for name, b in REFERENCES.items() if b.problem in ("attention", "latent_attention")]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(("edit", "message"), EDITS, ids=[message[:24] for _, message in EDITS])
def test_attention_names_the_tensor_and_both_values(name, edit, message):
    backend = REFERENCES[name]
    inputs = inputs_of(backend.problem)
    backend.fn(*inputs)
    for fn in (backend.fn, *backend.variants.values()):
        with pytest.raises(ValueError, match=f"^{message}$"):
            fn(*inputs._replace(**edit(inputs)))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_scale_that_no_writer_can_divide_by(name, scale):
    inputs = inputs_of(REFERENCES[name].problem, cache_format="fp8_e4m3")
    with pytest.raises(
        ValueError, match=rf"^kv_scale: is {scale}, must be finite and positive for fp8_e4m3$"
    ):
        REFERENCES[name].fn(*inputs._replace(kv_scale=torch.tensor(scale)))


TENSORS = [(name, field) for name, b in REFERENCES.items() for field in problems()[b.problem].shapes]


@pytest.mark.parametrize(("name", "field"), TENSORS)
def test_every_tensor_is_checked_for_axes_type_and_place(name, field):
    backend = REFERENCES[name]
    inputs = inputs_of(backend.problem)
    tensor = getattr(inputs, field)

    def refused(value, message):
        with pytest.raises(ValueError, match=message):
            backend.fn(*inputs._replace(**{field: value}))

    refused(tensor[None], rf"^{field}: shape \[1\b.*contract \[")
    refused(None, rf"^{field}: expected a tensor \[.*\], got NoneType$")
    refused(
        tensor.to(torch.complex64),
        r"^(\w+: dtype is complex64, must be|\w+: dtype is \w+, must be complex64)",
    )
    if len(problems()[backend.problem].shapes) > 1:
        refused(tensor.to("meta"), r"^\w+: on (meta|cpu), but \w+ is on (meta|cpu)$")


def valid(**changes):
    return Case(**({"problem": "attention", "config": CONFIG, "q_lens": (1,), "kv_lens": (1,)} | changes))


CASES = [
    ({"q_lens": (1, 1)}, r"case: 2 q_lens but 1 kv_lens"),
    ({"kv_lens": (-1,)}, r"case: kv_lens\[0\] is -1, must not be negative"),
    ({"block_size": 0}, r"case: block_size is 0, must be at least 1"),
    ({"num_kv_heads": 0}, r"case: num_kv_heads is 0, must be at least 1"),
    ({"dtype": "int8"}, r"case: dtype 'int8' is not one of bfloat16, float16, float32, float64"),
    ({"cache_format": "int3"}, r"cache format 'int3' is not one of bf16, .*"),
]


@pytest.mark.parametrize(("changes", "message"), CASES, ids=[message[:24] for _, message in CASES])
def test_cases(changes, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        valid(**changes)


PARTS = [
    (lambda: CacheLayout(entry_align=0), r"layout: entry_align is 0, must be at least 1"),
    (lambda: CacheLayout(block_gap=-2), r"layout: block_gap is -2, must not be negative"),
    (lambda: replace(CONFIG, num_heads=0), r"a\.x-k2: num_heads is 0, must be at least 1"),
    (
        lambda: replace(CONFIG, qk_rope_head_dim=3),
        r"a\.x-k2: qk_rope_head_dim is 3, must be even and not negative",
    ),
    (lambda: CONFIG.shard(3), r"a\.x-k2: num_heads=4 is not divisible by tp=3"),
    (lambda: CONFIG.shard(0), r"a\.x-k2: num_heads=4 is not divisible by tp=0"),
    (lambda: inputs_of("attention", regime="odd"), r"case: regime 'odd' is not one of plain, .*"),
    (lambda: preset("deepseek-v33"), r"preset 'deepseek-v33' is not known; did you mean .*"),
    (lambda: preset("?"), r"preset '\?' is not known; known are deepseek-v2, .*"),
    (lambda: MLAConfig.from_hf({}), r"config\.json: .*"),
]


@pytest.mark.parametrize(("make", "message"), PARTS, ids=[message[:24] for _, message in PARTS])
def test_parts_of_cases(make, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        make()


JSON = [
    ("[]", r"case: expected an object, got list"),
    ("{", r"case: not JSON: .*"),
    (lambda d: d.pop("q_lens"), r"case: missing 1 required .*'q_lens'"),
    (lambda d: d.update(q_len=[1]), r"case: unknown field 'q_len'; known are problem, .*"),
    (lambda d: d.update(q_lens=[1.5]), r"case\.q_lens: expected a list of integers, got \[1\.5\]"),
    (lambda d: d.update(q_lens=1), r"case\.q_lens: expected a list of integers, got 1"),
    (lambda d: d.update(seed="0"), r"case\.seed: expected int, got '0'"),
    (lambda d: d.update(seed=True), r"case\.seed: expected int, got True"),
    (lambda d: d.update(dtype=None), r"case\.dtype: expected str, got None"),
    (lambda d: d.update(layout=3), r"case\.layout: expected an object, got int"),
    (lambda d: d["config"].update(heads=3), r"case\.config: unknown field 'heads'; known are name, .*"),
    (
        lambda d: d["config"]["rope"].update(theta="big"),
        r"case\.config\.rope\.theta: expected float, got 'big'",
    ),
]


@pytest.mark.parametrize(("edit", "message"), JSON, ids=[message[:30] for _, message in JSON])
def test_cases_as_json(edit, message):
    text = edit
    if callable(edit):
        data = json.loads(valid().to_json())
        edit(data)
        text = json.dumps(data)
    with pytest.raises(ValueError, match=f"^{message}$"):
        Case.from_json(text)


def test_messages_are_one_line():
    for _, message in [*EDITS, *CASES, *PARTS, *JSON]:
        assert not re.search(r"\\n|\n", message)
