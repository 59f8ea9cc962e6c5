"""Verdicts as JUnit XML, which most CI systems show as a test report."""

import re
from collections.abc import Sequence
from itertools import groupby
from xml.etree import ElementTree

from oracles.console import describe, label
from oracles.verdict import BROKEN, FAIL, NOT_RUN, Verdict

# What a character of XML 1.0 (fifth edition, production 2) is not. A carriage return is one, but readers turn
# it into a line feed, so it is shown too.
NOT_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


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
    suite = _element(root, "testsuite", name=backend, **{name: str(n) for name, n in counts.items()})
    for verdict in verdicts:
        claim = "/".join(part for part in (verdict.variant, verdict.oracle) if part)
        name = f"{claim or verdict.status} {label(verdict.case)}"
        test = _element(suite, "testcase", classname=backend, name=name, time=f"{verdict.seconds:.3f}")
        if verdict.status in BROKEN:
            kind = "failure" if verdict.status == FAIL else "error"
            element = _element(test, kind, message=verdict.detail or verdict.oracle)
            element.text = _xml_safe("\n".join(describe(verdict)))
        elif verdict.status in NOT_RUN:
            _element(test, "skipped", message=verdict.detail)


def _element(parent: ElementTree.Element, tag: str, **attributes: str) -> ElementTree.Element:
    """A new last child, its attributes such that any XML parser reads them."""
    return ElementTree.SubElement(parent, tag, {name: _xml_safe(text) for name, text in attributes.items()})


def _xml_safe(text: str) -> str:
    """The same text, but what no XML may hold is an escape sequence of Python's."""
    return NOT_XML.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
