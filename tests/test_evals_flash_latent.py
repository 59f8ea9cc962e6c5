"""The right kernel of the gate's noise: judged like any backend, and its lazy maximum is one."""

import pytest
import torch

from evals.flash_latent import BACKEND, BLOCK, SLACK, _maxima
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.formats import cache_format
from mla_ref.latent import latent
from oracles.verdict import PASS
from oracles.verify import judge

CONFIG = MLAConfig(
    name="narrow", hidden_size=64, num_heads=2, q_lora_rank=None, kv_lora_rank=128, qk_nope_head_dim=32,
    qk_rope_head_dim=32, v_head_dim=32,
)  # fmt: skip
ORACLES = ("value", "lse", "empty_rows", "likely", "poison", "causal", "inputs_unchanged")


@pytest.mark.parametrize("regime", ["plain", "peaky", "stairs", "negative"])
@pytest.mark.parametrize(
    ("dtype", "fmt"), [("bfloat16", "bf16"), ("float16", "fp16"), ("bfloat16", "fp8_e4m3")]
)
def test_it_is_right(dtype: str, fmt: str, regime: str, seed: int):
    case = Case(
        problem="latent_attention", config=CONFIG, q_lens=(1, 5, 0, 3, 2), kv_lens=(300, 129, 7, 0, 1),
        dtype=dtype, cache_format=fmt, block_size=64, seed=seed, regime=regime,
    )  # fmt: skip
    verdicts = judge(BACKEND, case, oracles=ORACLES)
    assert {verdict.variant for verdict in verdicts} == {"default", *BACKEND.variants}
    for verdict in verdicts:
        assert verdict.status == PASS, f"{verdict.variant} {verdict.oracle}: {verdict.detail} {verdict.worst}"


def test_the_maximum_is_of_the_keys_so_far():
    """A block without a key, then rising scores: by 3, by more than the slack, and down again."""
    tops = torch.tensor([-torch.inf, 1.0, 4.0, 13.0, 2.0])
    scores = tops.repeat_interleave(BLOCK)[None, None, :-9]
    assert torch.equal(_maxima(scores, 0.0)[0, 0, ::BLOCK], torch.tensor([-torch.inf, 1.0, 4.0, 13.0, 13.0]))
    assert torch.equal(
        _maxima(scores, SLACK)[0, 0, ::BLOCK], torch.tensor([-torch.inf, 1.0, 1.0, 13.0, 13.0])
    )


def test_a_lazy_maximum_rounds_the_weight_that_decides():
    """One key outweighs all others: its weight is 1 to a running maximum, and any number to an older one."""
    heads = 64
    q, keys = torch.zeros(1, heads, 128), torch.zeros(2, BLOCK, 160)
    q[0, :, 0] = 1.0 - torch.arange(heads) / 256.0
    keys[0, 0, 0], keys[1, 5, 0] = 8.0, 12.25  # apart by 4.6 to 6.1 powers of two
    keys[1, 5, 1] = 1.0  # what comes out is its share
    rest = (
        torch.zeros(1, heads, 32, dtype=torch.bfloat16), keys.bfloat16(),
        torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([2 * BLOCK], dtype=torch.int32), 1, 1.0,
        cache_format("bf16"), torch.tensor(torch.nan),
    )  # fmt: skip
    exact = latent(q.double(), rest[0].double(), *rest[1:]).out[0, :, 1].bfloat16()
    running, lazy = (fn(q.bfloat16(), *rest).out[0, :, 1] for fn in (BACKEND.fn, *BACKEND.variants.values()))
    assert torch.equal(running, exact)
    assert (lazy != exact).sum() > heads / 4
