"""A cache format that another package brings as an entry point, in a process of its own."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mla_ref.cache_write import BACKEND as WRITER
from mla_ref.case import Case
from mla_ref.formats import CacheFormat, formats
from mla_ref.latent import BACKEND as LATENT
from mla_ref.layer import BACKEND as LAYER
from mla_ref.presets import preset
from oracles.command import main
from oracles.tables import TABLES, contract
from oracles.verdict import FAIL, PASS
from oracles.verify import judge

ROOT = Path(__file__).parent.parent
FORMAT = """
from dataclasses import replace
from mla_ref.formats import bf16

FORMAT = replace(bf16.FORMAT, name="theirs")
TAKEN = bf16.FORMAT
NUMBER = 7
"""


def installed(folder: Path, target: str) -> None:
    """A package of one module, as an installer leaves it."""
    (folder / "their_format.py").write_text(FORMAT)
    info = folder / "their_format-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-format\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mla_verify.formats]\ntheirs = their_format:{target}\n")


def python(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    paths = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(folder)!r}]\n"
    return subprocess.run([sys.executable, "-c", paths + code], capture_output=True, text=True, check=False)


def test_a_format_of_another_package_is_listed_dealt_and_judged(tmp_path: Path) -> None:
    installed(tmp_path, "FORMAT")
    code = """
from mla_ref.case import Case
from mla_ref.formats import formats
from mla_ref.presets import preset
from oracles.verify import find_backend, judge

assert list(formats())[-1] == "theirs"
case = Case(problem="latent_attention", config=preset("a.x-k2").shard(16), q_lens=(1,), kv_lens=(33,),
            cache_format="theirs")
