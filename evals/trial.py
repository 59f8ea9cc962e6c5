"""One attention path on trial against the definition of MLA, on a checkpoint whose noise was measured."""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from evals.model import Model, load, load_tokenizer
from evals.parity import Comparison, compare, finite
from evals.path import Attention, AttentionPath, Layer, attention_of
from evals.runs import Run
from evals.runs import load as load_run
from evals.statistics import FAIL, INCONCLUSIVE, PASS
from evals.task import TASK, template_rows
from evals.templates import NOT_LEARNT
from evals.tiers import (
    Divergence,
    Shadow,
    Text,
    divergence,
    forced_logits,
    reference_logits,
    shadow,
)
from evals.train.examination import held_out
from mla_ref.layer import layer_around

if TYPE_CHECKING:  # evals.lm imports lm_eval, which tiers 1 and 2 do without
    from evals.planted import Planted

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"
NOISE = "gate.json"
SEED = 40
SHOTS = 2  # of the prompts of tiers 1 and 2, which need no more than several blocks and chunks
MARGIN = 0.05
ANSWER_TOKENS = 96  # more than any held-out answer has
SOLVES = 0.90  # strict-match below which a baseline has nothing to lose

# How far above the measured noise of right variants a path may be. float32 noise lies decades below every
# bug but follows the machine's order of sums; that of 16-bit operands is large and steady. The codes that a
# float32 path turns over in a cache that rounds are measured at this distance, so no factor is above them.
FACTORS = {"float32": 10.0, "bfloat16": 3.0, "float16": 3.0}

# How many times as far from a float32 cache as right paths over the same format a path may be.
COST = 3.0

# What tiers 1 and 2 are held to, and tier 2 against a float32 cache.
MEASURES = ("median", "worst", "mean_kl", "max_kl", "max_logit")
TURNED = ("mean_kl", "max_kl", "max_logit")
COSTS = ("mean_kl", "max_kl")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One measure of one tier: what was found, and the most that is allowed."""

    tier: str
    measure: str
    found: float
    limit: float

    @property
    def ok(self) -> bool:
        """Fails closed: NaN is not within a limit."""
        return self.found <= self.limit

    @property
    def share(self) -> float:
        """Of the limit; infinite above a limit of 0."""
        return self.found / self.limit if self.limit else math.inf if self.found else 0.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a trial found. accuracy: tier 3, strict-match; None where it was left out."""

    path: AttentionPath
    lines: tuple[Line, ...]
    place: str
    accuracy: Comparison | None
    outcome: str
    reason: str


def digest(folder: Path) -> str:
    """sha256 of the checkpoint's weights: of its one file, or of its shards in the order of their names."""
    total = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as data:
            while part := data.read(1 << 24):
                total.update(part)
    return total.hexdigest()


def measured_noise(folder: Path, model_dtype: str = "float32") -> dict[str, Any]:
    """The noise that was stored beside a checkpoint.

    Raises: ValueError if there is none, or it was measured on other weights or with another type of them.
    """
    file = folder / NOISE
    if not file.is_file():
        raise ValueError(f"{file}: is missing; python -m evals calibrate {folder} writes it")
    try:
        noise = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise ValueError(f"{file}: not JSON: {error}") from None
    if not _is_noise(noise):
        raise ValueError(f"{file}: is of another version; calibrate it again")
    if (found := digest(folder)) != noise["sha256"]:
        raise ValueError(
            f"{folder}: sha256 of its weights is {found[:12]}…, but {NOISE} is of {noise['sha256'][:12]}…"
        )
    if noise["model_dtype"] != model_dtype:
        raise ValueError(
            f"{file}: is of a {noise['model_dtype']} model, not of a {model_dtype} one; calibrate it again"
        )
    return cast("dict[str, Any]", noise)


def _is_noise(noise: Any) -> bool:
    """Whether it has every part that a trial reads, each of its kind."""
    try:
        measured = {(kind, name): noise["noise"][kind][name] for kind in noise["noise"] for name in MEASURES}
        lossy = [kind for kind in noise["noise"] if kind.startswith("float32/") and kind != "float32/fp32"]
        kinds = {*lossy, *noise["turned"]}
        turned = {(kind, name): noise["turned"][kind][name] for kind in kinds for name in TURNED}
        cost = {(kind, name): noise["cost"][kind][name] for kind in noise["noise"] for name in COSTS}
        words = [noise["sha256"], noise["model_dtype"], *noise["noise"]]
        numbers = [noise["kv_scale"], *measured.values(), *turned.values(), *cost.values()]
    except (KeyError, TypeError):
        return False
    if not all(isinstance(each, str) for each in words):
        return False
    if any(kind.count("/") != 1 for kind in noise["noise"]):  # a type and a format
        return False
    # An infinite or negative limit is no limit, or one that nothing keeps.
    return all(isinstance(n, int | float) and math.isfinite(n) and n >= 0 for n in numbers)


