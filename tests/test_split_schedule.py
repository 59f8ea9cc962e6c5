"""The schedule, made by the kernel's own source under the emulator: every key of every row, once."""

from itertools import accumulate, pairwise

import pytest
import torch
from gluon_emulator import Emulated

from mla_fast import _split_schedule, gluon_decode
from mla_ref.values import integers

TRIALS = 40


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("schedule_kernel", "fixed_schedule_kernel"):
        monkeypatch.setattr(_split_schedule, name, Emulated(_split_schedule, name))


def planned(seed: int, trial: int, batch_invariant: bool):
    """Heads, lengths and plan of a batch."""

    def pick(name, values):
        return values[int(integers(seed, f"{name} {trial}", len(values)))]

    heads, num_sms = pick("heads", [8, 16, 20, 64, 128]), pick("multiprocessors", [6, 66, 132])
    b, longest = pick("b", [1, 2, 3, 7, 31, 64, 128, 200]), pick("longest", [1, 100, 4000, 70_000])
    q_lens = torch.tensor([0, 1, 1, 1, 2, 5])[integers(seed, f"q_lens {trial}", 6, b)].tolist()
    q_lens[0] = 1
    kv_lens = integers(seed, f"kv_lens {trial}", longest + 1, b).tolist()
    plan = gluon_decode.plan_for(
        num_sms,
        torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32),
        torch.tensor(kv_lens, dtype=torch.int32),
        num_tokens=sum(q_lens),
        num_heads=heads,
        max_kv_len=max(kv_lens),
        batch_invariant=batch_invariant,
    )
    return heads, q_lens, kv_lens, plan


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_every_pair_of_every_tile_once(batch_invariant: bool, seed: int, emulated: None) -> None:
    for trial in range(TRIALS):
        heads, q_lens, kv_lens, plan = planned(seed, trial, batch_invariant)
        starts = [0, *accumulate(q_lens)]
        offsets = plan.offsets.tolist()
        assert len(offsets) == plan.parts + 1
        assert offsets == sorted(offsets)
        pieces: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        items = plan.items.view(-1, _split_schedule.ITEM_FIELDS)[: offsets[-1]].tolist()
        for request, first, last, slot, row, num_rows, kv_len, row_in_request, visible in items:
            assert row == starts[request] * heads + row_in_request
            assert num_rows == q_lens[request] * heads - row_in_request
            assert (kv_len, visible) == (kv_lens[request], kv_lens[request] - q_lens[request] + 1)
            pieces.setdefault((request, row_in_request), []).append((first, last, slot))
        span = plan.lanes * gluon_decode.BLOCK
        assert set(pieces) == {(r, x) for r, q in enumerate(q_lens) for x in range(0, q * heads, span)}
        split = []
        for (request, row_in_request), runs in pieces.items():
            runs.sort()
            pairs = max(1, -(-kv_lens[request] // _split_schedule.PAIR_KEYS))
            assert [0, *(last for _, last, _ in runs)] == [*(first for first, _, _ in runs), pairs]
            slots = [slot for _, _, slot in runs]
            if len(runs) == 1:
                assert slots == [-1]
                continue
            assert all(b == a + 1 for a, b in pairwise(slots))
            row = starts[request] * heads + row_in_request
            split.append([row, q_lens[request] * heads - row_in_request, slots[0], slots[-1]])
        used = [slot for _, _, first, last in split for slot in range(first, last + 1)]
        assert len(set(used)) == len(used)
        assert all(slot < plan.num_slots for slot in used)
        merges = plan.merges.view(-1, _split_schedule.MERGE_FIELDS)[: int(plan.num_merges)].tolist()
        assert sorted(merges) == sorted(split)


def test_no_part_waits_long(seed: int, emulated: None) -> None:
    """The fullest part has at most what a split may cost, and a pair for each rounding, above the mean."""
    slack = (2 * int(_split_schedule.SPLIT_COST.value) + int(_split_schedule.OVERHEAD.value)) / 2 + 2
    for trial in range(TRIALS):
        *_, plan = planned(seed, trial, batch_invariant=False)
        offsets = plan.offsets.tolist()
        items = plan.items.view(-1, _split_schedule.ITEM_FIELDS)[: offsets[-1]].tolist()
        loads = [sum(i[2] - i[1] + 1 for i in items[a:b]) for a, b in pairwise(offsets)]
        assert max(loads) <= sum(loads) / len(loads) + slack


@pytest.mark.parametrize(
    ("b", "heads", "kv_len", "expected"),
    [
        (104, 64, 4096, "whole"),
        (116, 16, 4096, "whole"),
        (80, 64, 2048, "whole"),
        (52, 128, 4096, "whole"),
        (32, 32, 4096, "pieces"),
        (40, 64, 5000, "pieces"),
        (56, 64, 4096, "pieces"),
        (20, 128, 5000, "pieces"),
        (34, 64, 8192, "cut"),
        (24, 128, 4096, "cut"),
        (26, 128, 4096, "cut"),
    ],
)
def test_what_was_fastest_is_taken(b: int, heads: int, kv_len: int, expected: str, emulated: None) -> None:
    """Of equal requests, the kind of schedule that an H200 ran fastest (docs/kernels.md)."""
    plan = gluon_decode.plan_for(
        132,
        torch.arange(b + 1, dtype=torch.int32),
        torch.full([b], kv_len, dtype=torch.int32),
        num_tokens=b,
        num_heads=heads,
        max_kv_len=kv_len,
        batch_invariant=False,
    )
    most = max(end - begin for begin, end in pairwise(plan.offsets.tolist()))
    kind = "whole" if int(plan.num_merges) == 0 else "pieces" if most == 1 else "cut"
    assert kind == expected
