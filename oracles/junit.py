"""Verdicts as JUnit XML, which most CI systems show as a test report."""

from collections.abc import Sequence
from itertools import groupby
from xml.etree import ElementTree

from oracles.console import describe, label
from oracles.verdict import BROKEN, FAIL, NOT_RUN, Verdict


def to_junit(verdicts: Sequence[Verdict]) -> str:
    """One suite for each backend; a claim that failed is a failure, one that was not tried is skipped."""
    root = ElementTree.Element("testsuites")
    ordered = sorted(verdicts, key=lambda v: v.backend)
    for backend, group in groupby(ordered, key=lambda v: v.backend):
        _add_suite(root, backend, list(group))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_suite(root: ElementTree.Element, backend: str, verdicts: list[Verdict]) -> None:
    failures = sum(v.status == FAIL for v in verdicts)
    counts: dict[str, int] = {
        "tests": len(verdicts),
        "failures": failures,
        "errors": sum(v.status in BROKEN for v in verdicts) - failures,
        "skipped": sum(v.status in NOT_RUN for v in verdicts),
    }
    attributes = {"name": backend} | {name: str(n) for name, n in counts.items()}
    suite = ElementTree.SubElement(root, "testsuite", attributes)
    for verdict in verdicts:
        claim = "/".join(part for part in (verdict.variant, verdict.oracle) if part)
        name = f"{claim or verdict.status} {label(verdict.case)}"
        test = ElementTree.SubElement(
            suite, "testcase", classname=backend, name=name, time=f"{verdict.seconds:.3f}"
        )
        if verdict.status in BROKEN:
            kind = "failure" if verdict.status == FAIL else "error"
            element = ElementTree.SubElement(test, kind, message=_xml_safe(verdict.detail or verdict.oracle))
            element.text = _xml_safe("\n".join(describe(verdict)))
        elif verdict.status in NOT_RUN:
            ElementTree.SubElement(test, "skipped", message=_xml_safe(verdict.detail))


def _xml_safe(text: str) -> str:
    return "".join(c if c in "\t\n" or c >= " " else "?" for c in text)
