"""Conversations that a model serves, kept in memory and in files: the child's part."""

from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

from memfit.estimators.base.reading.request_trace import TraceRequest
from memfit.estimators.base.workload import Workload
from memfit.estimators.plans.offload.cache_tiers import Found, Move
from memfit.estimators.runtimes.measurement import Way
from memfit.probes.model_runner import ModelRunner
from memfit.probes.prompt_caches import stored


class KeptCache(NamedTuple):
    """A conversation between two requests."""

    tokens: int
    nbytes: int
    """As it is stored, in memory and without the header of its file."""


class StoredForm(NamedTuple):
    """How the caches of conversations are stored and restored."""

    fingerprint: str
    """Of the model."""
    bits: int
    way: Way
    prefill_step: int

    def of(self, caches: list[Any]) -> list[Any]:
        """Return caches in these bits; each one that is not is freed as soon as it can be."""
        import mlx.core as mx

        if self.bits != stored.FULL_BITS:
            for index in range(len(caches)):
                caches[index], _ = stored.quantised(caches[index], self.bits)
                mx.eval(caches[index].state)
        return caches

    def metadata(self, ids: list[int]) -> dict[str, str]:
        """Return what the file of a conversation says of itself."""
        return stored.metadata_of(self.fingerprint, ids)


class ConversationFiles:
    """The stored caches of conversations, one file each.

    A new file of a conversation replaces the old one when all of it is on the disk.
    """

    def __init__(self, directory: Path) -> None:
        """Take an empty directory."""
        self.directory = directory
        self._paths: dict[str, Path] = {}
        self._numbers: dict[str, int] = {}

    def path(self, agent: str) -> Path:
        """Return the file of a conversation that was written."""
        return self._paths[agent]

    def write(self, agent: str, tokens: int, caches: list[Any], metadata: dict[str, str]) -> None:
        """Write the cache of a conversation.

        Raises:
            InputError: when it cannot be written; the old file is as it was.
            MachineError: when the disk is too full.
        """
        number = self._numbers.setdefault(agent, len(self._numbers))
        path = self.directory / f"{number}-{tokens}.safetensors"
        stored.save(path, caches, metadata)
        old, self._paths[agent] = self._paths.get(agent), path
        if old is not None:
            stored.remove(old)

    def delete(self, agent: str) -> None:
        """Remove the file of a conversation."""
        stored.remove(self._paths.pop(agent))


class LiveConversations:
    """Answers each request with a model, and does what the tiers decide."""

    def __init__(
        self, runner: ModelRunner, files: ConversationFiles, form: StoredForm, text: list[int]
    ) -> None:
        """Take ``text`` as the ids that users write, as many as the longest prompt has."""
        self.runner, self.files, self.form, self.text = runner, files, form, text
        self.read_bytes = self.written_bytes = 0
        self.reload_ns = self.write_ns = self.prefill_ns = 0
        self.first_token_ns: dict[Found, int] = {}
        self._numbers: dict[str, int] = {}
        self._hot: dict[str, list[Any]] = {}
        self._ids: dict[str, list[int]] = {}
        """Of each conversation, as they are in its cache."""
        self._written_ids: dict[str, list[int]] = {}

    def request(
        self, request: TraceRequest, found: Found, kept: KeptCache | None
    ) -> tuple[KeptCache, int]:
        """Serve a request: restore its cache, compute the rest of the prompt, and generate."""
        import mlx.core as mx

        if found == "warm":
            self._ids[request.agent] = self._written_ids[request.agent]
            self._from_disk(request.agent)
        ids = self._prompt(request)
        start = perf_counter_ns()
        caches = self._restored(request.agent) if kept else []
        restored = perf_counter_ns()
        if found == "warm":
            self.reload_ns += restored - start
        reused = _cut(caches, kept.tokens, request.prompt_tokens) if kept else 0
        if not reused:
            caches = self.runner.caches(Workload(prompt_tokens=1))
        first = restored

        def on_prompt(processed: int, total: int) -> None:
            nonlocal first
            self.runner.report({})
            if processed == total:
                first = perf_counter_ns()

        workload = Workload(
            prompt_tokens=request.prompt_tokens,
            max_tokens=request.completion_tokens,
            prefill_step=self.form.prefill_step,
        )
        rest = mx.array(ids[reused:], mx.int32)
        for token, _ in self.runner.steps(rest, workload, caches, on_prompt):
            ids.append(token)
            self.runner.report({})
        mx.synchronize(self.runner.stream())
        self.prefill_ns += first - restored
        self.first_token_ns[found] = self.first_token_ns.get(found, 0) + first - start
        self._ids[request.agent] = ids
        start = perf_counter_ns()
        self._hot[request.agent] = caches = self.form.of(caches)
        self.write_ns += perf_counter_ns() - start
        return KeptCache(request.total_tokens, sum(cache.nbytes for cache in caches)), reused

    def move(self, move: Move) -> None:
        """Write, forget or delete the cache of a conversation."""
        agent = move.agent
        if move.action == "forget":
            del self._hot[agent]
        elif move.action == "delete":
            self.files.delete(agent)
        else:
            start = perf_counter_ns()
            ids = self._written_ids[agent] = self._ids[agent]
            self.files.write(agent, len(ids), self._hot[agent], self.form.metadata(ids))
            self.write_ns += perf_counter_ns() - start
            self.written_bytes += self.files.path(agent).stat().st_size
        self.runner.report({})

    def _prompt(self, request: TraceRequest) -> list[int]:
        """Return all earlier turns, and then text that no other conversation begins with."""
        number = self._numbers.setdefault(request.agent, len(self._numbers))
        start = number % len(self.text)
        earlier = self._ids.get(request.agent, [])
        fresh = self.text[start:] + self.text[:start]
        return [*earlier, *fresh[len(earlier) :]][: request.prompt_tokens]

    def _from_disk(self, agent: str) -> None:
        """Require that a file is as it was written, and let the system forget it."""
        path = self.files.path(agent)
        stored.checked_sha256(path)
        stored.drop_from_page_cache(path)
        self.read_bytes += path.stat().st_size

    def _restored(self, agent: str) -> list[Any]:
        if (caches := self._hot.pop(agent, None)) is None:
            own = self.runner.caches(Workload(prompt_tokens=1))
            metadata = self.form.metadata(self._written_ids[agent])
            caches = stored.read(self.files.path(agent), own, metadata)
        return stored.restored(caches, self.form.way, self.runner.report)


def _cut(caches: list[Any], tokens: int, prompt_tokens: int) -> int:
    """Cut a conversation to all but the last token of a prompt; return the tokens it keeps.

    0: it is longer, and cannot be cut.
    """
    from mlx_lm.models.cache import can_trim_prompt_cache

    extra = tokens - (prompt_tokens - 1)
    if extra <= 0:
        return tokens
    is_cut = can_trim_prompt_cache(caches) and all(cache.trim(extra) == extra for cache in caches)
    return prompt_tokens - 1 if is_cut else 0
