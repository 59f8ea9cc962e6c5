"""Language models of the DeepSeek-V2/V3 family whose attention is ours, served as an engine serves them.

transformers loads the checkpoint and computes everything but attention, experts included. Each attention
module is replaced by one that holds its weights and calls an implementation of ``layer`` on a paged cache.
Requests are batched continuously: in every step each of them either prefills its next chunk or decodes.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import nn

from evals.path import AttentionPath, Layer
from mla_ref.config import MLAConfig
from mla_ref.formats import cache_format
from mla_ref.layer import why_not_whole
from mla_ref.layout import CacheLayout, allocate
from mla_ref.pages import block_table, slots

SAME_AS = {"kimi_k2": "deepseek_v3"}  # model types under which transformers knows the same computation

Attend = Callable[[int, torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]
# (request, logits [m vocab] after its last m tokens) -> the tokens that follow; none end the request.
Choose = Callable[[int, torch.Tensor], list[int]]


class Model(NamedTuple):
    """transformers' causal model, its attention replaced, and what its attention is."""

    hf: Any
    config: MLAConfig

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        weight: torch.Tensor = self.hf.lm_head.weight
        return weight.device


class PagedAttention(nn.Module):
    """In the place of one attention module: its weights by name, its number, and no arithmetic."""

    def __init__(self, index: int, attention: nn.Module) -> None:
        super().__init__()
        self.index = index
        self.weights = {name: weight.detach() for name, weight in attention.named_parameters()}

    def forward(self, hidden_states: torch.Tensor, attend: Attend, **_: object) -> tuple[torch.Tensor, None]:
        """(what ``attend`` makes of hidden states [1 t d], no weights)."""
        return attend(self.index, hidden_states[0], self.weights)[None], None


