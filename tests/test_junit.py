from dataclasses import replace
from xml.etree import ElementTree

import pytest

from mla_ref.case import Case
from mla_ref.layout import CacheLayout
from mla_ref.presets import preset
from oracles.console import label
from oracles.junit import to_junit
from oracles.verdict import ERROR, FAIL, UNSUPPORTED, Verdict

CASE = Case(problem="rope", config=preset("a.x-k2"), q_lens=(1,), kv_lens=(1,))

# None of these may stand in XML, as itself or as a reference; two of them are not even UTF-8.
FORBIDDEN = ("\0", "\x08", "\x0b", "\x1b", "\x1f", "\ufffe", "\uffff", "\ud800", "\udfff")
ALLOWED = (
    "\t",
    "\n",
    " ",
    "~",
    "\x85",
    "\ud7ff",
    "\ue000",
    "\ufffd",
    "\U00010000",
    "\U0010ffff",
    "<&\"'>]]>",
)


def _read(text: str) -> list[ElementTree.Element]:
    """Every element of the report of three verdicts all of whose texts, names included, hold ``text``."""
    case = replace(CASE, config=replace(CASE.config, name=f"c{text}"))
    claim = {"backend": f"b{text}", "variant": f"v{text}", "oracle": f"o{text}", "detail": f"d{text}."}
    verdicts = [
        Verdict(status=status, case=case, device="cpu", **claim) for status in (FAIL, ERROR, UNSUPPORTED)
    ]
    return [*ElementTree.fromstring(to_junit(verdicts).encode("utf-8")).iter()]


@pytest.mark.parametrize("text", FORBIDDEN, ids=ascii)
def test_what_xml_may_not_hold_is_shown_escaped_everywhere(text: str):
    shown = ascii(text)[1:-1]
    suite, *tests = (e for e in _read(text) if e.tag in ("testsuite", "testcase"))
    assert suite.get("name") == f"b{shown}"
    assert {test.get("classname") for test in tests} == {f"b{shown}"}
    for test in tests:
        assert str(test.get("name")).startswith(f"v{shown}/o{shown} rope c{shown} ")
        assert test[0].get("message") == f"d{shown}."
    assert [test[0].tag for test in tests] == ["failure", "error", "skipped"]
    assert f"  why   d{shown}." in str(tests[0][0].text)


@pytest.mark.parametrize("text", ALLOWED, ids=ascii)
def test_what_xml_may_hold_is_kept(text: str):
    found = [e for e in _read(text) if e.tag in ("testsuite", "failure", "skipped")]
    assert [found[0].get("name"), *(e.get("message") for e in found[1:])] == [
        f"b{text}",
        f"d{text}.",
        f"d{text}.",
    ]


def test_two_cases_that_differ_in_memory_alone_have_two_names():
    cases = [
        CASE,
        *(replace(CASE, layout=layout) for layout in (CacheLayout(entry_align=256), CacheLayout(offset=64))),
    ]
    names = {label(case) for case in cases}
    assert len(names) == len(cases)
    assert any(" block=64 entry_align=256 plain " in name for name in names)
