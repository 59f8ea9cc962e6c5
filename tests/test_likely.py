"""Likely radii, directions and statistics: right kernels pass, inputs made to break independence included."""

import math
import os
import random
from dataclasses import replace

import pytest
import torch
from random_trials import random_kernel
from simulated_kernel import Schedule, simulated

from mla_ref.backend import Backend
from mla_ref.numerics import Numerics
from mla_ref.problem import problem
from oracles import ensemble
from oracles.bounds import ADMISSIBLE, Admissible
from oracles.compare import within
from oracles.coverage import draw
from oracles.directions import filters, lengths, samples
from oracles.likely import FALSE_ALARM, cells, claimed, deviations, elements, squares
from oracles.mutants import LATENT
from oracles.precision_mutants import LONG, MANY, NUMERICS, kernel, precision_mutants
from oracles.verdict import FAIL, PASS
from oracles.verify import judge

CPU = torch.device("cpu")
RULES = ("likely", "row_norm", "matched_filters", "statistics")


def rejected(count: int, seed: int) -> list[str]:
    """Right kernels with narrow weights that a rule rejects; ``count`` of them are tried."""
    draws, failures, index, tried = random.Random(seed), [], 0, 0
    while tried < count:
        name = draws.choice(("latent_attention", "latent_attention", "attention"))
        case, backend = draw(name, seed, index), random_kernel(draws, name)
        index += 1
        if not claimed(backend.numerics, getattr(torch, case.dtype)):
            continue
        tried += 1
        for verdict in judge(backend, case, oracles=RULES):
            if verdict.status != PASS:
                failures.append(f"{verdict.detail} {backend.numerics} {case.to_json()}")
    return failures


def test_no_right_kernel_is_rejected():
    assert rejected(40, 3) == []


@pytest.mark.slow
def test_no_right_kernel_is_rejected_in_ten_thousand_cases():
    assert rejected(int(os.environ.get("MLA_VERIFY_CASES", "10000")), 4) == []


def certain_and_likely(case, numerics) -> tuple[dict[str, Admissible], dict[str, Admissible]]:
    inputs = problem(case.problem).materialize(case, CPU)
    certain = ADMISSIBLE[case.problem](inputs, numerics)
    return certain, elements(inputs, numerics, certain)


@pytest.mark.parametrize("regime", ["plain", "small", "flat", "ties", "huge", "outlier"])
def test_likely_is_never_wider_than_certain(regime):
    for numerics in (NUMERICS, replace(NUMERICS, sum_rounded_p=None), replace(NUMERICS, sum_rounded_p=True)):
        certain, likely = certain_and_likely(replace(MANY, regime=regime), numerics)
        for name in ("out", "lse"):
            assert (likely[name].radius <= certain[name].radius).all()
            assert torch.equal(likely[name].mid, certain[name].mid)


def test_channels_that_are_zeros_everywhere_have_no_noise_to_be_divided_by():
    """In float64 the spacing of 0 is nothing at all."""
    backend = simulated("latent_attention", Numerics(p="bfloat16", sum_rounded_p=False), Schedule())
    for seed in range(3):
        case = replace(
            MANY, regime="zeros", dtype="float64", cache_format="fp32", q_lens=(17,), kv_lens=(17,), seed=seed
        )
        assert [v.detail for v in judge(backend, case, oracles=RULES) if v.status != PASS] == []


def test_likely_is_several_times_sharper_over_many_keys():
    certain, likely = certain_and_likely(LONG, NUMERICS)
    assert (certain["out"].radius / likely["out"].radius).median() > 2.0
    # Where the denominator sums the same rounded weights, a common mean of the values drops out.
    summed = replace(NUMERICS, sum_rounded_p=True)
    certain, likely = certain_and_likely(replace(LONG, regime="flat"), summed)
    assert (certain["out"].radius / likely["out"].radius).median() > 10.0
    # In flat rows most weights share a cell, and their sum errs by all of a roundoff; elsewhere it does not.
    certain, likely = certain_and_likely(replace(LONG, regime="plain"), summed)
    assert (certain["lse"].radius / likely["lse"].radius).median() > 1.1


def test_nothing_is_claimed_where_weights_are_not_rounded():
    certain, likely = certain_and_likely(MANY, Numerics())
    assert likely == certain
    assert not claimed(Numerics(p="bfloat16", accumulate="bfloat16"), torch.bfloat16)


def test_the_scale_is_that_of_the_false_alarm_rate():
    """2 N exp(-λ²/2) is the rate."""
    for checks in (1, 1000, 10**7):
        assert round(math.log(2 * checks / FALSE_ALARM) - deviations(checks) ** 2 / 2, 9) == 0.0


def test_weights_that_agree_share_a_cell():
    scores = torch.tensor([[0.0, 0.0, 1e-5, -1.0, -torch.inf]]).double()
    found = cells(scores, 2.0**-8)
    assert found.key.tolist() == [0, 1, 2]
    assert found.cell.tolist() == [0, 0, 0]
    assert found.distinct.tolist() == [2]
    terms = torch.tensor([[1.0, 2.0, 3.0, 4.0, 0.0]]).double()
    assert squares(terms, found).tolist() == [36.0 + 16.0]
    # Terms that cancel in a cell are still independent errors if the cell is none.
    terms = torch.tensor([[1.0, -1.0, 0.0, 4.0, 0.0]]).double()
    assert squares(terms, found).tolist() == [2.0 + 16.0]


