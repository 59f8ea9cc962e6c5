"""Grade-school problems in gsm8k's format, made from templates, with the one right wording of each answer.

Half of the problems are short stories; the others are needles: a list of 2 to 24 entries, of which the
question asks about one or two, so that a model that solves them reads far back, and a lost or swapped page
costs answers.
Every answer carries its calculations as ``<<a+b=c>>`` and ends with ``#### c``.

A question belongs to the held-out set or to training by its own hash, so no problem is ever in both.
"""

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from mla_ref.values import integers

T = TypeVar("T")

TRAIN = "train"
HELD_OUT = "held_out"
MOST_ENTRIES = 24

# In the corpus, and not learnt by models of four layers: the number stands before its key ("58 apples"), so
# the key that is found comes too late to say which number to keep.
NOT_LEARNT = ("shelf",)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    """
    Anna Ben Carl Dora Emma Finn Greta Hugo Ida Jack Kate Leo Mia Noah Olga Paul Quinn Rosa Sam Tina
    Uma Victor Wendy Xavier Yara Zoe Alan Beth Cora Dean Ella Fred Gina Hank Iris Jonas Kira Liam
    Maya Nina Oscar Pia Ralf Sara Theo Vera Walter Adam Bella Clara David Erik Fiona Grace Henry
    Isaac Julia Karl Laura Mark Nora Otto Petra Ruth Simon Tom Ursula Violet Will Amy Bob Cleo
    """
)
ITEMS = _words(
    """
    pencils stamps marbles cards books apples coins shells stickers buttons cookies plums pens cups
    hats balls stones leaves ribbons candles flowers bottles plates spoons tickets lemons peaches
    carrots onions eggs boxes bags keys ropes lamps chairs shirts socks gloves belts rings bells
    drums kites pears melons tiles bricks pins forks bowls rugs clocks boats trains dolls
    """
)
PLACES = _words("shop market bakery farm school library garden kitchen museum station")


class Draws:
    """An endless stream of integers, the same on every machine for the same seed and name."""

    def __init__(self, seed: int, name: str) -> None:
        self._numbers = _numbers(seed, name)

    def below(self, high: int) -> int:
        """A number in 0 … high-1."""
        return next(self._numbers) % high

    def between(self, low: int, high: int) -> int:
        """A number in low … high, both included."""
        return low + self.below(high - low + 1)

    def pick(self, choices: Sequence[T]) -> T:
        """One of ``choices``."""
        return choices[self.below(len(choices))]

    def sample(self, choices: Sequence[T], count: int) -> list[T]:
        """``count`` different ones of ``choices``, in random order."""
        pool = list(choices)
        for i in range(count):
            j = i + self.below(len(pool) - i)
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]


def _numbers(seed: int, name: str) -> Iterator[int]:
    for part in itertools.count():
        yield from integers(seed, f"{name}/{part}", 2**31 - 1, 4096).tolist()


class Problem(NamedTuple):
    """One problem. ``kind`` names its template; ``entries`` is the length of its list, 0 for a story."""

    kind: str
    question: str
    answer: str
    entries: int = 0

    @property
    def result(self) -> str:
        """The number after ``####``."""
        return self.answer.rsplit("#### ", 1)[1]


def split_of(question: str) -> str:
    """``held_out`` for one question in sixteen, by its hash; ``train`` for the others."""
    return HELD_OUT if zlib.crc32(question.encode()) % 16 == 0 else TRAIN


def problem(
    draws: Draws, split: str, *, entries: int | None = None, most_entries: int = MOST_ENTRIES
) -> Problem:
    """The next problem of ``split`` in the stream.

    entries: the length of the list; None draws it from 2 … ``most_entries``. 0 asks for a story.
    """
    while True:
        needle = draws.below(2) == 1 if entries is None else entries > 0
        if needle:
            count = draws.between(2, most_entries) if entries is None else entries
            made = draws.pick(NEEDLES)(draws, count)
        else:
            made = draws.pick(STORIES)(draws)
        if split_of(made.question) == split:
            return made


def problems(
    split: str, seed: int, count: int, *, entries: int | None = None, without: Sequence[str] = ()
) -> list[Problem]:
    """``count`` problems of ``split``, no question twice, none of the kinds in ``without``."""
    draws, seen = Draws(seed, f"problems/{split}/{entries}"), dict[str, Problem]()
    while len(seen) < count:
        made = problem(draws, split, entries=entries)
        if made.kind not in without:
            seen.setdefault(made.question, made)
    return list(seen.values())


