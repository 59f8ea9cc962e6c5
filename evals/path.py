"""How a model attends, every part of it chosen by name."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from mla_ref.absorbed import expand_output, fold_query
from mla_ref.backend import Backend, missing
from mla_ref.case import Case
from mla_ref.chunk_plan import packed
from mla_ref.chunked import chunked_by
from mla_ref.config import MLAConfig
from mla_ref.formats import CacheFormat
from mla_ref.layer import layer_around
from mla_ref.problem import AttentionOutput
from mla_ref.problems.attention import AttentionInputs
from mla_ref.problems.layer import LayerOutput
from oracles.verify import DEFAULT, find_backend

Attention = Callable[..., AttentionOutput]
Layer = Callable[..., LayerOutput]

CHUNKED = "mla_ref.chunked"
REFERENCE = "the reference"


@dataclass(frozen=True, kw_only=True)
class AttentionPath:
    """What an engine chooses when it serves a model.

    decode: implementation for requests with at most ``decode_threshold`` new tokens; a backend of
        ``attention`` or ``latent_attention``, "package.module" or "package.module[variant]".
    prefill: implementation for the others.
    cache_format, kv_scale, block_size: of the paged cache.
    chunk: prompt tokens of one request that are prefilled in one step; 0: the whole prompt.
    workspace_rows: rows through which ``mla_ref.chunked`` reads the context; 0: as many as an engine has.
    decode_threshold: the most new tokens that are still decoded, as when drafts are verified.
    dtype: of the queries and up-projections that attention is given, and of its output.
    """

    decode: str = "mla_ref.naive"
    prefill: str = "mla_ref.naive"
    cache_format: str = "fp32"
    kv_scale: float = 1.0
    block_size: int = 16
    chunk: int = 0
    workspace_rows: int = 0
    decode_threshold: int = 1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name, least in (("block_size", 1), ("decode_threshold", 1), ("chunk", 0), ("workspace_rows", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"path: {name} is {getattr(self, name)}, must be at least {least}")
        if not 0.0 < self.kv_scale < math.inf:
            raise ValueError(f"path: kv_scale is {self.kv_scale}, must be above 0 and finite")
        if self.workspace_rows and self.prefill != CHUNKED:
            raise ValueError(f"path: workspace_rows={self.workspace_rows}, but prefill is {self.prefill}")

    def __str__(self) -> str:
        changed = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in changed) or REFERENCE


def parse(text: str) -> AttentionPath:
    """The path that prints as ``text``: fields as name=value, in any order, the others as in the reference.

    Raises: ValueError that shows the part which is no field, or a value of the wrong type.
    """
    reference = AttentionPath()
    kinds = {f.name: type(getattr(reference, f.name)) for f in fields(reference)}
    if text.strip() in ("", REFERENCE):
        return reference
    before, *parts = re.split(rf"(?:^|\s)({'|'.join(kinds)})=", text.strip())
    if before.strip():
        raise ValueError(f"path: {before.strip()!r} is no field; they are {', '.join(kinds)}")
    values: dict[str, Any] = {}
    for name, value in zip(parts[::2], parts[1::2], strict=True):
        try:
            values[name] = kinds[name](value.strip())
        except ValueError:
            raise ValueError(f"path: {name} is {value.strip()!r}, must be {kinds[name].__name__}") from None
    return AttentionPath(**values)


def attention_of(path: AttentionPath, config: MLAConfig, device: str = "cpu") -> Attention:
    """The path's implementation of ``attention``: decode or prefill, request by request.

    Raises: ValueError with the backend's own reason if it cannot run here or does not cover the model.
    """
    decode = _implementation(path.decode, path, config, device)
    prefill = _implementation(path.prefill, path, config, device)
    if path.workspace_rows:
        rows = path.workspace_rows
        prefill = chunked_by(packed, lambda _contexts, _block_size: rows)
    chosen = _by_length(decode, prefill, path.decode_threshold)
    dtype = getattr(torch, path.dtype)
    return chosen if dtype == torch.float32 else in_type(dtype, chosen)


def layer_of(path: AttentionPath, config: MLAConfig, device: str = "cpu") -> Layer:
    """The whole layer that attends along this path."""
    return layer_around(attention_of(path, config, device))


def _implementation(name: str, path: AttentionPath, config: MLAConfig, device: str) -> Attention:
    spec, _, variant = name.removesuffix("]").partition("[")
    backend = find_backend(spec)
    if backend.problem not in ("attention", "latent_attention"):
        raise ValueError(f"path: {spec} solves {backend.problem}, not attention or latent_attention")
    if reason := missing(backend, device):
        raise ValueError(f"path: {spec} cannot run on {device}: {reason}")
    case = Case(
        problem=backend.problem,
        config=config,
        q_lens=(1,),
        kv_lens=(path.block_size,),
        dtype=path.dtype,
        cache_format=path.cache_format,
        block_size=path.block_size,
    )
    if reason := backend.supports(case):
        raise ValueError(f"path: {spec} does not cover {config.name} so: {reason}")
    fn = _variant(backend, variant or DEFAULT)
    return _between_projections(fn) if backend.problem == "latent_attention" else fn


def _variant(backend: Backend, name: str) -> Attention:
    known = {DEFAULT: backend.fn, **backend.variants}
    if name not in known:
        raise ValueError(f"path: {backend.name} has no variant {name!r}; it has {', '.join(known)}")
    return known[name]


def _between_projections(latent: Attention) -> Attention:
    """``attention`` by an implementation of ``latent_attention``, in the queries' own dtype."""

    def attention(
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cache_seqlens: torch.Tensor,
        w_uk: torch.Tensor,
        w_uv: torch.Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        cache_format: CacheFormat,
        kv_scale: torch.Tensor,
    ) -> AttentionOutput:
        attended = latent(
            fold_query(q_nope, w_uk),
            q_pe.contiguous(),
            kv_cache,
            block_table,
            cu_seqlens_q,
            cache_seqlens,
            max_seqlen_q,
            softmax_scale,
            cache_format,
            kv_scale,
        )
        return AttentionOutput(expand_output(attended.out, w_uv), attended.lse)

    return attention