def limits(noise: Mapping[str, Any], path: AttentionPath) -> dict[str, float] | None:
    """The most that each measure may be for a path of this type and format; None where none was measured."""
    kind = f"{path.dtype}/{path.cache_format}"
    found = noise["noise"].get(kind)
    if found is None:
        return None
    turned = noise["turned"].get(kind, {})
    return {name: turned.get(name, FACTORS[path.dtype] * found[name]) for name in MEASURES}


def limits_digest(noise: Mapping[str, Any]) -> str:
    """sha256 of every limit of a checkpoint, which its noise and the factors above it make."""
    every = {}
    for kind in noise["noise"]:
        dtype, fmt = kind.split("/")
        path = AttentionPath(dtype=dtype, cache_format=fmt)
        every[kind] = limits(noise, path), costs(noise, path)
    return hashlib.sha256(json.dumps(every, sort_keys=True).encode()).hexdigest()


def texts_of(folder: Path, each: int = 1) -> list[Text]:
    """Prompts and answers of tiers 1 and 2: ``each`` held-out story and list of every length.

    Prompts begin with what the checkpoint's tokenizer begins every text with.
    """
    tokenizer = load_tokenizer(folder)
    begin = tokenizer.encode("")
    sets = held_out(partial(tokenizer.encode, add_special_tokens=False), SEED, each, NOT_LEARNT, SHOTS)
    return [
        Text([*begin, *question.prompt], question.answer) for asked in sets.values() for question in asked
    ]


def measure(
    model: Model,
    path: AttentionPath,
    attention: Attention,
    layer: Layer,
    texts: Sequence[Text],
    reference: Sequence[torch.Tensor],
) -> tuple[Shadow, Divergence]:
    """Tiers 1 and 2 of an implementation. reference: its ``reference_logits``."""
    seen = shadow(model, path, attention, texts)
    return seen, divergence(reference, forced_logits(model, layer, path, texts))


def lines_of(seen: Shadow, apart: Divergence, allowed: Mapping[str, float]) -> tuple[Line, ...]:
    """What was measured beside what is allowed."""
    found = {"T1 shadow": seen._asdict(), "T2 logits": apart._asdict()}
    return tuple(
        Line(tier=tier, measure=name, found=values[name], limit=allowed[name])
        for tier, values in found.items()
        for name in MEASURES
        if name in values
    )


def answers_of(
    folder: Path,
    path: AttentionPath,
    questions: int,
    out: Path,
    device: str = "cpu",
    planted: "Planted | None" = None,
    model_dtype: str = "float32",
) -> Run:
    """lm_eval's run of one path on held-out problems; kept under ``out`` by the path's name, and resumed."""
    from evals.lm import evaluate

    place = run_folder(out, planted.name if planted else path)
    evaluate(folder, path, template_rows(questions), place, device=device, model_dtype=model_dtype,
             max_gen_toks=ANSWER_TOKENS, planted=planted)  # fmt: skip
    return load_run(place, TASK)


def run_folder(out: Path, path: AttentionPath | str) -> Path:
    """Where the run of a path, or of a planted one by its name, is kept under ``out``."""
    return out / re.sub(r"[^\w.+=-]+", "_", str(path))


def accuracy(
    folder: Path,
    path: AttentionPath,
    questions: int,
    out: Path,
    margin: float,
    device: str = "cpu",
    model_dtype: str = "float32",
) -> Comparison:
    """Tier 3: the reference and a path answer the same problems through lm_eval, paired by strict-match."""
    # The reference last: where several trials share ``out``, one of them asks it while others are busy.
    candidate, baseline = (
        answers_of(folder, each, questions, out, device, model_dtype=model_dtype)
        for each in (path, AttentionPath())
    )
    return compare(baseline, candidate, "strict-match", margin)


