"""How a stranger's kernel is called: which expression over the contract's inputs each parameter takes.

An expression is Python over the fields of ``latent_attention``'s inputs and these names:

- ``t, h, c, r, b, s``: tokens, heads, latent and rope channels, requests, ``max_seqlen_q``;
- ``query`` [t h c+r]: both parts of the query;
- ``entries`` [b j c+r]: every request's cached entries, contiguous;
- ``visible`` [b s j]: which of them each query may see.

The probe evaluates the very text that it prints into an adapter.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mla_ref.problems.latent_attention import LatentAttentionInputs

# Roles that are no tensor: the probe decides in each call whether and what to pass.
SCALE, CAUSAL, SPLITS, MASK = "scale", "causal", "splits", "mask"
DECIDED = (SCALE, CAUSAL, SPLITS, MASK)

CONTRACT = LatentAttentionInputs._fields

ROLES = {
    **{name: name for name in CONTRACT if name != "softmax_scale"},
    "query": "query",
    "query_batched": "query.view(b, s, h, c + r)",
    "query_heads_first": "query.view(b, s, h, c + r).transpose(1, 2)",
    "ql_nope_batched": "ql_nope.view(b, s, h, c)",
    "q_pe_batched": "q_pe.view(b, s, h, r)",
    "kv_cache_one_head": "kv_cache.unsqueeze(2)",
    "latent_cache": "kv_cache[..., :c]",
    "rope_cache": "kv_cache[..., c:]",
    "latent_cache_one_head": "kv_cache[..., None, :c]",
    "rope_cache_one_head": "kv_cache[..., None, c:]",
    "entries": "entries",
    "latent_entries_one_head": "entries[..., None, :c]",
    "rope_entries_one_head": "entries[..., None, c:]",
    "key_heads_first": "entries[:, None].expand(-1, h, -1, -1)",
    "value_heads_first": "entries[:, None, :, :c].expand(-1, h, -1, -1)",
    "latent_width": "c",
}

# What parameters of these names take, in kernels that nobody told us about; of several, what runs and fits.
SYNONYMS = {
    "query": ("q", "query", "q_all"),
    "ql_nope": ("ql_nope", "q_nope", "q_latent", "qv"),
    "q_pe": ("q_pe", "q_rope", "q_rot"),
    "kv_cache": ("kv_cache", "k_cache", "kcache", "blocked_k", "kv_c_and_k_pe_cache", "cache", "kv"),
    "latent_cache": ("ckv", "ckv_cache", "kv_c_cache", "v_cache"),
    "rope_cache": ("kpe", "kpe_cache", "k_pe_cache"),
    "block_table": ("block_table", "block_tables", "page_table", "req_to_token"),
    "cache_seqlens": (
        "cache_seqlens",
        "seq_lens",
        "seqused_k",
        "seqlens_k",
        "kv_lens",
        "context_lens",
        "b_seq_len",
    ),
    "cu_seqlens_q": ("cu_seqlens_q", "qo_indptr", "query_start_loc"),
    "max_seqlen_q": ("max_seqlen_q", "max_query_len"),
    "latent_width": ("head_dim_v", "kv_lora_rank"),
    "cache_format": ("cache_format",),
    "kv_scale": ("kv_scale",),
    SCALE: ("softmax_scale", "sm_scale", "scale"),
    CAUSAL: ("causal", "is_causal"),
    SPLITS: ("num_splits", "num_kv_splits"),
    MASK: ("attn_mask", "mask"),
}

# Other shapes of the same thing, tried where the first does not run.
SHAPES_OF = {
    "query": ("query", "query_batched", "query_heads_first"),
    "ql_nope": ("ql_nope", "ql_nope_batched"),
    "q_pe": ("q_pe", "q_pe_batched"),
    "kv_cache": ("kv_cache", "kv_cache_one_head"),
    "latent_cache": ("latent_cache", "latent_cache_one_head"),
    "rope_cache": ("rope_cache", "rope_cache_one_head"),
}


@dataclass(frozen=True)
class Spec:
    """One way to call a kernel.

    arguments: parameter -> expression. scale, causal, splits, mask: the parameters with that role, if any.
    imports: further names that the expressions take from the kernel's own module.
    """

    arguments: Mapping[str, str]
    scale: str | None = None
    causal: str | None = None
    splits: str | None = None
    mask: str | None = None
    imports: tuple[str, ...] = ()

    @property
    def uniform(self) -> bool:
        """Whether every request has as many query tokens."""
        return any("view(b, s" in text for text in self.arguments.values())

    @property
    def contiguous(self) -> bool:
        """Whether the keys are handed over one request after another, not in pages."""
        return any("entries" in text for text in self.arguments.values())

    def describe(self) -> str:
        """The call, as it would be typed."""
        decided = [f"{name}=…" for name in (self.scale, self.causal, self.splits, self.mask) if name]
        return ", ".join([*(f"{name}={text}" for name, text in self.arguments.items()), *decided])


_FA3 = {
    "q": "q_pe",
    "qv": "ql_nope",
    "cache_seqlens": "cache_seqlens",
    "cu_seqlens_q": "cu_seqlens_q",
    "max_seqlen_q": "max_seqlen_q",
    "return_softmax_lse": "True",
}

KNOWN: dict[str, tuple[Spec, ...]] = {
    "flash_mla_with_kvcache": (
        Spec(
            {
                "q": ROLES["query_batched"],
                "k_cache": ROLES["kv_cache_one_head"],
                "block_table": "block_table",
                "cache_seqlens": "cache_seqlens",
                "head_dim_v": "c",
                # Valid for one set of lengths; both generations of the library read them so.
                "tile_scheduler_metadata": "get_mla_metadata(cache_seqlens, s * h, 1)[0]",
                "num_splits": "get_mla_metadata(cache_seqlens, s * h, 1)[1]",
            },
            scale="softmax_scale",
            causal="causal",
            imports=("get_mla_metadata",),
        ),
    ),
    "flash_attn_with_kvcache": tuple(
        Spec({**_FA3, **cache}, scale="softmax_scale", causal="causal", splits="num_splits")
        for cache in (
            {
                "k_cache": ROLES["rope_cache_one_head"],
                "v_cache": ROLES["latent_cache_one_head"],
                "page_table": "block_table",
            },
            {"k_cache": ROLES["rope_entries_one_head"], "v_cache": ROLES["latent_entries_one_head"]},
        )
    ),
    "scaled_dot_product_attention": (
        Spec(
            {
                "query": ROLES["query_heads_first"],
                "key": ROLES["key_heads_first"],
                "value": ROLES["value_heads_first"],
            },
            scale="scale",
            causal="is_causal",
            mask="attn_mask",
        ),
    ),
}


def parameters(fn: Callable[..., Any]) -> dict[str, bool] | None:
    """Parameter -> whether it must be given; None for a function that does not say."""
    try:
        found = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return None
    named = [p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return {p.name: p.default is p.empty for p in named}


def specs(fn: Callable[..., Any], given: Sequence[str] = ()) -> list[Spec]:
    """The ways to call a kernel, the likeliest first: what was given, then its name, then its parameters.

    given: "parameter=role", or "parameter=expression".
    Raises: ValueError naming a parameter that must be given and has no role, or one that does not exist.
    """
    told = dict(_told(text) for text in given)
    known = parameters(fn)
    if not told and (found := KNOWN.get(getattr(fn, "__name__", ""))):
        accepted = [spec for spec in found if known is None or set(spec.arguments) <= set(known)]
        if accepted:
            return accepted
    if known is None:
        raise ValueError("the kernel has no signature: say --arg PARAMETER=ROLE for each of its parameters")
    if unknown := sorted(set(told) - set(known)):
        raise ValueError(f"--arg {unknown[0]}: no such parameter; there are {', '.join(known)}")
    return list(_guessed(known, told))


def _told(text: str) -> tuple[str, str]:
    name, equals, role = text.partition("=")
    if not equals or not name.isidentifier() or not role:
        raise ValueError(f"--arg {text!r}: expected PARAMETER=ROLE, or PARAMETER=EXPRESSION")
    return name, role


def _guessed(known: Mapping[str, bool], told: Mapping[str, str]) -> Iterator[Spec]:
    roles = {name: role for role, names in SYNONYMS.items() for name in names}
    choices: dict[str, tuple[str, ...]] = {}
    decided: dict[str, str | None] = dict.fromkeys(DECIDED)
    for name, needed in known.items():
        role = told.get(name) or roles.get(name)
        if role in DECIDED:
            decided[role] = name
        elif name in told:
            said = told[name]
            choices[name] = tuple(ROLES.get(shape, shape) for shape in SHAPES_OF.get(said, (said,)))
        elif role is not None:
            choices[name] = tuple(ROLES[shape] for shape in SHAPES_OF.get(role, (role,)))
        elif needed:
            raise ValueError(
                f"parameter {name!r} has no role: say --arg {name}=ROLE or an expression; "
                f"roles, which mla-verify probe --roles explains: {_listed()}"
            )
    for texts in itertools.product(*choices.values()):
        batched = ["view(b, s" in text for text in texts if text.startswith(("q", "ql_"))]
        if all(batched) or not any(batched):
            chosen = dict(zip(choices, texts, strict=True))
            yield Spec(chosen, decided[SCALE], decided[CAUSAL], decided[SPLITS], decided[MASK])


def _listed() -> str:
    return ", ".join([*ROLES, *DECIDED])
