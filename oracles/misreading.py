"""What an implementation seems to compute instead: readings of the inputs that have been met before.

A misreading is an edit of the inputs, or a coarser rounding than was declared. It is told where the truth
under it admits everything that was returned, which the truth of the inputs does not, and claims more of each
row than the hull of its values, which explains too much. Most are ruled out by the row with the worst
element, which is all that they cost.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from mla_ref.numerics import EXACT, INPUT, Numerics
from mla_ref.problem import Problem
from oracles.bounds import Admissible
from oracles.compare import within
from oracles.exact import attention
from oracles.locate import Rows, rows_of
from oracles.verdict import Worst

# Products of queries, keys and channels beyond which nobody waits for a guess; what is shown is small.
MAX_PRODUCTS = 2**22

# Of the error of a row, what may be left of it under a misreading that is looked at further.
NEAR = 0.5

# Readings that explain a failure alike, beyond which none is told.
FEW = 2

Truth = Callable[[Any, Numerics], Mapping[str, Admissible]]


class Misreading(NamedTuple):
    """What is said of it, the inputs as they were read, and how many keys each row saw of its request's."""

    says: str
    inputs: Any
    sees: torch.Tensor


def misread(
    contract: Problem, output: Any, inputs: Any, numerics: Numerics, truth: Truth, worst: Worst
) -> str:
    """What explains the whole of a wrong output of attention, or "".

    truth: what an output may be, field by field. worst: an element that is wrong.
    """
    if not all(hasattr(inputs, name) for name in ("cu_seqlens_q", "cache_seqlens", "softmax_scale")):
        return ""
    rows = rows_of(inputs, len(output[0]))
    if rows is None or rows.sees is None or output[0][0].numel() * int(rows.sees.sum()) > MAX_PRODUCTS:
        return ""
    output = contract.output(*(tensor.detach() for tensor in output))
    if any(bool(tensor.isnan().any()) for tensor in output):
        return ""  # no reading of live memory gives that

    row, head = worst.index[:2]
    one_head = "g" not in " ".join(contract.shapes.values()).split()  # else a key has heads of its own
    kept = torch.tensor([row], device=rows.request.device)
    got = getattr(_cut(contract.output_shapes, output, kept, head, one_head), worst.tensor)

    def error(reading: Misreading) -> float:
        given = _cut(contract.shapes, _alone(reading, rows, kept), kept, head, one_head)
        want = dict(zip(contract.output_shapes, attention(given), strict=True))[worst.tensor]
        return float(torch.where(got == want, 0.0, got.double() - want).abs().nan_to_num(nan=torch.inf).max())

    limit = NEAR * error(Misreading("", inputs, rows.sees))

    def explains(reading: Misreading) -> bool:
        if error(reading) >= limit:
            return False
        expected = truth(_whole(reading, rows), numerics)
        return not any(want.ill for want in expected.values()) and _admits(expected, output)

    found = [reading.says for reading in _misreadings(inputs, rows) if explains(reading)]
    if found:
        return f"as if {', or '.join(found)}" if len(found) <= FEW else ""
    if not _either_way(truth(inputs, numerics), output):
        return ""
    return next((says for says, wider in _wider(numerics) if _admits(truth(inputs, wider), output)), "")


def _either_way(expected: Mapping[str, Admissible], output: Any) -> bool:
    """Whether what is outside its bounds is too large here and too small there, as what is rounded is."""
    name = next(iter(expected))
    got, (low, high) = getattr(output, name).double(), expected[name].interval()
    outside = (got < low) | (got > high)
    larger = (got.abs() > expected[name].mid.abs())[outside]
    return bool(larger.any()) and not bool(larger.all())


def _admits(expected: Mapping[str, Admissible], output: Any) -> bool:
    return all(within(name, getattr(output, name), want).ok for name, want in expected.items())


def _whole(reading: Misreading, rows: Rows) -> Any:
    """The inputs as they were read; under another mask every row is a request of its own."""
    assert rows.sees is not None
    if torch.equal(reading.sees, rows.sees):
        return reading.inputs
    return _alone(reading, rows, torch.arange(len(rows.request), device=rows.request.device))