def load(folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Model:
    """The checkpoint in ``folder`` (config.json and safetensors, in one file or in shards), as ``dtype``.

    All of it is read into host memory first.

    Raises: ValueError, in one line, if there is none, its weights are quantised, its attention is more than
        MLA, a file is damaged, or a tensor is missing, superfluous or of another shape, for which
        transformers would draw random weights.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = MLAConfig.from_hf(folder)
    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if quantised := said.get("quantization_config"):
        raise ValueError(
            f"{folder}: its weights are quantised ({quantised.get('quant_method')}), must be plain"
        )
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder}: holds no *.safetensors")
    kind = SAME_AS.get(said["model_type"], said["model_type"])
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"{folder}: transformers has no model_type {kind!r}")
    with _quiet():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=_settings(kind, said, folder),
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they are reported below, like what is missing
            )
        except SafetensorError as error:
            raise ValueError(f"{folder}: {error}") from None
        except RuntimeError as error:
            stacked = "those of experts are missing or differ in shape"
            why = stacked if "conversion" in str(error) else str(error)
            raise ValueError(f"{folder}: transformers cannot put its tensors together: {why}") from None
    hf, found = loaded
    if reason := _why_not_whole_checkpoint(found):
        raise ValueError(f"{folder}: {reason}")
    return with_our_attention(hf.eval().to(device), config)


def load_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of the checkpoint. Raises: ValueError, in one line, if there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raises nothing narrower for a file that it cannot read
        why = " ".join(str(error).split())
        raise ValueError(f"{folder}: its tokenizer cannot be read: {why[:100]}") from None


def _settings(kind: str, said: Mapping[str, Any], folder: Path) -> Any:
    """transformers' configuration. Raises: ValueError, in one line, if a value of it is of another type."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[kind].from_dict({**said, "model_type": kind})
    except (StrictDataclassError, TypeError, ValueError) as error:
        why = str(error).strip().splitlines()[-1].strip()
        raise ValueError(f"{folder / 'config.json'}: transformers refuses it: {why}") from None


def _why_not_whole_checkpoint(found: Mapping[str, Any]) -> str | None:
    """What transformers says of the tensors that it did not find as it needed them. None: all were right."""
    if wrong := sorted(found["mismatched_keys"]):
        name, has, needs = wrong[0]
        return f"tensors of another shape: {len(wrong)}; {name} is {[*has]}, must be {[*needs]}"
    for keys, what in (("missing_keys", "missing"), ("unexpected_keys", "that the model does not have")):
        if names := sorted(found[keys]):
            return f"tensors {what}: {len(names)}, first {names[0]}"
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and load reports, which would be drawn over ours."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def with_our_attention(hf: Any, config: MLAConfig) -> Model:
    """The model with every attention module replaced, in place."""
    if reason := why_not_whole(config):
        raise ValueError(reason)
    for index, layer in enumerate(hf.model.layers):
        layer.self_attn = PagedAttention(index, layer.self_attn)
    return Model(hf, config)


class Step(NamedTuple):
    """One batch of one step: what every layer is called with besides its hidden states and weights."""

    positions: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cache_seqlens: torch.Tensor
    slot_mapping: torch.Tensor
    max_seqlen_q: int


def hidden_states(model: Model, tokens: torch.Tensor, attend: Attend) -> torch.Tensor:
    """The last hidden states [t d] of packed tokens [t]."""
    x = model.hf.model.embed_tokens(tokens)[None]
    for layer in model.hf.model.layers:
        x = layer(x, attend=attend)
    normed: torch.Tensor = model.hf.model.norm(x)[0]
    return normed


@torch.no_grad()
def serve(
    model: Model,
    layer: Layer,
    path: AttentionPath,
    prompts: Sequence[Sequence[int]],
    most_new: int,
    choose: Choose,
) -> None:
    """Prefill every prompt, then go on with the tokens that ``choose`` returns, until it returns none.

    A request is one of the batch until it ends, so the batches depend on the prompts, the path's ``chunk``
    and the chosen tokens alone. The blocks of the cache are shuffled; all that was not written is NaN.
    """
    device, config, fmt = model.device, model.config, cache_format(path.cache_format)
    tokens, cached = [list(prompt) for prompt in prompts], [0] * len(prompts)
    table, num_blocks = block_table(
        tuple(len(prompt) + most_new for prompt in prompts), path.block_size, CacheLayout(), len(prompts)
    )
    caches = _caches(model, path, num_blocks)
    scale = path.kv_scale if fmt.per_tensor_scale else float("nan")
    kv_scale = torch.tensor(scale, dtype=torch.float32, device=device)
    running = list(range(len(prompts)))
    while running:
        new = [tokens[i][cached[i] :][: path.chunk or None] for i in running]
        lengths = [cached[i] + len(part) for i, part in zip(running, new, strict=True)]
        step = _step(table[running], [len(part) for part in new], lengths, path.block_size, device)

        def attend(
            index: int, hidden: torch.Tensor, weights: Mapping[str, torch.Tensor], step: Step = step
        ) -> torch.Tensor:
            return layer(
                hidden_states=hidden,
                weights=weights,
                kv_cache=caches[index],
                config=config,
                cache_format=fmt,
                kv_scale=kv_scale,
                **step._asdict(),
            ).out

        packed = torch.tensor([token for part in new for token in part], device=device)
        hidden = hidden_states(model, packed, attend).split([len(part) for part in new])  # type: ignore[no-untyped-call]
        ended = []
        for i, rows, length in zip(running, hidden, lengths, strict=True):
            cached[i] = length
            if length < len(tokens[i]):
                continue
            asked = length - max(len(prompts[i]) - 1, length - len(rows))
            following = choose(i, model.hf.lm_head(rows[-asked:]).float())
            if not following:
                ended.append(i)
            tokens[i] += following
        running = [i for i in running if i not in ended]


def _caches(model: Model, path: AttentionPath, num_blocks: int) -> list[torch.Tensor]:
    """A cache [n k e] for each layer, in which nothing is written."""
    config, fmt = model.config, cache_format(path.cache_format)
    return [
        allocate(
            CacheLayout(),
            num_blocks=num_blocks,
            block_size=path.block_size,
            entry_width=fmt.entry_width(config.kv_lora_rank, config.qk_rope_head_dim),
            dtype=fmt.dtype,
            device=model.device,
        )
        for _ in model.hf.model.layers
    ]


def _step(
    table: torch.Tensor, q_lens: list[int], kv_lens: list[int], block_size: int, device: torch.device
) -> Step:
    starts = [length - count for length, count in zip(kv_lens, q_lens, strict=True)]
    spans = list(zip(starts, kv_lens, strict=True))
    return Step(
        positions=torch.cat([torch.arange(start, stop) for start, stop in spans]).to(device),
        block_table=table.to(device),
        cu_seqlens_q=torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32).to(device),
        cache_seqlens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        slot_mapping=torch.cat(
            [slots(row, start, stop, block_size) for row, (start, stop) in zip(table, spans, strict=True)]
        ).to(device),
        max_seqlen_q=max(q_lens),
    )


def greedy(
    model: Model,
    layer: Layer,
    path: AttentionPath,
    prompts: Sequence[Sequence[int]],
    most_new: int,
    stops: Callable[[list[int]], bool],
) -> list[list[int]]:
    """The likeliest continuation of each prompt: at most ``most_new`` tokens, ended where ``stops`` says."""
    written: list[list[int]] = [[] for _ in prompts]

    def choose(i: int, logits: torch.Tensor) -> list[int]:
        written[i].append(int(logits[-1].argmax()))
        return [] if len(written[i]) >= most_new or stops(written[i]) else written[i][-1:]

    serve(model, layer, path, prompts, most_new, choose)
    return written


def teacher_forced(
    model: Model,
    layer: Layer,
    path: AttentionPath,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> list[torch.Tensor]:
    """Logits [len(answer) vocab] before each token of each answer, float32.

    Prompts are prefilled in the path's chunks; answers are decoded, ``decode_threshold`` tokens a step.
    """
    seen: list[list[torch.Tensor]] = [[] for _ in prompts]

    def choose(i: int, logits: torch.Tensor) -> list[int]:
        seen[i].append(logits)
        count = sum(len(part) for part in seen[i])
        # The last token of an answer predicts what nobody asks for.
        return list(answers[i][count - 1 : count - 1 + path.decode_threshold][: len(answers[i]) - count])

    serve(model, layer, path, prompts, max(map(len, answers)), choose)
    return [torch.cat(parts) for parts in seen]
