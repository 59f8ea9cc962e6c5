"""What the judge says about one backend on one case."""

import json
from dataclasses import asdict, dataclass, replace

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
class Finding:
    """An oracle's answer. ``detail`` is one line; empty where the claim held."""

    ok: bool
    detail: str = ""
    worst: Worst | None = None
    num_bad: int = 0
    num_checked: int = 0


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

    def to_json(self) -> str:
        """One line of JSON. Non-finite numbers are written as strings, so that any parser reads it."""
        data = asdict(replace(self, worst=None))
        data["case"] = json.loads(self.case.to_json())
        if self.worst is not None:
            worst = asdict(self.worst)
            data["worst"] = {k: str(v) if isinstance(v, float) else v for k, v in worst.items()}
        return json.dumps(data, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> "Verdict":
        """The verdict that ``to_json`` wrote. Raises: ValueError naming the field that is wrong."""
        try:
            data = json.loads(text)
            data["case"] = Case.from_json(json.dumps(data["case"]))
            if data["worst"] is not None:
                worst = dict(data["worst"], index=tuple(data["worst"]["index"]))
                worst |= {name: float(worst[name]) for name in ("got", "want", "bound", "ratio")}
                data["worst"] = Worst(**worst)
            return Verdict(**data)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"verdict: {error}") from None
