"""Random right kernels: everything that a bound has to hold for."""

import random
from dataclasses import replace

from simulated_kernel import Schedule, simulated

from mla_ref.backend import Backend
from mla_ref.numerics import Numerics
from oracles.verify import backends


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
    # What is 2 ** 8 times as large does not fit into a float16 accumulator.
    if numerics.accumulate != "float16":
        schedule = replace(schedule, slack=draw.choice((0.0, 0.0, 8.0)), twice=draw.random() < 0.2)
    return simulated(problem, numerics, schedule)
