"""What llama.cpp leaves on the host where a GPU has no room: its --fit, and the divisions."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from memfit.estimators.base.units import ceil_div
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.results.context import AutoContext
from memfit.estimators.runtimes.facets import (
    ProgramContext,
    SplitMemory,
)
from memfit.estimators.runtimes.llama_cpp.statements import Stated
from memfit.estimators.runtimes.runtime import Runtime

_LEFT_FREE = 2**30  # common/common.h, fit_params_target
_FIT_CONTEXT = 4096  # common/common.h, fit_params_min_ctx


class Fitted(Stated, SplitMemory, ProgramContext, frozen=True):
    """llama.cpp with as much on the GPU as fits."""

    def divisions(self) -> Iterator[Sequence[tuple[dict[str, int], Runtime]]]:
        """Yield experts of ever more layers on the host, then ever fewer layers on the GPU."""
        settings, blocks = self.settings, self.placement.blocks
        is_set = settings.gpu_layers is not None or settings.automatic or settings.host_experts
        if is_set or self.host is None:
            return
        experts = {"host_experts": blocks} if self.subject.model.experts() else {}
        if experts:
            yield [self._division(host_experts=layers) for layers in range(1, blocks + 1)]
        yield [self._division(gpu_layers=layers, **experts) for layers in range(blocks, -1, -1)]

    def _division(self, **layers: int) -> tuple[dict[str, int], Runtime]:
        return layers, replace(self.settings, **layers)

    def settled(self, workload: Workload) -> Runtime:
        """Return llama.cpp with the most layers on the GPU that leave what its --fit leaves.

        Without a device there is nothing to fit, and without a GPU no layer to place.
        """
        device = self.subject.device
        if not self.settings.automatic or device is None or device.backend == "cpu":
            return self.runtime
        if self._leaves_enough(workload):
            return self.runtime
        for layers in range(self.placement.blocks, 0, -1):
            chosen = replace(self.settings, gpu_layers=layers)
            if replace(self, runtime=chosen)._leaves_enough(workload):
                return chosen
        return replace(self.settings, gpu_layers=0)

    def _leaves_enough(self, workload: Workload) -> bool:
        device = self.subject.device
        assert device
        return self.figures(workload).moment.nbytes + _LEFT_FREE <= device.working_set_bytes

    def program_context(self, workload: Workload, *, fitted: bool) -> int:
        """Return a sequence's part of the model's context, or of the longest that --fit keeps.

        Source: common/fit.cpp: whole steps of 256 cells, and at least 4096; below that it moves
        layers. It interpolates where memfit searches.
        """
        sequences, device = workload.batch, self.subject.device

        def part(tokens: int) -> int:
            return ceil_div(tokens, sequences)

        most = workload.total_tokens

        def is_longer(steps: int) -> bool:
            return not self._leaves_enough(replace(workload, prompt_tokens=part(steps * step)))

        step = self.settings.kv_step
        if not fitted or device is None or device.backend == "cpu" or most <= _FIT_CONTEXT:
            return part(most)
        if self._leaves_enough(replace(workload, prompt_tokens=part(most))):
            return part(most)
        least = _FIT_CONTEXT // step
        steps = range(least + 1, most // step + 1)
        return part((least + bisect_left(steps, True, key=is_longer)) * step)

    def automatic_context(
        self, device: Device, workload: Workload, *, most: int, longest: int
    ) -> AutoContext:
        """Return the model's own context, and the longest that fits."""
        reason = ""
        if most > longest:
            reason = f"llama.cpp takes the model's own {most} tokens unless a context is set"
        return AutoContext(self.runtime.budget.of_device(device), most, longest, reason)
