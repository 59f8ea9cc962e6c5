"""What rules without a truth are made of: inputs edited on purpose, and what a second run owes the first.

Inputs are edited where their meaning is known: which query rows a request has, which entries it has cached,
and what they hold. Every edit keeps the case's types, widths, format and layout, so that whoever supports the
case supports the probe; where lengths or blocks change, ``runnable`` asks.

An edit depends on a case alone, so it is made once for all variants and backends: pass the function that
makes it to ``made`` and ``admissible``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from mla_ref.case import Case
from mla_ref.formats import cache_format
from mla_ref.layout import allocate
from mla_ref.numerics import EXACT, Numerics
from mla_ref.pages import block_table, scatter, slots
from mla_ref.problem import problem
from mla_ref.problems.paged_attention import pages
from mla_ref.values import integers, signs
from oracles.asked import declined
from oracles.bounds import ADMISSIBLE, Admissible, is_known, spacing, type_named
from oracles.compare import identical, told, within, worst_of
from oracles.oracle import Trial, private_copy
from oracles.verdict import Finding

ATTENTION = ("latent_attention", "attention", "paged_attention")

# Every problem whose inputs are tensors.
OF_TENSORS = (*ATTENTION, "merge_states", "rope", "cache_write", "rope_cache_write", "cache_gather", "layer")
LATENT = ("latent_attention", "attention")

# Scales of probes: dropped or squared they are far off, and products with them are exact.
KV_SCALE, V_SCALE = 2.0**-6, 2.0**-5

Make = Callable[[Case, str], Any]


class Probe(NamedTuple):
    """Inputs whose output is known in closed form. want: float64, by field."""

    inputs: Any
    want: Mapping[str, torch.Tensor]


@lru_cache(maxsize=4)
def materialized(case: Case, device: str) -> Any:
    """The tensors of a case; shared, so never to be changed."""
    return problem(case.problem).materialize(case, torch.device(device))


@lru_cache(maxsize=16)
def made(make: Make, case: Case, device: str) -> Any:
    """What ``make`` makes of a case; shared, so never to be changed."""
    return make(case, device)


@lru_cache(maxsize=16)
def admitted(make: Make, case: Case, device: str, numerics: Numerics) -> Mapping[str, Admissible]:
    """What the output on ``make``'s inputs may be under these numerics."""
    return ADMISSIBLE[case.problem](made(make, case, device), numerics)


def admissible(make: Make, trial: Trial, case: Case | None = None) -> Mapping[str, Admissible]:
    """What the output on ``make``'s inputs may be."""
    return admitted(make, case or trial.case, trial.device, trial.backend.numerics)


@lru_cache(maxsize=16)
def _known(
    plant: Callable[[Case, str], Probe], case: Case, device: str, numerics: Numerics
) -> Mapping[str, Admissible]:
    inputs, want = made(plant, case, device)
    expected = ADMISSIBLE[case.problem](inputs, numerics)
    cut: tuple[str, ...] = ("out",) if numerics.operand != EXACT else ()
    if _keys_are_rounded(inputs, case, numerics):
        cut = tuple(want)
    return {
        name: expected[name] if name in cut else expected[name]._replace(mid=mid)
        for name, mid in want.items()
    }


def _keys_are_rounded(inputs: Any, case: Case, numerics: Numerics) -> bool:
    """Whether the type of keys and values does not hold those of the cache: a stranger's format, then."""
    if numerics.kv == EXACT or not hasattr(inputs, "kv_cache"):
        return False
    dtype = type_named(numerics.kv, getattr(torch, case.dtype))
    return any(not torch.equal(x.to(dtype).to(x), x) for x in decoded(inputs))


