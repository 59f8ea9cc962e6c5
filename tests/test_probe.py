"""The probe: what it finds out about right kernels and liars, and the adapters that it writes."""

import importlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import liars
import pytest
import torch

from mla_ref.case import Case
from mla_ref.layout import CacheLayout
from mla_ref.problem import problem
from oracles import conventions
from oracles.adapter_text import Manner, source
from oracles.call_spec import ROLES, specs
from oracles.command import main
from oracles.conventions import Answer, Fit, case_of, probe, verdict
from oracles.probe_cli import FIRST, State, interrogated, kernel_named
from oracles.verdict import PASS, UNSUPPORTED
from oracles.verify import judge, oracles_for

# What an honest kernel of ``liars`` answers.
HONEST = {
    "scale": "as given",
    "causal mask, q_len > 1": "causal=True: bottom-right",
    "out": "[b s h c]",
    "lse base": "e",
    "lse layout": "[b h s]",
    "lse of": "scaled scores",
    "lse dtype": "float32",
    "default scale": "none: it must be given",
    "entries past the length": "never used",
    "ragged queries": "no",
    "deterministic": "yes",
    "batch-invariant": "yes",
    "split-invariant": "undetermined",
    "inputs written": "no",
    "entry stride": "honoured",
    "block stride": "honoured",
    "offset": "honoured",
    "steps of 16 bytes": "honoured",
    "alignment": "one element",
    "rows without a key: out": "0",
    "rows without a key: lse": "-∞",
    "more queries than keys": "out 0, lse -∞",
    "-1 in the table's tail": "not followed",
    "garbage in the table's tail": "not followed",
    "adapter": "holds",
}

# The deviations of each liar, and nothing else may be said of it.
LIARS = {
    "honest": {},
    "base_two": {"lse base": "2"},
    "transposed_lse": {"lse layout": "[h t]"},
    "infinite_when_empty": {
        "rows without a key: lse": "+∞",
        "more queries than keys": "out 0, lse +∞",
    },
    "wide_default": {"default scale": "576^-0.5 (latent + rope)"},
    "top_left": {"causal mask, q_len > 1": "causal=True: top-left"},
    "past_the_length": {
        "entries past the length": "read and attended to, to the end of the last block",
        "more queries than keys": "not asked",
    },
}
TWO_AT_ONCE = {
    "base_two_transposed": {"lse base": "2", "lse layout": "[h t]"},
    "top_left_and_wide": {
        "causal mask, q_len > 1": "causal=True: top-left",
        "default scale": "576^-0.5 (latent + rope)",
    },
    "base_two_infinite": {
        "lse base": "2",
        "rows without a key: lse": "+∞",
        "more queries than keys": "out 0, lse +∞",
    },
    "unmasked_past_the_length": {
        "causal mask, q_len > 1": "causal=True: none",
        "entries past the length": "read and attended to, to the end of the last block",
    },
    "ignores_scale_base_two": {
        "scale": "576^-0.5 (latent + rope)",
        "default scale": "the parameter is ignored",
        "lse base": "2",
        "adapter": "declines all that was tried",
    },
}
MORE = {
    "unmasked": {"causal mask, q_len > 1": "causal=True: none"},
    "nan_when_empty": {
        "rows without a key: out": "NaN",
        "rows without a key: lse": "NaN",
        "more queries than keys": "out NaN, lse NaN",
    },
    "zero_weight": {"entries past the length": "read, and weighted 0: NaN spreads"},
    "narrow_lse": {"lse dtype": "bfloat16", "rows without a key: lse": "none returned"},
    "unscaled_lse": {"lse of": "scores before scaling"},
    "packed": {"entry stride": "refuses", "block stride": "refuses", "alignment": "not asked"},
    "aligned": {"alignment": "16 bytes"},
    "refuses_negative": {"-1 in the table's tail": "refuses"},
    "restless": {
        "deterministic": "no",
        "batch-invariant": "undetermined",
        "causal mask, q_len > 1": "bottom-right",
    },
    "in_batch": {"batch-invariant": "no", "causal mask, q_len > 1": "bottom-right"},
}
# Small sizes, but for what has a default made for large ones.
SMALL = conventions.Geometry(32, 16, 4, 16, "bfloat16", "bf16")


