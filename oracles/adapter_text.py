"""The adapter that the probe prints: a module with one backend, from what was found out about a kernel.

The probe calls strangers through this very text, so that what it saw is what is pasted.
"""

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from mla_ref.numerics import INPUT, Numerics
from oracles.call_spec import CONTRACT, Spec

# How the elements of [t h] follow each other in memory, and back.
ORDERS = {
    "t h": "{x}.reshape(t, h{c})",
    "h t": "{x}.reshape(h, t{c}).transpose(0, 1)",
    "b h s": "{x}.reshape(b, h, s{c}).transpose(1, 2).reshape(t, h{c})",
}

BOTTOM_RIGHT, TOP_LEFT, UNMASKED = "bottom-right", "top-left", "none"

# Wide enough for any kernel that sums in float32 and stores nothing narrower than the query.
NUMERICS = Numerics(
    kv=INPUT,
    p=INPUT,
    shared_p=False,
    partial=INPUT,
    max_splits=160,
    dot_roundings=1.5,
    exp_error=2048.0,
)


@dataclass(frozen=True, kw_only=True)
class Manner:
    """What is known about a kernel so far, and how it is called because of it.

    target: "module:callable". device: type of the device that it ran on.
    out_at, lse_at: where in the returned tuple they are; None where there is no log-sum-exp, or no tuple.
    out_order, lse_order: keys of ``ORDERS``. lse_factor: what makes it a natural logarithm,
        as text.
    flag: what the causal parameter is given, an expression. masked: the mask says what is seen, not the flag.
    alignment: of the causal mask; None where only one query token was accepted.
    fixed_scale: what the kernel multiplies by whatever it is told; None where it listens.
    splits: the number to ask for; None: the kernel's own choice.
    zeroed: entries that belong to no token are zeroed in a copy first. clamped: table entries are kept inside
        the pool. empties: rows without a key are answered for, from the lengths. no_empty: they are declined.
    written: inputs that the kernel changes, and gets copies of.
    whole_blocks: every length must fill its last block. uniform: every request has as many query tokens.
    widths, block_sizes, dtypes, heads: what was tried and held; None: whatever was tried.
    alignment_bytes: of every entry, where fewer were refused. declined: kinds of layout that do not work.
    """

    target: str
    spec: Spec
    device: str = "cpu"
    out_at: int | None = None
    lse_at: int | None = None
    out_order: str = "t h"
    lse_order: str = "t h"
    lse_factor: str = ""
    flag: str = "True"
    masked: bool = False
    alignment: str | None = BOTTOM_RIGHT
    fixed_scale: float | None = None
    splits: int | None = None
    omitted_scale: bool = False
    zeroed: bool = False
    clamped: bool = False
    written: tuple[str, ...] = ()
    empties: bool = False
    no_empty: bool = False
    whole_blocks: bool = False
    uniform: bool = False
    widths: tuple[tuple[int, int], ...] | None = None
    block_sizes: tuple[int, ...] | None = None
    dtypes: tuple[tuple[str, str], ...] = ()
    heads: tuple[int, ...] | None = None
    alignment_bytes: int = 1
    declined: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The kernel's module."""
        return self.target.partition(":")[0]


def arguments(manner: Manner) -> dict[str, str]:
    """Parameter -> expression, of one call."""
    spec = manner.spec
    found = dict(spec.arguments)
    if spec.scale and not manner.omitted_scale:
        found[spec.scale] = "softmax_scale"
    if spec.mask and manner.masked:
        found[spec.mask] = "visible[:, None]"
    elif spec.causal:
        found[spec.causal] = manner.flag
    if spec.splits and manner.splits is not None:
        found[spec.splits] = str(manner.splits)
    return found


def names_in(manner: Manner) -> str:
    """All expressions of a call, to look names up in."""
    return " ".join(arguments(manner).values())


def source(manner: Manner) -> str:
    """The module."""
    parts = [_requires(manner), _supports(manner), _ask(manner), *_parts(manner), _adapter(manner)]
    parts.append(_backend())
    body = "\n\n\n".join(part.strip("\n") for part in parts) + "\n"
    return f"{_head(manner, body)}\n\n\n{body}"


