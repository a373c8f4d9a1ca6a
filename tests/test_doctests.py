"""The worked examples in docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest

import memfit.estimators

MODULES = [
    found.name
    for found in pkgutil.walk_packages(memfit.estimators.__path__, "memfit.estimators.")
    if not found.ispkg
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), raise_on_error=False)
    assert result.failed == 0
