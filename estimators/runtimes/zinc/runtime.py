"""zinc: the whole context before the first token, in float32, by its own memory plan."""

from collections import Counter
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from memfit.estimators.arch.specs import GatedDelta, KVBuffer
from memfit.estimators.base.units import open_size
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.kv_cache import state_bytes
from memfit.estimators.results.context import AutoContext
from memfit.estimators.results.estimate import Note
from memfit.estimators.runtimes.auto_context import RuntimeMemoryProfile
from memfit.estimators.runtimes.interface import MemoryFigures
from memfit.estimators.runtimes.runtime import Budget, Runtime
from memfit.estimators.runtimes.token_cache import TokenCacheModel
from memfit.estimators.runtimes.token_cost import attention_buffers
from memfit.estimators.runtimes.zinc.memory_plan import (
    AUTO_CONTEXT_PERCENT,
    AUTO_CONTEXT_STEP,
    auto_context_tokens_for_device_budget,
    fitting_context_tokens,
    model_config,
    profile,
)

# The description of 2026-06-12; later versions charge the cache to attending layers only.
ZINC = Runtime(
    name="zinc",
    version="2026-06-12",
    prefill_step=512,  # without effect here: its buffers are those of one token
    kv_step=1,
    kv_group_size=64,
    quantized_kv_start=0,
    cache_dtype="F32",
    growth="contiguous",
    charges="every layer",
    budget=Budget("working_set", AUTO_CONTEXT_PERCENT),
    context_step=AUTO_CONTEXT_STEP,
    keeps="cache, states and buffers on the device, a page table and staging in host memory",
    allocates="the whole context before the first token, in float32",
    source="https://github.com/zolotukhin/zinc, src/gpu/memory_plan.zig",
    faults=(
        "its automatic context is never below 4096 tokens, whether they fit or not",
        "it charges cache and recurrent state to every layer of a hybrid model",
    ),
)


class Zinc(TokenCacheModel, frozen=True):
    """zinc; its notes show what it charges to layers that do not attend."""

    defaults = ZINC
    table_bytes = 4

    def buffers(self) -> Iterable[KVBuffer]:
        """Return one full cache a layer, as wide as the widest of those that attend."""
        model = self.subject.model
        found = attention_buffers(model.mixers())
        widest = max(found, key=lambda buffer: buffer.elements_per_token, default=None)
        if widest is None:
            return ()
        full = KVBuffer(widest.heads, widest.key_dim, widest.value_dim)
        return (full,) * len(model.layers)

    @property
    def _profile(self) -> RuntimeMemoryProfile:
        return profile(model_config(self.subject.model))

    def memory_profile(self, workload: Workload, figures: MemoryFigures) -> RuntimeMemoryProfile:
        """Return zinc's own profile, of which each sequence has its states and tokens."""
        plain, batch = self._profile, workload.batch
        states = plain.gpu_ssm_bytes * batch
        return replace(
            plain,
            fixed_device_local_bytes=plain.fixed_device_local_bytes - plain.gpu_ssm_bytes + states,
            device_local_bytes_per_token=plain.device_local_bytes_per_token * batch,
            host_visible_bytes_per_token=plain.host_visible_bytes_per_token * batch,
            gpu_ssm_bytes=states,
        )

    def states(self, workload: Workload) -> int:
        return workload.batch * self._profile.gpu_ssm_bytes

    def workspace(self, workload: Workload) -> int:
        """Return the bytes of its buffers, on the device and in host memory."""
        plan = self._profile
        on_device = plan.fixed_device_local_bytes - plan.gpu_ssm_bytes
        return on_device + plan.fixed_host_visible_bytes

    def _notes(self, workload: Workload, figures: MemoryFigures) -> Iterator[Note]:
        """Yield what it charges to layers that do not attend."""
        model = self.subject.model
        if any(mixer.kind == GatedDelta.kind for mixer in model.mixers()):
            costs = self.token_costs(workload)
            cache = self.cache(costs, workload.total_tokens, workload).nbytes
            text = (
                f"zinc charges its cache to all {len(model.layers)} layers:"
                f" {open_size(cache)}, where those that attend need"
                f" {open_size(self._needed_bytes(workload))}; and states to all:"
                f" {open_size(self.states(workload))}, where the model's are"
                f" {open_size(state_bytes(model, workload.batch))}"
            )
            yield Note("warning", "runtime-fault", text)

    def context_notes(self, workload: Workload, figures: MemoryFigures) -> Iterator[Note]:
        """Yield what a token takes as zinc charges it, and in the layers that attend."""
        token = self._needed_bytes(workload) // workload.total_tokens // workload.batch
        charged = figures.kv.bytes_per_token - self.table_bytes
        if token != charged:
            text = (
                f"a token takes {open_size(charged)} as zinc charges it,"
                f" {open_size(token)} in the layers that attend"
            )
            yield Note("warning", "runtime-fault", text)

    def _needed_bytes(self, workload: Workload) -> int:
        """The cache for the workload's tokens if only layers that attend had one."""
        model, tokens = self.subject.model, workload.total_tokens
        return workload.batch * sum(
            layers * self.token_bytes(workload, buffer) * buffer.held_tokens(tokens)
            for buffer, layers in Counter(attention_buffers(model.mixers())).items()
        )

    def automatic_context(
        self, device: Device, workload: Workload, *, most: int, longest: int
    ) -> AutoContext:
        """Return zinc's own choice, which has a floor, and the one without it."""
        memory, weights = self._profile, self.resident_bytes()
        whole, budget = device.working_set_bytes, self.runtime.budget.of_device(device)
        its_own = auto_context_tokens_for_device_budget(memory, weights, whole, most)
        right = fitting_context_tokens(memory, weights, whole, most)
        reason = ""
        if its_own > right:
            need = memory.total_device_local_bytes(weights, its_own)
            reason = (
                f"zinc's floor of {its_own} tokens needs {need} bytes on the device,"
                f" its budget is {budget}"
            )
        return AutoContext(budget, its_own, right, reason)