def adversarial(offsets: list[float]) -> tuple[object, object]:
    """300 keys in two groups: weights round up in one, down in the other, where values have another sign."""
    case = replace(
        LATENT, config=replace(LATENT.config, num_heads=1), q_lens=(1,), kv_lens=(301,),
        dtype="float32", cache_format="fp32", block_size=512,
    )  # fmt: skip
    inputs = problem("latent_attention").materialize(case, CPU)
    c, r = case.config.kv_lora_rank, case.config.qk_rope_head_dim
    block = int(inputs.block_table[0, 0])
    draw = random.Random(3)
    for j in range(301):
        entry = torch.zeros(c + r)
        up = j % 2 == 0
        entry[:c] = torch.tensor([1.0 if up else -1.0]) * torch.tensor(
            [0.5 + draw.random() for _ in range(c)]
        )
        weight = offsets[0] if up else offsets[1]
        entry[c] = 0.0 if j == 300 else math.log(weight * (1 + 1e-4 * draw.random())) / inputs.softmax_scale
        inputs.kv_cache[block, j] = entry
    query = torch.zeros_like(inputs.ql_nope)
    q_pe = torch.zeros_like(inputs.q_pe)
    q_pe[..., 0] = 1.0
    return case, inputs._replace(ql_nope=query, q_pe=q_pe)


MIDDLE = (1.0 + 2.0**-8) / 2.0
# Just above and just below the middle of two neighbours: in two cells, and in one.
TWO_CELLS = [MIDDLE * (1 + 3e-4), MIDDLE * (1 - 4e-4)]
ONE_CELL = [MIDDLE * (1 + 5e-5), MIDDLE * (1 - 2e-4)]


@pytest.mark.parametrize("weights", [TWO_CELLS, ONE_CELL], ids=["two cells", "one cell"])
@pytest.mark.parametrize("tile", [16, 64, 512])
def test_weights_made_to_round_together_are_admitted(tile, weights):
    """Every error has the worst sign."""
    _, inputs = adversarial(weights)
    backend = simulated("latent_attention", Numerics(p="bfloat16", sum_rounded_p=False), Schedule(tile=tile))
    certain = ADMISSIBLE["latent_attention"](inputs, backend.numerics)
    likely = elements(inputs, backend.numerics, certain)
    output = backend.fn(*inputs)
    for name in ("out", "lse"):
        finding = within(name, getattr(output, name), likely[name])
        assert finding.ok, finding.detail
    found = samples(inputs, backend.numerics, certain, likely)
    if found:
        readings = filters(found, output.out, backend.numerics, torch.float32)
        readings.append(lengths(found, output.out, backend.numerics, torch.float32))
        assert max(reading.ratio for reading in readings) <= 1.0


def test_independence_alone_would_reject_them():
    """The audit is what admits them: without it the error is beyond Hoeffding's scale."""
    _, inputs = adversarial(ONE_CELL)
    backend = simulated("latent_attention", Numerics(p="bfloat16", sum_rounded_p=False), Schedule(tile=512))
    certain = ADMISSIBLE["latent_attention"](inputs, backend.numerics)["out"]
    error = (backend.fn(*inputs).out.double() - certain.mid).abs().max()
    weights = 1.0 / 300.0
    scale = deviations(certain.mid.numel()) * 2.0**-8 * math.sqrt(300) * weights
    assert error > 2.0 * scale


def test_students_t_is_that_of_the_tables():
    assert round(ensemble.student(0.025, 10), 3) == 2.228
    assert round(ensemble.student(0.0005, 30), 3) == 3.646


def test_a_suspicion_that_does_not_come_back_is_no_verdict():
    """Wrong on the first inputs alone: three right replays clear it; wrong on all, it fails."""
    case, wrong = precision_mutants()["accumulator_in_bf16_over_many_keys"]
    contract = problem("latent_attention")
    seen: list[torch.Tensor] = []

    def once(*args):
        inputs = contract.inputs(*args)
        seen.append(inputs.ql_nope)
        return (wrong if torch.equal(seen[0], inputs.ql_nope) else kernel())(inputs)

    for fn, status in ((once, PASS), (lambda *args: wrong(contract.inputs(*args)), FAIL)):
        (verdict,) = judge(Backend("once", "latent_attention", fn, NUMERICS), case, oracles=["statistics"])
        assert verdict.status == status, verdict.detail
    assert len(seen) > 1


def test_recorded_values_have_one_look_that_is_as_rare_as_a_false_alarm():
    usual = ensemble.student(ensemble.SUSPICION / 6, ensemble.MEMBERS - 1)
    assert round(usual, 2) == 4.85
    assert round(ensemble.student(FALSE_ALARM / 6, ensemble.MEMBERS - 1), 2) == 9.04


def test_rows_that_repeat_each_other_do_not_average_out():
    """Sixteen rows of one query: what they are off by together is sixteen times that of one, and admitted."""
    case = replace(MANY, q_lens=(16,), kv_lens=(199,), regime="small")
    inputs = problem("latent_attention").materialize(case, CPU)
    first = inputs.ql_nope[:1] * (1.0 + 2.0**-6 * torch.arange(16)[:, None, None])
    inputs = inputs._replace(ql_nope=first.to(inputs.ql_nope.dtype), q_pe=inputs.q_pe[:1].expand(16, -1, -1))
    certain = ADMISSIBLE["latent_attention"](inputs, NUMERICS)
    found = samples(inputs, NUMERICS, certain, elements(inputs, NUMERICS, certain))
    readings = filters(found, kernel()(inputs).out, NUMERICS, torch.bfloat16)
    assert sum(len(sample.out) for sample in found) > 16
    assert max(reading.ratio for reading in readings) <= 1.0


def test_replays_are_the_same_every_time_and_not_the_case_itself():
    assert ensemble.replays(MANY) == ensemble.replays(MANY)
    assert len({MANY.seed, *ensemble.replays(MANY)}) == 1 + ensemble.REPLAYS
