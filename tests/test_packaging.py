"""The package map of pyproject.toml and the folders agree."""

import ast
import re
import warnings
from collections.abc import Iterator
from importlib import metadata
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import tomli

from memfit.estimators.base.version import __version__

ROOT = Path(__file__).parent.parent
FOLDERS = ("api", "cli", "estimators", "probes", "sample_configs", "docs/schema")


@pytest.fixture(scope="module")
def setuptools_table() -> Any:
    return tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def packages_in_folders() -> list[str]:
    """Return the dotted names of all folders that hold an ``__init__.py``."""
    found = (init.parent for top in FOLDERS for init in (ROOT / top).rglob("__init__.py"))
    return sorted(dotted(folder) for folder in found)


def dotted(path: Path) -> str:
    """Return the name under which a folder or a module is imported."""
    top, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["memfit", *([] if top in ("api", "docs") else [top]), *rest])


def folder_of(package: str) -> Path:
    inits = (init for top in FOLDERS for init in (ROOT / top).rglob("__init__.py"))
    return next(init.parent for init in inits if dotted(init.parent) == package)


def data_files_in_folders() -> set[Path]:
    """Return the files that are neither Python nor a tool's output."""
    files = {path for top in FOLDERS for path in (ROOT / top).rglob("*") if path.is_file()}
    return {path for path in files if path.suffix not in {".py", ".pyc"} and path.name[0] != "."}


def test_every_package_of_the_folders_is_declared(setuptools_table: Any) -> None:
    assert sorted(setuptools_table["packages"]) == packages_in_folders()


def test_every_python_file_is_in_a_package() -> None:
    unpackaged = [
        path
        for top in FOLDERS
        for path in (ROOT / top).rglob("*.py")
        if not (path.parent / "__init__.py").is_file()
    ]
    assert unpackaged == []


def test_every_data_file_is_declared(setuptools_table: Any) -> None:
    declared: set[Path] = set()
    for package, patterns in setuptools_table["package-data"].items():
        folder = folder_of(package)
        for pattern in patterns:
            matched = set(folder.glob(pattern))
            assert matched, f"{package}: nothing matches {pattern}"
            declared |= matched
    assert declared == data_files_in_folders()


def test_no_text_of_the_code_points_to_a_file_that_a_wheel_lacks() -> None:
    """Docstrings are for readers of the repository; what else is written, a user may see."""
    named = re.compile(r"\b(?:docs|tests|benchmarks)/\w|\b(?:README|CONTRIBUTING|SECURITY)\b")
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for top in FOLDERS
        for path in (ROOT / top).rglob("*.py")
        for node in texts(ast.parse(path.read_text(encoding="utf-8")))
        if named.search(node.value)
    ]
    assert found == []


def texts(tree: ast.AST) -> Iterator[Any]:
    """Yield the strings of a module that are not docstrings."""
    alone = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node


def test_the_installed_version_equals_the_code() -> None:
    try:
        installed = metadata.version("memfit")
    except metadata.PackageNotFoundError:
        pytest.skip("memfit is not installed here")
    assert installed == __version__


def test_the_changelog_has_the_version() -> None:
    headings = re.findall(r"^## \[?([0-9][^\]\s]*)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == __version__


def test_constraints_have_only_names_and_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9.]+", line)] == []


def test_every_development_tool_is_pinned_and_what_else_memfit_needs_may_be() -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    extras = project["optional-dependencies"]
    wanted = [each for extra in ("dev", "mcp", "mlx", "vlm") for each in extras[extra]]
    tools = {re.split(r"[\[><=; ]", line)[0] for line in wanted}
    needed = {re.split(r"[><=]", line)[0] for line in project["dependencies"]}
    assert tools - {"memfit"} == names - needed


@pytest.fixture(scope="module")
def setup_module() -> Any:
    spec = spec_from_file_location("setup", ROOT / "setup.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    # setuptools takes Python's own distutils where a warning in its copy is an error.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec.loader.exec_module(module)
    return module


README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\]\(([^()\s]+)\)")


def test_the_page_on_an_index_has_no_relative_links(setup_module: Any) -> None:
    assert len(LINK.findall(README)) > 15
    page = setup_module.index_page(README, "")
    assert LINK.findall(page) == []
    assert "(`docs/why.md`) has that" in page
    assert "![" not in page


def test_with_an_address_the_page_links_to_every_file_of_the_repository(setup_module: Any) -> None:
    address = "https://example.org/memfit"
    page = setup_module.index_page(README, address)
    found = LINK.findall(page)
    assert len(found) == len(LINK.findall(README))
    for target in found:
        file = re.fullmatch(rf"{address}/(?:blob|raw)/HEAD/([^#]+)(?:#.*)?", target)
        assert file, target
        assert (ROOT / file[1]).exists(), target
    assert page.count(f"]({address}/raw/HEAD/docs/images/") == README.count("](docs/images/")
    assert setup_module.urls(address)["Documentation"] == f"{address}/blob/HEAD/docs/index.md"


def test_no_address_is_invented(setup_module: Any) -> None:
    assert setup_module.urls("") == {}
    assert setup_module.REPOSITORY == ""
