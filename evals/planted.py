"""Attention paths that are right, and seventeen that are wrong by one edit, for proof that the gate sees.

Each wrong one departs in one step that people got wrong; most of them cost no answer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from evals.model import Model
from evals.path import Attention, AttentionPath, Layer, attention_of, in_type
from mla_ref.config import MLAConfig
from mla_ref.layer import layer_around
from mla_ref.merge_states import merge
from mla_ref.problem import AttentionOutput
from mla_ref.problems.attention import AttentionInputs
from mla_ref.problems.layer import LayerOutput
from mla_ref.rows import Request, causal_mask, compute_dtype, keys, requests, softmax_values

Steps = Mapping[str, Callable[..., Any]]  # where ``attend`` departs from what is right: (value, request)

SERVED = AttentionPath(decode="mla_ref.absorbed", prefill="mla_ref.chunked", chunk=96, workspace_rows=64)
WINDOW = 64


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One attention path with a name. attention, layer: what replaces the path's own."""

    name: str
    path: AttentionPath = SERVED
    attention: Callable[[MLAConfig], Attention] | None = None
    around: Callable[[Layer], Layer] = lambda layer: layer

    def attend(self, model: Model) -> Attention:
        """Its implementation of ``attention``."""
        if self.attention is not None:
            return in_type(getattr(torch, self.path.dtype), self.attention(model.config))
        return attention_of(self.path, model.config, model.device.type)

    def layer(self, model: Model) -> Layer:
        """Its implementation of ``layer``."""
        return self.around(layer_around(self.attend(model)))


def attend(inputs: AttentionInputs, steps: Steps) -> AttentionOutput:
    """Expanded attention over two parts of the keys, merged, in which any step may differ."""
    dtype, dims = compute_dtype(inputs.q_nope), (inputs.w_uk.shape[-1], inputs.q_pe.shape[-1])
    out = inputs.q_nope.new_empty(*inputs.q_nope.shape[:2], inputs.w_uv.shape[1])  # rounds what it is given
    q_nope, q_pe, w_uk, w_uv = (
        each.to(dtype) for each in (inputs.q_nope, inputs.q_pe, inputs.w_uk, inputs.w_uv)
    )
    lse = inputs.q_nope.new_empty(inputs.q_nope.shape[:2], dtype=torch.float32)
    block_size = inputs.kv_cache.shape[1]
    for request in requests(inputs.block_table, inputs.cu_seqlens_q, inputs.cache_seqlens):

        def step(name: str, value: Any, request: Request = request) -> Any:
            return steps[name](value, request, block_size) if name in steps else value

        read = step("request", request)
        kv_c, k_pe = keys(
            inputs.kv_cache, read, 0, request.kv_len, dims, inputs.cache_format, inputs.kv_scale, dtype
        )
        k_nope = torch.einsum("hpc,jc->hjp", w_uk, kv_c)
        value = torch.einsum("hvc,jc->hjv", w_uv, kv_c)
        scores = torch.einsum("shp,hjp->hsj", q_nope[request.rows], k_nope)
        scores += torch.einsum("shr,jr->hsj", q_pe[request.rows], k_pe)
        scores *= inputs.softmax_scale
        mask = step("mask", causal_mask(request, 0, request.kv_len, scores.device))
        half = request.kv_len // 2
        parts = [
            softmax_values(scores[..., part], mask[:, part], value[:, part])
            for part in (slice(half), slice(half, None))
        ]
        outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
        row, row_lse = steps["merge"](outs, lses) if "merge" in steps else merge(outs, lses)
        out[request.rows], lse[request.rows] = step("out", row), row_lse
    return AttentionOutput(out, lse)


def _departing(**steps: Callable[..., Any]) -> Callable[[MLAConfig], Attention]:
    def of(config: MLAConfig) -> Attention:
        return lambda *args: attend(AttentionInputs(*args), steps)

    return of


def _given(
    change: Callable[[AttentionInputs, MLAConfig], dict[str, Any]],
) -> Callable[[MLAConfig], Attention]:
    """The served path's attention on inputs of which some fields are wrong."""

    def of(config: MLAConfig) -> Attention:
        def wrong(*args: Any) -> AttentionOutput:
            inputs = AttentionInputs(*args)
            right = attention_of(SERVED, config, inputs.q_nope.device.type)
            return right(*inputs._replace(**change(inputs, config)))

        return wrong

    return of


def _scale(factor: float) -> Callable[[MLAConfig], Attention]:
    return _given(lambda inputs, _: {"softmax_scale": inputs.softmax_scale * factor})


def _shifted(by: int) -> Callable[..., torch.Tensor]:
    def mask(right: torch.Tensor, request: Request, block_size: int) -> torch.Tensor:
        return causal_mask(request._replace(kv_len=request.kv_len + by), 0, right.shape[1], right.device)

    return mask


def _columns(mask: torch.Tensor) -> torch.Tensor:
    return torch.arange(mask.shape[1], device=mask.device)


def _first_page_dropped(mask: torch.Tensor, request: Request, block_size: int) -> torch.Tensor:
    return mask & (_columns(mask) >= block_size)


def _last_page_of_one_lost(mask: torch.Tensor, request: Request, block_size: int) -> torch.Tensor:
    lost = request.q_len == 1 and request.kv_len % block_size == 1
    return mask & (_columns(mask) < request.kv_len - lost)


