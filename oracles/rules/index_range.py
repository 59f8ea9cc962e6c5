"""Addresses beyond 32 bits.

Claim: with pages that begin more than 2³² elements into the pool, and then with query rows, tokens or states
    so far apart that the last quarter of them does, the output is the same, and what is written arrives
    there.
Why: block · stride leaves 32 bits in any pool of some gigabytes, and token · stride in a long prefill: it
    wraps, with a sign or without, in elements or in bytes, and reads or overwrites another request. On a CPU
    such memory is a mapping of which only what is in use is ever touched, so nothing large is allocated; on a
    GPU it is real memory.
Exact or bounded: with pages moved bit for bit where the backend repeats itself; else within both radii. Where
    there is no such memory, or a call takes more than ``OF_A_CALL`` of its own, beyond 2³¹ elements, where
    nothing without a sign has wrapped yet but bytes; and left out where that is too much. Which of them the
    verdict says.
Kills: offsets of pages, slots, rows and states in 32 bits, with a sign or without, numbers of blocks in 16,
    in readers and in writers.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from mla_ref.layout import POISON_BYTE
from oracles.compare import identical, told, worst_of
from oracles.memory import counted_again, ran_out, refused_beyond, untouched
from oracles.oracle import Oracle, Raised, Trial, private_copy, storage_bytes
from oracles.probes import agree, nothing, pools, same
from oracles.verdict import Finding

# Elements, the farthest first: no number of 32 bits is as large, and none with a sign. Beyond the first wraps
# whatever wraps at either of them, in elements or in bytes.
REACHES = {2**32: "2³²", 2**31: "2³¹"}

# Elements; a multiple of what any copy engine asks for.
ALIGNMENT = 4096

# Bytes that a call may take on the host: one that copies a whole pool would fill the machine, be it right.
OF_A_CALL = 2**32

# What moves inputs by so many elements.
Move = Callable[[Any, int], Any]

ROWS = ("ql_nope", "q_nope", "q_pe", "query", "kv_c", "k_pe", "outs", "lses", "x")


def check(trial: Trial) -> Finding:
    """Run over the same pages, far in, and over the same rows, far apart."""
    findings: list[Finding] = []
    for what, move in (("pages", _far_pages), ("rows", _far_rows)):
        finding = _farthest(trial, what, move)
        if finding is not None:
            findings.append(finding)
            if not finding.ok:  # known, whatever becomes of the next call
                return finding
    if not findings:
        return nothing("nothing has two rows")
    spoken = next((finding for finding in findings if finding.num_checked), findings[0])
    return replace(spoken, detail="; ".join(finding.detail for finding in findings if finding.detail))


def _farthest(trial: Trial, what: str, move: Move) -> Finding | None:
    """What a call says of inputs moved as far as there is memory for; None if nothing can be moved."""
    lacking: list[str] = []
    for reach, words in REACHES.items():
        where = f"with {what} beyond {words} elements"
        try:
            finding = _moved(trial, move, reach, where, exact=what == "pages")
        except MemoryError as error:
            lacking.append(f"{where}: {error}")
            continue
        finally:
            _give_back(trial.device)
        if finding is None or not finding.ok or not lacking:
            return finding
        return replace(finding, detail=f"not judged {lacking[0]}")
    return nothing(f"not judged {lacking[-1]}")


def _moved(trial: Trial, move: Move, reach: int, where: str, *, exact: bool) -> Finding | None:
    """What a call says of moved inputs, which are gone when it is known; None if nothing can be moved.

    Raises: MemoryError if there is too little for them, or for the call.
    """
    moved = move(private_copy(trial.inputs), reach)
    if moved is None:
        return None
    try:
        with refused_beyond(OF_A_CALL) if trial.device == "cpu" else nullcontext():
            output = trial.call(moved)
    except Raised as error:
        if not ran_out(error.__cause__):
            raise Raised(f"{where}: {error}") from error.__cause__
        raise MemoryError(f"no memory in the call: {error}") from None
    return _as_before(trial, output, moved, where, exact=exact)


def _as_before(trial: Trial, output: Any, moved: Any, where: str, *, exact: bool) -> Finding:
    """Other strides of a row may choose another order of its sums; those of pages stay.

    exact: it is pages that were moved.
    """
    if not trial.problem.writes:
        return same(trial, output, where, exact=exact)
    left, findings = trial.left(), []
    for name in trial.problem.writes:
        want = getattr(left, name)
        got = getattr(moved, name)
        if exact:
            got = got[-want.shape[0] :]
            findings.append(_between(name, got, want))
        findings.append(identical(name, got, want, "n k e", trial.inputs))
    first = trial.run(trial.inputs)
    for name, expected in trial.expected().items():
        letters, pair = trial.problem.output_shapes[name], (getattr(output, name), getattr(first, name))
        finding = identical(name, *pair, letters, trial.inputs)
        if not finding.ok:
            finding = agree(name, *pair, expected, expected, letters, trial.inputs)
        findings.append(finding)
    worst = worst_of(findings)
    return told(where, worst)


def _between(name: str, pages: torch.Tensor, want: torch.Tensor) -> Finding:
    """Between the entries of the far pages nothing was written: there is the poison that was put there."""
    raw = storage_bytes(pages)[pages.storage_offset() * pages.element_size() :]
    fresh = torch.full_like(raw, POISON_BYTE)
    fresh.view(want.dtype).as_strided(pages.shape, pages.stride()).copy_(want)
    return identical(f"memory between the entries of {name}", raw, fresh)


def _far_pages(inputs: Any, reach: int) -> Any:
    """The inputs with their pages behind ``reach`` elements' worth of pages that nobody owns, or None.

    The first of those pages are poison: an address that wraps is there.
    """
    if not any(hasattr(inputs, name) for name in ("kv_cache", "key_cache")):
        return None
    caches = {name: getattr(inputs, name) for name in pools(inputs)}
    num_blocks, block_size = next(iter(caches.values())).shape[:2]
    strides = {name: _blocks_outermost(cache) for name, cache in caches.items()}
    before = max(-(-reach // steps[0]) for steps in strides.values())
    far = {}
    for name, cache in caches.items():
        shape = before + num_blocks, *cache.shape[1:]
        last = sum((n - 1) * step for n, step in zip(shape, strides[name], strict=True))
        memory = _memory((last + 1) * cache.element_size(), cache.device)
        block = strides[name][0] * cache.element_size()
        for part in (slice(before * block, None), slice((num_blocks + 1) * block)):
            memory[part].fill_(POISON_BYTE)
        far[name] = memory.view(cache.dtype).as_strided(shape, strides[name])
        far[name][before:] = cache
    return inputs._replace(**far, **_renamed(inputs, before, num_blocks, block_size))


def _blocks_outermost(cache: torch.Tensor) -> tuple[int, ...]:
    """The cache's own strides, or packed ones where blocks lie between its heads."""
    if cache.stride(0) >= max(cache.stride()):
        return tuple(cache.stride())
    return cache[0].numel(), *cache[0].contiguous().stride()


