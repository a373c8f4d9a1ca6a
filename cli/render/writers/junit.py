"""JUnit XML: suites of test cases."""

from collections.abc import Sequence
from typing import Protocol
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from memfit.cli.render.document import Case, Suite
from memfit.cli.render.output import visible


class HasSuites(Protocol):
    """What this writer needs."""

    def suites(self) -> tuple[str, Sequence[Suite]]:
        """Return the name of the report, and its suites."""


def write(view: HasSuites, *, to_file: bool) -> str:
    """Return the view's suites as an XML document that ends with a line feed."""
    name, suites = view.suites()
    root = _counted("testsuites", name, [case for suite in suites for case in suite.cases])
    for suite in suites:
        element = _counted("testsuite", suite.name, suite.cases)
        element.extend(_case(case, suite.name) for case in suite.cases)
        root.append(element)
    indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _counted(tag: str, name: str, cases: Sequence[Case]) -> Element:
    outcomes = [case.outcome for case in cases]
    counts = {
        "tests": len(cases),
        "failures": outcomes.count("failure"),
        "errors": outcomes.count("error"),
        "skipped": outcomes.count("skipped"),
    }
    return Element(tag, {"name": visible(name), **{key: str(n) for key, n in counts.items()}})


def _case(case: Case, suite: str) -> Element:
    place = {"file": visible(case.file), "line": str(case.line)}
    names = {"classname": visible(suite), "name": visible(case.name)}
    element = Element("testcase", {**names, **place, "time": "0"})
    if case.outcome:
        result = SubElement(element, case.outcome, message=visible(case.message))
        result.text = visible(case.text) or None
    return element
