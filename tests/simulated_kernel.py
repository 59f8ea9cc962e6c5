"""Right implementations with low-precision arithmetic, as kernels have it: what no bound may ever reject."""

import math
from dataclasses import dataclass, replace

import torch

from evals.flash_latent import held
from mla_ref.backend import Backend
from mla_ref.numerics import EXACT, Numerics
from mla_ref.problem import AttentionOutput
from mla_ref.rows import causal_mask, compute_dtype, keys, requests
from oracles.bounds import type_named

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a simulated kernel walks over the keys, and where it rounds.

    base2: exponentials and logarithms in base 2, the scale folded into it. paired: two tiles at a time, the
    second half of the channels multiplied by a first tile of weights that is rescaled and rounded again.
    normalised: weights divided by their sum before they are rounded. folded: partial results merged one after
    another. backwards: from the newest tile to the oldest. exp_noise: in units of the roundoff. slack: powers
    of two by which scores may exceed the maximum before it moves. twice: the maximum before a tile is
    subtracted first, and then the difference from the tile's own.
    """

    tile: int = 16
    splits: int = 1
    base2: bool = True
    paired: bool = False
    normalised: bool = False
    folded: bool = False
    backwards: bool = False
    exp_noise: float = 0.0
    slack: float = 0.0
    twice: bool = False


def simulated(problem: str, numerics: Numerics, schedule: Schedule) -> Backend:
    """A backend that computes by this schedule and declares what it does."""
    depth = max(schedule.splits - 1, 1) if schedule.folded else 1
    declared = replace(
        numerics,
        min_tile=schedule.tile,
        max_splits=schedule.splits,
        merge_depth=depth,
        shared_p=not schedule.paired,
        slack=math.inf if schedule.twice else schedule.slack,
        # Weights that are divided by their sum beforehand are rounded after it.
        sum_rounded_p=numerics.sum_rounded_p and not schedule.normalised,
    )

    def latent(*args):
        return _attend(args, None, declared, schedule)

    def attention(*args):
        return _attend((*args[:6], *args[8:]), args[6:8], declared, schedule)

    fn = latent if problem == "latent_attention" else attention
    return Backend("tests.simulated_kernel", problem, fn, declared)


def _attend(args, weights, numerics, schedule):
    q_nope, q_pe, cache, table, offsets, lengths, _, scale, fmt, kv_scale = args
    wide, narrow = compute_dtype(q_nope), q_nope.dtype
    if numerics.accumulate != "compute":
        wide = getattr(torch, numerics.accumulate)
    c = q_nope.shape[2] if weights is None else weights[0].shape[2]
    width = c if weights is None else weights[1].shape[1]
    out = q_nope.new_empty(*q_nope.shape[:2], width)
    lse = q_nope.new_empty(q_nope.shape[:2], dtype=torch.float32)

    def narrowed(x, name):
        return x if name == EXACT else x.to(type_named(name, narrow)).to(wide)

    for request in requests(table, offsets, lengths):
        kv = wide if numerics.kv == EXACT else type_named(numerics.kv, narrow)
        decoded = keys(cache, request, 0, request.kv_len, (c, q_pe.shape[2]), fmt, kv_scale, kv)
        kv_c, k_pe = (x.to(wide) for x in decoded)
        nope, pe = (x[request.rows].to(wide).transpose(0, 1) for x in (q_nope, q_pe))
        key, value = kv_c[None], kv_c[None]
        if numerics.form == "absorbed":
            nope = narrowed(torch.einsum("hsp,hpc->hsc", nope, weights[0].to(wide)), numerics.operand)
        elif numerics.form == "expanded":
            key = narrowed(torch.einsum("jc,hpc->hjp", kv_c, weights[0].to(wide)), numerics.operand)
            value = narrowed(torch.einsum("jc,hvc->hjv", kv_c, weights[1].to(wide)), numerics.operand)
        dots = nope @ key.transpose(1, 2) + pe @ k_pe.T
        mask = causal_mask(request, 0, request.kv_len, q_nope.device)
        row, row_lse = _row(dots, mask, value, scale, numerics, schedule, lambda x: narrowed(x, numerics.p))
        if numerics.form == "absorbed":
            row = torch.einsum("hsc,hvc->hsv", narrowed(row, numerics.operand), weights[1].to(wide))
        out[request.rows] = row.transpose(0, 1).to(narrow)
        lse[request.rows] = row_lse.T.to(torch.float32)
    return AttentionOutput(out, lse)


def _row(dots, mask, value, scale, numerics, schedule, round_p):
    """Tiles, splits and their merge, for scores [h s j] before scaling."""
    factor = torch.tensor(scale * (LOG2_E if schedule.base2 else 1.0), dtype=dots.dtype)
    exp, log = (torch.exp2, torch.log2) if schedule.base2 else (torch.exp, torch.log)
    generator = torch.Generator().manual_seed(dots.shape[-1])
    roundoff = torch.finfo(dots.dtype).eps / 2

    def noisy_exp(x):
        noise = 2.0 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1.0
        return exp(x) * (1.0 + schedule.exp_noise * roundoff * noise)

    scores = (dots * factor).masked_fill(~mask, -torch.inf)
    tiles = list(range(0, scores.shape[-1], schedule.tile))
    tiles = tiles[::-1] if schedule.backwards else tiles
    per = -(-len(tiles) // schedule.splits) or 1
    parts = [tiles[i : i + per] for i in range(0, len(tiles), per)]
    states = [_split(part, scores, value, noisy_exp, log, numerics, schedule, round_p) for part in parts]
    states = [(x.to(_partial(numerics, x)).to(x.dtype), lse) for x, lse in states]
    if not states:
        zero = scores.new_zeros(*scores.shape[:2], value.shape[-1])
        return zero, zero[..., 0] - torch.inf
    if schedule.folded:
        state = states[0]
        for i, other in enumerate(states[1:], start=2):
            x, lse = _merge([state, other], noisy_exp, log)
            # The last result is no partial one.
            state = x if i == len(states) else x.to(_partial(numerics, x)).to(x.dtype), lse
    else:
        state = _merge(states, noisy_exp, log) if len(states) > 1 else states[0]
    return state[0], state[1] / LOG2_E if schedule.base2 else state[1]


def _partial(numerics, x):
    return x.dtype if numerics.partial == EXACT else type_named(numerics.partial, x.dtype)


def _split(tiles, scores, value, exp, log, numerics, schedule, round_p):
    h, s, _ = scores.shape
    top = scores.new_full((h, s), -torch.inf)
    total, acc = scores.new_zeros(h, s), scores.new_zeros(h, s, value.shape[-1])
    half = value.shape[-1] // 2 if schedule.paired else value.shape[-1]
    slack = schedule.slack if schedule.base2 else schedule.slack / LOG2_E
    waiting = None
    if schedule.normalised:
        first, end = min(tiles), max(tiles) + schedule.tile
        part = scores[..., first:end]
        top = part.amax(-1).nan_to_num(neginf=0.0)
        total = exp(part - top[..., None]).sum(-1)
        lse = log(total) + top
    for i, tile in enumerate(tiles):
        columns = slice(tile, tile + schedule.tile)
        part, v = scores[..., columns], value[:, columns]
        if schedule.normalised:
            acc = acc + round_p(exp(part - lse.nan_to_num(neginf=0.0)[..., None])) @ v
            continue
        if schedule.twice:
            part = part - top.nan_to_num(neginf=0.0)[..., None]
            above = part.amax(-1)
            # Before a row's first key there is nothing to be above.
            blank = top.isneginf()
            new = torch.where(blank, above, top + held(torch.zeros_like(top), above, slack))
            part = part - torch.where(blank, above.nan_to_num(neginf=0.0), new - top)[..., None]
        else:
            new = held(top, part.amax(-1), slack)
            part = part - new.nan_to_num(neginf=0.0)[..., None]
        rescale = exp(top - new.nan_to_num(neginf=0.0))
        p = exp(part)
        rounded = round_p(p)
        total = total * rescale + (rounded if numerics.sum_rounded_p else p).sum(-1)
        acc = acc * rescale[..., None]
        acc[..., :half] += rounded @ v[..., :half]
        if schedule.paired and i % 2 == 0 and i + 1 < len(tiles):
            waiting = p, v[..., half:]
        else:
            if waiting is not None:
                acc[..., half:] += round_p(waiting[0] * rescale[..., None]) @ waiting[1]
                waiting = None
            acc[..., half:] += rounded @ v[..., half:]
        top = new
    if schedule.normalised:
        return acc, lse
    return acc / total.masked_fill(total == 0, 1.0)[..., None], log(total) + top


def _merge(states, exp, log):
    lses = torch.stack([lse for _, lse in states])
    top = lses.amax(0)
    safe = top.nan_to_num(neginf=0.0)
    weights = exp(lses - safe)
    total = weights.sum(0)
    out = sum(w[..., None] * x for w, (x, _) in zip(weights, states, strict=True))
    return out / total.masked_fill(total == 0, 1.0)[..., None], log(total) + top
