import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="models are loaded by transformers")
pytest.importorskip("tokenizers", reason="the checkpoints' tokenizer needs tokenizers")
pytest.importorskip("scipy", reason="the statistics of the gate need scipy")

from evals.model import Model, load
from evals.path import AttentionPath
from evals.planted import Planted, bugs, right
from evals.tiers import Text, divergence, reference_logits, shadow
from evals.trial import CHECKPOINTS, NOISE, Line, limits, lines_of, measure, measured_noise, texts_of

MINI = CHECKPOINTS / "mini"
SCALE = json.loads((MINI / NOISE).read_text())["kv_scale"]
RIGHT = {path.name: path for path in right(SCALE)}
BUGS = {bug.name: bug for bug in bugs(SCALE)}

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
    key = AttentionPath(cache_format=path.cache_format, kv_scale=path.kv_scale)
    if key not in references:
        references[key] = reference_logits(mini, key, texts)
    seen, apart = measure(mini, path, planted.attend(mini), planted.layer(mini), texts, references[key])
    return lines_of(seen, apart, limits(measured_noise(MINI), path))


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_path_is_within_noise(name: str, mini: Model, texts: list[Text], references: dict):
    lines = _lines(RIGHT[name], mini, texts, references)
    assert all(line.ok for line in lines), lines


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_seen_and_by_the_tier_that_can(name: str, mini: Model, texts: list[Text], references: dict):
    lines = _lines(BUGS[name], mini, texts, references)
    tiers = {line.tier for line in lines if not line.ok}
    assert tiers == ({"T2 logits"} if name in OUTSIDE else {"T1 shadow", "T2 logits"}), lines


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
    shutil.copy(MINI / NOISE, tmp_path)
    weights = bytearray((MINI / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match=r"sha256 of its weights is .*, but gate\.json is of"):
        measured_noise(tmp_path)


def test_what_was_not_measured_has_no_limits():
    noise = measured_noise(MINI)
    assert limits(noise, AttentionPath(dtype="float16")) is None
    assert limits(noise, replace(RIGHT["absorbed"].path)) is not None