# What a body that has the first in it imports, in the order of a formatted file.
IMPORTS = (
    ("math.", "import math"),
    ("torch.", "\nimport torch\n"),
    ("Backend(", "from mla_ref.backend import Backend"),
    ("cache_format(", "from mla_ref.formats import cache_format"),
    ("Numerics(", "from mla_ref.numerics import Numerics"),
    ("scatter(", "from mla_ref.pages import gather, scatter, slots"),
    ("gather(", "from mla_ref.pages import gather"),
    ("AttentionOutput(", "from mla_ref.problem import AttentionOutput, implements"),
    ("PROBLEM", "from mla_ref.problems.latent_attention import PROBLEM"),
    ("causal_mask(", "from mla_ref.rows import causal_mask, requests"),
)


def _head(manner: Manner, body: str) -> str:
    found = [line for word, line in IMPORTS if word in body]
    if "from mla_ref.pages import gather, scatter, slots" in found:
        found.remove("from mla_ref.pages import gather")
    title = f'"""Adapter to {manner.target}, written by mla-verify probe: it claims what was tried."""'
    return "\n".join([title, "", "import importlib.util", *found])


def _requires(manner: Manner) -> str:
    root = manner.module.partition(".")[0]
    lines = [
        "def requires(device):",
        '    """The kernel\'s module, and the device it was tried on."""',
    ]
    if manner.device != "cpu":
        lines += [
            f'    if device != "{manner.device}":',
            f'        return "was tried on {manner.device} alone"',
        ]
    lines.append(f'    return None if importlib.util.find_spec("{root}") else "{root} is not installed"')
    return "\n".join(lines)


def _supports(manner: Manner) -> str:
    checks = list(_checks(manner))
    lines = ["def supports(case):", '    """What was tried, and held."""']
    if any("config" in condition for condition, _ in checks):
        lines.append("    config = case.config")
    for condition, reason in checks:
        lines += [f"    if {condition}:", f"        return {reason}"]
    lines.append("    return None")
    return "\n".join(lines)


def _text(value: object) -> str:
    return repr(value).replace("'", '"')


def _checks(manner: Manner) -> Iterator[tuple[str, str]]:
    """Conditions under which a case is declined, and the reasons."""
    pairs = "zip(case.q_lens, case.kv_lens, strict=True)"
    if manner.widths is not None:
        yield (
            f"(config.kv_lora_rank, config.qk_rope_head_dim) not in {_text(manner.widths)}",
            'f"c={config.kv_lora_rank}, r={config.qk_rope_head_dim} was not tried, or did not run"',
        )
    if manner.heads is not None:
        yield (
            f"config.num_heads not in {_text(manner.heads)}",
            'f"{config.num_heads} heads were not tried, or did not run"',
        )
    if manner.block_sizes is not None:
        yield (
            f"case.block_size not in {_text(manner.block_sizes)}",
            'f"blocks of {case.block_size} were not tried, or did not run"',
        )
    yield (
        f"(case.dtype, case.cache_format) not in {_text(manner.dtypes)}",
        'f"{case.dtype} over a {case.cache_format} cache was not tried, or did not run"',
    )
    if manner.fixed_scale is not None:
        yield (
            f"config.softmax_scale != {manner.fixed_scale!r}",
            f'f"multiplies by {manner.fixed_scale:.6g}, whatever it is told"',
        )
    if manner.uniform:
        yield (
            "len(set(case.q_lens)) != 1 or not case.q_lens[0]",
            'f"q_lens are {case.q_lens}; it takes one positive length for the whole batch"',
        )
    if manner.alignment != BOTTOM_RIGHT:
        yield _causal_check(manner, pairs)
    if manner.no_empty:
        yield f"any(q > kv for q, kv in {pairs})", '"a row sees no key"'
    if manner.whole_blocks:
        yield (
            "any(length % case.block_size for length in case.kv_lens)",
            '"it attends to all of the last block, whatever the length"',
        )
    yield from _layout_checks(manner)


def _causal_check(manner: Manner, pairs: str) -> tuple[str, str]:
    if manner.alignment == TOP_LEFT:
        several = "max(case.q_lens, default=0) > 1 and " if manner.flag != "True" else ""
        return f"{several}any(q and q != kv for q, kv in {pairs})", '"its causal mask is aligned top-left"'
    return "max(case.q_lens, default=0) > 1", f'"it has no causal mask aligned {BOTTOM_RIGHT}"'


