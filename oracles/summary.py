"""A run in a few figures, for programs: what was asked, and each backend's counts and nearest errors."""

from collections import Counter
from pathlib import Path
from typing import Any

from oracles.report import Subject, gathered, verdicts_of
from oracles.run_directory import RunDirectory, is_run_directory
from oracles.verdict import BROKEN, HELD, NOT_RUN


def summary(path: Path) -> dict[str, Any]:
    """What a run directory or a file of verdicts holds, as JSON holds it.

    cases: those on which a claim was tried. largest_error_over_bound: by oracle, finite ones.
    Raises: ValueError if it cannot be read.
    """
    cases: dict[Subject, set[Any]] = {}

    def counting() -> Any:
        for verdict in verdicts_of(path):
            tried = cases.setdefault(Subject(verdict.case.problem, verdict.backend), set())
            if verdict.status not in NOT_RUN:
                tried.add(verdict.case)
            yield verdict

    found = gathered(counting())
    nearest: dict[Subject, dict[str, float]] = {}
    for (subject, oracle), ratio in sorted(found.nearest.items()):
        if ratio < float("inf"):
            nearest.setdefault(subject, {})[oracle] = round(ratio, 3)

    def counts(statuses: Counter[str]) -> dict[str, int]:
        kinds = {"claims_held": HELD, "claims_failed": BROKEN, "claims_not_run": NOT_RUN}
        return {name: sum(statuses[status] for status in of) for name, of in kinds.items()}

    manifest = RunDirectory(path).manifest if is_run_directory(path) else {}
    return {
        "command": ["mla-verify", *manifest["command"]] if manifest else [],
        "versions": manifest.get("versions", {}),
        "devices": dict(found.devices),
        "backends": {
            subject.backend: {
                "problem": subject.problem,
                "cases": len(cases[subject]),
                **counts(statuses),
                "largest_error_over_bound": nearest.get(subject, {}),
            }
            for subject, statuses in sorted(found.statuses.items())
        },
    }
