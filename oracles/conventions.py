"""What an unknown kernel takes and returns, found out by calling it on small inputs.

Every question has its possible answers; each predicts, through ``oracles.exact`` and the bounds, what the
kernel may return. An answer is given where one prediction holds and no other does. Where none does, or more
than one, the answer is "undetermined", with the nearest. What is known already is converted before the next
question is asked, so that one deviation is not taken for another.
"""

import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from mla_ref.backend import Backend
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.layout import CacheLayout
from mla_ref.pages import DEAD_BLOCK
from mla_ref.problem import problem
from mla_ref.problems.latent_attention import LatentAttentionInputs
from oracles.adapter_text import BOTTOM_RIGHT, NUMERICS, ORDERS, TOP_LEFT, UNMASKED, Manner, source
from oracles.bounds import ADMISSIBLE, Admissible
from oracles.call_spec import Spec
from oracles.compare import identical, within
from oracles.exits import first_line
from oracles.oracle import private_copy, storage_bytes
from oracles.verdict import BROKEN, HELD, NOT_RUN
from oracles.verify import judge

PROBLEM = "latent_attention"
SEED = 7

PACKED = CacheLayout()

# No default of anybody's.
GIVEN_SCALE = 0.0937

GIVEN = "as given"
YES, NO, REFUSES = "yes", "no", "refuses"


class Geometry(NamedTuple):
    """Sizes and types of one trial."""

    c: int
    r: int
    heads: int
    block_size: int
    dtype: str
    cache_format: str


