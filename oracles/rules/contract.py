"""The shape of the answer.

Claim: the output has its problem's fields, in order, with their types, shapes and device, and asks for no
    gradient.
Why: a float32 output where the contract says bfloat16, or lse as [h t], breaks every caller; an output that
    belongs to a graph keeps all that it was made of alive, step after step.
Exact or bounded: exact. The judge refuses to read an output of another shape, so every other claim fails with
    this one.
Kills: lse in the query's dtype, axes swapped, a missing lse, a graph that hangs on the output.
"""

from oracles.oracle import Oracle, Trial
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Shapes are right in any output that got this far; look for graphs."""
    output, names = trial.run(trial.inputs), trial.problem.output_shapes
    attached = [name for name in names if getattr(output, name).requires_grad]
    if attached:
        return Finding(ok=False, detail=f"{attached[0]}: asks for gradients of inputs that ask for none")
    return Finding(ok=True, num_checked=len(names))


ORACLE = Oracle(
    name="contract",
    check=check,
    kills=(
        "lse_in_query_dtype",
        "lse_heads_first",
        "lse_missing",
        "read_in_float32",
        "output_in_a_graph",
    ),
)
