"""One registry finds the row of every model class, in a file that it imports only then."""

import subprocess
import sys
from importlib import import_module

from memfit.estimators.arch.registry import FAMILIES


def test_every_file_has_rows_of_the_types_that_the_registry_looks_for_in_it() -> None:
    for file in set(FAMILIES.values()):
        rows = import_module(f"memfit.estimators.arch.families.{file}").CLASSES
        assert rows.keys() == {each for each, of in FAMILIES.items() if of == file}, file


def test_a_row_is_found_without_importing_the_other_classes() -> None:
    program = """
import sys
from memfit.estimators.arch.registry import FAMILIES, class_row
class_row("qwen3")
package = "memfit.estimators.arch.families."
print({each for each in FAMILIES.values() if package + each in sys.modules})
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert run.stdout.strip() == "{'dense_models'}", run.stderr
