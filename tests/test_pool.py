"""The pool: what a backend's import may take, and what its functions may."""

import re
import time

import pytest

from mla_ref.case import Case
from mla_ref.presets import PRESETS
from oracles.matrix import Job
from oracles.pool import judge_all
from oracles.verdict import PASS, TIMEOUT
from oracles.worker import Limits

# Its import takes longer than its functions may; as long as one of them takes.
SLOW = """
import time
from mla_ref.backend import Backend
from mla_ref.rope import BACKEND as RIGHT

def waiting(*inputs):
    time.sleep({seconds})
    return RIGHT.fn(*inputs)

time.sleep({seconds})
VARIANTS = {{"waiting": waiting, "again": RIGHT.fn}}
BACKEND = Backend("slow", "rope", RIGHT.fn, RIGHT.numerics, variants=VARIANTS)
"""


@pytest.mark.parametrize("patience", [60.0, 1.0])
def test_an_import_has_time_of_its_own_and_functions_have_none_of_it(patience, tmp_path, monkeypatch):
    seconds, limit = 3.0, 2.0
    (tmp_path / "slow_import.py").write_text(SLOW.format(seconds=seconds))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("oracles.pool.IMPORT_SECONDS", patience)
    config = PRESETS["a.x-k2"].shard(16)
    case = Case(problem="rope", config=config, q_lens=(1,), kv_lens=(2,))
    begun = time.monotonic()
    [(_, verdicts)] = judge_all([Job(case, ("slow_import",), ("value",), "cpu")], 1, Limits(limit))
    found = {verdict.variant: (verdict.status, verdict.detail) for verdict in verdicts}
    told = r"took longer than 2 s in {}, slow_import\.py:\d+"
    if patience < limit:
        # The greater of the two: an import is never given less than a function.
        assert set(found) == {""}
        assert found[""][0] == TIMEOUT
        assert re.fullmatch(told.format("<module>"), found[""][1]), found
        return
    assert time.monotonic() - begun > seconds
    assert [found[name][0] for name in ("default", "waiting", "again")] == [PASS, TIMEOUT, PASS]
    assert re.fullmatch(told.format("waiting"), found["waiting"][1]), found