def _tail_page_dropped(mask: torch.Tensor, request: Request, block_size: int) -> torch.Tensor:
    return mask & (_columns(mask) < request.kv_len // block_size * block_size)


def _window(mask: torch.Tensor, request: Request, block_size: int) -> torch.Tensor:
    query = torch.arange(request.q_len, device=mask.device)[:, None] + request.kv_len - request.q_len
    return mask & (_columns(mask) > query - WINDOW)


def _page_aliased(request: Request, _: Request, block_size: int) -> Request:
    if request.q_len > 1:
        return request
    row = request.table_row.clone()
    row[1] = row[0]
    return request._replace(table_row=row)


def _in_base_2(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.exp2(lses - lses.amax(0))
    return (weights[..., None] * outs).sum(0) / weights.sum(0)[..., None], lses.logsumexp(0)


def _mean(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return outs.mean(0), lses.logsumexp(0)


def _heads_swapped(out: torch.Tensor, request: Request, block_size: int) -> torch.Tensor:
    return out[:, [1, 0, *range(2, out.shape[1])]]


def _positions(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Layer], Layer]:
    """The layer with other positions: ``change`` of them and of each token's number of new tokens."""

    def around(layer: Layer) -> Layer:
        def wrong(*, positions: torch.Tensor, cu_seqlens_q: torch.Tensor, **rest: Any) -> LayerOutput:
            q_lens = cu_seqlens_q.diff()
            changed = change(positions, q_lens.repeat_interleave(q_lens))
            return layer(positions=changed, cu_seqlens_q=cu_seqlens_q, **rest)

        return wrong

    return around


def _decoded_one_late(positions: torch.Tensor, q_lens: torch.Tensor) -> torch.Tensor:
    return torch.where(q_lens == 1, positions + 1, positions)


def _restarting(positions: torch.Tensor, q_lens: torch.Tensor) -> torch.Tensor:
    return torch.where(q_lens == 1, positions, positions % SERVED.chunk)


def _stored_under(factor: float) -> Callable[[Layer], Layer]:
    """The layer whose per-tensor scale is off, where it writes and where it reads."""

    def around(layer: Layer) -> Layer:
        def wrong(*, kv_scale: torch.Tensor, **rest: Any) -> LayerOutput:
            return layer(kv_scale=kv_scale * factor, **rest)

        return wrong

    return around


def right(kv_scale: float) -> tuple[Planted, ...]:
    """Paths without a fault. kv_scale: of the checkpoint's fp8_e4m3 cache."""
    return (*RIGHT, Planted(name="fp8_e4m3 cache", path=_fp8(kv_scale)))


def bugs(kv_scale: float) -> tuple[Planted, ...]:
    """The seventeen. kv_scale: of the checkpoint's fp8_e4m3 cache."""
    fp8 = _fp8(kv_scale)
    reading = _given(lambda inputs, _: {"kv_scale": inputs.kv_scale * 1.1})
    return (
        Planted(name="fp8 scale + 10 % on reading", path=fp8, attention=reading),
        Planted(name="fp8 scale 8 times too small", path=fp8, around=_stored_under(1 / 8)),
        *BUGS,
    )


def in_16_bits(planted: Planted) -> Planted:
    """The same on operands and outputs of bfloat16, and a bf16 cache where there was a float32 one."""
    path = replace(planted.path, dtype="bfloat16")
    if path.cache_format == AttentionPath.cache_format:
        path = replace(path, cache_format="bf16")
    return replace(planted, path=path)


def _fp8(kv_scale: float) -> AttentionPath:
    return replace(SERVED, cache_format="fp8_e4m3", kv_scale=kv_scale)


RIGHT = (
    Planted(name="absorbed", path=replace(SERVED, prefill="mla_ref.absorbed", workspace_rows=0)),
    Planted(name="chunked prefill, absorbed decode"),
    Planted(name="chunked prefill, split decode", path=replace(SERVED, decode="mla_ref.split[num_splits=7]")),
    Planted(
        name="equal shares",
        path=replace(SERVED, prefill="mla_ref.chunked[equal_share, small workspace]", workspace_rows=0),
    ),
    Planted(
        name="torch SDPA",
        path=replace(SERVED, decode="mla_fast.sdpa", prefill="mla_fast.sdpa", workspace_rows=0, chunk=0),
    ),
    Planted(name="drafts of three", path=replace(SERVED, decode_threshold=3)),
    Planted(name="blocks of 64", path=replace(SERVED, block_size=64)),
    Planted(name="two parts, merged", attention=_departing()),
    *(Planted(name=f"{fmt} cache", path=replace(SERVED, cache_format=fmt)) for fmt in ("bf16", "fp8_ds_mla")),
)

BUGS = (
    Planted(name="softmax scale + 1 %", attention=_scale(1.01)),
    Planted(name="softmax scale + 5 %", attention=_scale(1.05)),
    Planted(
        name="softmax scale of the nope channels alone",
        attention=_given(lambda _, config: {"softmax_scale": config.qk_nope_head_dim**-0.5}),
    ),
    Planted(name="mask one key too far", attention=_departing(mask=_shifted(1))),
    Planted(name="mask hides the token itself", attention=_departing(mask=_shifted(-1))),
    Planted(name="merge takes lse for base 2", attention=_departing(merge=_in_base_2)),
    Planted(name="first page dropped", attention=_departing(mask=_first_page_dropped)),
    Planted(name="last page of one token lost in decode", attention=_departing(mask=_last_page_of_one_lost)),
    Planted(name="second page read twice in decode", attention=_departing(request=_page_aliased)),
    Planted(name=f"window of {WINDOW}", attention=_departing(mask=_window)),
    Planted(name="decoded tokens rotated one position late", around=_positions(_decoded_one_late)),
    Planted(name="merge is the mean", attention=_departing(merge=_mean)),
    Planted(name="positions restart in every chunk", around=_positions(_restarting)),
    Planted(name="last page dropped", attention=_departing(mask=_tail_page_dropped)),
    Planted(name="heads 0 and 1 swapped", attention=_departing(out=_heads_swapped)),
)
