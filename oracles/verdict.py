"""What the judge says about one backend on one case."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from mla_ref.case import Case

PASS = "pass"
FAIL = "fail"
ERROR = "error"
CRASH = "crash"
TIMEOUT = "timeout"
UNSUPPORTED = "unsupported"
UNAVAILABLE = "unavailable"

HELD = (PASS,)
BROKEN = (FAIL, ERROR, CRASH, TIMEOUT)
NOT_RUN = (UNSUPPORTED, UNAVAILABLE)
STATUSES = HELD + BROKEN + NOT_RUN


def claims_something(status: str, num_checked: int) -> bool:
    """Whether anything was looked at, of which it says that it held, or something broke."""
    return status in BROKEN or (status in HELD and num_checked > 0)


# Of the fields of a verdict that any text may claim to be, what they are.
_PLAIN: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("backend", "variant", "oracle", "device", "detail"), (str,)),
    **dict.fromkeys(("num_bad", "num_checked"), (int,)),
    "seconds": (float, int),
}


@dataclass(frozen=True, kw_only=True)
class Worst:
    """The element farthest outside (or nearest to) its bound.

    ratio: error over bound; infinite where the masks of NaN or ±inf disagree.
    place: where it is in the problem's words: "request 1, query 0, head 3, channel 17".
    """

    tensor: str
    index: tuple[int, ...]
    got: float
    want: float
    bound: float
    ratio: float
    place: str


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Which elements of a tensor are bad: ``oracles.locate``.

    where: one line in the problem's words. guess: what explains every one of them, or empty.
    shares: percent of bad elements, in rows (of requests, say) and columns (of heads); 0 and 100 only where
        it is none and all. row, column: what they are, in words; row_step, column_step: how many make a cell.
    """

    where: str
    guess: str = ""
    row: str = ""
    column: str = ""
    row_step: int = 1
    column_step: int = 1
    shares: tuple[tuple[int, ...], ...] = ()

    def text(self) -> str:
        """Both lines as one."""
        return "; ".join(part for part in (self.where, self.guess) if part)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An oracle's answer. ``detail`` is one line; empty where the claim held.

    pattern: looks at all bad elements at once. more: what else is known of them, or "". Neither is called
        before the claim is known to be broken, and nothing that they do makes it less so.
    """

    ok: bool
    detail: str = ""
    worst: Worst | None = None
    num_bad: int = 0
    num_checked: int = 0
    pattern: Callable[[], Pattern] | None = field(default=None, compare=False, repr=False)
    more: Callable[[], str] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One claim about one backend on one case.

    status: pass, fail, error (it raised), crash, timeout, unsupported (outside its contract) or
        unavailable (cannot run here). Only pass is a success; the last two carry the reason in ``detail``.
    """

    status: str
    backend: str
    variant: str
    oracle: str
    case: Case
    device: str
    detail: str = ""
    worst: Worst | None = None
    num_bad: int = 0
    num_checked: int = 0
    seconds: float = 0.0
    pattern: Pattern | None = None

    @property
    def claims(self) -> bool:
        """As ``claims_something``."""
        return claims_something(self.status, self.num_checked)

    def to_json(self) -> str:
        """One line of JSON. Non-finite numbers are written as strings, so that any parser reads it."""
        data = self.without_case()
        data["case"] = json.loads(self.case.to_json())
        return json.dumps(data, separators=(",", ":"))

    def without_case(self) -> dict[str, Any]:
        """Every other field, as JSON holds it: a case may have many verdicts."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "case"}
        if self.worst is not None:
            worst = asdict(self.worst)
            data["worst"] = {k: str(v) if isinstance(v, float) else v for k, v in worst.items()}
        data["pattern"] = None if self.pattern is None else asdict(self.pattern)
        return data

    @staticmethod
    def from_json(text: str) -> "Verdict":
        """The verdict that ``to_json`` wrote. Raises: ValueError naming the field that is wrong."""
        try:
            data = json.loads(text)
            if not isinstance(data, dict):
                raise ValueError(f"expected an object, got {type(data).__name__}")
            if "case" not in data:
                raise ValueError("case is missing")
            case = Case.from_json(json.dumps(data.pop("case")))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"verdict: {error}") from None
        return Verdict.on(case, data)

    @staticmethod
    def on(case: Case, data: Mapping[str, Any]) -> "Verdict":
        """The verdict whose other fields are ``data``. Raises: ValueError naming the field that is wrong."""
        try:
            data = dict(data)
            if data["status"] not in STATUSES:
                raise ValueError(f"status {data['status']!r} is not one of {', '.join(STATUSES)}")
            for name, kind in _PLAIN.items():
                if name in data and type(data[name]) not in kind:
                    got = f"{data[name]!r} ({type(data[name]).__name__})"
                    raise ValueError(f"{name} is {got}, must be {kind[0].__name__}")
            if data["worst"] is not None:
                worst = dict(data["worst"], index=tuple(data["worst"]["index"]))
                worst |= {name: float(worst[name]) for name in ("got", "want", "bound", "ratio")}
                data["worst"] = Worst(**worst)
            if data.get("pattern") is not None:
                shares = tuple(map(tuple, data["pattern"]["shares"]))
                data["pattern"] = Pattern(**dict(data["pattern"], shares=shares))
            return Verdict(case=case, **data)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"verdict: {error}") from None
