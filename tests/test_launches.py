"""Kernels go to their tensors' GPU, current or not: every launch stands in ``with launching(…)``."""

import ast
from collections.abc import Iterator
from pathlib import Path

import mla_fast

FOLDER = Path(mla_fast.__file__).parent
MERGE = (
    "_split_keys.py",
    "merge",
    "_merge_splits_kernel",
)  # launches for its callers, in their ``launching``


def launches(node: ast.AST, guarded: bool = False) -> Iterator[tuple[str, int, bool]]:
    """(kernel, line, whether it is guarded) of each ``kernel[grid](…)`` and ``merge(…)`` below a node."""
    if isinstance(node, ast.With):
        names = [
            ast.unparse(item.context_expr.func)
            for item in node.items
            if isinstance(item.context_expr, ast.Call)
        ]
        guarded = guarded or "launching" in names
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func.value if isinstance(node.func, ast.Subscript) else node.func)
        if name == MERGE[1] or (isinstance(node.func, ast.Subscript) and name.endswith("kernel")):
            yield name, node.lineno, guarded
    for child in ast.iter_child_nodes(node):
        yield from launches(child, guarded)


def test_every_launch_names_its_device() -> None:
    found = {
        (path.name, name, line): guarded
        for path in FOLDER.glob("*.py")
        for name, line, guarded in launches(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert {"gluon_decode.py", "gluon_prefill.py", "triton_cache_write.py"} <= {file for file, _, _ in found}
    assert "merge" in {name for _, name, _ in found}
    left = [place for place, guarded in found.items() if not guarded]
    assert [(file, name) for file, name, _ in left] == [(MERGE[0], MERGE[2])]


def test_a_launch_outside_is_found() -> None:
    text = "with launching(d):\n    my_kernel[(1,)](x)\nwith other(d):\n    my_kernel[(2,)](x)\ntable[0](x)\n"
    assert [(line, guarded) for _, line, guarded in launches(ast.parse(text))] == [(2, True), (4, False)]
