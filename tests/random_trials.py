"""Random small cases and random right kernels: everything that a bound has to hold for."""

import random
from dataclasses import replace

from simulated_kernel import Schedule, simulated

from mla_ref.backend import Backend
from mla_ref.case import DTYPES, Case
from mla_ref.config import MLAConfig
from mla_ref.formats import cache_format, formats
from mla_ref.numerics import Numerics
from mla_ref.values import REGIMES
from oracles.verify import backends

LENGTHS = (0, 1, 2, 5, 15, 16, 17, 33, 64, 65, 130, 300)


def random_case(draw: random.Random, problem: str) -> Case:
    config = MLAConfig(
        name="random",
        hidden_size=32,
        num_heads=draw.choice((1, 2, 4)),
        q_lora_rank=None,
        kv_lora_rank=draw.choice((16, 32, 128)),
        qk_nope_head_dim=draw.choice((8, 16, 32)),
        qk_rope_head_dim=draw.choice((4, 8, 16)),
        v_head_dim=draw.choice((8, 16)),
    )
    widths = config.kv_lora_rank, config.qk_rope_head_dim
    fits = [name for name in formats() if not cache_format(name).why_not_dims(*widths)]
    requests = draw.randrange(1, 4)
    return Case(
        problem=problem,
        config=config,
        q_lens=tuple(draw.choice((0, 1, 1, 2, 3, 7)) for _ in range(requests)),
        kv_lens=tuple(draw.choice(LENGTHS) for _ in range(requests)),
        dtype=draw.choice(DTYPES),
        cache_format=draw.choice(fits),
        block_size=draw.choice((1, 4, 16, 64)),
        regime=draw.choice(tuple(REGIMES)),
        kv_scale=draw.choice((1.0, 0.5, 0.037)),
        seed=draw.randrange(2**31),
    )


def random_kernel(draw: random.Random, problem: str) -> Backend:
    """One of the references, or a simulated kernel that rounds wherever kernels do."""
    references = [b for b in backends().values() if b.problem == problem and b.name.startswith("mla_ref.")]
    if draw.random() < 0.2:
        backend = draw.choice(references)
        name = draw.choice(("", *backend.variants))
        return replace(backend, fn=backend.variants[name] if name else backend.fn, variants={})
    schedule = Schedule(
        tile=draw.choice((1, 4, 16, 64)),
        splits=draw.choice((1, 1, 2, 3, 8)),
        base2=draw.random() < 0.7,
        paired=draw.random() < 0.3,
        folded=draw.random() < 0.4,
        backwards=draw.random() < 0.3,
        exp_noise=draw.choice((0.0, 2.0)),
    )
    if draw.random() < 0.2:
        schedule = replace(schedule, normalised=True, paired=False)
    numerics = Numerics(
        accumulate=draw.choice(("compute",) * 8 + ("bfloat16", "float16")),
        p=draw.choice(("input", "bfloat16", "float16", "exact")),
        sum_rounded_p=draw.choice((True, False)),
        partial=draw.choice(("exact", "input", "bfloat16", "float16")),
        kv=draw.choice(("exact", "input", "bfloat16")),
        operand=draw.choice(("exact", "input", "bfloat16")),
        form="latent" if problem == "latent_attention" else draw.choice(("absorbed", "expanded")),
    )
    return simulated(problem, numerics, schedule)