assert Case.from_json(case.to_json()) == case
print(*(v.status for v in judge(find_backend("mla_ref.latent"), case, oracles=["value", "lse"])))
"""
    ran = python(tmp_path, code)
    assert ran.stdout == "pass pass\n", ran.stderr


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("TAKEN", "their_format:TAKEN is called 'bf16'"),
        ("NUMBER", "their_format:NUMBER is int, not CacheFormat"),
    ],
)
def test_an_entry_point_that_is_no_new_format_is_refused(tmp_path: Path, target: str, message: str) -> None:
    installed(tmp_path, target)
    ran = python(tmp_path, "from mla_ref.formats import formats; formats()")
    assert ran.returncode == 1
    assert f"ValueError: mla_verify.formats: {message}" in ran.stderr


GROUP = 32


def encode(kv_c, k_pe, kv_scale):
    """Codes of four bits, two a byte; a scale and a zero for 32 channels in float16; rope in float16."""
    tiles = kv_c.float().unflatten(-1, (-1, GROUP))
    low, high = tiles.amin(-1, keepdim=True), tiles.amax(-1, keepdim=True)
    scale, zero = ((high - low) / 15).clamp(2.0**-14, 4096.0).half(), low.clamp(-60_000.0, 60_000.0).half()
    codes = ((tiles - zero.float()) / scale.float()).round().clamp(0, 15).to(torch.uint8).flatten(-2)
    parts = codes[..., ::2] | codes[..., 1::2] << 4, scale.squeeze(-1), zero.squeeze(-1), k_pe.half()
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def decode(entries, c, r, kv_scale, dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    parts = entries[..., : c // 2 + c // 8 + 2 * r].split([c // 2, c // 16, c // 16, 2 * r], -1)
    packed, scale, zero, rope = (part.clone() for part in parts)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).to(wide).unflatten(-1, (-1, GROUP))
    scale, zero = (x.view(torch.float16).to(wide).unsqueeze(-1) for x in (scale, zero))
    return (codes * scale + zero).flatten(-2).to(dtype), rope.view(torch.float16).to(dtype)


def rope_first(kv_c, k_pe, kv_scale):
    return torch.cat([k_pe, kv_c], -1).bfloat16()


def rope_first_decoded(entries, c, r, kv_scale, dtype):
    return entries[..., r : r + c].to(dtype), entries[..., :r].to(dtype)


STRANGE = (
    CacheFormat(
        name="int4",
        dtype=torch.uint8,
        entry_width=lambda c, r: c // 2 + c // 8 + 2 * r,
        encode=encode,
        decode=decode,
        latent_roundoff=1 / 15,
        why_not_dims=lambda c, r: f"c={c} is no multiple of {GROUP}" if c % GROUP else None,
    ),
    CacheFormat(
        name="rope_first",
        dtype=torch.bfloat16,
        entry_width=lambda c, r: c + r,
        encode=rope_first,
        decode=rope_first_decoded,
        latent_roundoff=2.0**-8,
    ),
)


def case_of(problem, fmt, **changes):
    shape = {"q_lens": (2, 3), "kv_lens": (35, 5), "seed": 3}
    return Case(
        problem=problem,
        config=preset("minicpm3-4b").shard(40),
        cache_format=fmt.name,
        dtype="float32",
        **shape | changes,
    )


@pytest.fixture(params=STRANGE, ids=lambda fmt: fmt.name)
def theirs(request, monkeypatch):
    monkeypatch.setitem(formats(), request.param.name, request.param)
    return request.param


@pytest.mark.parametrize("regime", ["plain", "heavy"])
def test_what_is_right_over_a_format_that_only_itself_knows_is_no_alarm(theirs, regime):
    for right, oracles in (
        (LATENT, ["value", "value_scale", "causal", "needle", "many_requests"]),
        (WRITER, ["stored", "quantiser", "long_request"]),
        (LAYER, ["value", "stored"]),
    ):
        case = case_of(right.problem, theirs, regime=regime)
        verdicts = judge(replace(right, variants={}), case, oracles=oracles)
        assert [(v.oracle, v.detail) for v in verdicts if v.status != PASS] == []
        assert all(v.num_checked for v in verdicts if v.oracle == "stored")


def test_what_is_wrong_over_such_a_format_is_seen(theirs):
    def half_as_large(*given):
        kv_c, k_pe = theirs.decode(*given)
        return kv_c / 2 if kv_c.abs().max() > 4 else kv_c, k_pe

    def attends(*given):
        return LATENT.fn(*given[:-2], replace(theirs, decode=half_as_large), given[-1])

    def writes(kv_c, k_pe, kv_cache, slot_mapping, cache_format, kv_scale):
        return WRITER.fn(kv_c.flip(-1), k_pe, kv_cache, slot_mapping, cache_format, kv_scale)

    def to_the_next_slot(kv_c, k_pe, kv_cache, slot_mapping, cache_format, kv_scale):
        return WRITER.fn(kv_c, k_pe, kv_cache, slot_mapping.roll(1), cache_format, kv_scale)

    for right, fn, oracle in (
        (LATENT, attends, "value_scale"),
        (WRITER, writes, "stored"),
        (WRITER, writes, "quantiser"),
        (WRITER, to_the_next_slot, "stored"),
    ):
        wrong = replace(right, fn=fn, variants={})
        assert [v.status for v in judge(wrong, case_of(right.problem, theirs), oracles=[oracle])] == [FAIL]


def test_a_strangers_format_is_listed_with_where_it_comes_from(theirs):
    rows = {row[0]: row for row in TABLES["formats"]().rows}
    assert rows[theirs.name][-1] == f"Brought by {__name__}."
    assert contract(theirs.name).startswith("A cache format that another package brings")


def test_a_format_that_does_not_load_is_one_line_whatever_is_listed(monkeypatch, capsys):
    def broken():
        raise ValueError("cache format theirs: cannot be loaded")

    monkeypatch.setattr("oracles.tables.formats", broken)
    assert main(["list", "regimes"]) == 2
    assert capsys.readouterr().err.splitlines() == ["mla-verify: cache format theirs: cannot be loaded"]
