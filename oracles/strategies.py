"""Cases for hypothesis: one description for property tests and fuzzing, shrinking towards the plainest case.

That is one head, one token, one block, packed pages, bf16 and plain values. Nothing is drawn element by
element: values follow from a regime and a seed, so a failing case shrinks over two dozen integers.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mla_ref.case import DTYPES, Case
from mla_ref.config import MLAConfig
from mla_ref.formats import cache_format, formats
from mla_ref.layout import CacheLayout
from mla_ref.layout_algebra import KV_ORDERS
from mla_ref.problem import problem as find_problem
from mla_ref.values import REGIMES
from oracles.coverage import ELEMENTS
from oracles.dimensions import MODELS, PROJECTIONS, ROPES, config_of, elements, names_of

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

HEADS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 24, 40, 64, 96, 128)
BLOCK_SIZES = (64, 1, 2, 3, 16, 24, 32, 48, 128, 256)

# Edges of tiles and blocks, and lengths that are none.
KV_LENS = tuple(
    sorted({0, 1, 2, 3, 5, 97, 191, *(n + d for n in (16, 32, 64, 128, 256) for d in (-1, 0, 1))})
)
Q_LENS = (1, 0, 2, 3, 4, 5, 8, 16, 17, 33)
SCALES = (1.0, 0.5, 0.0173, 3.7, 0.0041, 120.0)

# Bytes, in elements of the widest type.
ELEMENT = 8


def cases(
    problem: str,
    *,
    supports: Callable[[Case], str | None] | None = None,
    dtypes: Sequence[str] = DTYPES,
    cache_formats: Sequence[str] | None = None,
    max_requests: int = 4,
    max_keys: int = 300,
    max_heads: int = 16,
    max_rank: int = 128,
    max_elements: int = ELEMENTS,
) -> "SearchStrategy[Case]":
    """Valid cases of a problem.

    supports: a backend's; only cases that it takes are drawn. max_elements: work, as ``dimensions.elements``.

    Raises: ValueError if no cache format is left.
    """
    import hypothesis.strategies as st
    from hypothesis import assume

    models = sorted((model for model in MODELS if model[0] <= max_rank), key=sum) or [min(MODELS)]
    names = [name for name in _plain_first(sorted(formats())) if name in (cache_formats or formats())]
    if not names:
        raise ValueError(f"{problem}: none of {', '.join(cache_formats or ())} is a cache format")
    contract = find_problem(problem)

    @st.composite
    def case(draw: "DrawFn") -> Case:
        config = draw(_configs(problem, models, [h for h in HEADS if h <= max_heads]))
        q_lens, kv_lens = draw(_lengths(problem, max_requests, max_keys))
        groups = [g for g in range(1, config.num_heads + 1) if config.num_heads % g == 0]
        fits = [name for name in names if not cache_format(name).why_not_dims(*_widths(config))]
        assume(fits)
        scale = draw(st.sampled_from(SCALES))
        made = Case(
            problem=problem,
            config=config,
            q_lens=q_lens,
            kv_lens=kv_lens,
            dtype=draw(st.sampled_from(tuple(dtypes))),
            cache_format=draw(st.sampled_from(fits)),
            block_size=draw(st.sampled_from(BLOCK_SIZES)),
            layout=draw(_layouts()),
            regime=draw(st.sampled_from(tuple(REGIMES))),
            kv_scale=scale,
            seed=draw(st.integers(0, 2**31 - 1)),
            num_kv_heads=draw(st.sampled_from(groups)),
            v_scale=scale * draw(st.sampled_from((1.0, 1.25))),
            kv_layout=draw(st.sampled_from(tuple(KV_ORDERS.values()))),
        )
        assume(contract.why_not(made) is None and elements(made) <= max_elements)
        assume(supports is None or supports(made) is None)
        return made

    return case()


def call_sequences(
    problem: str, *, max_calls: int = 4, max_requests: int = 4, max_keys: int = 300, **bounds: Any
) -> "SearchStrategy[list[Case]]":
    """Calls of one process, one after the other: the same model, types and pages, other lengths and values.

    Whatever an implementation keeps from one call to the next, plans, workspaces, prepared weights, has to be
    right for the next one. ``bounds`` are those of ``cases``.
    """
    import hypothesis.strategies as st

    lengths = _lengths(problem, max_requests, max_keys)
    later = st.lists(st.tuples(lengths, st.integers(0, 2**31 - 1)), min_size=1, max_size=max_calls - 1)
    limit = bounds.get("max_elements", ELEMENTS)

    def sequence(first: Case, others: Any) -> list[Case]:
        return [
            first,
            *(replace(first, q_lens=q, kv_lens=kv, seed=seed) for (q, kv), seed in others),
        ]

    first = cases(problem, max_requests=max_requests, max_keys=max_keys, **bounds)
    return st.builds(sequence, first, later).filter(lambda calls: all(elements(c) <= limit for c in calls))


def _plain_first(names: Sequence[str]) -> list[str]:
    return sorted(names, key=lambda name: name != "bf16")


def _widths(config: MLAConfig) -> tuple[int, int]:
    return config.kv_lora_rank, config.qk_rope_head_dim


def _configs(
    problem: str, models: Sequence[tuple[int, ...]], heads: Sequence[int]
) -> "SearchStrategy[MLAConfig]":
    import hypothesis.strategies as st

    projections = tuple(PROJECTIONS.values()) if "projections" in names_of(problem) else ({},)

    return st.builds(
        config_of,
        st.sampled_from(list(models)),
        st.sampled_from(list(heads)),
        st.sampled_from(list(ROPES.values())),
        st.integers(1, 61) if problem == "cache_capacity" else st.just(1),
        st.sampled_from(list(projections)),
    )


def _lengths(
    problem: str, max_requests: int, max_keys: int
) -> "SearchStrategy[tuple[tuple[int, ...], tuple[int, ...]]]":
    """(q_lens, kv_lens): edges of blocks and tiles and any others, idle requests, rows without keys."""
    import hypothesis.strategies as st

    edges = [n for n in KV_LENS if n <= max_keys]
    kv_len = st.integers(0, max_keys) | st.sampled_from(edges)
    q_len = st.sampled_from(Q_LENS)
    one = st.tuples(q_len, kv_len) | st.integers(0, 64).map(lambda n: (n, n))
    least = 1 if problem == "merge_states" else 0
    return st.lists(one, min_size=least, max_size=max_requests).map(
        lambda pairs: (tuple(q for q, _ in pairs), tuple(kv for _, kv in pairs))
    )


def _layouts() -> "SearchStrategy[CacheLayout]":
    """Packed pages in order first; every stride, gap and offset is whole elements of the widest type."""
    import hypothesis.strategies as st

    return st.builds(
        CacheLayout,
        entry_align=st.sampled_from((1, ELEMENT, 128, 256)),
        block_gap=st.sampled_from((0, ELEMENT, 512)),
        offset=st.sampled_from((0, ELEMENT, 24, 1024)),
        shuffled=st.booleans(),
        spare_blocks=st.integers(0, 40),
        block_align=st.sampled_from((1, 576)),
    )
