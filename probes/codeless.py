"""Keep the code of model repositories out of a measuring process.

transformers imports the modules that an ``auto_map`` names in any of a model's files:
``module.Class`` in its directory, ``WHERE--module.Class`` in another directory or in a snapshot of
the Hub's cache, offline too. trust_remote_code=False does not prevent it: processors of mlx-vlm
(0.7.10: got, inkling) pass True themselves, and others (molmo, phi3_v) render chat templates
without Jinja's sandbox. So no ``auto_map`` and no code reach the libraries (`codeless_view`), and
what would import or run some raises an error (`forbid_repository_code`).
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from memfit.estimators.base.errors import MemfitError, UnsupportedError
from memfit.estimators.base.files import list_names, printable, read_whole
from memfit.estimators.base.unfinished import unfinished_folder
from memfit.probes.loading import one_line

# What mlx-vlm downloads of a repository (mlx_vlm/utils.py, get_model_path), without its Python.
_DATA = {".json", ".jsonl", ".safetensors", ".model", ".tiktoken", ".txt", ".jinja"}
_KEY = "auto_map"
# The key; JSON may escape any of its letters.
_SPELLED = re.compile("".join(rf"(?:{c}|\\u00{ord(c):02x})" for c in _KEY).encode(), re.I)
_MAX_JSON_BYTES = 256_000_000  # the largest tokenizer.json have about 35 MB
# What finds, copies or imports a repository's module: transformers, dynamic_module_utils.py.
_IMPORTERS = ("get_class_from_dynamic_module", "get_cached_module_file", "get_class_in_module")


class RepositoryCodeError(BaseException):
    """A library was about to import code of a repository.

    No subclass of Exception: libraries catch those, and go on with something else.
    """


def forbid_repository_code() -> None:
    """Let transformers import no repository's module, and Jinja run no template unsandboxed.

    For a measuring process, before it imports what copies these functions.
    """
    with suppress(ImportError):
        from transformers import dynamic_module_utils

        for name in _IMPORTERS:
            setattr(dynamic_module_utils, name, _refuse)
    with suppress(ImportError):
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        # The one that transformers has for chat templates (utils/chat_template_utils.py).
        vars(jinja2)["Environment"] = ImmutableSandboxedEnvironment
        jinja2.Template.environment_class = ImmutableSandboxedEnvironment


def _refuse(reference: object = "", where: object = "", *_: Any, **__: Any) -> NoReturn:
    raise RepositoryCodeError(
        f"{printable(where)}: {_KEY}: {printable(reference)} is code of a repository, which memfit"
        " never runs"
    )


@contextmanager
def refusals() -> Iterator[None]:
    """Raise the UnsupportedError of a refusal in the block."""
    try:
        yield
    except RepositoryCodeError as error:
        raise UnsupportedError(str(error)) from None


class UnloadableError(Exception):
    """A library cannot load a tokenizer or processor; the message has its reason."""


@contextmanager
def codeless_view(path: Path) -> Iterator[Path]:
    """Give a folder with links to the data of a model, for what loads a tokenizer or processor.

    No ``auto_map`` in its files has an entry.

    Raises:
        UnsupportedError: when the block fails and a file names code, or would run some.
        UnloadableError: when the block fails otherwise.
    """
    with unfinished_folder() as folder:
        view = folder / (path.resolve().name or "model")
        view.mkdir()
        emptied = [name for name in list_names(path) if _adopt(path.absolute() / name, view)]
        try:
            yield view
        except MemfitError:
            raise
        except RepositoryCodeError as error:
            raise UnsupportedError(one_line(error, view, path)) from None
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a library may raise anything
            reason = f"{type(error).__name__}: {one_line(error, view, path)}"
            if not emptied:
                raise UnloadableError(reason) from None
            raise UnsupportedError(
                f"{printable(path / emptied[0])}: {_KEY}: cannot be loaded without code of a"
                f" repository, which memfit never runs ({reason})"
            ) from None


def _adopt(file: Path, view: Path) -> bool:
    """Link a file of data, or copy it with an empty auto_map; return whether it had one.

    Raises:
        CheckpointError: when it cannot be read.
    """
    if file.suffix not in _DATA or not file.is_file():
        return False
    new = view / file.name
    if file.suffix == ".json":
        content = read_whole(file, limit=_MAX_JSON_BYTES)
        if _SPELLED.search(content):
            with suppress(ValueError, RecursionError):  # transformers cannot read it either
                new.write_text(json.dumps(_emptied(json.loads(content))), "utf-8")
                return True
            return False
    new.symlink_to(file)
    return False


def _emptied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: {} if key == _KEY else _emptied(each) for key, each in value.items()}
    return [_emptied(each) for each in value] if isinstance(value, list) else value
