import re

import numpy as np
import pytest

from evals import gsm8k
from evals.templates import (
    HELD_OUT,
    ITEMS,
    MOST_ENTRIES,
    NAMES,
    NEEDLES,
    PLACES,
    STORIES,
    TRAIN,
    Draws,
    problem,
    problems,
    split_of,
)


def _calculations(answer: str) -> list[tuple[str, int]]:
    return [(left, int(right)) for left, right in re.findall(r"<<([0-9+*/-]+)=([0-9]+)>>", answer)]


@pytest.mark.parametrize("split", [TRAIN, HELD_OUT])
def test_every_answer_is_right_and_in_the_format(split: str, seed: int):
    for made in problems(split, seed, 400):
        calculations = _calculations(made.answer)
        assert calculations, made
        for left, right in calculations:
            a, operation, b = re.fullmatch(r"(\d+)([-+*/])(\d+)", left).groups()
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}.get(
                operation, int(a) / int(b)
            ) == right
        assert made.answer.endswith(f"\n#### {calculations[-1][1]}")
        assert made.result == str(calculations[-1][1])
        assert "Question:" not in made.question + made.answer


def test_every_number_of_a_first_calculation_stands_in_the_question(seed: int):
    for made in problems(TRAIN, seed, 400):
        # Where a fact is asked for, the question holds it: no answer needs a number from elsewhere.
        first = re.findall(r"\d+", _calculations(made.answer)[0][0])
        numbers = re.findall(r"\d+", made.question)
        assert all(n in numbers or (n == "2" and made.kind == "half") for n in first), made


def test_a_question_is_in_one_split_only(seed: int):
    train, held_out = (problems(split, seed, 500) for split in (TRAIN, HELD_OUT))
    assert {p.question for p in train}.isdisjoint(p.question for p in held_out)
    assert {split_of(p.question) for p in train} == {TRAIN}
    assert len({p.question for p in held_out}) == 500


def test_all_kinds_and_lengths_occur(seed: int):
    draws = Draws(seed, "kinds")
    made = [problem(draws, TRAIN) for _ in range(3000)]
    assert len({p.kind for p in made}) == len(STORIES) + len(NEEDLES)
    assert {p.entries for p in made} == {0, *range(2, MOST_ENTRIES + 1)}
    assert {p.entries for p in problems(HELD_OUT, seed, 40, entries=20)} == {20}
    short = [problem(draws, TRAIN, most_entries=3) for _ in range(300)]
    assert max(p.entries for p in short) == 3


def test_a_needle_is_anywhere_in_its_list(seed: int):
    at = [
        re.findall(r"[a-z]+ \$\d+", p.question).index(f"{asked[1]} ${asked[2]}")
        for p in problems(TRAIN, seed, 400, entries=8)
        if (asked := re.search(r"The price of (\w+) is \$(\d+)", p.answer))
    ]
    assert set(at) == set(range(8))


def test_draws_are_the_same_on_every_machine():
    draws = Draws(3, "golden")
    assert [draws.below(1000) for _ in range(5)] == [472, 69, 279, 343, 203]
    assert sorted(draws.sample(NAMES, len(NAMES))) == sorted(NAMES)


def test_gsm8k_is_named_where_it_is_missing(tmp_path):
    with pytest.raises(ValueError, match=r"gsm8k: .*train\.jsonl is missing; pass --data"):
        gsm8k.rows("train", tmp_path)


def test_words_are_one_token_each():
    pytest.importorskip("tokenizers", reason="the checkpoints' tokenizer needs tokenizers")
    from tokenizers import Tokenizer

    from evals.train.run import CHECKPOINTS

    tokenizer = Tokenizer.from_file(str(CHECKPOINTS / "mini" / "tokenizer.json"))
    for word in NAMES + ITEMS + PLACES:
        assert len(tokenizer.encode(f" {word}").ids) == 1, word
    assert len(tokenizer.encode("1234567890").ids) == 10


def test_rows_are_the_tokens_of_the_prompts(seed: int):
    pytest.importorskip("tokenizers", reason="the checkpoints' tokenizer needs tokenizers")
    from tokenizers import Tokenizer

    from evals.train.corpus import ANSWER, Writer
    from evals.train.run import CHECKPOINTS

    tokenizer = Tokenizer.from_file(str(CHECKPOINTS / "mini" / "tokenizer.json"))
    row = Writer(tokenizer, [], 700).block(seed, 5)[3]
    tokens = (row & (ANSWER - 1)).tolist()
    text = tokenizer.decode(tokens)
    assert tokenizer.encode(text).ids[:-2] == tokens[:-2]  # the cut may fall inside a word
    assert re.match(r"Question: .*\?\nAnswer: .*\n#### \d+\n\nQuestion: ", text)
    flagged = tokenizer.decode([t if f else 0 for t, f in zip(tokens, row >= ANSWER, strict=True)])
    assert flagged.count("####") == text.count("####")
    assert "Answer" not in flagged
    assert row.dtype == np.uint16
