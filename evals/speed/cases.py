"""The shapes that are timed, as data and as cases."""

from collections.abc import Sequence
from typing import NamedTuple

from mla_ref.case import Case
from mla_ref.layout import CacheLayout
from mla_ref.presets import preset


class Shape(NamedTuple):
    """``batch`` equal requests. merge_states: ``q_len`` rows a request, ``batch`` states."""

    problem: str
    batch: int
    heads: int
    q_len: int
    kv_len: int
    cache_format: str = "bf16"


DECODE = (
    Shape("latent_attention", 128, 128, 1, 4096),
    Shape("latent_attention", 128, 128, 2, 4096),
    Shape("latent_attention", 128, 64, 1, 4096),
    Shape("latent_attention", 128, 16, 1, 4096),
    Shape("latent_attention", 64, 16, 1, 32768),
    Shape("latent_attention", 1, 128, 1, 65536),
    Shape("latent_attention", 1, 16, 1, 131072),
    Shape("latent_attention", 32, 32, 1, 4096),
    Shape("latent_attention", 8, 128, 1, 8192),
)
COPIED = ("bf16", "fp8_e4m3", "fp8_ds_mla", "fp8_ds_mla_pow2")
SUITES: dict[str, tuple[Shape, ...]] = {
    "decode": DECODE,
    "decode-fp8": (
        Shape("latent_attention", 128, 16, 1, 4096, "fp8_ds_mla"),
        Shape("latent_attention", 128, 128, 1, 4096, "fp8_ds_mla"),
        Shape("latent_attention", 128, 128, 1, 4096, "fp8_e4m3"),
    ),
    "prefill": (
        Shape("attention", 1, 128, 4096, 4096),
        Shape("attention", 1, 128, 16384, 16384),
        Shape("attention", 1, 16, 4096, 36864),
    ),
    "copy": (
        *(Shape("cache_write", 32, 16, 8192, 8192, fmt) for fmt in COPIED),
        *(Shape("rope_cache_write", 32, 16, 8192, 8192, fmt) for fmt in COPIED),
        *(Shape("cache_gather", 32, 16, 8192, 8192, fmt) for fmt in COPIED),
        Shape("merge_states", 2, 16, 32768, 4096),
        Shape("merge_states", 8, 16, 8192, 4096),
    ),
}


def case_of(
    shape: Shape, *, model: str = "deepseek-v3", block_size: int = 64, dtype: str = "bfloat16", seed: int = 0
) -> Case:
    """The shape with a model's widths. Raises: ValueError where its heads cannot be split so."""
    config = preset(model)
    if not 1 <= shape.heads <= config.num_heads or config.num_heads % shape.heads:
        raise ValueError(f"heads: {shape.heads} is no share of the {config.num_heads} heads of {model}")
    return Case(
        problem=shape.problem,
        config=config.shard(config.num_heads // shape.heads),
        q_lens=(shape.q_len,) * shape.batch,
        kv_lens=(shape.kv_len,) * shape.batch,
        dtype=dtype,
        cache_format=shape.cache_format,
        block_size=block_size,
        layout=CacheLayout(spare_blocks=0),
        kv_scale=0.0173 if shape.cache_format == "fp8_e4m3" else 1.0,
        seed=seed,
    )


def cases(suites: Sequence[str]) -> list[Case]:
    """The cases of suites by name. Raises: ValueError that lists the known ones."""
    for name in suites:
        if name not in SUITES:
            raise ValueError(f"suite {name!r} is not one of {', '.join(SUITES)}")
    return [case_of(shape) for name in suites for shape in SUITES[name]]


def label(case: Case) -> str:
    """A case in a few words: "latent_attention b128 h16 q1 s4096 bf16"."""
    lengths = [
        f"{letter}{values[0] if len(set(values)) == 1 else sum(values)}"
        for letter, values in (("q", case.q_lens), ("s", case.kv_lens))
    ]
    form = case.dtype if case.problem == "merge_states" else case.cache_format
    return " ".join((case.problem, f"b{len(case.q_lens)}", f"h{case.config.num_heads}", *lengths, form))
