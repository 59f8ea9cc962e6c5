"""What an unknown rotary embedding does: which channels it pairs, where it writes them, which way it turns.

It is called with every usual shape of its arguments; what it returns is compared with every combination of
the pairing that it reads, the order that it writes, and the direction, from float64 angles.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mla_ref.config import RopeConfig
from mla_ref.numerics import FLOAT32, INPUT, Numerics
from mla_ref.problems.rope import RopeInputs
from mla_ref.values import bell, integers
from oracles.bounds import ADMISSIBLE
from oracles.conventions import Answer, Fit, compared, tensors_in, verdict
from oracles.exact import angles, pairs, unpaired
from oracles.exits import first_line

TOKENS, HEADS, CHANNELS = 7, 3, 32
ROPE = RopeConfig(theta=10000.0)

# Tables and angles of any precision that is used.
NUMERICS = Numerics(angle=FLOAT32, table=INPUT)

# Parameter -> what it may be given, over the names x [t h r], positions [t], cos and sin [t r/2], rope.
PACKED, BATCHED = "x", "x.transpose(0, 1)[None]"
TENSORS = ("x", "q", "k", "query", "key", "t", "xq", "xk")
TABLES = ("{}", "{}[:, None]", "torch.cat([{0}, {0}], dim=-1)", "torch.cat([{0}, {0}], dim=-1)[None]",
          "{}.repeat_interleave(2, dim=-1)")  # fmt: skip
OTHERS = {"positions": "positions", "position_ids": "positions", "rope": "rope"}

SPLIT = {True: "interleaved: (0, 1), (2, 3), …", False: "half-split: (0, r/2), (1, r/2 + 1), …"}


def rotates(fn: Callable[..., Any]) -> bool:
    """Whether a callable looks like a rotary embedding: tensors and tables, and no cache."""
    try:
        names = set(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return False
    return bool(names & set(TENSORS)) and ({"cos", "sin"} <= names or bool(names & set(OTHERS)))


def ways(fn: Callable[..., Any]) -> list[dict[str, str]]:
    """Parameter -> expression, for every usual shape of what it must be given. Raises: ValueError."""
    found = []
    needed = [p for p in inspect.signature(fn).parameters.values() if p.default is p.empty]
    for x, table in itertools.product((PACKED, BATCHED), TABLES):
        texts = {}
        for parameter in needed:
            name = parameter.name
            if name in TENSORS:
                texts[name] = x
            elif name in ("cos", "sin"):
                texts[name] = table.format(name)
            elif name in OTHERS:
                texts[name] = OTHERS[name]
            else:
                raise ValueError(f"parameter {name!r} of a rotary embedding is not known")
        if texts not in found:
            found.append(texts)
    return found


def inputs_on(device: str) -> RopeInputs:
    """Tokens at unlike positions, float32."""
    x = bell(7, "x", TOKENS, HEADS, CHANNELS).float()
    positions = integers(7, "positions", 4000, TOKENS)
    return RopeInputs(x.to(device), positions.to(device), ROPE)


def predictions(inputs: RopeInputs) -> Mapping[tuple[bool, bool, int], Any]:
    """(pairs read interleaved, written interleaved, direction) -> what may be returned."""
    found = {}
    for read, written, way in itertools.product((True, False), (True, False), (1, -1)):
        rope = RopeConfig(theta=ROPE.theta, interleaved=read)
        given = inputs._replace(positions=way * inputs.positions, rope=rope)
        want = ADMISSIBLE["rope"](given, NUMERICS)["x"]
        mid, radius = (unpaired(*pairs(x, read), written) for x in (want.mid, want.radius))
        found[read, written, way] = want._replace(mid=mid, radius=radius)
    return found


def probe_rotation(fn: Callable[..., Any], device: str = "cpu") -> list[Answer]:
    """The answers about a rotary embedding."""
    inputs = inputs_on(device)
    angle = angles(ROPE, inputs.positions, CHANNELS)
    scope = {"torch": torch, **inputs._asdict(), "cos": angle.cos().float(), "sin": angle.sin().float()}
    wanted, fits, refused = predictions(inputs), [], ""
    for texts in ways(fn):
        given = {name: eval(text, {}, {**scope, "x": inputs.x.clone()}) for name, text in texts.items()}
        try:
            result = fn(**given)
        except Exception as error:
            refused = f"{type(error).__name__}: {first_line(error)}"
            continue
        for _, tensor in tensors_in(result)[:1]:
            fits += _fits(tensor, texts, wanted)
    fit, evidence = verdict(_alike(fits))
    if fit is None:
        return [Answer("rope", "undetermined", evidence if fits else refused, known=False)]
    texts, (read, written, way) = fit.found
    called = ", ".join(f"{name}={text}" for name, text in texts.items())
    return [
        Answer("call", f"float32, {HEADS} heads, {CHANNELS} channels", called),
        Answer("pairs read", SPLIT[read], evidence),
        Answer("order written", SPLIT[written], "" if read == written else "not where they were read"),
        Answer("direction", "forwards" if way == 1 else "backwards"),
    ]


def _fits(tensor: torch.Tensor, texts: dict[str, str], wanted: Mapping[Any, Any]) -> list[Fit]:
    """Every prediction against one result, whose axes are those of what was given."""
    batched = BATCHED in texts.values()
    shape = (1, HEADS, TOKENS, CHANNELS) if batched else (TOKENS, HEADS, CHANNELS)
    if tuple(tensor.shape) != shape:
        return []
    got = tensor[0].transpose(0, 1) if batched else tensor
    return [compared(got, want, tuple(map(str, _words(key))), (texts, key)) for key, want in wanted.items()]


def _words(key: tuple[bool, bool, int]) -> tuple[str, str, str]:
    read, written, way = key
    kinds = {True: "interleaved", False: "half-split"}
    return f"reads {kinds[read]}", f"writes {kinds[written]}", "forwards" if way == 1 else "backwards"


def _alike(fits: list[Fit]) -> list[Fit]:
    """One fit a prediction: two shapes of a table that mean the same are no two answers."""
    best: dict[Any, Fit] = {}
    for fit in sorted(fits, key=lambda fit: (not fit.holds, fit.ratio)):
        best.setdefault(fit.found[1], fit)
    return list(best.values())