def _layout_checks(manner: Manner) -> Iterator[tuple[str, str]]:
    stored = "cache_format(case.cache_format).entry_bytes(config.kv_lora_rank, config.qk_rope_head_dim)"
    if "entry stride" in manner.declined:
        yield f"case.layout.entry_stride({stored}) != {stored}", '"its entries are packed"'
    if "block stride" in manner.declined:
        yield (
            f"case.layout.block_stride({stored}, case.block_size) != case.block_size * {stored}",
            '"its blocks are packed"',
        )
    if "offset" in manner.declined:
        yield "case.layout.offset", '"its cache starts where its memory does"'
    if manner.alignment_bytes > 1:
        step = manner.alignment_bytes
        yield (
            f"case.layout.why_not_aligned({stored}, case.block_size, {step})",
            f"case.layout.why_not_aligned({stored}, case.block_size, {step})",
        )


# The contract's names, as the lines of a signature and of a call.
NAMES = textwrap.wrap(", ".join(CONTRACT) + ",", width=100)


def _preparation(manner: Manner) -> Iterator[str]:
    used = names_in(manner)
    for name in manner.written:
        yield f"{name} = {name}.clone()"
    if manner.zeroed and not manner.spec.contiguous:
        yield "kv_cache = live(kv_cache, block_table, cache_seqlens)"
    if manner.clamped:
        yield "block_table = block_table.clamp(0, kv_cache.shape[0] - 1)"
    if "query" in used.replace("query_", ""):
        yield "query = torch.cat([ql_nope, q_pe], dim=-1)"
    if "entries" in used:
        fill = "0.0" if manner.zeroed else "torch.nan"
        yield f"entries = rows(kv_cache, block_table, cache_seqlens, {fill})"
    if "visible" in used:
        # As many columns as the longest request has keys, in pages or one after another alike.
        yield "key = torch.arange(max([1, *cache_seqlens.tolist()]), device=cache_seqlens.device)"
        yield "row = torch.arange(s, device=cache_seqlens.device)"
        yield "visible = key <= (cache_seqlens[:, None] - s + row)[..., None]"


def _sizes(text: str) -> Iterator[str]:
    """The assignment of the sizes that a text uses."""
    words = set(textwrap.dedent(text).replace("(", " ").replace(")", " ").replace(",", " ").split())
    words |= {word for part in words for word in part.replace("[", " ").replace("]", " ").split()}
    if words & {"t", "h", "c", ":c", "c:"}:
        yield "t, h, c = ql_nope.shape"
    if words & {"r"}:
        yield "r = q_pe.shape[2]"
    if words & {"b", "s"}:
        yield "b, s = block_table.shape[0], max_seqlen_q"


# What a kernel's module may not be called in the function that imports it.
NAMES_TAKEN = (*CONTRACT, *"thcrbs", "query", "entries", "visible", "key", "row", "rows", "live", "max")


def _ask(manner: Manner) -> str:
    body, imports = [*_preparation(manner)], manner.spec.imports
    module, _, path = manner.target.partition(":")
    alias = "kernels" if module.partition(".")[0] in NAMES_TAKEN else ""
    call = [f"{parameter}={text}," for parameter, text in arguments(manner).items()]
    lines = [
        "def ask(",
        *(f"    {line}" for line in NAMES),
        "):",
        '    """What the kernel itself returns."""',
        f"    import {module} as {alias}" if alias else f"    import {module}",
        *([f"    from {manner.module} import {', '.join(imports)}"] if imports else []),
        "",
        *(f"    {line}" for line in _sizes(" ".join([*body, *call]))),
        *(f"    {line}" for line in body),
        f"    return {alias or module}.{path}(",
        *(f"        {line}" for line in call),
        "    )",
    ]
    return "\n".join(lines)