def shows(
    trial: Trial,
    plant: Callable[[Case, str], Probe],
    case: Case,
    what: str,
    *,
    exact_dots: bool = False,
    more: Callable[[torch.Tensor], str] | None = None,
    also: Callable[[Any, Any], Finding] | None = None,
) -> Finding:
    """The output on a probe is its closed form, up to the radii that bounds.py derives for its inputs.

    Where a stage is declared to be rounded, ``out`` follows from the rounded stage instead; where keys and
    values are rounded that do not fit, everything from the rounded ones.

    what: what the probe's inputs are. exact_dots: no sum of products of this probe is rounded by any
        accumulator, in whatever order. more: what else is to be said of rows and heads [t h] whose ``out`` is
        wrong. also: what else is claimed of the probe's inputs and an output that is as it may be.
    """
    if not runnable(trial, case):
        return nothing("the backend does not take the probe")
    inputs = made(plant, case, trial.device).inputs
    output, known = trial.run(inputs), _known(plant, case, trial.device, _of_probe(trial, exact_dots))
    shapes = trial.problem.output_shapes
    found = [within(name, getattr(output, name), want, shapes[name], inputs) for name, want in known.items()]
    finding = told(what, worst_of(found))
    if also is not None and finding.ok:
        claimed = told(what, also(inputs, output))
        return finding if claimed.ok else claimed
    if more is None or finding.worst is None:
        return finding
    return replace(finding, more=lambda: more(_wrong(output.out, known["out"])))


def _wrong(got: torch.Tensor, want: Admissible) -> torch.Tensor:
    """[t h] of a tensor [t h v]."""
    value, (low, high) = got.detach().double(), want.interval()
    inside: torch.Tensor = ((value >= low) & (value <= high)).all(-1)
    return ~inside


def _of_probe(trial: Trial, exact_dots: bool) -> Numerics:
    numerics = trial.backend.numerics
    return replace(numerics, dot_roundings=0.0) if exact_dots else numerics


def runnable(trial: Trial, case: Case) -> bool:
    """Whether the backend on trial takes a case."""
    return declined(trial.backend, case, trial.disturbed) is None


def nothing(why: str) -> Finding:
    """A claim that a case says nothing about."""
    return Finding(ok=True, detail=why)


class Part(NamedTuple):
    """Query rows start … stop-1 of a request, counted in it, over kv_len keys from its block ``first`` on."""

    request: int
    start: int
    stop: int
    kv_len: int
    first: int = 0


def lengths(inputs: Any) -> list[tuple[int, int]]:
    """(q_len, kv_len) of each request."""
    offsets = inputs.cu_seqlens_q.tolist()
    return [(b - a, n) for (a, b), n in zip(pairwise(offsets), inputs.cache_seqlens.tolist(), strict=True)]


def whole(inputs: Any, order: Iterable[int]) -> list[Part]:
    """Requests as they are, in this order."""
    sizes = lengths(inputs)
    return [Part(i, 0, *sizes[i]) for i in order]


def alone(inputs: Any, rows: Callable[[int], Iterable[int]]) -> list[Part]:
    """Rows as requests of their own, each with the keys that it sees. rows: q_len -> which."""
    return [
        Part(i, s, s + 1, min(max(kv_len - q_len + s + 1, 0), kv_len))
        for i, (q_len, kv_len) in enumerate(lengths(inputs))
        for s in rows(q_len)
    ]


def last_rows(q_len: int) -> range:
    """The newest row, which sees every key."""
    return range(max(q_len - 1, 0), q_len)


def rows_of(inputs: Any, parts: Sequence[Part]) -> torch.Tensor:
    """Which rows of the packed batch the parts are."""
    offsets = inputs.cu_seqlens_q.tolist()
    rows = [
        row
        for part in parts
        for row in range(offsets[part.request] + part.start, offsets[part.request] + part.stop)
    ]
    return torch.tensor(rows, dtype=torch.int64, device=inputs.cu_seqlens_q.device)


def with_parts(case: Case, parts: Sequence[Part]) -> Case:
    """The lengths of a batch of parts."""
    return replace(
        case,
        q_lens=tuple(part.stop - part.start for part in parts),
        kv_lens=tuple(part.kv_len for part in parts),
    )


def batch(inputs: Any, parts: Sequence[Part]) -> Any:
    """A batch of parts, over the same pages."""
    device, table = inputs.cu_seqlens_q.device, inputs.block_table
    rows, taken = rows_of(inputs, parts), table[[part.request for part in parts]]
    for i, part in enumerate(parts):
        taken[i, : table.shape[1] - part.first] = table[part.request, part.first :]
    q_lens = [part.stop - part.start for part in parts]
    return inputs._replace(
        **{name: getattr(inputs, name)[rows] for name in queries(inputs)},
        block_table=taken,
        cu_seqlens_q=torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32).to(device),
        cache_seqlens=torch.tensor([part.kv_len for part in parts], dtype=torch.int32, device=device),
        max_seqlen_q=max(q_lens, default=0),
    )


