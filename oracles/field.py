"""How other projects decide that an attention kernel is right: their rules and their numbers, as data.

None of these is a tolerance of this project, and nothing here judges a backend: the numbers are beside the
kill matrix so that one sees what they would have let through. Each rule is restated from the test that its
``source`` names, and is given what it would be glad of: a float64 truth, rounded to the output's type.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from oracles.exact import attention, attention_rows


class Compared(NamedTuple):
    """An output and the truth, float64 all of them, and what another low-precision implementation gives.

    out, want [t h v]. lse, want_lse [t h]. plain [t h v]: the same attention, every step in the query's type.
    """

    out: torch.Tensor
    lse: torch.Tensor
    want: torch.Tensor
    want_lse: torch.Tensor
    plain: torch.Tensor


class Rule(NamedTuple):
    """A project's criterion. accepts: whether it lets an output pass. source: where it stands."""

    name: str
    accepts: Callable[[Compared], bool]
    source: str


def compared(inputs: Any, output: Any) -> Compared:
    """What the rules look at, for one output; -inf in both log-sum-exps is no difference."""
    out, lse = attention(inputs)
    dtype = inputs[0].dtype
    empty = lse.isneginf() & output.lse.isneginf()
    return Compared(
        out=output.out.double(),
        lse=output.lse.double().masked_fill(empty, 0.0),
        want=out.to(dtype).double(),
        want_lse=lse.float().double().masked_fill(empty, 0.0),
        plain=_plain(inputs),
    )


def _plain(inputs: Any) -> torch.Tensor:
    """Scores, softmax and sums in the query's type, the scale folded into the keys."""
    dtype = inputs[0].dtype
    out = torch.zeros(attention(inputs)[0].shape, dtype=torch.float64)
    for rows in attention_rows(inputs):
        query, q_pe, key, k_pe, values = rows.operands[:5]
        keys, rope = ((x * inputs.softmax_scale).to(dtype) for x in (key, k_pe))
        scores = query.to(dtype).transpose(0, 1) @ keys.transpose(1, 2)
        scores = scores + q_pe.to(dtype).transpose(0, 1) @ rope.T
        weights = torch.softmax(scores.masked_fill(~rows.seen, -torch.inf).float(), dim=-1).nan_to_num(
            nan=0.0
        )
        out[rows.tokens, rows.heads] = (weights.to(dtype) @ values.to(dtype)).double().transpose(0, 1)
    return out


def _close(got: torch.Tensor, want: torch.Tensor, relative: float, absolute: float) -> bool:
    return bool(((got - want).abs() <= absolute + relative * want.abs()).all())


def _apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """1 - 2 ⟨x, y⟩ / (⟨x, x⟩ + ⟨y, y⟩)."""
    square = float((got.square() + want.square()).sum())
    return 1.0 - 2.0 * float((got * want).sum()) / max(square, 1e-12)


def _flash_mla(x: Compared) -> bool:
    def either(got: torch.Tensor, want: torch.Tensor, absolute: float, relative: float) -> bool:
        error = (got - want).abs()
        return bool(((error < absolute) | (error / (want.abs() + 1e-6) < relative)).all())

    rounded = either(x.out, x.want, 8e-4, 2.01 / 128) and either(x.lse, x.want_lse, 1e-6, 8.01 / 65536)
    return rounded and abs(_apart(x.out, x.want)) <= 5e-6


def _cosine(x: Compared) -> bool:
    return _apart(x.out, x.want) < 1e-5 and _apart(x.lse, x.want_lse) < 1e-5


def _twice_plain(x: Compared) -> bool:
    """No farther than twice the plain implementation, plus what adding and taking away 0.3 does."""
    rounding = ((x.want.float() + 0.3 - 0.3).double() - x.want).abs().max()
    limit = 2.0 * (x.plain - x.want).abs().max() + 2.0 * rounding
    return bool((x.out - x.want).abs().max() <= limit)


def _cutlass(x: Compared) -> bool:
    pairs = ((x.out, x.want), (x.lse, x.want_lse))
    errors = [(got - want).abs() for got, want in pairs]
    return all(bool(error.max() < 1e-2 and error.mean() < 1e-3) for error in errors)


RULES = {
    rule.name: rule
    for rule in (
        Rule(
            "vllm",
            lambda x: _close(x.out, x.want, 1e-2, 5e-1),
            "vLLM tests/v1/attention/test_mla_backends.py at 015c13d: relative 1e-2, absolute 5e-1, out only",
        ),
        Rule(
            "vllm-0.05",
            lambda x: _close(x.out, x.want, 1e-2, 5e-2),
            "the same test in another revision: absolute 5e-2",
        ),
        Rule("cosine", _cosine, "vLLM tests/kernels/attention/test_flashmla.py at 0f70589: 1e-5 of both"),
        Rule(
            "flash-mla",
            _flash_mla,
            "FlashMLA tests/test_flash_mla_dense_decoding.py at 9241ae3: absolute 8e-4 or relative 2.01/128, "
            "cosine 5e-6; lse absolute 1e-6 or relative 8.01/65536",
        ),
        Rule(
            "flash-attention",
            _twice_plain,
            "FlashAttention's tests: twice the error of a plain low-precision implementation",
        ),
        Rule(
            "flashinfer",
            lambda x: _close(x.out, x.want, 1e-2, 1e-2) and _close(x.lse, x.want_lse, 1e-3, 1e-3),
            "FlashInfer tests/attention/test_deepseek_mla.py: 1e-3 in float16, here 1e-2 for out in bfloat16",
        ),
        Rule(
            "cutlass",
            _cutlass,
            "CUTLASS examples/77_blackwell_fmha/77_blackwell_mla.cu: largest 1e-2 and mean 1e-3, out and lse",
        ),
    )
}  # fmt: skip


def rejecting(inputs: Any, output: Any) -> set[str]:
    """Which of the rules reject an output."""
    x = compared(inputs, output)
    finite = all(bool(part.isfinite().all()) for part in (x.out, x.lse))
    return {name for name, rule in RULES.items() if not (finite and rule.accepts(x))}
