"""What a kernel of the house declines it refuses when it is called, too: nothing is wrong in silence."""

import itertools
from dataclasses import replace

import pytest
import torch

from mla_ref.backend import missing
from mla_ref.case import Case
from mla_ref.formats import formats
from mla_ref.layout import CacheLayout
from mla_ref.presets import PRESETS
from mla_ref.problem import problem
from oracles.asked import declined
from oracles.verify import backends

# Its supports() says what can be judged of a model's own layer; the model computes whatever it is given.
NOT_REFUSING = ("mla_fast.transformers_layer",)

WHOLE = replace(PRESETS["deepseek-v3"].shard(64), hidden_size=64, q_lora_rank=32)
ODD = replace(WHOLE, kv_lora_rank=96, qk_rope_head_dim=40, qk_nope_head_dim=24, v_head_dim=40)
LAYOUTS = (CacheLayout(), CacheLayout(offset=2), CacheLayout(entry_align=6, block_gap=2))
KERNELS = [
    name
    for name, backend in backends().items()
    if name.startswith("mla_fast.") and not missing(backend, "cpu")
]


def declined_cases(backend):
    """A case for each reason that the backend has for none of them."""
    found = {}
    types = ("bfloat16", "float16", "float32", "float64")
    for dtype, form, block_size, layout, config in itertools.product(
        types, formats(), (1, 64), LAYOUTS, (WHOLE, ODD)
    ):
        case = Case(
            problem=backend.problem, config=config, q_lens=(1, 2), kv_lens=(70, 5), dtype=dtype,
            cache_format=form, block_size=block_size, layout=layout,
        )  # fmt: skip
        if problem(case.problem).why_not(case) is None and (reason := declined(backend, case)):
            found.setdefault(reason, case)
    return found


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in NOT_REFUSING])
def test_what_is_declined_is_refused(name):
    backend = backends()[name]
    for reason, case in declined_cases(backend).items():
        inputs = problem(case.problem).materialize(case, torch.device("cpu"))
        for variant in (backend.fn, *backend.variants.values()):
            try:
                variant(*inputs)
            except ValueError:
                continue
            pytest.fail(f"declined because {reason}, and yet called: {case.to_json()}")


def test_there_is_something_to_refuse():
    """Of the kernels that run here, at least these have a contract that is narrower than the problem's."""
    pytest.importorskip("triton")
    narrow = {name for name in KERNELS if declined_cases(backends()[name])}
    expected = {"chunked_sdpa", "triton_decode", "triton_paged_attention", "triton_cache_write"}
    assert narrow >= {f"mla_fast.{name}" for name in expected}