ROWS = '''
def rows(kv_cache, block_table, cache_seqlens, fill):
    """Every request's entries [b j e], and ``fill`` behind them."""
    lengths = cache_seqlens.tolist()
    found = kv_cache.new_full((len(lengths), max([1, *lengths]), kv_cache.shape[2]), fill)
    for i, length in enumerate(lengths):
        found[i, :length] = gather(kv_cache, block_table[i], 0, length)
    return found
'''

LIVE = '''
def live(kv_cache, block_table, cache_seqlens):
    """A copy of the cache, 0 wherever no token is."""
    copy = kv_cache.new_zeros(kv_cache.shape)
    for i, length in enumerate(cache_seqlens.tolist()):
        entries = gather(kv_cache, block_table[i], 0, length)
        scatter(copy, slots(block_table[i], 0, length, kv_cache.shape[1]), entries)
    return copy
'''

UNSEEING = '''
def unseeing(cu_seqlens_q, cache_seqlens, num_tokens):
    """[t], True where a query row sees no key."""
    q_lens = cu_seqlens_q.diff().long()
    first = (cu_seqlens_q[:-1] + q_lens - cache_seqlens).repeat_interleave(q_lens)
    return torch.arange(num_tokens, device=first.device) < first
'''

LOG_SUM_EXP = '''
def log_sum_exp(ql_nope, q_pe, kv_cache, block_table, cu_seqlens_q, cache_seqlens, softmax_scale):
    """[t h], computed here, since the kernel returns none: only ``out`` is the kernel's own."""
    query = torch.cat([ql_nope, q_pe], dim=-1).float()
    lse = query.new_full(query.shape[:2], -torch.inf)
    for request in requests(block_table, cu_seqlens_q, cache_seqlens):
        entries = gather(kv_cache, request.table_row, 0, request.kv_len).float()
        scores = softmax_scale * torch.einsum("she,je->hsj", query[request.rows], entries)
        mask = causal_mask(request, 0, request.kv_len, query.device)
        lse[request.rows] = scores.masked_fill(~mask, -torch.inf).logsumexp(-1).T
    return lse
'''


def _parts(manner: Manner) -> Iterator[str]:
    if "entries" in names_in(manner):
        yield ROWS
    if manner.zeroed and not manner.spec.contiguous:
        yield LIVE
    if manner.empties:
        yield UNSEEING
    if manner.lse_at is None:
        yield LOG_SUM_EXP


def _adapter(manner: Manner) -> str:
    result = "result" if manner.out_at is None else f"result[{manner.out_at}]"
    body = [
        "result = ask(",
        *(f"    {line}" for line in NAMES),
        ")",
        f"out = {ORDERS[manner.out_order].format(x=result, c=', c')}",
    ]
    if manner.lse_at is None:
        body.append(f"lse = log_sum_exp({', '.join(CONTRACT[:6])}, softmax_scale)")
    else:
        text = ORDERS[manner.lse_order].format(x=f"result[{manner.lse_at}]", c="") + ".float()"
        body.append(f"lse = {text}{manner.lse_factor}")
    if manner.empties:
        body += [
            "empty = unseeing(cu_seqlens_q, cache_seqlens, t)",
            "out = out.masked_fill(empty[:, None, None], 0.0)",
            "lse = lse.masked_fill(empty[:, None], -torch.inf)",
        ]
    sizes = list(_sizes(" ".join(body)))
    end = "return AttentionOutput(out.to(ql_nope.dtype), lse)"
    lines = [
        "@implements(PROBLEM, values=False)",
        "def adapter(",
        *(f"    {line}" for line in NAMES),
        "):",
        '    """Multi-query attention over the latent cache, by the kernel."""',
        *(f"    {line}" for line in [*sizes, *body, end]),
    ]
    return "\n".join(lines)


def _backend() -> str:
    usual = asdict(Numerics())
    declared = [f"{name}={_text(value)}" for name, value in asdict(NUMERICS).items() if value != usual[name]]
    return "\n".join(
        [
            "# Wide enough for any kernel that sums in float32: narrow it to what the kernel really rounds.",
            "# sum_rounded_p=False first, if the denominator sums weights that are not rounded yet.",
            "NUMERICS = Numerics(",
            f"    {', '.join(declared)},",
            ")",
            "BACKEND = Backend(__name__, PROBLEM.name, adapter, NUMERICS, requires, supports)",
        ]
    )
