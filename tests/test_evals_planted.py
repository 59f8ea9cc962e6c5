import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="models are loaded by transformers")
pytest.importorskip("tokenizers", reason="the checkpoints' tokenizer needs tokenizers")
pytest.importorskip("scipy", reason="the statistics of the gate need scipy")

from evals.calibration import FORMATS, MOVED, parted
from evals.model import Model, load
from evals.parity import Comparison
from evals.path import AttentionPath, attention_of
from evals.planted import Planted, bugs, in_16_bits, right
from evals.statistics import FAIL, INCONCLUSIVE, PASS, Paired, decide
from evals.tiers import Text, defined, divergence, forced_logits, reference_logits, shadow
from evals.trial import (
    CHECKPOINTS,
    FACTORS,
    MEASURES,
    NOISE,
    TURNED,
    Line,
    cost_of_format,
    costs,
    decided,
    limits,
    lines_of,
    measure,
    measured_noise,
    texts_of,
)
from mla_ref.layer import layer_around

MINI, GEOM = CHECKPOINTS / "mini", CHECKPOINTS / "geom"
SCALE = json.loads((MINI / NOISE).read_text())["kv_scale"]
RIGHT = {path.name: path for path in right(SCALE)}
BUGS = {bug.name: bug for bug in bugs(SCALE)}

PARTS = ("sha256", "model_dtype", "kv_scale", "noise", "turned", "cost")  # of what is stored

# They are outside attention, whose inputs both sides share in tier 1.
OUTSIDE = {
    "fp8 scale 8 times too small",
    "decoded tokens rotated one position late",
    "positions restart in every chunk",
}


@pytest.fixture(scope="module")
def mini() -> Model:
    return load(MINI)


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    """A story and a list of ten."""
    return texts_of(MINI)[::2]


@pytest.fixture(scope="module")
def references() -> dict[AttentionPath, list[torch.Tensor]]:
    return {}


def _lines(planted: Planted, mini: Model, texts: list[Text], references: dict) -> tuple[Line, ...]:
    path = planted.path
    key = replace(
        defined(path), block_size=AttentionPath.block_size
    )  # which changes no bit of the definition
    if key not in references:
        references[key] = reference_logits(mini, key, texts)
    seen, apart = measure(mini, path, planted.attend(mini), planted.layer(mini), texts, references[key])
    return lines_of(seen, apart, limits(measured_noise(MINI), path))


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_path_is_within_noise(name: str, mini: Model, texts: list[Text], references: dict):
    lines = _lines(RIGHT[name], mini, texts, references)
    assert all(line.ok for line in lines), lines


@pytest.mark.parametrize("fmt", ["bf16", "fp8_ds_mla"])
@pytest.mark.parametrize("decode", ["evals.flash_latent", "evals.flash_latent[lazy maximum]"])
def test_a_kernel_of_16_bits_is_within_noise(decode: str, fmt: str, mini: Model, texts: list[Text]):
    """In other chunks and blocks than its noise was measured in, and with another prefill."""
    path = AttentionPath(
        decode=decode, prefill="mla_fast.sdpa", chunk=64, block_size=64, cache_format=fmt, dtype="bfloat16"
    )
    noise, attention = measured_noise(MINI), attention_of(path, mini.config)
    reference = reference_logits(mini, path, texts)
    seen, apart = measure(mini, path, attention, layer_around(attention), texts, reference)
    lines = lines_of(seen, apart, limits(noise, path))
    lines += cost_of_format(mini, path, attention, texts, noise)
    assert {line.tier for line in lines} == {"T1 shadow", "T2 logits", "T2 cost"}
    assert all(line.ok for line in lines), lines


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_seen_and_by_the_tier_that_can(name: str, mini: Model, texts: list[Text], references: dict):
    lines = _lines(BUGS[name], mini, texts, references)
    tiers = {line.tier for line in lines if not line.ok}
    assert tiers == ({"T2 logits"} if name in OUTSIDE else {"T1 shadow", "T2 logits"}), lines


@pytest.mark.parametrize("fmt", FORMATS[1:])
def test_codes_that_noise_turns_over_are_within_the_limits(fmt: str, mini: Model, texts: list[Text]):
    """Other codes than the limits were measured with, by moves as large as the noise of a right path."""
    over = AttentionPath(cache_format=fmt, kv_scale=SCALE)
    noise = measured_noise(MINI)
    allowed = limits(noise, over)
    [apart] = parted(mini, over, texts, noise["noise"][f"float32/{fmt}"]["median"], [MOVED])
    assert 0.0 < apart.max_kl <= allowed["max_kl"]
    assert apart.mean_kl <= allowed["mean_kl"]
    assert apart.max_logit <= allowed["max_logit"]


