"""A gate's report as JUnit XML: a suite for each target, a test case for each limit."""

import re
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from memfit.cli.render.gate import text as gate_text
from memfit.estimators.results.gate import GateReport, TargetReport

# What XML 1.0 cannot hold, escaped or not (https://www.w3.org/TR/xml/#charsets).
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: GateReport) -> str:
    """Return the report as an XML document that ends with a line feed."""
    suites = [_suite(target, report) for target in report.targets]
    root = Element("testsuites", _totals("memfit gate", suites))
    root.extend(suites)
    indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _suite(target: TargetReport, report: GateReport) -> Element:
    cases = _cases(target, report.policy)
    suite = Element("testsuite", _totals(target.name, cases))
    suite.extend(cases)
    return suite


def _cases(target: TargetReport, policy: str) -> list[Element]:
    cases = []
    if target.message is not None:
        case = _case(target, gate_text.status(target), policy, target.line)
        SubElement(case, "error", message=_text(target.message))
        cases.append(case)
    for check in target.checks:
        case = _case(target, gate_text.limit_name(check), policy, check.line)
        if target.status == "undecided":
            SubElement(case, "skipped", message="the figures are bounds")
        elif not check.passed:
            failure = SubElement(case, "failure", message=_text(gate_text.broken(check)))
            failure.text = _text(gate_text.remedy(check))
        cases.append(case)
    return cases


def _case(target: TargetReport, name: str, policy: str, line: int) -> Element:
    place = {"file": _text(policy), "line": str(line)}
    return Element("testcase", {"classname": target.name, "name": name, **place, "time": "0"})


def _totals(name: str, children: list[Element]) -> dict[str, str]:
    counts = {
        kind: sum(len(list(child.iter(kind))) for child in children)
        for kind in ("failure", "error", "skipped")
    }
    return {
        "name": name,
        "tests": str(sum(len(list(child.iter("testcase"))) for child in children)),
        "failures": str(counts["failure"]),
        "errors": str(counts["error"]),
        "skipped": str(counts["skipped"]),
    }


def _text(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)
