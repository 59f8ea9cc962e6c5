"""Powers of two on their way through a kernel: which bits of its output they leave alone.

A product with a power of two commutes with every rounding but those at an absolute distance, of numbers
below the smallest normal one, which a processor may keep, round, or take for 0 where they are read or made.
Each moves a result by no more than ``flush``, the smallest normal number, times what it is multiplied by
afterwards:

- a score, by the sums and products of its own dots, by each absorbed or scaled query against the magnitudes
  of a key, and by each expanded or scaled key and each weight against those of a query;
- an output, where values are scaled, by those of its value's dot, of the average, and of each weight that
  is read.

Where ``likely.bits_kept_from`` says that such a movement shows, bits are not claimed, and the two outputs are
the same within what either of them may be off.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from oracles.bounds import Admissible, Format, accumulator, number_format
from oracles.compare import identical, worst_of
from oracles.likely import bits_kept_from
from oracles.oracle import Trial
from oracles.probes import agree, decoded, queries, repeats, stored
from oracles.verdict import Finding

FACTOR = 4.0  # that inputs are multiplied by

# Roundings of one score on its way to a weight, or of one element of the output to its type.
STEPS = 8

# Distance to the largest number, for what is scaled before it is summed.
HEADROOM = 64.0


class Magnitudes(NamedTuple):
    """Largest sums of magnitudes: of one query, of one cached token, and of one column of weights."""

    query: float
    key: float
    keys_weight: float
    values_weight: float

    def largest_product(self) -> float:
        """What no partial sum of scores or values exceeds, in any order of the products."""
        query, key, weight = max(self.query, 1.0), max(self.key, 1.0), max(self.keys_weight, 1.0)
        return max(query * key * weight, key * self.values_weight)


def magnitudes(inputs: Any) -> Magnitudes:
    """Of what the queries see. float64 throughout."""
    query = sum(_largest(getattr(inputs, name).double().abs().sum(-1)) for name in queries(inputs))
    if hasattr(inputs, "kv_cache"):
        kv_c, k_pe = decoded(inputs)
        key = _largest(kv_c.abs().sum(-1) + k_pe.abs().sum(-1))
    else:
        key = max(_largest(x) for x in _paged(inputs))
    weights = (getattr(inputs, name, None) for name in ("w_uk", "w_uv"))
    by_key, by_value = (
        1.0 if w is None else _largest(w.double().abs().sum(dim))
        for w, dim in zip(weights, (1, 2), strict=True)
    )
    return Magnitudes(query, key, by_key, by_value)


def _paged(inputs: Any) -> Iterator[torch.Tensor]:
    coded = inputs.key_cache.dtype == torch.float8_e4m3fn
    for name, scale in (("key_cache", inputs.k_scale), ("value_cache", inputs.v_scale)):
        yield stored(inputs)[name].double().abs().sum(-1) * (scale.double() if coded else 1.0)


def _largest(x: torch.Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def why_not_scaled(trial: Trial) -> str:
    """Why inputs times FACTOR may not pass without a word of infinity, or nothing."""
    query = getattr(torch, trial.case.dtype)
    narrow = accumulator(trial.backend.numerics, query).flush > 0.0 and query != torch.float64
    largest = torch.finfo(torch.float32 if narrow else torch.float64).max
    reach = (
        FACTOR * HEADROOM * max(trial.inputs.softmax_scale, 1.0) * magnitudes(trial.inputs).largest_product()
    )
    return "products would be near the largest numbers" if not reach < largest else ""


def kept_by_scores(trial: Trial) -> dict[str, float]:
    """From which magnitude on bits of each output are kept where queries, or keys' weights, are scaled."""
    inputs, acc, flush = trial.inputs, *_formats(trial)
    at = magnitudes(inputs)
    p, width = inputs.w_uk.shape[1] if hasattr(inputs, "w_uk") else 0, _width(inputs)
    moved = 2.0 * (width + 1) + at.key * (2.0 * p + 1.0 + at.keys_weight)
    moved += at.query * (2.0 * width + 1.0) + at.query * at.key
    moved *= flush * max(inputs.softmax_scale, 1.0)
    t, h = getattr(inputs, queries(inputs)[0]).shape[:2]
    least = bits_kept_from(moved, STEPS * t * h * max([1, *trial.case.kv_lens]), acc.roundoff)
    # Exponentials of the smallest scores are near 1: where those keep their bits, weights do.
    return {"out": 0.0, "lse": least} if least <= 1.0 else {"out": torch.inf, "lse": torch.inf}


def kept_by_values(trial: Trial) -> dict[str, float]:
    """From which magnitude on bits of each output are kept where the weights of values are scaled."""
    acc, flush = _formats(trial)
    keys, size = max(trial.case.kv_lens, default=0), trial.run(trial.inputs).out.numel()
    moved = flush * (magnitudes(trial.inputs).key + 2.0 * (_width(trial.inputs) + keys + 1))
    return {"out": bits_kept_from(moved, STEPS * size, acc.roundoff), "lse": 0.0}


def _width(inputs: Any) -> int:
    return sum(int(getattr(inputs, name).shape[-1]) for name in queries(inputs))


def _formats(trial: Trial) -> tuple[Format, float]:
    """The accumulator's format, and the largest of the path's smallest normal numbers."""
    numerics, query = trial.backend.numerics, getattr(torch, trial.case.dtype)
    acc = accumulator(numerics, query)
    names = (numerics.kv, numerics.operand, numerics.p, numerics.partial)
    return acc, max(acc.flush, *(number_format(name, query).flush for name in names))


def as_claimed(
    trial: Trial,
    got: Any,
    want: Any,
    may_be: Callable[[], tuple[Mapping[str, Admissible], Mapping[str, Admissible]]],
    least: Mapping[str, float],
    what: str,
) -> Finding:
    """Two outputs are the same: bit for bit from ``least`` on, within both radii elsewhere.

    may_be: what ``got`` and ``want`` may be. Within both radii everywhere, where the backend does not repeat
        itself.
    """
    findings = []
    for name, letters in trial.problem.output_shapes.items():
        x, y = getattr(got, name), getattr(want, name)
        if not isinstance(x, torch.Tensor) or x.shape != y.shape:
            findings.append(identical(name, x, y, letters, trial.inputs))
            continue
        small = y.abs() < least[name]
        finding = identical(
            name,
            x.masked_fill(small | (x == 0.0), 0.0),
            y.masked_fill(small | (y == 0.0), 0.0),
            letters,
            trial.inputs,
        )
        bounded = not finding.ok and not repeats(trial)
        if not bounded:
            findings.append(finding)
        if bounded or bool(small.any()):
            here, there = may_be()
            findings.append(agree(name, x, y, here[name], there[name], letters, trial.inputs))
    worst = worst_of(findings)
    return replace(worst, detail=f"{what}: {worst.detail}" if worst.detail else "")