@pytest.mark.parametrize("folder", [MINI, GEOM], ids=["mini", "geom"])
def test_a_limit_has_one_margin(folder: Path):
    """A multiple of the noise of right paths, or what a path comes to that is off by that multiple."""
    noise = measured_noise(folder)
    assert set(noise["turned"]) == {f"float32/{fmt}" for fmt in FORMATS[1:]}
    for kind, found in noise["noise"].items():
        dtype, fmt = kind.split("/")
        allowed = limits(noise, AttentionPath(dtype=dtype, cache_format=fmt))
        turned = noise["turned"].get(kind, {})
        assert set(turned) <= set(TURNED)
        assert allowed == {name: FACTORS[dtype] * found[name] for name in MEASURES} | turned
        assert all(found[name] <= turned[name] for name in turned)


def test_the_reference_takes_the_steps_of_the_path(mini: Model, texts: list[Text]):
    """So their projections have the same shapes, and what they cache before any attention is the same."""
    path = replace(RIGHT["drafts of three"].path, cache_format="fp8_ds_mla", block_size=64)
    same = AttentionPath(cache_format="fp8_ds_mla", block_size=64, chunk=96, decode_threshold=3)
    assert defined(path) == defined(replace(path, dtype="bfloat16")) == same
    caches = []
    for each in (path, same):
        attention, first = attention_of(each, mini.config), []

        def watched(*args, attention=attention, first=first):
            first.append(args[2])
            return attention(*args)

        forced_logits(mini, layer_around(watched), each, [Text(texts[0].prompt, texts[0].answer[:5])])
        caches.append(first[0].view(torch.uint8))
    assert torch.equal(*caches)


@pytest.fixture(scope="module")
def geom() -> Model:
    return load(GEOM)


@pytest.fixture(scope="module")
def plain_16_bits(geom: Model) -> tuple[list[Text], list[torch.Tensor]]:
    """A story and a list of ten, and the reference's logits over a bf16 cache."""
    texts = texts_of(GEOM)[::2]
    return texts, reference_logits(geom, in_16_bits(RIGHT["absorbed"]).path, texts)


@pytest.mark.parametrize(
    ("name", "tiers"),
    [
        ("softmax scale + 1 %", {"T2 logits"}),
        ("second page read twice in decode", {"T1 shadow"}),
        ("merge takes lse for base 2", {"T1 shadow", "T2 logits"}),
    ],
)
def test_the_faintest_bugs_are_seen_in_16_bits(name: str, tiers: set[str], geom: Model, plain_16_bits: tuple):
    """Of the seventeen in bfloat16 the three that are nearest to their limits; what does not see them is a
    control: rounding alone is within noise."""
    texts, reference = plain_16_bits
    bug = in_16_bits(BUGS[name])
    found = measure(geom, bug.path, bug.attend(geom), bug.layer(geom), texts, reference)
    lines = lines_of(*found, limits(measured_noise(GEOM), bug.path))
    assert {line.tier for line in lines if not line.ok} == tiers, lines


def test_there_are_seventeen():
    assert len(BUGS) == 17
    assert set(BUGS) > OUTSIDE


def test_nan_is_outside_every_limit(mini: Model, texts: list[Text]):
    def broken(*args):
        right = RIGHT["absorbed"].attend(mini)(*args)
        return right._replace(out=right.out * torch.nan)

    seen = shadow(mini, RIGHT["absorbed"].path, broken, texts[:1])
    assert seen.median == seen.worst == float("inf")
    rows = [torch.zeros(2, 5)]
    apart = divergence(rows, [rows[0] * torch.nan])
    assert apart.mean_kl == apart.max_kl == apart.max_logit == float("inf")
    assert not Line(tier="T2 logits", measure="max_kl", found=float("nan"), limit=1.0).ok