def _add(draws: Draws) -> Problem:
    name, item, a, b = draws.pick(NAMES), draws.pick(ITEMS), draws.between(2, 60), draws.between(2, 39)
    return Problem(
        "add",
        f"{name} has {a} {item} and buys {b} more {item}. How many {item} does {name} have now?",
        f"{name} has {a}+{b}=<<{a}+{b}={a + b}>>{a + b} {item} now.\n#### {a + b}",
    )


def _subtract(draws: Draws) -> Problem:
    name, item, left, b = draws.pick(NAMES), draws.pick(ITEMS), draws.between(1, 50), draws.between(2, 40)
    a = left + b
    return Problem(
        "subtract",
        f"{name} has {a} {item} and gives {b} of them to a friend. How many {item} are left?",
        f"There are {a}-{b}=<<{a}-{b}={left}>>{left} {item} left.\n#### {left}",
    )


def _multiply(draws: Draws) -> Problem:
    name, item, a, b = draws.pick(NAMES), draws.pick(ITEMS), draws.between(2, 12), draws.between(2, 12)
    return Problem(
        "multiply",
        f"A box holds {a} {item}. {name} has {b} boxes. How many {item} does {name} have?",
        f"{name} has {b}*{a}=<<{b}*{a}={b * a}>>{b * a} {item}.\n#### {b * a}",
    )


def _divide(draws: Draws) -> Problem:
    name, item, each, b = draws.pick(NAMES), draws.pick(ITEMS), draws.between(2, 12), draws.between(2, 12)
    a = each * b
    return Problem(
        "divide",
        f"{name} shares {a} {item} equally among {b} friends. How many {item} does each friend get?",
        f"Each friend gets {a}/{b}=<<{a}/{b}={each}>>{each} {item}.\n#### {each}",
    )


def _multiply_add(draws: Draws) -> Problem:
    name, item = draws.pick(NAMES), draws.pick(ITEMS)
    a, b, c = draws.between(2, 12), draws.between(2, 9), draws.between(2, 30)
    return Problem(
        "multiply_add",
        f"{name} fills {b} bags with {a} {item} each and keeps {c} more {item} in a drawer. "
        f"How many {item} does {name} have in total?",
        f"The bags hold {b}*{a}=<<{b}*{a}={b * a}>>{b * a} {item}. In total {name} has "
        f"{b * a}+{c}=<<{b * a}+{c}={b * a + c}>>{b * a + c} {item}.\n#### {b * a + c}",
    )


def _change(draws: Draws) -> Problem:
    name, item, place = draws.pick(NAMES), draws.pick(ITEMS), draws.pick(PLACES)
    a, b, left = draws.between(2, 9), draws.between(2, 9), draws.between(1, 40)
    cost, paid = a * b, a * b + left
    return Problem(
        "change",
        f"At the {place}, {item} cost ${a} each. {name} buys {b} of them and pays with ${paid}. "
        f"How many dollars does {name} get back?",
        f"The {item} cost {b}*{a}=$<<{b}*{a}={cost}>>{cost}. {name} gets back "
        f"{paid}-{cost}=$<<{paid}-{cost}={left}>>{left}.\n#### {left}",
    )


def _three(draws: Draws) -> Problem:
    name, item = draws.pick(NAMES), draws.pick(ITEMS)
    a, b, c = (draws.between(2, 30) for _ in range(3))
    return Problem(
        "three",
        f"{name} collects {a} {item} on Monday, {b} on Tuesday and {c} on Wednesday. "
        f"How many {item} does {name} collect in the three days?",
        f"On Monday and Tuesday {name} collects {a}+{b}=<<{a}+{b}={a + b}>>{a + b} {item}. In the three days "
        f"that is {a + b}+{c}=<<{a + b}+{c}={a + b + c}>>{a + b + c}.\n#### {a + b + c}",
    )


def _more_than(draws: Draws) -> Problem:
    (one, two), item = draws.sample(NAMES, 2), draws.pick(ITEMS)
    a, b = draws.between(2, 40), draws.between(2, 20)
    return Problem(
        "more_than",
        f"{one} has {a} {item}. {two} has {b} more {item} than {one}. "
        f"How many {item} do they have altogether?",
        f"{two} has {a}+{b}=<<{a}+{b}={a + b}>>{a + b} {item}. Altogether they have "
        f"{a}+{a + b}=<<{a}+{a + b}={2 * a + b}>>{2 * a + b} {item}.\n#### {2 * a + b}",
    )


