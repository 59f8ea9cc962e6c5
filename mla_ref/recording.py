"""Real inputs of attention: what a model's layer was given, in a safetensors file of one case.

A recording gives the values of a case of the regime "recorded": queries, latents, rope keys, up-projections.
Everything else, pages, formats and types, follows from the case, as with values that are made. Lengths may
differ from the recorded ones: a request has its first keys and its last queries, from the other end again
where it is longer; it may have fewer heads, and requests come round again where there are more.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mla_ref.case import RECORDED, Case, Recording

# What a file says it is, and the two keys of its header that are ours.
KIND = "mla-verify recording 1"
CASE_KEY, SOURCE_KEY = "case", "source"

SHAPES = {
    "q_nope": "t h p",
    "q_pe": "t h r",
    "ql_nope": "t h c",
    "kv_c": "n c",
    "k_pe": "n r",
    "w_uk": "h p c",
    "w_uv": "h v c",
}
PROBLEMS = ("attention", "latent_attention", "cache_write", "cache_gather")

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
HEADER_LIMIT = 1 << 20


class Recorded(NamedTuple):
    """A file as it was read.

    case: of ``attention``, with the recorded lengths and types. source: where it comes from, as written.
    """

    case: Case
    source: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]


def read(path: Path | str) -> Recorded:
    """A recording, whatever its hash. Raises: ValueError that names the file, and what is wrong with it."""
    return _parsed(str(path), _bytes_of(str(path)))


@lru_cache(maxsize=4)
def recorded(recording: Recording) -> Recorded:
    """The recording that a case names. Raises: ValueError on another hash, with both."""
    content = _bytes_of(recording.path)
    found = hashlib.sha256(content).hexdigest()
    if found != recording.sha256:
        raise ValueError(f"{recording.path}: its sha256 is {found}, but the case names {recording.sha256}")
    return _parsed(recording.path, content)


def _bytes_of(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None


def _parsed(path: str, content: bytes) -> Recorded:
    header, data = _header(path, content)
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or notes.get("kind") != KIND:
        raise ValueError(f"{path}: is no recording: its header does not say {KIND!r}")
    try:
        case = Case.from_json(notes[CASE_KEY])
        source = json.loads(notes[SOURCE_KEY])
        tensors = {name: _tensor(data, **about) for name, about in header.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None
    for name, shape in shapes_of(case).items():
        if name not in tensors:
            raise ValueError(f"{path}: {name} is missing")
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"{path}: {name} is {list(tensors[name].shape)}, but its case has {list(shape)}")
    named = Recording(path=path, sha256=hashlib.sha256(content).hexdigest())
    return Recorded(replace(case, regime=RECORDED, recording=named), source, tensors)


def _header(path: str, content: bytes) -> tuple[dict[str, Any], memoryview]:
    """The header and the data of a safetensors file: eight bytes of length, JSON, tensors."""
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or size > min(HEADER_LIMIT, len(content) - 8):
        raise ValueError(f"{path}: is no safetensors file")
    try:
        header = json.loads(content[8 : 8 + size])
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise ValueError(f"{path}: is no safetensors file")
    return header, memoryview(content)[8 + size :]


def _tensor(data: memoryview, dtype: str, shape: Sequence[int], data_offsets: Sequence[int]) -> torch.Tensor:
    if dtype not in DTYPES:
        raise ValueError(f"type {dtype} is not one of {', '.join(DTYPES)}")
    start, stop = data_offsets
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if not 0 <= start <= stop <= len(data) or stop - start != size:
        raise ValueError(f"a tensor {list(shape)} of {dtype} is at {start} … {stop} of {len(data)} bytes")
    if not size:
        return torch.empty(tuple(shape), dtype=DTYPES[dtype])
    return torch.frombuffer(bytearray(data[start:stop]), dtype=DTYPES[dtype]).reshape(tuple(shape))


def shapes_of(case: Case) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a recording with this case's lengths and dimensions."""
    config = case.config
    sizes = {
        "t": sum(case.q_lens),
        "n": sum(case.kv_lens),
        "h": config.num_heads,
        "p": config.qk_nope_head_dim,
        "r": config.qk_rope_head_dim,
        "c": config.kv_lora_rank,
        "v": config.v_head_dim,
    }
    return {name: tuple(sizes[letter] for letter in letters.split()) for name, letters in SHAPES.items()}


def why_not_recorded(case: Case) -> str | None:
    """Why the case's recording cannot give its values, or None; None too for every other regime."""
    if case.regime != RECORDED:
        return None
    if case.recording is None:
        return "the regime is recorded, but there is no recording"
    if case.problem not in PROBLEMS:
        return f"a recording holds no inputs of {case.problem}"
    here, there = case.config, recorded(case.recording).case.config
    for field in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"):
        if getattr(here, field) != getattr(there, field):
            return f"{field} is {getattr(here, field)}, but was recorded as {getattr(there, field)}"
    if here.num_heads > there.num_heads:
        return f"num_heads is {here.num_heads}, but {there.num_heads} were recorded"
    return None


def served(case: Case, problem: str) -> Case:
    """A recorded case as one of another problem, where its recording serves that; any other case as it is."""
    serves = case.regime == RECORDED and problem in PROBLEMS
    return replace(case, problem=problem) if serves else case


def recorded_tensor(case: Case, name: str) -> torch.Tensor:
    """A tensor of ``SHAPES``, float64, for the case's own lengths and heads.

    Raises: ValueError with the reason of ``why_not_recorded``.
    """
    if (reason := why_not_recorded(case)) or case.recording is None:
        raise ValueError(f"case: {reason}")
    was, _, tensors = recorded(case.recording)
    letters = SHAPES[name].split()
    tensor = tensors[name]
    if "h" in letters:
        tensor = tensor.narrow(letters.index("h"), 0, case.config.num_heads)
    if letters[0] == "t":
        tensor = tensor[_rows(case.q_lens, was.q_lens, newest=True)]
    if letters[0] == "n":
        tensor = tensor[_rows(case.kv_lens, was.kv_lens, newest=False)]
    return tensor.to(torch.float64)


def _rows(wanted: Sequence[int], there: Sequence[int], newest: bool) -> torch.Tensor:
    """int64, recorded rows of each request: its first or its newest, over again where more are wanted."""
    starts = torch.tensor([0, *there]).cumsum(0).tolist()
    rows = [torch.empty(0, dtype=torch.int64)]
    for i, length in enumerate(wanted):
        had = there[i % len(there)] if there else 0
        if length and not had:
            raise ValueError(f"case: request {i} has {length} tokens, but none were recorded")
        index = torch.arange(length) + (-length if newest else 0)
        rows.append(starts[i % len(there)] + index % had if length else rows[0])
    return torch.cat(rows)