def _alone(reading: Misreading, rows: Rows, kept: torch.Tensor) -> Any:
    """Rows as requests; tensors of one row a token still have them all."""
    return reading.inputs._replace(
        block_table=reading.inputs.block_table[rows.request[kept]],
        cu_seqlens_q=torch.arange(len(kept) + 1, dtype=torch.int32, device=kept.device),
        cache_seqlens=reading.sees[kept].to(torch.int32),
        max_seqlen_q=1,
    )


def _cut(shapes: Mapping[str, str], fields: Any, few: torch.Tensor, head: int, one_head: bool) -> Any:
    """Of every tensor those tokens, and that head."""
    found = {}
    for name, letters in shapes.items():
        value, axes = getattr(fields, name), letters.split()
        if "t" in axes:
            value = value.index_select(axes.index("t"), few)
        if one_head and "h" in axes:
            value = value.narrow(axes.index("h"), head, 1)
        found[name] = value
    return fields._replace(**found)


def _misreadings(inputs: Any, rows: Rows) -> Iterator[Misreading]:
    """Those that differ from the inputs, one difference each."""
    assert rows.sees is not None
    assert rows.kv_len is not None
    for says, changes in (*_scales(inputs), *_pages(inputs), *_parts(inputs)):
        yield Misreading(says, inputs._replace(**changes), rows.sees)
    met = [rows.sees]
    for says, sees in _masks(inputs, rows.sees, rows.kv_len, rows.query):
        if not any(torch.equal(sees, other) for other in met):
            met.append(sees)
            yield Misreading(says, inputs, sees)


def _scales(inputs: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    of = (("c", "ql_nope"), ("c", "w_uk"), ("p", "q_nope"), ("r", "q_pe"), ("d", "query"))
    sizes = {letter: getattr(inputs, name).shape[2] for letter, name in of if hasattr(inputs, name)}
    scale = float(inputs.softmax_scale)
    met = {scale}
    for letters in ("c+r", "p+r", "c", "p", "d"):
        if set(letters.split("+")) <= set(sizes):
            size = sum(sizes[letter] for letter in letters.split("+"))
            if size and (value := size**-0.5) not in met:
                met.add(value)
                yield (
                    f"softmax_scale were {value:.4g}, {size}^-0.5 ({letters}), not {scale:.4g}",
                    {"softmax_scale": value},
                )
    for what, value in (("1", 1.0), ("squared", scale * scale)):
        if value not in met:
            yield f"softmax_scale were {what}, not {scale:.4g}", {"softmax_scale": value}
    for name in ("kv_scale", "k_scale", "v_scale"):
        factor = getattr(inputs, name, None)
        if factor is not None and factor.isfinite() and float(factor) != 1.0:
            yield f"{name} were 1, not {float(factor):.4g}", {name: torch.ones_like(factor)}


def _pages(inputs: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    table = inputs.block_table
    if len(table) > 1 and int(inputs.cache_seqlens.max()) == int(inputs.cache_seqlens[0]):
        yield "every request had the pages of request 0", {"block_table": table[:1].expand_as(table)}


def _parts(inputs: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, what in (("q_pe", "rope"), ("ql_nope", "latent"), ("q_nope", "nope")):
        query = getattr(inputs, name, None)
        if query is not None and query.shape[-1]:
            yield f"the {what} channels took no part in the scores", {name: torch.zeros_like(query)}


def _masks(
    inputs: Any, sees: torch.Tensor, kv_len: torch.Tensor, query: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    cache = inputs.kv_cache if hasattr(inputs, "kv_cache") else inputs.key_cache
    size = cache.shape[1]
    yield "every token saw one key more, if there is one", torch.minimum(sees + 1, kv_len)
    yield "every token saw one key less", (sees - 1).clamp(min=0)
    yield "the newest key of every request were lost", torch.minimum(sees, kv_len - 1).clamp(min=0)
    yield "there were no causal mask", kv_len
    yield "the causal mask were aligned top-left", torch.minimum(query + 1, kv_len)
    yield "blocks that are not full were left out", torch.minimum(sees, kv_len // size * size)


def _wider(numerics: Numerics) -> Iterator[tuple[str, Numerics]]:
    """Roundings that many kernels make and few authors think of."""
    if numerics.p == EXACT:
        yield (
            "errors are as small as where weights are rounded to the queries' type, which "
            'Numerics(p="input") would declare',
            replace(numerics, p=INPUT, shared_p=False),
        )