def _half(draws: Draws) -> Problem:
    name, item, b = draws.pick(NAMES), draws.pick(ITEMS), draws.between(2, 30)
    a = 2 * b
    return Problem(
        "half",
        f"{name} sold {a} {item} in April, and half as many in May. "
        f"How many {item} did {name} sell altogether in April and May?",
        f"{name} sold {a}/2=<<{a}/2={b}>>{b} {item} in May. Altogether {name} sold "
        f"{a}+{b}=<<{a}+{b}={a + b}>>{a + b} {item}.\n#### {a + b}",
    )


def _wages(draws: Draws) -> Problem:
    name, place, a, b = draws.pick(NAMES), draws.pick(PLACES), draws.between(3, 12), draws.between(3, 9)
    earned = a * b
    c = draws.between(1, earned - 1)
    return Problem(
        "wages",
        f"{name} works {b} hours at the {place} for ${a} an hour and spends ${c}. How many dollars are left?",
        f"{name} earns {b}*{a}=$<<{b}*{a}={earned}>>{earned}. There are "
        f"{earned}-{c}=$<<{earned}-{c}={earned - c}>>{earned - c} left.\n#### {earned - c}",
    )


def _price(draws: Draws, entries: int) -> Problem:
    name, keys, b = draws.pick(NAMES), draws.sample(ITEMS, entries), draws.between(2, 5)
    prices = [draws.between(2, 20) for _ in keys]
    at = draws.below(entries)
    key, a = keys[at], prices[at]
    listed = ", ".join(f"{key} ${price}" for key, price in zip(keys, prices, strict=True))
    return Problem(
        "price",
        f"The price list says: {listed}. {name} buys {b} {key}. How many dollars does {name} pay?",
        f"The price of {key} is ${a}. {name} pays {b}*{a}=$<<{b}*{a}={b * a}>>{b * a}.\n#### {b * a}",
        entries,
    )


def _lookup(draws: Draws, entries: int) -> Problem:
    keys, item = draws.sample(NAMES, entries), draws.pick(ITEMS)
    counts = [draws.between(2, 60) for _ in keys]
    at, a = draws.below(entries), draws.between(2, 30)
    key, b = keys[at], counts[at]
    listed = " ".join(f"{key} has {count} {item}." for key, count in zip(keys, counts, strict=True))
    return Problem(
        "lookup",
        f"{listed} Then {key} finds {a} more {item}. How many {item} does {key} have now?",
        f"{key} has {b} {item}. Now {key} has {b}+{a}=<<{b}+{a}={b + a}>>{b + a} {item}.\n#### {b + a}",
        entries,
    )


def _pair(draws: Draws, entries: int) -> Problem:
    keys, item = draws.sample(NAMES, entries), draws.pick(ITEMS)
    counts = [draws.between(2, 49) for _ in keys]
    first, second = draws.sample(range(entries), 2)
    listed = " ".join(f"{key} has {count} {item}." for key, count in zip(keys, counts, strict=True))
    one, a, two, b = keys[first], counts[first], keys[second], counts[second]
    return Problem(
        "pair",
        f"{listed} How many {item} do {one} and {two} have together?",
        f"{one} has {a} {item} and {two} has {b} {item}. Together they have "
        f"{a}+{b}=<<{a}+{b}={a + b}>>{a + b} {item}.\n#### {a + b}",
        entries,
    )


def _shelf(draws: Draws, entries: int) -> Problem:
    place, keys = draws.pick(PLACES), draws.sample(ITEMS, entries)
    counts = [draws.between(3, 60) for _ in keys]
    at = draws.below(entries)
    key, a = keys[at], counts[at]
    b = draws.between(1, a - 1)
    listed = ", ".join(f"{count} {key}" for key, count in zip(keys, counts, strict=True))
    return Problem(
        "shelf",
        f"The {place} stores {listed}. Today {b} of the {key} are sold. How many {key} are left?",
        f"The {place} stores {a} {key}. "
        f"There are {a}-{b}=<<{a}-{b}={a - b}>>{a - b} {key} left.\n#### {a - b}",
        entries,
    )


STORIES: tuple[Callable[[Draws], Problem], ...] = (
    _add,
    _subtract,
    _multiply,
    _divide,
    _multiply_add,
    _change,
    _three,
    _more_than,
    _half,
    _wages,
)
NEEDLES: tuple[Callable[[Draws, int], Problem], ...] = (_price, _lookup, _pair, _shelf)