def _renamed(inputs: Any, before: int, num_blocks: int, block_size: int) -> dict[str, torch.Tensor]:
    """The fields that name pages, each live name larger by ``before`` pages."""
    if hasattr(inputs, "block_table"):
        table = inputs.block_table
        return {"block_table": torch.where(table < num_blocks, table + before, table)}
    slot = inputs.slot_mapping
    return {"slot_mapping": torch.where(slot >= 0, slot + before * block_size, slot)}


def _far_rows(inputs: Any, reach: int) -> Any:
    """The inputs with a quarter of several rows or states ``reach`` elements behind the first, or None.

    The first rows of all tensors are neighbours, and so are their second ones: addresses are spent once.
    """
    tensors = {name: getattr(inputs, name) for name in ROWS if hasattr(inputs, name)}
    tensors = {name: x for name, x in tensors.items() if x.shape[0] > 1 and x[0].numel()}
    if not tensors:
        return None
    widest = max(x.element_size() for x in tensors.values())
    count = max(x.shape[0] for x in tensors.values())
    firsts, row = {}, 0
    for name, x in tensors.items():
        firsts[name] = row
        row += -(-x[0].numel() * x.element_size() // ALIGNMENT) * ALIGNMENT
    step = -(-reach * widest // ((count - max(count // 4, 1)) * ALIGNMENT)) * ALIGNMENT
    memory = _memory(max(step, row) * (count - 1) + row, next(iter(tensors.values())).device)
    far = {}
    for name, x in tensors.items():
        strides = (max(step, row) // x.element_size(), *x[0].contiguous().stride())
        far[name] = memory.view(x.dtype).as_strided(x.shape, strides, firsts[name] // x.element_size())
        far[name].copy_(x)
    return inputs._replace(**far)


def _memory(size: int, device: torch.device) -> torch.Tensor:
    """Bytes that nobody has touched yet. Raises: MemoryError that says how many, if there are less."""
    try:
        if device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=device)
        return torch.frombuffer(untouched(size), dtype=torch.uint8)
    except (OSError, torch.OutOfMemoryError):
        more = f"{size / 2**30:.1f} GiB in one piece, more than this process may have on {device}"
        raise MemoryError(f"that takes {more}") from None


def _give_back(device: str) -> None:
    """What is free is whoever's comes next, who could give back nothing of it were it cut from it."""
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
    else:
        counted_again()


ORACLE = Oracle(
    name="index_range",
    check=check,
    problems=(
        "latent_attention",
        "attention",
        "paged_attention",
        "cache_gather",
        "cache_write",
        "rope_cache_write",
        "merge_states",
        "rope",
    ),
    kills=(
        "read_in_32_bits",
        "paged_read_in_32_bits",
        "gather_in_32_bits",
        "write_in_32_bits",
        "blocks_numbered_in_16_bits",
        "query_offset_in_32_bits",
        "states_offset_in_32_bits",
        "write_token_offset_in_32_bits",
        "fused_query_offset_in_32_bits",
        "read_in_unsigned_32_bits",
        "paged_read_in_unsigned_32_bits",
        "write_in_unsigned_32_bits",
        "states_offset_in_unsigned_32_bits",
    ),
    on_device=True,  # memory this large is not sent
)
