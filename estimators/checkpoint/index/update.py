"""The index made again from the Hub: the models of publishers, and mlx-community's conversions.

What was read is kept line by line, so that an update that was interrupted goes on where it was.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from memfit.estimators.base.errors import MemfitError, UnreachableError
from memfit.estimators.base.progress import Progress
from memfit.estimators.checkpoint.config import CONFIG, MAX_CONFIG_BYTES
from memfit.estimators.checkpoint.hub.parallel import start
from memfit.estimators.checkpoint.hub.requests import Client
from memfit.estimators.checkpoint.hub.settings import Hub
from memfit.estimators.checkpoint.index.names import is_plain
from memfit.estimators.checkpoint.index.records import (
    Header,
    Index,
    IndexedModel,
    QuantizedRepository,
    SourceFile,
    write_index,
)

CONVERSIONS = "mlx-community"
MAX_LISTING_BYTES = 64_000_000
_LISTED = 1000  # the most that one answer of the Hub has (huggingface_hub, hf_api.py, paginate)
_FIELDS = ("createdAt", "safetensors", "tags", "usedStorage")
_BITS = re.compile(r"(\d)-?bits?\b|(mxfp4|mxfp8|nvfp4|bf16|fp16)", re.IGNORECASE)
_KEY = "hub"


class _Listed(Struct, rename="camel"):
    """What a listing of the Hub says of a repository."""

    id: str
    created_at: str = ""
    safetensors: Mapping[str, Any] | None = None
    tags: list[str] = field(default_factory=list)
    used_storage: int | None = None

    def tag(self, start: str) -> str:
        return next((each[len(start) :] for each in self.tags if each.startswith(start)), "")


class Update(Struct, frozen=True):
    """What an update read."""

    models: int
    """Repositories whose config was read."""
    kept: int
    """Models of the former index that the Hub did not list."""
    refused: int
    """Repositories without a config that can be read, as gated ones are."""


def publishers(index: Index) -> list[str]:
    """Return the owners of the models whose config an index has, sorted."""
    owners = {name.partition("/")[0] for name in index.names if index.model(name).config}
    return sorted(owners)


def update_index(
    path: Path,
    former: Index,
    hub: Hub,
    parameters: Callable[[IndexedModel], int | None],
    owners: list[str],
    progress: Progress,
) -> Update:
    """Read the models of ``owners`` from the Hub and write the index to ``path``.

    ``parameters`` counts those of a config. A part that is there from an update that did not end
    is not read again.

    Raises:
        UnreachableError: when the Hub cannot be reached; what was read is kept.
        OSError: when the file cannot be written.
    """
    if hub.offline:
        raise UnreachableError("HF_HUB_OFFLINE is set: an index is made from the Hub; unset it")
    client = Client(hub, "the index", progress)
    part = path.with_name(f"{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    read = {model.name: model for model in _read_part(part)}
    listed = [each for owner in owners for each in _listing(client, hub, owner)]
    progress.begin("reading configs", len(listed))
    refused = 0
    with open(part, "ab") as kept:
        for each in listed:
            if each.id not in read:
                model = _model(client, hub, each, parameters)
                refused += model.config is None
                read[model.name] = model
                kept.write(msgspec.json.encode(model) + b"\n")
                kept.flush()
            progress.advance()
    progress.end()
    conversions = _conversions(_listing(client, hub, CONVERSIONS))
    models = [
        replace(model, quantized=tuple(conversions.get(name, ())) or model.quantized)
        for name, model in {**_former(former), **read}.items()
    ]
    today = datetime.now(timezone.utc).date().isoformat()
    sources = {**former.header.sources, _KEY: SourceFile(f"{hub.endpoint}/", today)}
    write_index(path, Header(made=today, sources=sources), models)
    os.unlink(part)
    return Update(len(read), len(models) - len(read), refused)


def _former(index: Index) -> dict[str, IndexedModel]:
    return {name: index.model(name) for name in index.names}


def _read_part(part: Path) -> Iterator[IndexedModel]:
    if not part.is_file():
        return
    for line in part.read_bytes().splitlines():
        try:
            yield msgspec.json.decode(line, type=IndexedModel)
        except msgspec.DecodeError:
            return  # cut when the update was interrupted


def _listing(client: Client, hub: Hub, owner: str) -> list[_Listed]:
    fields = "".join(f"&expand[]={name}" for name in _FIELDS)
    url = f"{hub.endpoint}/api/models?author={quote(owner)}&limit={_LISTED}&sort=downloads{fields}"
    content = _get(client, url, MAX_LISTING_BYTES)
    try:
        return msgspec.json.decode(content, type=list[_Listed])
    except msgspec.DecodeError as error:
        raise UnreachableError(f"{url}: not a listing of the Hub: {error}") from None


def _model(
    client: Client,
    hub: Hub,
    listed: _Listed,
    parameters: Callable[[IndexedModel], int | None],
) -> IndexedModel:
    """What is known of a repository; where its config cannot be read, its name and total."""
    total = (listed.safetensors or {}).get("total")
    model = IndexedModel(
        name=listed.id,
        published=total if isinstance(total, int) else None,
        released=listed.created_at[:10],
        license=listed.tag("license:"),
        source=f"{_KEY}:{listed.id}/blob/main/{CONFIG}",
    )
    if not is_plain(listed.id):
        return model
    try:
        url = f"{hub.endpoint}/{listed.id}/resolve/main/{CONFIG}"
        config = json.loads(_get(client, url, MAX_CONFIG_BYTES))
    except (MemfitError, ValueError):
        return model
    if not isinstance(config, dict):
        return model
    model = replace(model, config=config, context=_context(config))
    count = parameters(model)
    is_same = count is not None and count == model.published
    return replace(model, parameters=count, checked="total" if is_same else "")


def _context(config: Mapping[str, Any]) -> int | None:
    text = config.get("text_config")
    holders = (text if isinstance(text, dict) else {}, config)
    found = next((each["max_position_embeddings"] for each in holders if _LIMIT in each), None)
    return found if isinstance(found, int) else None


_LIMIT = "max_position_embeddings"


def _conversions(listed: list[_Listed]) -> dict[str, list[QuantizedRepository]]:
    """The repositories with fewer bits, by the model that they say they are made from."""
    found: dict[str, list[QuantizedRepository]] = {}
    for each in listed:
        base = each.tag("base_model:quantized:") or each.tag("base_model:")
        bits = _BITS.search(each.id.rpartition("/")[2])
        if base and bits and each.used_storage:
            label = f"{bits[1]}bit" if bits[1] else bits[2].lower()
            found.setdefault(base, []).append(
                QuantizedRepository(each.id, label, each.used_storage)
            )
    return found


def _get(client: Client, url: str, limit: int) -> bytes:
    (job,) = start([lambda: client.get(url, lambda _: limit + 1)], 1)
    content = client.result(job).content
    if len(content) > limit:
        raise UnreachableError(f"{url}: the Hub sent more than {limit} bytes")
    return content