def queries(inputs: Any) -> tuple[str, ...]:
    """The fields that hold queries, the part that no value shares last."""
    return tuple(name for name in ("ql_nope", "q_nope", "q_pe", "query") if hasattr(inputs, name))


def pools(inputs: Any) -> tuple[str, ...]:
    """The fields that hold pages."""
    return ("kv_cache",) if hasattr(inputs, "kv_cache") else ("key_cache", "value_cache")


def live(inputs: Any) -> torch.Tensor:
    """Flat slots of every cached token, request by request."""
    block_size = getattr(inputs, pools(inputs)[0]).shape[1]
    found = [
        slots(row, 0, n, block_size) for row, (_, n) in zip(inputs.block_table, lengths(inputs), strict=True)
    ]
    return torch.cat([inputs.block_table.new_empty(0, dtype=torch.int64), *found])


def stored(inputs: Any) -> dict[str, torch.Tensor]:
    """The entries of every cached token, request by request, as they are stored."""
    slot = live(inputs)
    return {name: _at(getattr(inputs, name), slot) for name in pools(inputs)}


def _at(cache: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    return cache[slot // cache.shape[1], slot % cache.shape[1]]


def restored(inputs: Any, entries: Mapping[str, torch.Tensor]) -> Any:
    """The inputs with these entries in place of the cached ones."""
    other, slot = private_copy(inputs), live(inputs)
    for name, values in entries.items():
        scatter(getattr(other, name), slot, values)
    return other


def fresh_pages(inputs: Any, case: Case, num_blocks: int) -> dict[str, torch.Tensor]:
    """Pages in the case's blocks and layout, for entries like those of the inputs, every byte poison."""
    if case.problem == "paged_attention":
        return dict(zip(pools(inputs), pages(case, num_blocks, inputs.key_cache.device), strict=True))
    cache = inputs.kv_cache
    fresh = allocate(
        case.layout,
        num_blocks=num_blocks,
        block_size=case.block_size,
        entry_width=cache.shape[2],
        dtype=cache.dtype,
        device=cache.device,
    )
    return {"kv_cache": fresh}


def cached_anew(inputs: Any, case: Case, entries: Mapping[str, torch.Tensor]) -> Any:
    """The inputs over fresh pages, in the case's lengths, blocks and layout, that hold these entries."""
    device = inputs.block_table.device
    table, num_blocks = block_table(case.kv_lens, case.block_size, case.layout, case.seed)
    other = inputs._replace(
        **fresh_pages(inputs, case, num_blocks),
        block_table=table.to(device),
        cache_seqlens=torch.tensor(case.kv_lens, dtype=torch.int32, device=device),
    )
    slot = live(other)
    for name, values in entries.items():
        scatter(getattr(other, name), slot, values)
    return other


def is_strange(inputs: Any) -> bool:
    """Whether there is a cache of which only the format itself knows the entries."""
    return hasattr(inputs, "cache_format") and not is_known(inputs.cache_format)


def decoded(inputs: Any, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent [n c] and rope part [n r] of every cached token, request by request."""
    entries = stored(inputs)["kv_cache"]
    channels: tuple[torch.Tensor, torch.Tensor] = inputs.cache_format.decode(
        entries, _latent_width(inputs), inputs.q_pe.shape[2], inputs.kv_scale, dtype
    )
    return channels


def encoded(inputs: Any, kv_c: torch.Tensor, k_pe: torch.Tensor) -> dict[str, torch.Tensor]:
    """Entries of these channels, in the inputs' format."""
    kv_c, k_pe = (x if x.dtype == torch.float64 else x.float() for x in (kv_c, k_pe))
    return {"kv_cache": inputs.cache_format.encode(kv_c, k_pe, inputs.kv_scale)}


def exactly_scaled(case: Case) -> Case:
    """The case under scales that are powers of two; itself where its format has none."""
    if not cache_format(case.cache_format).per_tensor_scale:
        return case
    return replace(case, kv_scale=KV_SCALE, v_scale=V_SCALE)


def payload(case: Case, count: int, width: int, device: str, powers: range = range(-8, -1)) -> torch.Tensor:
    """[count width] float64: four significant bits, so that every format and type holds them exactly.

    In tiles of 128 channels with a power of two of their own, each of which has one largest code, so that
    the scale of a tile is a power of two as well; under one scale for all tiles, a single power.

    powers: those of two to choose from; beyond the usual ones not every format and type has them.
    """
    seed, tiles = case.seed, -(-width // 128)
    lanes = slice(min(width, 128))
    codes = integers(seed, "payload", 15, count, tiles, 128)[..., lanes].to(torch.float64).add_(1.0)
    at = integers(seed, "largest", min(width, 128), count, tiles, 1)
    codes.scatter_(2, at, 448.0)
    codes *= signs(seed, "sign", count, tiles, 128)[..., lanes]
    power = integers(seed, "power", len(powers), count, tiles, 1).double() + powers.start
    if problem(case.problem).name == "paged_attention" or "fp8_e4m3" in case.cache_format:
        power = torch.full_like(power, -6.0)
    return codes.mul_(torch.exp2(power)).flatten(1)[:, :width].to(device)


def selecting(inputs: Any) -> Any:
    """Weights that pick one latent channel for each channel of a head, another for each head."""
    if not hasattr(inputs, "w_uk"):
        return inputs
    picked = {}
    for name, step in (("w_uk", 7), ("w_uv", 11)):
        weight = torch.zeros_like(getattr(inputs, name))
        picked[name] = weight.scatter_(2, _picks(weight, step)[..., None], 1.0)
    return inputs._replace(**picked)


def _picks(weight: torch.Tensor, step: int) -> torch.Tensor:
    h, x, c = weight.shape
    head, channel = torch.arange(h, device=weight.device), torch.arange(x, device=weight.device)
    return (channel + step * head[:, None] + 1) % c


def heads_view(inputs: Any, values: torch.Tensor) -> torch.Tensor:
    """[… h v] what each head reads of latents [… c] under ``selecting`` weights, or of values [… g v]."""
    if hasattr(inputs, "w_uv"):
        return values[..., _picks(inputs.w_uv, 11)]
    if hasattr(inputs, "query"):
        return values.repeat_interleave(inputs.query.shape[1] // values.shape[-2], dim=-2)
    return values[..., None, :].expand(*values.shape[:-1], inputs.ql_nope.shape[1], values.shape[-1])


def picked(expected: Admissible, rows: torch.Tensor | slice) -> Admissible:
    """What some rows may be."""
    return expected._replace(mid=expected.mid[rows], radius=expected.radius[rows])


def moved_truth(trial: Trial, here: Admissible, there: Admissible) -> torch.Tensor | float:
    """How far apart two runs' right outputs are that would be equal but for the rounding of a stage."""
    return here.mid - there.mid if trial.backend.numerics.operand != EXACT else 0.0


def code_width(inputs: Any) -> int:
    """Channels of a key that are no part of its value."""
    return int(inputs.q_pe.shape[2] if hasattr(inputs, "q_pe") else inputs.query.shape[2])


def asked(inputs: Any, query: torch.Tensor) -> Any:
    """The inputs with queries [t h w] of the channels that are no part of a value, and of no other."""
    if hasattr(inputs, "query"):
        return inputs._replace(query=query.to(inputs.query.dtype))
    silent = {
        name: torch.zeros_like(getattr(inputs, name))
        for name in ("ql_nope", "q_nope")
        if hasattr(inputs, name)
    }
    return inputs._replace(**silent, q_pe=query.to(inputs.q_pe.dtype))


def planted(inputs: Any, key: torch.Tensor, value: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """(the inputs with these keys [n w] and values [n v], what each head reads [n h v]).

    What is read is what the format makes of the values: those of the house hold them, a stranger's may not.
    Key-value heads differ by a rotation of their channels.
    """
    inputs = selecting(inputs)
    if hasattr(inputs, "kv_cache"):
        inputs = restored(inputs, encoded(inputs, value, key))
        return inputs, heads_view(inputs, decoded(inputs)[0])
    groups = inputs.key_cache.shape[2]
    keys = key[:, None].expand(-1, groups, -1)
    values = torch.stack([value.roll(g, 1) for g in range(groups)], dim=1)
    entries = {
        name: _codes(channels, scale, getattr(inputs, name).dtype)
        for name, channels, scale in (
            ("key_cache", keys, inputs.k_scale),
            ("value_cache", values, inputs.v_scale),
        )
    }
    return restored(inputs, entries), heads_view(inputs, values)


def _codes(channels: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (channels / scale.double() if dtype == torch.float8_e4m3fn else channels).to(dtype)


def value_channels(inputs: Any) -> int:
    """Channels of a stored value."""
    return int(inputs.value_cache.shape[3] if hasattr(inputs, "value_cache") else _latent_width(inputs))


def _latent_width(inputs: Any) -> int:
    return int(inputs.w_uk.shape[2] if hasattr(inputs, "w_uk") else inputs.ql_nope.shape[2])


def first_keys(inputs: Any) -> list[int]:
    """Where each request's tokens begin among those of all."""
    starts = [0]
    for _, kv_len in lengths(inputs):
        starts.append(starts[-1] + kv_len)
    return starts


def agree(
    name: str,
    got: torch.Tensor,
    other: torch.Tensor,
    here: Admissible,
    there: Admissible,
    where: str,
    inputs: Any,
    moved: torch.Tensor | float = 0.0,
) -> Finding:
    """Two outputs differ by ``moved``, up to what each of them may be off, the rounding of both included."""
    half = 0.5 * spacing(there.mid.abs() + there.radius, there.dtype)
    radius = (here.radius + there.radius + half).masked_fill(~there.mid.isfinite(), 0.0)
    return within(name, got, Admissible(other.double() + moved, radius, here.dtype), where, inputs)


def repeats(trial: Trial) -> bool:
    """Whether a second run on the same bytes gives the same bytes."""
    first, again = trial.run(trial.inputs), trial.run(private_copy(trial.inputs))
    return all(identical("", getattr(again, name), getattr(first, name)).ok for name in trial.expected())


def same(trial: Trial, again: Any, what: str, *, exact: bool, rows: torch.Tensor | None = None) -> Finding:
    """A second output is the first, or the ``rows`` of it in this order.

    exact: bit for bit, but for the sign of a zero, where the backend repeats itself; else, as for every
        other, within both radii.
    what: what was different about the second run.
    """
    first, expected, inputs = trial.run(trial.inputs), trial.expected(), trial.inputs
    if rows is not None:
        first, inputs = only(first, rows), None
        expected = {name: picked(x, rows) for name, x in expected.items()}
    return alike(trial, again, first, expected, what, exact=exact, inputs=inputs)


def only(output: Any, rows: torch.Tensor) -> Any:
    """Some rows of an output."""
    return type(output)(*(x[rows] for x in output))


def alike(
    trial: Trial,
    got: Any,
    want: Any,
    expected: Mapping[str, Admissible],
    what: str,
    *,
    exact: bool,
    inputs: Any = None,
) -> Finding:
    """Two outputs of which each may be what is expected are the same, as ``same`` says it."""
    findings = []
    for name, letters in trial.problem.output_shapes.items():
        pair = getattr(got, name), getattr(want, name)
        finding = identical(name, _unsigned(pair[0]), _unsigned(pair[1]), letters, inputs)
        if not finding.ok and not (exact and repeats(trial)):
            finding = agree(name, *pair, expected[name], expected[name], letters, inputs)
        findings.append(replace(finding, detail=f"{what}: {finding.detail}" if finding.detail else ""))
    return worst_of(findings)


def _unsigned(x: Any) -> Any:
    """Zeros without their sign: a weight of 0 gives the sum that of a value which the row does not see."""
    return x.masked_fill(x == 0.0, 0.0) if isinstance(x, torch.Tensor) else x


def wide(trial: Trial) -> bool:
    """Whether powers of two pass through every type of the path: float16 and 8 bits are too narrow."""
    numerics, query = trial.backend.numerics, getattr(torch, trial.case.dtype)
    names = (numerics.kv, numerics.operand, numerics.p, numerics.partial, numerics.accumulate)
    types = [type_named(name, query) for name in names if name != "compute"]
    least = torch.finfo(torch.float32).tiny
    return all(torch.finfo(dtype).tiny <= least for dtype in (query, *types))