def judge(
    folder: Path,
    path: AttentionPath,
    questions: int,
    out: Path,
    margin: float = MARGIN,
    device: str = "cpu",
    model_dtype: str = "float32",
) -> Outcome:
    """All tiers of one path. questions: of tier 3; 0 leaves it out. out: where its runs are kept.

    FAIL if a tier fails; else INCONCLUSIVE if one cannot tell; else PASS.
    """
    noise = measured_noise(folder, model_dtype)
    if path.cache_format == "fp8_e4m3" and path.kv_scale == AttentionPath.kv_scale:
        path = replace(path, kv_scale=noise["kv_scale"])
    model, texts = load(folder, device, getattr(torch, model_dtype)), texts_of(folder)
    allowed, attention = limits(noise, path), attention_of(path, model.config, model.device.type)
    reference = reference_logits(model, path, texts)
    seen, apart = measure(model, path, attention, layer_around(attention), texts, reference)
    lines = lines_of(seen, apart, allowed or dict.fromkeys(MEASURES, float("nan")))
    lines += cost_of_format(model, path, attention, texts, noise)
    paired = None
    if questions:
        paired = accuracy(folder, path, questions, out, margin, device, model_dtype)
    outcome, reason = decided(path, lines, paired, seen.place, apart.first)
    return Outcome(path=path, lines=lines, place=seen.place, accuracy=paired, outcome=outcome, reason=reason)


def cost_of_format(
    model: Model, path: AttentionPath, attention: Attention, texts: Sequence[Text], noise: Mapping[str, Any]
) -> tuple[Line, ...]:
    """A lossy cache against a float32 one: no more is lost than where right paths read that format."""
    allowed = costs(noise, path)
    if allowed is None:
        return ()
    got = forced_logits(model, layer_around(attention), path, texts)
    apart = divergence(reference_logits(model, AttentionPath(), texts), got)
    return tuple(
        Line(tier="T2 cost", measure=name, found=getattr(apart, name), limit=allowed[name]) for name in COSTS
    )


def costs(noise: Mapping[str, Any], path: AttentionPath) -> dict[str, float] | None:
    """The most that a path may be apart from a float32 cache; None over one, or where none was measured."""
    known = noise["cost"].get(f"{path.dtype}/{path.cache_format}")
    if path.cache_format == AttentionPath.cache_format or known is None:
        return None
    return {name: COST * known[name] for name in COSTS}


def decided(
    path: AttentionPath, lines: Sequence[Line], paired: Comparison | None, place: str, first: str = ""
) -> tuple[str, str]:
    """Outcome and reason. place: of the worst error of tier 1. first: of a divergence of tier 2, if any."""
    if any(math.isnan(line.limit) for line in lines):
        return INCONCLUSIVE, f"no noise was measured for {path.dtype} over a {path.cache_format} cache"
    if over := [line for line in lines if not line.ok]:
        worst = max(over, key=lambda line: line.share)
        where = f"; worst in {place}" if worst.tier.startswith("T1") else ""
        if first and not where:
            where = f"; first at {first}"
        return FAIL, (
            f"{worst.tier}: {worst.measure} is {worst.found:.2g}, at most {worst.limit:.2g} is noise{where}"
        )
    if paired is None:
        return PASS, "T1 and T2 are within noise; T3 was left out"
    if paired.pair.baseline < SOLVES:
        return INCONCLUSIVE, f"T3: the baseline solves {paired.pair.baseline:.2%}, a gate needs {SOLVES:.0%}"
    return paired.decision.outcome, f"T3: {paired.decision.reason}"


def report(result: Outcome) -> Iterator[str]:
    """The trial, line by line."""
    yield f"path: {result.path}"
    yield ""
    yield "|  tier   | measure |  found | at most|    |"
    yield "|---------|---------|-------:|-------:|----|"
    for line in result.lines:
        mark = "ok" if line.ok else "FAIL"
        yield f"|{line.tier:9}|{line.measure:9}|{line.found:8.1e}|{line.limit:8.1e}|{mark:4}|"
    if result.accuracy is not None:
        pair, decision = result.accuracy.pair, result.accuracy.decision
        yield ""
        yield (
            f"T3 strict-match, {pair.n} questions: baseline {pair.baseline:.2%}, candidate "
            f"{pair.candidate:.2%}; {pair.lost} lost, {pair.won} won, texts equal "
            f"{result.accuracy.text_equal:.2%}; 95 % bound {decision.bound:.2%}, McNemar p {decision.p:.2g}, "
            f"smallest loss seen {decision.detectable:.2%}"
        )
    yield ""
    yield f"{result.outcome}: {result.reason}"


def as_json(result: Outcome) -> str:
    """The trial as one JSON object; null is what is no number, such as a limit that was not measured."""
    return json.dumps(finite(asdict(result)), indent=2, allow_nan=False)
