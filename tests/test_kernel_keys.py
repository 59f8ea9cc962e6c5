"""Keys of compiled kernels: the same whatever a process did before, so that what was compiled is found."""

import json
import os
import subprocess
import sys
import textwrap
from itertools import permutations
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

KERNELS = """
import json, sys
import triton
import triton.language as tl
from oracles.kernel_keys import settle

BASE = tl.constexpr(2.0)
STEP = tl.constexpr({step})

@triton.jit
def inner(x):
    return x + STEP

@triton.jit
def outer(x):
    return inner(x) * BASE

@triton.jit
def first(x):
    tl.store(x, outer(tl.load(x)))

@triton.jit
def second(x):
    tl.store(x, inner(tl.load(x)))

settle()
settle()
functions = dict(inner=inner, outer=outer, first=first, second=second)
for name in sys.argv[1:]:
    functions[name].cache_key
print(json.dumps({{name: f.cache_key for name, f in sorted(functions.items())}}))
"""


def keys(tmp_path, order, step=1.5):
    file = tmp_path / "kernels.py"
    file.write_text(textwrap.dedent(KERNELS).format(step=step))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    words = [sys.executable, str(file), *order]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_keys_do_not_depend_on_what_was_launched_before(tmp_path):
    pytest.importorskip("triton")
    orders = [("first",), ("second", "first"), ("inner", "outer"), *permutations(("outer", "second"))]
    found = [keys(tmp_path, order) for order in orders]
    assert all(each == found[0] for each in found[1:])
    assert len(set(found[0].values())) == 4
    other = keys(tmp_path, ("first",), step=2.5)
    assert all(other[name] != key for name, key in found[0].items())
