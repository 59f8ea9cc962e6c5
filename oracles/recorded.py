"""What a Hugging Face model gives its attention, watched from outside and written as recordings.

``kv_b_proj`` is called on every latent that a layer attends to, and the attention function with the rotated
queries and keys: between them they see all that a case of ``attention`` needs, in every model that has both.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mla_ref.absorbed import fold_query
from mla_ref.case import RECORDED, Case
from mla_ref.config import MLAConfig
from mla_ref.layer import up_projections
from mla_ref.recording import CASE_KEY, KIND, SOURCE_KEY, shapes_of

# The largest number of a float8 type that has no infinities: what an engine's scale brings the largest to.
LARGEST_E4M3 = 448.0

# How the tokens of a text pass: the first half at once, a chunk, two as drafts are verified, the last one.
STAGES = ("prefill", "chunked", "mtp", "decode")
FEWEST_TOKENS = 8


class Call(NamedTuple):
    """One request in one call of one layer's attention, on the CPU.

    q_nope: [s h p]. q_pe: [s h r]. kv_c: [j c]. k_pe: [j r]: of all tokens that it has, the new ones last.
    """

    q_nope: torch.Tensor
    q_pe: torch.Tensor
    kv_c: torch.Tensor
    k_pe: torch.Tensor


class Layer(NamedTuple):
    """The calls of one layer, a list for each call of the model, a request each; and its up-projections."""

    calls: list[list[Call]]
    w_uk: torch.Tensor
    w_uv: torch.Tensor
    sha256: str


@contextmanager
def watching(model: Any, config: MLAConfig, layers: Sequence[int]) -> Iterator[dict[int, Layer]]:
    """Within it, every call of these layers' attention is kept; the model computes what it always does.

    Layers are those that have a ``kv_b_proj``, in the model's order.

    Raises: ValueError if there are fewer, or one attends otherwise than the contract says.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = model.config._attn_implementation or "eager"
    every = [m for m in model.modules() if isinstance(getattr(m, "kv_b_proj", None), torch.nn.Linear)]
    for index in layers:
        if index >= len(every):
            raise ValueError(f"layer {index}: {config.name} has {len(every)} layers with a kv_b_proj, from 0")
    modules = {index: every[index] for index in layers}
    found = {index: _layer(module, config) for index, module in modules.items()}
    numbers = {id(module): index for index, module in modules.items()}
    latents: dict[int, torch.Tensor] = {}

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        if (index := numbers.get(id(module))) is not None:
            _check(config, index, query, key, mask, kwargs["scaling"])
            found[index].calls.append(_calls(config, query, key, latents.pop(index)))
        plain = plainly or sys.modules[type(module).__module__].eager_attention_forward
        return plain(module, query, key, value, mask, **kwargs)

    def keep(index: int, _module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        latents[index] = arguments[0].detach()

    plainly: Callable[..., Any] | None = ALL_ATTENTION_FUNCTIONS.get(name)
    hooks = [m.kv_b_proj.register_forward_pre_hook(partial(keep, index)) for index, m in modules.items()]
    ALL_ATTENTION_FUNCTIONS[name] = attend
    try:
        yield found
    finally:
        ALL_ATTENTION_FUNCTIONS.pop(name)
        for hook in hooks:
            hook.remove()


def _layer(module: Any, config: MLAConfig) -> Layer:
    digest = hashlib.sha256()
    for name, weight in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    w_uk, w_uv = up_projections(module.kv_b_proj.weight.detach().cpu(), config)
    return Layer([], w_uk, w_uv, digest.hexdigest())


def _check(
    config: MLAConfig, index: int, query: torch.Tensor, key: torch.Tensor, mask: Any, scaling: float
) -> None:
    """Raises: ValueError on another width, scale or mask than the contract has."""
    if query.shape[-1] != config.qk_head_dim:
        raise ValueError(f"layer {index}: queries are {query.shape[-1]} wide, not {config.qk_head_dim}")
    theirs, ours = (float(torch.tensor(x, dtype=torch.float32)) for x in (scaling, config.softmax_scale))
    if theirs != ours:
        raise ValueError(f"layer {index}: its scale is {theirs}, but {config.name} has {ours}")
    if mask is None:
        return
    s, j = query.shape[2], key.shape[2]
    seen = mask[..., -s:, :j] if mask.dtype == torch.bool else mask[..., -s:, :j] == 0.0
    causal = torch.arange(j, device=seen.device) <= torch.arange(j - s, j, device=seen.device)[:, None]
    if not torch.equal(seen, causal.expand_as(seen)):
        raise ValueError(f"layer {index}: its mask is not causal alone: record texts without padding")


def _calls(config: MLAConfig, query: torch.Tensor, key: torch.Tensor, latent: torch.Tensor) -> list[Call]:
    """A batch of the model, cut into requests. query [b h s x], key [b h j x], latent [b 1 j c]."""
    b, j = key.shape[0], key.shape[2]
    kv_c = latent.reshape(b, -1, config.kv_lora_rank)
    if kv_c.shape[1] != j:
        raise ValueError(
            f"kv_b_proj was given {kv_c.shape[1]} tokens, but there are {j} keys: "
            "this version of transformers caches expanded keys"
        )
    p = config.qk_nope_head_dim
    rows = query.detach().transpose(1, 2)
    return [
        Call(*(x.cpu() for x in (rows[i, :, :, :p], rows[i, :, :, p:], kv_c[i], key[i, 0, :, p:].detach())))
        for i in range(b)
    ]


def passes(num_tokens: int) -> tuple[int, ...]:
    """How many tokens of a text each stage takes. Raises: ValueError on a text that is too short."""
    if num_tokens < FEWEST_TOKENS:
        raise ValueError(f"a text has {num_tokens} tokens, must have at least {FEWEST_TOKENS}")
    half = num_tokens // 2
    return half, num_tokens - half - 3, 2, 1


@torch.no_grad()
def record(
    model: Any, config: MLAConfig, texts: Sequence[Sequence[int]], layers: Sequence[int]
) -> Iterator[tuple[int, str, Case, dict[str, torch.Tensor], dict[str, Any]]]:
    """(layer, stage, case, tensors, source) for each of these layers: every text is a request.

    Each text passes alone, in the steps of ``STAGES``, its own tokens forced: nothing is sampled.
    """
    import transformers

    device = next(model.parameters()).device
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    with watching(model, config, layers) as found:
        for tokens in texts:
            cache, start = transformers.DynamicCache(config=model.config), 0
            for count in passes(len(tokens)):
                ids = torch.tensor([list(tokens[start : start + count])], device=device)
                model(input_ids=ids, use_cache=True, **{name: cache})
                start += count
    for index, layer in found.items():
        for step, stage in enumerate(STAGES):
            requests = [call for calls in layer.calls[step :: len(STAGES)] for call in calls]
            source = {
                "model": config.name,
                "layer": index,
                "layer_sha256": layer.sha256,
                "stage": stage,
                "softmax_scale": config.softmax_scale,
                "transformers": transformers.__version__,
                "torch": torch.__version__,
            }
            yield index, stage, *_case(config, layer, requests), source


def _case(config: MLAConfig, layer: Layer, requests: Sequence[Call]) -> tuple[Case, dict[str, torch.Tensor]]:
    q_nope, q_pe, kv_c, k_pe = (torch.cat(parts) for parts in zip(*requests, strict=True))
    dtype = str(q_nope.dtype).removeprefix("torch.")
    case = Case(
        problem="attention",
        config=config,
        q_lens=tuple(len(call.q_nope) for call in requests),
        kv_lens=tuple(len(call.kv_c) for call in requests),
        dtype=dtype,
        cache_format={"bfloat16": "bf16", "float16": "fp16"}.get(dtype, "fp32"),
        regime=RECORDED,
        # A power of two, as calibrated scales of engines often are; read by formats that have a scale.
        kv_scale=_power_of_two(float(kv_c.abs().max()) / LARGEST_E4M3),
    )
    ql_nope = fold_query(q_nope.double(), layer.w_uk.double()).to(q_nope.dtype)
    tensors = {
        "q_nope": q_nope,
        "q_pe": q_pe,
        "ql_nope": ql_nope,
        "kv_c": kv_c,
        "k_pe": k_pe,
        "w_uk": layer.w_uk,
        "w_uv": layer.w_uv,
    }
    return case, tensors


def _power_of_two(x: float) -> float:
    """The smallest power of two that is not below x."""
    return float(torch.exp2(torch.tensor(max(x, 2.0**-126), dtype=torch.float64).log2().ceil()))


def write(path: Path, case: Case, tensors: Mapping[str, torch.Tensor], source: Mapping[str, Any]) -> None:
    """One case a file. Raises: ValueError if the tensors are not those of the case."""
    from safetensors.torch import save_file

    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != (wanted := shapes_of(case)):
        raise ValueError(f"recording: its tensors are {shapes}, but the case has {wanted}")
    plain = replace(case, recording=None)
    notes = {"kind": KIND, CASE_KEY: plain.to_json(), SOURCE_KEY: json.dumps(dict(source))}
    save_file({name: x.contiguous() for name, x in tensors.items()}, path, metadata=notes)
