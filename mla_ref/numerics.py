"""What an implementation declares about its own rounding. The judge holds it to exactly this."""

from dataclasses import dataclass

EXACT = "exact"
INPUT = "input"
FLOAT32 = "float32"
FLOAT64 = "float64"


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Number formats at every point where a value is rounded.

    Fields that name a type take "input" (the query's dtype), a torch dtype name such as "bfloat16",
    "float32", "float64", or "exact" where no rounding beyond the accumulator's happens.

    accumulate: type of scores, softmax and sums. "compute": float64 for float64 queries, float32 for others.
    kv: type that dequantised keys and values are rounded to before they are multiplied.
    operand: type that a stage's materialised result is rounded to: the absorbed query and the latent
        output (``form="absorbed"``), or the expanded keys and values (``form="expanded"``).
    stage: type that a whole layer rounds to between its steps: projections, norms, rotations, attention. A
        write that rotates rounds a key to it before it is encoded.
    angle: type of rotary frequencies and of their product with the position. table: of cosines and sines.
    form: "latent" (no projections), "absorbed" or "expanded".
    p: type of the softmax weights in the product with the values.
    shared_p: whether every channel of a row multiplies the same rounded weights; False where warpgroups round
        copies of their own, or a tile's scale is folded in before.
    sum_rounded_p: whether the denominator sums the rounded weights; None: either.
    partial: type of partial outputs between splits or chunks.
    max_splits: the most partial results that are ever merged into one row.
    merge_depth: merges that a partial result passes through: 1 where all are merged at once, up to
        max_splits - 1 where they are folded in one after another.
    min_tile: the fewest keys between two updates of the running maximum.
    slack: powers of two by which a score may exceed the maximum that is subtracted from it: 0 where that is
        never older than the score, the threshold of a lazy one, or inf where an older maximum is subtracted
        first, whatever exceeds it, and then the difference from the newest.
    dot_roundings: roundings per product of a dot, in units of the accumulator's roundoff. 1 covers IEEE sums
        in any order and the 16-bit units of Hopper and Blackwell; Ampere's shorter alignment needs 1.5.
    exp_error: relative error of the exponential, in units of the accumulator's roundoff (``ex2.approx``: 4).
    log_error: error of the logarithm, in the same units, relative to 1 + its magnitude.
    """

    accumulate: str = "compute"
    kv: str = EXACT
    operand: str = EXACT
    stage: str = EXACT
    angle: str = FLOAT64
    table: str = EXACT
    form: str = "latent"
    p: str = EXACT
    shared_p: bool = True
    sum_rounded_p: bool | None = None
    partial: str = EXACT
    max_splits: int = 1
    merge_depth: int = 1
    min_tile: int = 16
    slack: float = 0.0
    dot_roundings: float = 1.0
    exp_error: float = 4.0
    log_error: float = 4.0