# Tried in this order until one runs: what decode kernels are built for, then what a CPU likes.
GEOMETRIES = (
    Geometry(512, 64, 16, 64, "bfloat16", "bf16"),
    Geometry(512, 64, 64, 64, "bfloat16", "bf16"),
    Geometry(512, 64, 128, 128, "bfloat16", "bf16"),
    Geometry(512, 64, 16, 64, "float16", "fp16"),
    Geometry(32, 16, 4, 16, "float32", "fp32"),
)
WIDTHS = ((512, 64), (256, 64), (256, 32), (128, 16))
BLOCK_SIZES = (1, 16, 32, 64, 128)
HEADS = (1, 3, 16, 128)
DTYPES = (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32"))


class Answer(NamedTuple):
    """One line of the table. known: False where the question stays open, and ``evidence`` says why."""

    question: str
    value: str
    evidence: str = ""
    known: bool = True


class Refused(Exception):
    """The kernel raised; its message is an answer."""


class Died(Exception):
    """The kernel took the device along: nothing more can be asked in this process."""


@dataclass(frozen=True)
class Bench:
    """Where a kernel is tried. geometry: what it accepted."""

    device: str
    geometry: Geometry


def inputs_of(
    bench: Bench,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    layout: CacheLayout = PACKED,
    regime: str = "plain",
) -> LatentAttentionInputs:
    """Inputs whose table has no column that no request needs, and nothing dead in the others."""
    case = case_of(bench.geometry, tuple(q_lens), tuple(kv_lens), layout, regime)
    inputs: LatentAttentionInputs = problem(PROBLEM).materialize(case, torch.device(bench.device))
    table = inputs.block_table[:, :-1]
    table = torch.where(table == DEAD_BLOCK, inputs.block_table.min(), table)
    return inputs._replace(block_table=table.contiguous(), softmax_scale=GIVEN_SCALE)


def case_of(
    geometry: Geometry,
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    layout: CacheLayout = PACKED,
    regime: str = "plain",
) -> Case:
    """A case of these sizes."""
    config = MLAConfig(
        name="probe",
        hidden_size=64,
        num_heads=geometry.heads,
        q_lora_rank=None,
        kv_lora_rank=geometry.c,
        qk_nope_head_dim=128,
        qk_rope_head_dim=geometry.r,
        v_head_dim=128,
    )
    return Case(
        problem=PROBLEM,
        config=config,
        q_lens=q_lens,
        kv_lens=kv_lens,
        dtype=geometry.dtype,
        cache_format=geometry.cache_format,
        block_size=geometry.block_size,
        layout=layout,
        regime=regime,
        seed=SEED,
    )


def seen_by(inputs: LatentAttentionInputs, alignment: str) -> torch.Tensor:
    """How many keys each query row sees [t], under one alignment of the mask."""
    q_lens = inputs.cu_seqlens_q.diff()
    request = torch.arange(len(q_lens), device=q_lens.device).repeat_interleave(q_lens.long())
    row = torch.arange(len(request), device=q_lens.device) - inputs.cu_seqlens_q[:-1][request]
    kv_lens = inputs.cache_seqlens[request]
    if alignment == UNMASKED:
        return kv_lens
    first = torch.ones_like(kv_lens) if alignment == TOP_LEFT else kv_lens - q_lens[request] + 1
    return torch.minimum(first + row, kv_lens).clamp(min=0).to(torch.int32)


def predicted(
    inputs: LatentAttentionInputs, scale: float = GIVEN_SCALE, alignment: str = BOTTOM_RIGHT
) -> dict[str, Admissible]:
    """What a kernel may return that scales and masks like this: every row as a request of its own."""
    q_lens = inputs.cu_seqlens_q.diff().long()
    rows = inputs._replace(
        block_table=inputs.block_table.repeat_interleave(q_lens, dim=0),
        cu_seqlens_q=torch.arange(len(inputs.ql_nope) + 1, dtype=torch.int32, device=inputs.ql_nope.device),
        cache_seqlens=seen_by(inputs, alignment),
        max_seqlen_q=1,
        softmax_scale=scale,
    )
    return ADMISSIBLE[PROBLEM](rows, NUMERICS)


def loaded(manner: Manner) -> dict[str, Any]:
    """The names of the adapter's module."""
    return _loaded(manner.target, source(manner))


@lru_cache(maxsize=64)
def _loaded(target: str, text: str) -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": f"adapter to {target}"}
    exec(compile(text, f"<adapter to {target}>", "exec"), scope)
    return scope


def call(manner: Manner, inputs: Any, function: str = "adapter") -> Any:
    """What the adapter returns, or with "ask" what the kernel does, on a private copy of the inputs."""
    return call_on(manner, private_copy(inputs), function)


def call_on(manner: Manner, inputs: Any, function: str) -> Any:
    """The same on these very inputs.

    Raises: Refused, Died.
    """
    try:
        result = loaded(manner)[function](*inputs)
        if manner.device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        line = f"{type(error).__name__}: {first_line(error)}"
        if "CUDA error" in str(error):
            raise Died(line) from None
        raise Refused(line) from None
    return result


def tensors_in(result: Any) -> list[tuple[int | None, torch.Tensor]]:
    """The tensors of a result and where they are."""
    if isinstance(result, torch.Tensor):
        return [(None, result)]
    parts = enumerate(result) if isinstance(result, (tuple, list)) else ()
    return [(i, part) for i, part in parts if isinstance(part, torch.Tensor) and part.is_floating_point()]


def ordered(x: torch.Tensor, order: str, sizes: tuple[int, int, int], *last: int) -> torch.Tensor:
    """x [t h …] from elements that follow each other in another order."""
    b, s, h = sizes
    t = b * s
    if order == "h t":
        return x.reshape(h, t, *last).transpose(0, 1)
    if order == "b h s":
        return x.reshape(b, h, s, *last).transpose(1, 2).reshape(t, h, *last)
    return x.reshape(t, h, *last)


class Fit(NamedTuple):
    """How a prediction compares. holds: every element is within its bound. ratio: of the worst one."""

    holds: bool
    ratio: float
    words: tuple[str, ...]
    found: tuple[Any, ...]


def compared(got: torch.Tensor, want: Admissible, words: tuple[str, ...], found: tuple[Any, ...]) -> Fit:
    """One prediction against the kernel's answer, in the answer's own type."""
    finding = within("it", got, want._replace(dtype=got.dtype))
    return Fit(finding.ok, finding.worst.ratio if finding.worst else math.inf, words, found)


def verdict(fits: list[Fit]) -> tuple[Fit | None, str]:
    """The one prediction that holds, if there is one, and what was seen."""
    ranked = sorted(fits, key=lambda fit: (not fit.holds, fit.ratio))
    holding = [fit for fit in ranked if fit.holds]
    if not ranked:
        return None, "nothing of the right size was returned"
    if not holding:
        return None, f"nothing tried fits; nearest is {_words(ranked[0])}, at {_times(ranked[0].ratio)}"
    if len(holding) > 1:
        return None, " and ".join(_words(fit) for fit in holding[:3]) + " fit alike"
    best = holding[0]
    evidence = f"{best.ratio:.2g} of its bound"
    if len(ranked) > 1:
        differs = [there for here, there in zip(best.words, ranked[1].words, strict=True) if here != there]
        evidence += f"; next {', '.join(differs)}, at {_times(ranked[1].ratio)}"
    return best, evidence


def _words(fit: Fit) -> str:
    return ", ".join(word for word in fit.words if word)


def _times(ratio: float) -> str:
    return f"{ratio:.1f} × its bound" if math.isfinite(ratio) else "NaN or ∞ where none may be"


def scales(geometry: Geometry) -> dict[str, float]:
    """What a kernel might multiply its scores by."""
    c, r, p, given = geometry.c, geometry.r, 128, GIVEN_SCALE
    found = {
        GIVEN: given,
        "given · log2(e)": given * math.log2(math.e),
        "given · ln(2)": given * math.log(2.0),
        "given²": given * given,
        "1 (none)": 1.0,
        f"{c + r}^-0.5 (latent + rope)": (c + r) ** -0.5,
        f"{p + r}^-0.5 (nope + rope)": (p + r) ** -0.5,
        f"{c}^-0.5 (latent)": c**-0.5,
        f"{p}^-0.5 (nope)": p**-0.5,
        f"{r}^-0.5 (rope)": r**-0.5,
    }
    unlike: dict[str, float] = {}
    for name, value in found.items():
        if value not in unlike.values():
            unlike[name] = value
    return unlike


def fitted(
    manner: Manner,
    bench: Bench,
    inputs: LatentAttentionInputs,
    *,
    orders: Sequence[str],
    alignments: Sequence[str],
    scale: float | None = None,
) -> tuple[Fit | None, str]:
    """Which order, scale and mask explain ``out``; ``found`` is (where, order, scale's name, scale, mask).

    scale: the one that is known already.
    """
    result = call(manner, inputs, "ask")
    (t, h, c), b = inputs.ql_nope.shape, len(inputs.cache_seqlens)
    fits = []
    known = {n: value for n, value in scales(bench.geometry).items() if scale in (None, value)}
    wants = {
        (name, alignment): predicted(inputs, value, alignment)["out"]
        for name, value in known.items()
        for alignment in alignments
    }
    for at, tensor in tensors_in(result):
        if tensor.numel() != t * h * c:
            continue
        for order in orders:
            out = ordered(tensor, order, (b, t // b, h), c)
            for (name, alignment), want in wants.items():
                mask = f"mask {alignment}" if len(alignments) > 1 else ""
                words = (f"scale {name}", mask, f"order [{order} c]")
                fits.append(compared(out, want, words, (at, order, name, known[name], alignment)))
    return verdict(fits)


def mask_of(manner: Manner, inputs: LatentAttentionInputs) -> str:
    """The mask that the adapter's call asks for."""
    switched_off = manner.flag != "True" and inputs.max_seqlen_q == 1
    return UNMASKED if manner.alignment is None or switched_off else manner.alignment


def holds(manner: Manner, inputs: Any, rows: slice = slice(None)) -> Fit:
    """Whether the adapter is right on these inputs, on some of the rows."""
    out, lse = call(manner, inputs)
    want = predicted(inputs, manner.fixed_scale or GIVEN_SCALE, mask_of(manner, inputs))
    fits = []
    for got, name in ((out, "out"), (lse, "lse")):
        part = want[name]
        part = part._replace(mid=part.mid[rows], radius=part.radius[rows])
        fits.append(compared(got[rows], part, (name,), ()))
    return max(fits, key=lambda fit: (not fit.holds, fit.ratio))


def tried(manner: Manner, inputs: Any, rows: slice = slice(None)) -> tuple[str, str]:
    """YES, NO or REFUSES, and what was seen."""
    try:
        fit = holds(manner, inputs, rows)
    except Refused as error:
        return REFUSES, str(error)
    if fit.holds:
        return YES, f"{fit.ratio:.2g} of the bound"
    return NO, f"{fit.words[0]} is off: {_times(fit.ratio)}"


def q_lens_for(manner: Manner, kv_lens: Sequence[int]) -> list[int]:
    """Query lengths on which the mask does not matter."""
    whole = manner.alignment == TOP_LEFT and (manner.spec.causal is None or manner.flag == "True")
    return list(kv_lens) if whole else [1] * len(kv_lens)


def ask_call(bench: Bench, specs: Sequence[Spec], target: str) -> tuple[list[Answer], Bench, Manner | None]:
    """How the kernel is called: the first spec and geometry with which its output is explained."""
    seen: list[str] = []
    for geometry in (bench.geometry,) if bench.geometry.c else GEOMETRIES:
        here = replace(bench, geometry=geometry)
        for spec in specs:
            manner = Manner(target=target, spec=spec, device=bench.device, uniform=spec.uniform)
            try:
                fit, evidence = _contact(manner, here)
            except Refused as error:
                seen.append(f"{geometry.dtype} c={geometry.c}: {error}")
                continue
            if fit is None:
                seen.append(evidence)
                continue
            at, order, name, scale, alignment = fit.found
            manner = replace(
                manner,
                out_at=at,
                out_order=order,
                alignment=alignment,
                fixed_scale=None if name == GIVEN else scale,
                dtypes=((geometry.dtype, geometry.cache_format),),
                widths=((geometry.c, geometry.r),),
                block_sizes=(geometry.block_size,),
                heads=(geometry.heads,),
            )
            sizes = f"{geometry.dtype}, c={geometry.c} r={geometry.r}, {geometry.heads} heads"
            sizes += f", blocks of {geometry.block_size}"
            answers = [
                Answer("call", sizes, spec.describe()),
                Answer("scale", name if spec.scale else f"no parameter; {name}", evidence),
            ]
            return answers, here, manner
    reason = "; ".join(dict.fromkeys(seen[:3]))
    return [Answer("call", "undetermined", reason, known=False)], bench, None


def _contact(manner: Manner, bench: Bench) -> tuple[Fit | None, str]:
    """The first fit: of one query token; of three where a mask leaves that one a single key, and no scale."""
    lengths = [2 * bench.geometry.block_size] * 3
    one = inputs_of(bench, (1, 1, 1), lengths)
    fit, evidence = fitted(manner, bench, one, orders=("t h", "h t"), alignments=(UNMASKED, TOP_LEFT))
    if fit is not None or TOP_LEFT not in evidence:
        return fit, evidence
    three = inputs_of(bench, (3, 3, 3), lengths, regime="recency")
    return fitted(manner, bench, three, orders=tuple(ORDERS), alignments=(BOTTOM_RIGHT, TOP_LEFT, UNMASKED))


def ask_mask(bench: Bench, manner: Manner) -> tuple[list[Answer], Manner]:
    """The mask for several query tokens, and the order of the output's axes."""
    inputs = inputs_of(bench, (3, 3, 3), (2 * bench.geometry.block_size,) * 3, regime="recency")
    every = (BOTTOM_RIGHT, TOP_LEFT, UNMASKED)
    question = "causal mask, q_len > 1"
    flag = f"{manner.spec.causal}=True: " if manner.spec.causal else ""
    known = manner.fixed_scale or GIVEN_SCALE
    try:
        fit, evidence = fitted(manner, bench, inputs, orders=tuple(ORDERS), alignments=every, scale=known)
    except Refused as error:
        answer = Answer(question, f"{REFUSES} q_len > 1", str(error))
        return [answer], replace(manner, alignment=None)
    if fit is None:
        answer = Answer(question, "undetermined", evidence, known=False)
        return [answer], replace(manner, alignment=None)
    _, order, _, _, alignment = fit.found
    answers = [
        Answer(question, flag + alignment, evidence),
        Answer("out", f"[{_axes(order, manner)} c]"),
    ]
    manner = replace(manner, out_order=order, alignment=alignment)
    if alignment != BOTTOM_RIGHT and manner.spec.mask:
        masked = replace(manner, masked=True)
        fit, evidence = fitted(masked, bench, inputs, orders=(order,), alignments=every)
        if fit is not None and fit.found[-1] == BOTTOM_RIGHT:
            answers.append(Answer("explicit mask", f"honoured by {manner.spec.mask}", evidence))
            return answers, replace(masked, alignment=BOTTOM_RIGHT)
    if alignment == TOP_LEFT and manner.spec.causal:
        switched = replace(manner, flag="max_seqlen_q > 1")
        decode = inputs_of(bench, (1, 1, 1), (2 * bench.geometry.block_size,) * 3)
        fit, _ = fitted(switched, bench, decode, orders=("t h", "h t"), alignments=(UNMASKED, TOP_LEFT))
        if fit is not None and fit.found[-1] == UNMASKED:
            return answers, switched
    return answers, manner


def _axes(order: str, manner: Manner) -> str:
    if order == "t h" and manner.spec.uniform:
        return "b s h"
    return order


def ask_lse(bench: Bench, manner: Manner) -> tuple[list[Answer], Manner]:
    """Where the log-sum-exp is, its base, order, type, and what it is of."""
    s = 1 if manner.alignment is None else 3
    length = 2 * bench.geometry.block_size
    if manner.alignment == TOP_LEFT and not manner.spec.causal:
        s = length = bench.geometry.block_size
    inputs = inputs_of(bench, (s,) * 3, (length,) * 3, regime="recency")
    scale = manner.fixed_scale or GIVEN_SCALE
    want = predicted(inputs, scale, mask_of(manner, inputs))["lse"]
    (t, h, _), b = inputs.ql_nope.shape, 3
    result = call(manner, inputs, "ask")
    kinds = {
        "scaled scores": (1.0, ""),
        "scores before scaling": (scale, " * softmax_scale"),
        "scaled scores, negated": (-1.0, " * -1.0"),
    }
    fits = []
    sized = [(at, x) for at, x in tensors_in(result) if at != manner.out_at and x.numel() == t * h]
    orders = tuple(ORDERS) if s > 1 else ("t h", "h t")
    for at, tensor in sized:
        for order in orders:
            got = ordered(tensor, order, (b, s, h))
            for base, unit, text in (("e", 1.0, ""), ("2", math.log(2.0), " * math.log(2.0)")):
                for kind, (times, more) in kinds.items():
                    # natural = value · unit · times, so the value itself is the truth divided by both.
                    factor = unit * times
                    part = want._replace(mid=want.mid / factor, radius=want.radius / abs(factor))
                    words = (f"base {base}", f"of {kind}", f"order [{order}]")
                    fits.append(compared(got, part, words, (at, order, base, kind, text + more, tensor)))
    if not sized:
        answer = Answer("lse", "none returned", "the adapter computes its own, which judges out alone")
        return [answer], replace(manner, lse_at=None)
    fit, evidence = verdict(fits)
    if fit is None:
        return [Answer("lse", "undetermined", evidence, known=False)], replace(manner, lse_at=None)
    at, order, base, kind, factor, tensor = fit.found
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = f"[{_axes(order, manner)}]"
    held = f"in a tensor {list(tensor.shape)}"
    answers = [
        Answer("lse base", base, evidence),
        Answer("lse layout", shape, held),
        Answer("lse of", kind),
        Answer("lse dtype", dtype),
    ]
    if tensor.dtype not in (torch.float32, torch.float64):
        reason = "its rounding alone is beyond what a float32 one may err: the adapter computes its own"
        answers[-1] = Answer("lse dtype", dtype, reason)
        at = None
    return answers, replace(manner, lse_at=at, lse_order=order, lse_factor=factor)


def ask_default_scale(bench: Bench, manner: Manner) -> tuple[list[Answer], Manner]:
    """What is multiplied by where nobody says."""
    question, spec = "default scale", manner.spec
    if spec.scale is None:
        return [Answer(question, "no parameter", "see scale")], manner
    if manner.fixed_scale is not None:
        return [Answer(question, "the parameter is ignored", "see scale")], manner
    if _required(manner):
        return [Answer(question, "none: it must be given", "the parameter has no default")], manner
    lengths = [2 * bench.geometry.block_size] * 3
    q_lens = q_lens_for(manner, lengths)
    inputs = inputs_of(bench, q_lens, lengths)
    try:
        fit, evidence = fitted(
            replace(manner, omitted_scale=True),
            bench,
            inputs,
            orders=(manner.out_order,),
            alignments=(mask_of(manner, inputs),),
        )
    except Refused as error:
        return [Answer(question, "none: it must be given", str(error))], manner
    if fit is None:
        return [Answer(question, "undetermined", evidence, known=False)], manner
    return [Answer(question, fit.found[2], evidence)], manner


def _required(manner: Manner) -> bool:
    module, _, path = manner.target.partition(":")
    fn: Any = importlib.import_module(module)
    for part in path.split("."):
        fn = getattr(fn, part)
    try:
        return inspect.signature(fn).parameters[str(manner.spec.scale)].default is inspect.Parameter.empty
    except (TypeError, ValueError, KeyError):
        return False


def ask_lengths(bench: Bench, manner: Manner) -> tuple[list[Answer], Manner]:
    """Whether slots past a request's length are read, and what of them reaches the result."""
    question, k = "entries past the length", bench.geometry.block_size
    ragged = (k + max(k // 8, 1), 2 * k, max(k // 4, 1))
    if manner.uniform and manner.alignment == TOP_LEFT and not manner.spec.causal:
        ragged = (k + max(k // 8, 1),) * 3
    inputs = inputs_of(bench, q_lens_for(manner, ragged), ragged)
    seen = {}
    if manner.spec.contiguous:
        seen["zeros"] = tried(replace(manner, zeroed=True), inputs)
        seen["NaN"] = tried(manner, inputs)
    else:
        for name, fill in (("zeros", 0.0), ("huge", 3e4), ("NaN", math.nan)):
            seen[name] = tried(manner, with_dead(inputs, fill))
    evidence = "; ".join(f"{name} there: {said}" for name, (_, said) in seen.items())
    if all(value == YES for value, _ in seen.values()):
        return [Answer(question, "never used", evidence)], manner
    if all(seen[name][0] == YES for name in seen if name != "NaN"):
        answer = Answer(question, "read, and weighted 0: NaN spreads", evidence)
        return [answer], replace(manner, zeroed=True)
    whole = (k, 2 * k, k)
    if len(set(ragged)) == 1:
        whole = (k,) * 3
    value, said = tried(manner, inputs_of(bench, q_lens_for(manner, whole), whole))
    if value == YES:
        answer = Answer(question, "read and attended to, to the end of the last block", evidence)
        return [answer], replace(manner, whole_blocks=True)
    evidence = f"{evidence}; whole blocks: {said}"
    answer = Answer(question, "read and attended to: lengths are not honoured", evidence)
    return [answer], replace(manner, declined=(*manner.declined, "lengths"))


def with_dead(inputs: LatentAttentionInputs, value: float) -> LatentAttentionInputs:
    """The same, with this value in every slot, gap and padding byte that no token has."""
    other = private_copy(inputs)
    whole = storage_bytes(other.kv_cache).view(other.kv_cache.dtype)
    whole.fill_(value)
    k = inputs.kv_cache.shape[1]
    for blocks, length in zip(inputs.block_table.tolist(), inputs.cache_seqlens.tolist(), strict=True):
        for j in range(-(-length // k)):
            live = slice(0, min(length - j * k, k))
            other.kv_cache[blocks[j], live] = inputs.kv_cache[blocks[j], live]
    return other  # type: ignore[no-any-return]


STRIDES = ("entry stride", "block stride", "offset")


def ask_strides(bench: Bench, manner: Manner) -> tuple[list[Answer], Manner]:
    """Whether entries and blocks that are further apart, and a cache that starts late, are read right."""
    if manner.spec.contiguous:
        return [Answer("strides", "not asked", "it takes no pages: the adapter copies them")], manner
    apart = CacheLayout(entry_align=256), CacheLayout(block_gap=1024), CacheLayout(offset=1024)
    answers, declined = [], list(manner.declined)
    words = {YES: "honoured", NO: "ignored", REFUSES: REFUSES}
    for name, layout in zip(STRIDES, apart, strict=True):
        inputs = _plain_inputs(bench, manner, layout)
        value, said = tried(manner, inputs)
        answers.append(Answer(name, words[value], said))
        if value != YES:
            declined.append(name)
    if declined != list(manner.declined):
        return answers, replace(manner, declined=tuple(declined))
    value, said = tried(manner, _plain_inputs(bench, manner, CacheLayout(block_gap=16, offset=16)))
    answers.append(Answer("steps of 16 bytes", words[value], said))
    return answers, replace(manner, alignment_bytes=1 if value == YES else 1024)


def _plain_inputs(bench: Bench, manner: Manner, layout: CacheLayout = PACKED) -> Any:
    lengths = [2 * bench.geometry.block_size] * 3
    return inputs_of(bench, q_lens_for(manner, lengths), lengths, layout=layout)


def ask_alignment(bench: Bench, manner: Manner) -> tuple[list[Answer], Manner]:
    """Whether an entry may start at any multiple of its elements, or only of 16 bytes."""
    question = "alignment"
    if manner.spec.contiguous or set(STRIDES) & set(manner.declined) or manner.alignment_bytes > 1:
        return [Answer(question, "not asked", "it takes no other steps")], manner
    step = 2 if bench.geometry.dtype != "float32" else 4
    value, said = tried(manner, _plain_inputs(bench, manner, CacheLayout(block_gap=step, offset=step)))
    if value != YES:
        return [Answer(question, "16 bytes", f"{step} bytes: {said}")], replace(manner, alignment_bytes=16)
    return [Answer(question, "one element", said)], manner


def ask_empty(bench: Bench, manner: Manner) -> tuple[list[Answer], Manner]:
    """What rows are given that see no key, and whether their neighbours stay right."""
    k = bench.geometry.block_size
    lengths = (0, k, 2 * k)
    q_lens = [1, 1, 1]
    if manner.alignment == TOP_LEFT and not manner.spec.causal:
        answer = Answer("rows without a key", "not asked", "its mask gives every row a key")
        return [answer], replace(manner, no_empty=True)
    inputs = inputs_of(bench, q_lens, lengths)
    try:
        out, lse = call(manner, inputs)
    except Refused as error:
        answer = Answer("rows without a key", REFUSES, str(error))
        return [answer], replace(manner, no_empty=True)
    value, said = tried(manner, inputs, slice(1, None))
    own = manner.lse_at is not None
    answers = [
        Answer("rows without a key: out", _told(out[:1]), f"their neighbours: {said}"),
        Answer("rows without a key: lse", _told(lse[:1]) if own else "none returned"),
    ]
    right = bool((out[:1] == 0).all()) and bool((lse[:1] == -torch.inf).all())
    if value != YES:
        return answers, replace(manner, no_empty=True)
    if manner.alignment == BOTTOM_RIGHT:
        more, late = _more_queries_than_keys(bench, manner)
        answers.append(more)
        right = right and late
        if not more.known:
            return answers, replace(manner, no_empty=True)
    return answers, replace(manner, empties=not right)


def _more_queries_than_keys(bench: Bench, manner: Manner) -> tuple[Answer, bool]:
    """The first two of three queries that share one key: what they get, and whether it is 0 and -∞."""
    inputs = inputs_of(bench, (3, 3, 3), (1, bench.geometry.block_size, 3))
    question = "more queries than keys"
    if manner.whole_blocks:
        return Answer(question, "not asked", "lengths must fill their blocks"), True
    try:
        out, lse = call(manner, inputs)
    except Refused as error:
        return Answer(question, REFUSES, str(error), known=False), False
    value, said = tried(manner, inputs, slice(2, None))
    given = f"out {_told(out[:2])}, lse {_told(lse[:2])}"
    answer = Answer(question, given, f"their neighbours: {said}", value == YES)
    return answer, bool((out[:2] == 0).all()) and bool((lse[:2] == -torch.inf).all())


def _told(x: torch.Tensor) -> str:
    """One word for a tensor of one value."""
    x = x.double()
    for word, same in (
        ("NaN", x.isnan()),
        ("+∞", x == torch.inf),
        ("-∞", x == -torch.inf),
        ("0", x == 0.0),
    ):
        if bool(same.all()):
            return word
    low, high = float(x.min()), float(x.max())
    return f"{low:.4g}" if low == high else f"{low:.4g} … {high:.4g}"


def ask_repeat(bench: Bench, manner: Manner) -> tuple[list[Answer], Manner]:
    """Whether the same inputs give the same bits, alone and among others, whatever the number of splits."""
    k = bench.geometry.block_size
    lengths = (64 * k, 2 * k, 5 * k)
    if manner.uniform and q_lens_for(manner, lengths)[0] != 1:
        lengths = (4 * k,) * 3
    inputs = inputs_of(bench, q_lens_for(manner, lengths), lengths)
    if "lengths" in manner.declined:
        return [Answer("deterministic", "undetermined", "lengths are not honoured", known=False)], manner
    first = call(manner, inputs)
    runs = [call(manner, inputs) for _ in range(4)]
    same = all(_bits(first, run) for run in runs)
    answers = [Answer("deterministic", YES if same else NO, "5 runs of the same inputs, bit for bit")]
    if not same:
        reason = "the same call does not even repeat itself"
        names = ("batch-invariant", "split-invariant")
        return answers + [Answer(name, "undetermined", reason, known=False) for name in names], manner
    stop = int(inputs.cu_seqlens_q[1])
    alone = inputs._replace(
        ql_nope=inputs.ql_nope[:stop],
        q_pe=inputs.q_pe[:stop],
        block_table=inputs.block_table[:1],
        cu_seqlens_q=inputs.cu_seqlens_q[:2],
        cache_seqlens=inputs.cache_seqlens[:1],
        max_seqlen_q=stop,
    )
    single = call(manner, alone)
    same = _bits([x[:stop] for x in first], single)
    evidence = f"a request of {lengths[0]} keys among three and alone, bit for bit"
    answers.append(Answer("batch-invariant", YES if same else NO, evidence))
    answers.append(_splits(manner, inputs))
    return answers, manner


def _splits(manner: Manner, inputs: Any) -> Answer:
    question = "split-invariant"
    if manner.spec.splits is None:
        return Answer(question, "undetermined", "no parameter sets the number of splits", known=False)
    try:
        results = [call(replace(manner, splits=n), inputs) for n in (1, 2, 5)]
    except Refused as error:
        return Answer(question, REFUSES, str(error))
    same = all(_bits(results[0], other) for other in results[1:])
    right = [tried(replace(manner, splits=n), inputs)[1] for n in (1, 2, 5)]
    return Answer(question, YES if same else NO, f"1, 2 and 5 splits: {', '.join(right)}")


def _bits(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return all(identical("it", x.contiguous(), y.contiguous()).ok for x, y in zip(a, b, strict=True))


def ask_written(bench: Bench, manner: Manner) -> tuple[list[Answer], Manner]:
    """Whether the call changes what it was given."""
    before = _plain_inputs(bench, manner)
    given = private_copy(before)
    call_on(manner, given, "ask")
    changed = [
        name
        for name, x, y in zip(before._fields, before, given, strict=True)
        if isinstance(x, torch.Tensor) and not torch.equal(storage_bytes(x), storage_bytes(y))
    ]
    answer = Answer("inputs written", ", ".join(changed) or NO, "every byte of their storages")
    return [answer], replace(manner, written=tuple(changed))


def ask_sizes(bench: Bench, manner: Manner) -> tuple[list[Answer], Manner]:
    """Which widths, block sizes, types and numbers of heads run and are right."""
    g = bench.geometry

    def right(geometry: Geometry) -> bool:
        here = replace(bench, geometry=geometry)
        return tried(manner, _plain_inputs(here, manner))[0] == YES

    own = (g.c, g.r), g.block_size, (g.dtype, g.cache_format), g.heads
    wanted = [_with(kind, one) for kind, one in zip((WIDTHS, BLOCK_SIZES, DTYPES, HEADS), own, strict=True)]
    widths = [w for w in wanted[0] if right(g._replace(c=w[0], r=w[1]))]
    blocks = [k for k in wanted[1] if manner.spec.contiguous or right(g._replace(block_size=k))]
    types = [d for d in wanted[2] if right(g._replace(dtype=d[0], cache_format=d[1]))]
    heads = [n for n in wanted[3] if right(g._replace(heads=n))]
    answers = [
        Answer("widths c+r", ", ".join(f"{c}+{r}" for c, r in widths), f"of {len(wanted[0])} tried"),
        Answer("block sizes", ", ".join(map(str, blocks)), f"of {', '.join(map(str, wanted[1]))}"),
        Answer(
            "types", ", ".join(name for name, _ in types), f"of {', '.join(name for name, _ in wanted[2])}"
        ),
        Answer("heads", ", ".join(map(str, heads)), f"of {', '.join(map(str, wanted[3]))}"),
    ]
    return answers, replace(
        manner,
        widths=None if widths == wanted[0] else tuple(widths),
        block_sizes=None if blocks == wanted[1] else tuple(blocks),
        dtypes=tuple(types),
        heads=None if heads == wanted[3] else tuple(heads),
    )


def _with(kinds: Sequence[Any], own: Any) -> list[Any]:
    """What is tried of one kind, that of the first contact included."""
    return list(dict.fromkeys([*kinds, own]))


def ask_ragged(bench: Bench, manner: Manner) -> tuple[list[Answer], Manner]:
    """Whether requests may have different numbers of query tokens, none included."""
    question = "ragged queries"
    if manner.spec.uniform:
        return [Answer(question, NO, "it takes one query length for the whole batch")], manner
    k = bench.geometry.block_size
    q_lens = (1, 0, 3) if manner.alignment == BOTTOM_RIGHT else (1, 0, 1)
    lengths = (k, k, 2 * k)
    if q_lens_for(manner, lengths)[0] != 1:
        q_lens = lengths
    value, said = tried(manner, inputs_of(bench, q_lens, lengths))
    return [Answer(question, value, said)], replace(manner, uniform=value != YES)


def ask_tail(value: int, word: str) -> Callable[[Bench, Manner], tuple[list[Answer], Manner]]:
    """What block-table entries behind the last block do."""

    def ask(bench: Bench, manner: Manner) -> tuple[list[Answer], Manner]:
        question = f"{word} in the table's tail"
        if "block_table" not in manner.spec.arguments.values():
            return [Answer(question, "not asked", "it takes no block table")], manner
        inputs = _plain_inputs(bench, manner)
        tail = inputs.block_table.new_full((len(inputs.block_table), 2), value)
        table = torch.cat([inputs.block_table, tail], dim=1)
        found, said = tried(manner, inputs._replace(block_table=table))
        if found == YES:
            return [Answer(question, "not followed", said)], manner
        return [Answer(question, "followed" if found == NO else REFUSES, said)], replace(manner, clamped=True)

    return ask


def ask_rotation(bench: Bench, manner: Manner) -> tuple[list[Answer], Manner]:
    """Whether queries and keys are rotated on the way."""
    value, said = tried(manner, _plain_inputs(bench, manner))
    if value == YES:
        return [Answer("rope", "none applied: takes rotated q_pe and k_pe", said)], manner
    return [Answer("rope", "undetermined", said, known=False)], manner


def ask_adapter(bench: Bench, manner: Manner) -> tuple[list[Answer], Manner]:
    """Whether the adapter holds the ordinary claims on cases that it supports."""
    if "lengths" in manner.declined:
        return [Answer("adapter", "none", "lengths are not honoured", known=False)], manner
    backend: Backend = loaded(manner)["BACKEND"]
    k = bench.geometry.block_size
    cases = [
        case_of(bench.geometry, q_lens, kv_lens)
        for q_lens, kv_lens in (
            ((1, 1, 1), (2 * k, k, 3 * k)),
            ((1, 1, 1), (k + 1, 0, 7)),
            ((3, 3), (k + 1, 5)),
            ((2, 0, 3), (k + 1, 5, 2)),
            ((k, k), (k, k)),
        )
    ]
    verdicts = [v for case in cases for v in judge(backend, case, device=bench.device, oracles=JUDGED)]
    broken = [v for v in verdicts if v.status in BROKEN]
    held, not_run = (sum(v.status in kind for v in verdicts) for kind in (HELD, NOT_RUN))
    counts = f"{held} claims held, {len(broken)} failed, {not_run} declined"
    if not broken and not held:
        return [Answer("adapter", "declines all that was tried", counts)], manner
    if broken:
        first = f"{counts}; {broken[0].oracle}: {broken[0].detail}"
        return [Answer("adapter", "not right", first, known=False)], manner
    return [Answer("adapter", "holds", f"{counts}, of {', '.join(JUDGED)}")], manner


JUDGED = ("contract", "value", "lse", "empty_rows", "poison", "inputs_unchanged", "layout")


class Question(NamedTuple):
    """crashed: what is assumed of a kernel that died of the question."""

    name: str
    ask: Callable[[Bench, Manner], tuple[list[Answer], Manner]]
    crashed: Callable[[Manner], Manner] = lambda manner: manner


# The dangerous ones last: a kernel that dies of one leaves the others answered.
QUESTIONS = (
    Question("mask", ask_mask, lambda m: replace(m, alignment=None)),
    Question("lse", ask_lse, lambda m: replace(m, lse_at=None)),
    Question("default scale", ask_default_scale),
    Question("rope", ask_rotation),
    Question("lengths", ask_lengths, lambda m: replace(m, declined=(*m.declined, "lengths"))),
    Question("ragged queries", ask_ragged, lambda m: replace(m, uniform=True)),
    Question("repeat", ask_repeat),
    Question("inputs written", ask_written),
    Question("sizes", ask_sizes),
    Question("strides", ask_strides, lambda m: replace(m, declined=(*m.declined, *STRIDES))),
    Question("rows without a key", ask_empty, lambda m: replace(m, no_empty=True)),
    Question("-1 in the table's tail", ask_tail(-1, "-1"), lambda m: replace(m, clamped=True)),
    Question(
        "garbage in the table's tail", ask_tail(DEAD_BLOCK, "garbage"), lambda m: replace(m, clamped=True)
    ),
    Question("alignment", ask_alignment, lambda m: replace(m, alignment_bytes=16)),
    Question("adapter", ask_adapter),
)


def first_contact(
    target: str, specs: Sequence[Spec], device: str, geometry: Geometry | None
) -> tuple[list[Answer], Bench, Manner | None]:
    """The answers about the call itself; None where no call is understood, and nothing more can be asked."""
    bench = Bench(device, geometry or Geometry(0, 0, 0, 0, "", ""))
    return ask_call(bench, specs, target)


def put(question: Question, bench: Bench, manner: Manner) -> tuple[list[Answer], Manner]:
    """One question; a kernel that refuses where it should not leaves it open."""
    try:
        return question.ask(bench, manner)
    except Refused as error:
        return [Answer(question.name, "undetermined", f"{REFUSES}: {error}", known=False)], manner


def probe(
    target: str, specs: Sequence[Spec], device: str = "cpu", geometry: Geometry | None = None
) -> tuple[list[Answer], Manner | None]:
    """Every answer, asked in this process."""
    answers, bench, manner = first_contact(target, specs, device, geometry)
    if manner is None:
        return answers, None
    for question in QUESTIONS:
        more, manner = put(question, bench, manner)
        answers += more
    return answers, manner
