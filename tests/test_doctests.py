"""The worked examples in docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest

import memfit.cli
import memfit.estimators
import memfit.probes

MODULES = [
    found.name
    for package in (memfit.cli, memfit.estimators, memfit.probes)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not found.ispkg
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
