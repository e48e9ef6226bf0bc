"""A JUnit report, which CI servers show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from opensora_accel.verify.report import Report

_NOT_XML = re.compile(r"(\x1b\[[0-9;]*m)|[^\t\n\r\x20-\ud7ff\ue000-\ufffd]")
"""Colours of a terminal, and characters that XML 1.0 has not."""


def to_junit(report: Report | None, violations: Sequence[str] | None, error: str | None = None) -> str:
    """One test case for each mesh, and one for the communication (`violations` None: not recorded).

    `error`: why nothing, or not all, was compared.
    """
    suite = ElementTree.Element("testsuite", name="opensora-accel verify")
    if report is not None:
        for result in report.results:
            failures = [*map(str, report.findings_of(result)), *result.errors.values()]
            _add_case(suite, f"gradients on {result.shape}", result.seconds, failures)
    if violations is not None:
        _add_case(suite, "communication", 0.0, violations)
    if error is not None:
        _add_case(suite, "verify", 0.0, [error], "error")
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(len(suite.findall("testcase/failure"))))
    suite.set("errors", str(len(suite.findall("testcase/error"))))
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def _add_case(
    suite: ElementTree.Element, name: str, seconds: float, failures: Sequence[str], kind: str = "failure"
) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname="verify", name=name, time=f"{seconds:.3f}")
    if failures:
        text = _NOT_XML.sub("", "\n".join(failures))
        ElementTree.SubElement(case, kind, message=text.splitlines()[0]).text = text