def in_type(dtype: torch.dtype, attention: Attention) -> Attention:
    """``attention`` on rounded queries and weights; its output widened again."""

    def rounded(*args: object) -> AttentionOutput:
        inputs = AttentionInputs(*args)  # type: ignore[arg-type]
        names = ("q_nope", "q_pe", "w_uk", "w_uv")
        narrow = {name: getattr(inputs, name).to(dtype) for name in names}
        out, lse = attention(*inputs._replace(**narrow))
        return AttentionOutput(out.to(inputs.q_nope.dtype), lse)

    return rounded


def _by_length(decode: Attention, prefill: Attention, threshold: int) -> Attention:
    """Requests of at most ``threshold`` new tokens go to ``decode``, the others to ``prefill``."""

    def attention(*args: object) -> AttentionOutput:
        inputs = AttentionInputs(*args)  # type: ignore[arg-type]
        q_lens = inputs.cu_seqlens_q.diff()
        short = q_lens <= threshold
        if bool(short.all()):
            return decode(*inputs)
        if not bool(short.any()):
            return prefill(*inputs)
        out = inputs.q_nope.new_empty(*inputs.q_nope.shape[:2], inputs.w_uv.shape[1])
        lse = inputs.q_nope.new_empty(inputs.q_nope.shape[:2], dtype=torch.float32)
        for implementation, chosen in ((decode, short), (prefill, ~short)):
            rows = chosen.repeat_interleave(q_lens)
            out[rows], lse[rows] = implementation(*_only(inputs, chosen, rows))
        return AttentionOutput(out, lse)

    return attention


def _only(inputs: AttentionInputs, chosen: torch.Tensor, rows: torch.Tensor) -> AttentionInputs:
    """The requests of a batch that are ``chosen`` [b], whose queries are ``rows`` [t]."""
    q_lens = inputs.cu_seqlens_q.diff()[chosen]
    offsets = torch.cat([q_lens.new_zeros(1), q_lens.cumsum(0)]).to(torch.int32)
    return inputs._replace(
        q_nope=inputs.q_nope[rows],
        q_pe=inputs.q_pe[rows],
        block_table=inputs.block_table[chosen],
        cu_seqlens_q=offsets,
        cache_seqlens=inputs.cache_seqlens[chosen],
        max_seqlen_q=int(q_lens.max()),
    )