def test_noise_belongs_to_its_weights(tmp_path: Path):
    with pytest.raises(ValueError, match=r"gate\.json: is missing; python -m evals calibrate"):
        measured_noise(tmp_path)
    with pytest.raises(ValueError, match="is of a float32 model, not of a bfloat16 one; calibrate it again"):
        measured_noise(MINI, "bfloat16")
    shutil.copy(MINI / NOISE, tmp_path)
    weights = bytearray((MINI / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match=r"sha256 of its weights is .*, but gate\.json is of"):
        measured_noise(tmp_path)


KIND = "float32/fp32"


@pytest.mark.parametrize(
    "edit",
    [
        lambda noise: [noise],
        lambda noise: noise | {"cost": {fmt: {} for fmt in FORMATS}},
        lambda noise: noise | {"cost": noise["cost"] | {KIND: {"mean_kl": 0.0}}},
        lambda noise: noise | {"noise": noise["noise"] | {KIND: dict.fromkeys(noise["noise"][KIND], "x")}},
        *(
            lambda noise, n=n: (
                noise | {"noise": noise["noise"] | {KIND: dict.fromkeys(noise["noise"][KIND], n)}}
            )
            for n in (float("inf"), float("nan"), -1.0)
        ),
        lambda noise: noise | {"noise": noise["noise"] | {"float32": noise["noise"][KIND]}},
        lambda noise: noise | {"noise": None},
        lambda noise: noise | {"turned": noise["turned"] | {"float32/bf16": {"mean_kl": 0.0}}},
        lambda noise: noise | {"turned": {}},
        lambda noise: noise | {"turned": noise["turned"] | {"float32/bf16": dict.fromkeys(TURNED, -1.0)}},
        lambda noise: noise | {"sha256": None},
        *(lambda noise, gone=gone: {key: noise[key] for key in noise if key != gone} for gone in PARTS),
    ],
)
def test_noise_of_another_version_is_refused(edit, tmp_path: Path):
    shutil.copy(MINI / "model.safetensors", tmp_path)
    (tmp_path / NOISE).write_text(json.dumps(edit(json.loads((MINI / NOISE).read_text()))))
    with pytest.raises(ValueError, match=r"gate\.json: is of another version; calibrate it again"):
        measured_noise(tmp_path)


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe"])
def test_noise_that_is_not_json_is_named(data: bytes, tmp_path: Path):
    (tmp_path / NOISE).write_bytes(data)
    with pytest.raises(ValueError, match=r"gate\.json: not JSON: "):
        measured_noise(tmp_path)


def test_divergence_is_a_sum_of_squares_however_small_it_is():
    """Twice the difference of logits is four times the divergence, far below float64's roundoff."""
    logits = torch.tensor([[3.0, 1.0, -2.0]])
    moved = [logits + torch.tensor([[2.0**-n, 0.0, 0.0]], dtype=torch.float64) for n in (30, 31)]
    two, one = (divergence([logits.double()], [each]).max_kl for each in moved)
    assert 0.0 < one < torch.finfo(torch.float64).eps
    assert 3.99 < two / one < 4.01
    assert divergence([logits], [logits]).max_kl == 0.0


def test_an_order_that_changes_counts_only_where_one_token_stands_out():
    """The second row's likeliest token is another one; the first row's two are too near to each other."""
    want, got = torch.tensor([[1.0, 0.95], [2.0, 0.0]]), torch.tensor([[1.0, 0.5], [0.0, 2.0]])
    assert divergence([want], [got]).top1 == 0.0
    assert divergence([want], [want]).top1 == 1.0


def lines(**shares: float) -> tuple[Line, ...]:
    """A line of each tier, so many times its limit."""
    return tuple(Line(tier=tier, measure="worst", found=share, limit=1.0) for tier, share in shares.items())


def answered(baseline: int, lost: int) -> Comparison:
    pair = Paired(both=baseline - lost, lost=lost, won=0, neither=1000 - baseline)
    return Comparison(
        filter="strict-match", pair=pair, decision=decide(pair, 0.05), text_equal=1.0, flips=()
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "paired", "outcome", "reason"),
    [
        (lines(T1=0.5, T2=1.0), None, PASS, "T1 and T2 are within noise; T3 was left out"),
        (lines(T1=2.0, T2=3.0), None, FAIL, "T2: worst is 3, at most 1 is noise; first at question 4"),
        (lines(T1=4.0, T2=3.0), None, FAIL, "T1: worst is 4, at most 1 is noise; worst in layer 2"),
        (lines(T1=2.0), answered(950, 0), FAIL, "T1: worst is 2, at most 1 is noise; worst in layer 2"),
        (lines(T1=1.0), answered(950, 0), PASS, "T3: 95 % bound on the loss"),
        (lines(T1=1.0), answered(950, 200), FAIL, "T3: 200 questions lost"),
        (lines(T1=1.0), answered(900, 0), PASS, "T3: 95 % bound on the loss"),
        (lines(T1=1.0), answered(899, 0), INCONCLUSIVE, "T3: the baseline solves 89.90%, a gate needs 90%"),
    ],
)
def test_a_trial_fails_by_any_tier_and_passes_by_all(found, paired, outcome: str, reason: str):
    said = decided(AttentionPath(), found, paired, "layer 2", "question 4")
    assert said[0] == outcome
    assert said[1].startswith(reason)


def test_a_trial_without_limits_is_undecided():
    unmeasured = (Line(tier="T1", measure="worst", found=9.0, limit=math.nan), *lines(T2=9.0))
    said = decided(AttentionPath(dtype="float16", cache_format="bf16"), unmeasured, answered(950, 0), "")
    assert said == (INCONCLUSIVE, "no noise was measured for float16 over a bf16 cache")


def test_a_float32_cache_costs_nothing():
    noise = measured_noise(MINI)
    assert costs(noise, AttentionPath()) is None
    assert costs(noise, AttentionPath(cache_format="bf16", dtype="float16")) is None
    known = noise["cost"]["float32/bf16"]
    assert costs(noise, AttentionPath(cache_format="bf16")) == {name: 3.0 * known[name] for name in known}


def test_what_was_not_measured_has_no_limits():
    noise = measured_noise(MINI)
    assert limits(noise, AttentionPath(dtype="float16")) is None
    assert limits(noise, replace(RIGHT["absorbed"].path)) is not None