def told(target: str, *given: str, geometry=SMALL) -> tuple[dict[str, str], Manner | None, list[Answer]]:
    answers, manner = probe(target, specs(kernel_named(target), given), "cpu", geometry)
    return {answer.question: answer.value for answer in answers}, manner, answers


def imported(manner: Manner, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    """The adapter as a user has it: a file, pasted and imported."""
    (folder / f"{name}.py").write_text(source(manner), encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    return importlib.import_module(name).BACKEND


# They make their own requests, of a case's model, stage and layout: two of the cases are enough for them.
OF_THEIR_OWN = ("long_request", "many_requests")
GIVEN = [rule.name for rule in oracles_for(problem("latent_attention")) if rule.name not in OF_THEIR_OWN]


def judged(backend, geometry) -> dict[str, int]:
    """Verdicts by every oracle on cases of all kinds; none may be anything but these two."""
    k = geometry.block_size
    lengths = [
        ((1, 1, 1), (2 * k + 2, 0, 7)),
        ((1, 1), (2 * k, 3 * k)),
        ((2, 2), (k + 1, 1)),
        ((1, 0, 3), (k, k, 5)),
        ((k, k), (k, k)),
    ]
    layouts = [CacheLayout(), CacheLayout(entry_align=256), CacheLayout(block_gap=1024, offset=512)]
    counts = {PASS: 0, UNSUPPORTED: 0}
    for i, (q_lens, kv_lens) in enumerate(lengths):
        case = case_of(geometry, q_lens, kv_lens, layouts[i % 3])
        for verdict_ in judge(backend, case, oracles=None if i in (0, 2) else GIVEN):
            assert verdict_.status in counts, verdict_
            counts[verdict_.status] += 1
    return counts


@pytest.fixture(autouse=True)
def no_copies_of_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters that copy a pool are stopped before they have copied gigabytes, not after."""
    monkeypatch.setattr("oracles.rules.index_range.OF_A_CALL", 2**28)


@pytest.mark.parametrize("name", [*LIARS, *TWO_AT_ONCE, *MORE])
def test_every_deviation_is_found_and_nothing_else(name, tmp_path, monkeypatch):
    deviations = {**LIARS, **TWO_AT_ONCE, **MORE}[name]
    geometry = conventions.GEOMETRIES[0] if "576" in str(deviations) else SMALL
    values, manner, _ = told(f"liars:{name}", geometry=geometry)
    wanted = HONEST | deviations
    found = {question: value for question, value in values.items() if question in wanted}
    if name == "restless":  # no claim of two runs can be held to it
        found.pop("adapter")
    missing = set(wanted) - set(found)
    assert missing <= {"more queries than keys", "adapter", "steps of 16 bytes"}, missing
    assert found == {question: wanted[question] for question in found}
    assert manner is not None
    backend = imported(manner, tmp_path, monkeypatch, f"adapter_{name}")
    if name != "restless":
        assert (judged(backend, geometry)[PASS] > 0) == (values["adapter"] == "holds")


def test_the_reference_and_sdpa(tmp_path, monkeypatch):
    values, manner, _ = told("mla_ref.latent:latent")
    wanted = HONEST | {
        "causal mask, q_len > 1": "bottom-right",
        "out": "[t h c]",
        "lse layout": "[t h]",
        "ragged queries": "yes",
    }
    assert {question: values[question] for question in wanted} == wanted
    assert (
        judged(imported(manner, tmp_path, monkeypatch, "adapter_latent"), conventions.GEOMETRIES[0])[PASS]
        > 90
    )

    sdpa = "torch.nn.functional:scaled_dot_product_attention"
    values, manner, _ = told(sdpa, geometry=conventions.GEOMETRIES[0])
    assert values["causal mask, q_len > 1"] == "is_causal=True: top-left"
    assert values["explicit mask"] == "honoured by attn_mask"
    assert values["lse"] == "none returned"
    assert values["default scale"] == "576^-0.5 (latent + rope)"
    assert values["entries past the length"] == "read, and weighted 0: NaN spreads"
    assert values["out"] == "[b h s c]"
    assert judged(imported(manner, tmp_path, monkeypatch, "adapter_sdpa"), SMALL)[PASS] > 60


def test_ragged_queries_and_inputs_that_are_overwritten(tmp_path, monkeypatch):
    values, manner, _ = told("liars:packed_queries")
    assert (values["ragged queries"], values["lse layout"], values["lse base"]) == ("yes", "[h t]", "2")
    assert values["inputs written"] == "no"
    values, manner, _ = told("liars:overwrites")
    assert values["inputs written"] == "ql_nope"
    assert values["adapter"] == "holds"
    judged(imported(manner, tmp_path, monkeypatch, "adapter_overwrites"), SMALL)


def test_an_adapter_is_right_because_of_its_conversions(tmp_path, monkeypatch):
    """Each conversion taken back is a red verdict."""
    case = case_of(SMALL, (1, 1), (34, 0))
    for name, undone in (
        ("base_two", {"lse_factor": ""}),
        ("transposed_lse", {"lse_order": "t h"}),
        ("infinite_when_empty", {"empties": False}),
        ("zero_weight", {"zeroed": False}),
    ):
        _, manner, _ = told(f"liars:{name}")
        assert {v.status for v in judge(imported(manner, tmp_path, monkeypatch, f"right_{name}"), case)} == {
            PASS
        }
        wrong = imported(replace(manner, **undone), tmp_path, monkeypatch, f"wrong_{name}")
        assert {v.status for v in judge(wrong, case)} != {PASS}


def test_what_nothing_explains_stays_open():
    values, manner, answers = told("liars:nonsense")
    assert values == {"call": "undetermined"}
    assert manner is None
    assert not answers[0].known
    assert "nothing tried fits; nearest is" in answers[0].evidence


def test_predictions_that_fit_alike_are_no_answer():
    one, two = (Fit(True, ratio, (word,), (word,)) for ratio, word in ((0.2, "here"), (0.9, "there")))
    assert verdict([one, two]) == (None, "here and there fit alike")
    assert verdict([one])[0] == one
    assert verdict([one._replace(holds=False, ratio=3.0)])[0] is None
    assert verdict([])[0] is None


def test_a_parameter_without_a_role_is_named():
    with pytest.raises(ValueError, match="parameter 'tuning' has no role: say --arg tuning=ROLE"):
        specs(liars.needs_more)
    (spec, *_) = specs(liars.needs_more, ["tuning=None"])
    assert spec.arguments["tuning"] == "None"
    with pytest.raises(ValueError, match="--arg nothing: no such parameter; there are q, kv_cache"):
        specs(liars.needs_more, ["tuning=None", "nothing=q"])
    with pytest.raises(ValueError, match=r"--arg 'tuning': expected PARAMETER=ROLE"):
        specs(liars.needs_more, ["tuning"])


def test_a_role_is_tried_in_each_of_its_shapes():
    def kernel(q, pool, block_table, seqlens_k, scale): ...

    caches = {spec.arguments["pool"] for spec in specs(kernel, ["pool=kv_cache"])}
    assert caches == {"kv_cache", "kv_cache.unsqueeze(2)"}


def test_roles_are_told(capsys):
    given = (
        "a=query_batched", "b=kv_cache", "table=block_table", "lens=cache_seqlens", "factor=scale"
    )  # fmt: skip
    values, _, _ = told("liars:renamed", *given)
    assert values["lse layout"] == "[b h s]"
    assert values["adapter"] == "holds"
    given = tuple(text.replace("query_batched", ROLES["query_batched"]) for text in given)
    assert told("liars:renamed", *given)[0] == values


def test_a_kernel_that_dies_leaves_the_others_answered():
    target = "liars:dies_of_negative"
    first = State(target, specs(liars.dies_of_negative), "cpu", SMALL)
    steps = list(interrogated(first, 60.0))
    values = {answer.question: (answer.value, answer.evidence) for answers, _ in steps for answer in answers}
    state = steps[-1][1]
    assert values["-1 in the table's tail"] == ("ends its process", "it ended with exit code 17")
    assert values["garbage in the table's tail"][0] == "not followed"
    assert values["adapter"][0] == "holds"
    assert state.manner is not None
    assert state.manner.clamped
    assert state.at > first.at == FIRST


def test_the_command_prints_a_table_and_writes_the_adapter(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    path = tmp_path / "adapter.py"
    small = ["--latent", "32", "--rope", "16", "--heads", "4", "--block-size", "16"]
    assert main(["probe", "liars:base_two", *small, "--adapter", str(path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^lse base +2 +[\d.e-]+ of its bound; next ", out, re.MULTILINE)
    assert "lse = result[1]" in path.read_text()
    assert main(["probe", "liars:nonsense", "--latent", "128", "--rope", "64", "--heads", "4", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["answers"][0]["value"] == "undetermined"
    assert data["adapter"] == ""


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["liars"], "expected module:callable"),
        (["liars:nothing"], "module 'liars' has no attribute 'nothing'"),
        (["no_such_module:fn"], "No module named 'no_such_module'"),
        (["liars:math"], "is module, which cannot be called"),
        (["liars:needs_more"], "parameter 'tuning' has no role"),
        (["liars:honest", "--dtype", "int4"], "--dtype 'int4' is not one of bfloat16"),
    ],
)
def test_usage(words, complaint, capsys):
    assert main(["probe", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_roles_are_listed(capsys):
    assert main(["probe", "x:y", "--roles"]) == 0
    out = capsys.readouterr().out
    assert all(f"{name} " in out for name in ROLES)


def test_adapters_of_other_layouts_say_what_they_decline():
    manner = Manner(
        target="m:f", spec=specs(liars.honest)[0], dtypes=(("bfloat16", "bf16"),), alignment_bytes=16
    )
    case = case_of(conventions.GEOMETRIES[0], (1,), (64,), CacheLayout(offset=2))
    assert "no multiple of 16" in str(conventions.loaded(manner)["supports"](case))
    for name, layout in (
        ("entry stride", CacheLayout(entry_align=256)),
        ("block stride", CacheLayout(block_gap=64)),
        ("offset", CacheLayout(offset=64)),
    ):
        declining = replace(manner, declined=(name,))
        case = case_of(conventions.GEOMETRIES[0], (1,), (64,), layout)
        assert conventions.loaded(declining)["supports"](case) is not None
        plain = replace(case, layout=CacheLayout())
        assert conventions.loaded(declining)["supports"](plain) is None
        assert isinstance(case, Case)


def test_predictions_of_masks_differ_by_their_keys():
    inputs = conventions.inputs_of(conventions.Bench("cpu", conventions.GEOMETRIES[-1]), (3, 2), (5, 2))
    seen = {mask: conventions.seen_by(inputs, mask).tolist() for mask in ("bottom-right", "top-left", "none")}
    assert seen == {"bottom-right": [3, 4, 5, 1, 2], "top-left": [1, 2, 3, 1, 2], "none": [5, 5, 5, 2, 2]}
    assert torch.equal(inputs.block_table, inputs.block_table.clamp(min=0))


THEIRS = "transformers.models.deepseek_v3.modeling_deepseek_v3"
PAIRS, HALVES = "interleaved: (0, 1), (2, 3), …", "half-split: (0, r/2), (1, r/2 + 1), …"


@pytest.mark.parametrize(
    ("target", "read", "written", "direction"),
    [
        ("mla_ref.rope:rotate", PAIRS, PAIRS, "forwards"),
        (f"{THEIRS}:apply_rotary_pos_emb", HALVES, HALVES, "forwards"),
        (f"{THEIRS}:apply_rotary_pos_emb_interleave", PAIRS, HALVES, "forwards"),
        ("liars:rotate_backwards", HALVES, HALVES, "backwards"),
        ("liars:rotate_heads_first", PAIRS, PAIRS, "forwards"),
    ],
)
def test_rotary_embeddings(target, read, written, direction, capsys):
    if target.startswith("transformers"):
        pytest.importorskip("transformers", reason="asks transformers' own rotations")
    assert main(["probe", target, "--json"]) == 0
    answers = {one["question"]: one["value"] for one in json.loads(capsys.readouterr().out)["answers"]}
    assert (answers["pairs read"], answers["order written"]) == (read, written)
    assert answers["direction"] == direction


def test_a_rotation_that_is_none_stays_open(capsys):
    assert main(["probe", "liars:rotate_twice"]) == 1
    assert re.search(r"^rope +undetermined +nothing tried fits", capsys.readouterr().out, re.MULTILINE)
