"""The emulator's barriers: who waits for ever is told at once, and who is waited for may take its time."""

import threading

import pytest
from gluon_emulator import LANGUAGE, STAND_INS, Barriers

BARRIER = STAND_INS["mbarrier"]


def run(*partitions):
    LANGUAGE.warp_specialize(partitions, (), ())


def barriers(count):
    made = Barriers(count)
    for each in made.all:
        BARRIER.init(each, 1)
    return made.all


@pytest.mark.parametrize("ended", [False, True], ids=["each waits for the other", "the other has ended"])
def test_a_deadlock_is_found_when_everybody_waits(ended):
    one, two = barriers(2)

    def first():
        BARRIER.wait(one, 0)
        BARRIER.arrive(two)

    def second():
        if not ended:
            BARRIER.wait(two, 0)
            BARRIER.arrive(one)

    with pytest.raises(RuntimeError, match="deadlock: nobody completes this phase"):
        run((first, ()), (second, ()))


def test_whoever_is_slow_is_waited_for():
    one, two = barriers(2)
    waited, order = threading.Event(), []

    def slow():
        assert waited.wait(60)
        order.append("slow")
        BARRIER.arrive(one)
        BARRIER.wait(two, 0)

    def waiting():
        threading.Timer(0.05, waited.set).start()  # the other is not at a barrier, while this one waits
        BARRIER.wait(one, 0)
        order.append("waiting")
        BARRIER.arrive(two)

    run((slow, ()), (waiting, ()))
    assert order == ["slow", "waiting"]


def test_one_that_fails_ends_the_others_with_its_error():
    [never] = barriers(1)

    def failing():
        raise LookupError("lost")

    with pytest.raises(LookupError, match="lost"):
        run((failing, ()), (BARRIER.wait, (never, 0)))


def test_a_copy_lands_before_the_next_phase_begins():
    [one] = barriers(1)
    landed = []

    def copy():
        landed.append(len(landed))
        return 8

    for copies in (0, 1):
        BARRIER.expect(one, 8)
        assert len(landed) == one.phase == copies
        one.copied(copy)
    BARRIER.wait(one, 1)
    assert landed == [0, 1]


def test_more_arrivals_than_a_barrier_counts():
    [one] = barriers(1)
    BARRIER.expect(one, 8)
    with pytest.raises(AssertionError, match="more arrivals than the barrier's count"):
        BARRIER.arrive(one)


def test_a_phase_that_is_over_is_not_waited_for():
    [one] = barriers(1)
    run((BARRIER.arrive, (one,)), (BARRIER.wait, (one, 0)))
    BARRIER.wait(one, 0)
    with pytest.raises(RuntimeError, match="deadlock"):
        BARRIER.wait(one, 1)
