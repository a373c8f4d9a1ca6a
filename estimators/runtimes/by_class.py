"""A model as a runtime's own class describes it: for one that no family describes."""

from collections import Counter

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.modules import Module, Part
from memfit.estimators.machine.device import Device
from memfit.estimators.runtimes.interface import Subject
from memfit.estimators.runtimes.source import Interpolated
from memfit.estimators.runtimes.traced_workspace import ModelTrace, TracedWorkspace
from memfit.estimators.weights.derived import QuantizationPlan
from memfit.estimators.weights.footprint import WeightFootprint, bounded, bounded_by_name
from memfit.estimators.weights.parts import part_of
from memfit.estimators.weights.quantization_plan import declared

# Predicted against measured peaks: docs/accuracy.md.
TRACE_ERROR_PERCENT = 10


def described_by_class(trace: ModelTrace, device: Device | None) -> Subject:
    """Return a checkpoint as its class describes it, with a workspace between traced prompts.

    Raises:
        MachineError: when a package of the class is not installed.
        UnsupportedError: when there is no such class, or what it holds is not described.
    """
    checkpoint, quantize = trace.checkpoint, trace.quantize
    model = trace.description(device)
    plan = QuantizationPlan(quantize, converting=True) if quantize else None
    plan = plan or declared(checkpoint.config, model, checkpoint.config_name).plan
    footprint = weights_by_trace(trace, model, plan, device)
    source = Interpolated(TracedWorkspace(trace, model.max_context))
    return Subject(checkpoint, model, footprint, device, source)


def weights_by_trace(
    trace: ModelTrace, model: Model, plan: QuantizationPlan | None, device: Device | None
) -> WeightFootprint:
    """Return the weights as the class of an undescribed model holds them; ``plan`` packs them.

    Towers are not among those that are loaded: a runtime for images adds them.
    """
    weights = trace.weights(device)
    of_files = trace.quantize is None and trace.rank is None
    tensors = trace.checkpoint.tensors if of_files else None
    named = weights if tensors is None else {t.name: t.nbytes for t in tensors}
    modules, parts = dict(model.all_modules()), {part.value: 0 for part in Part}

    def module_of(name: str) -> Module | None:
        return modules.get(name.rpartition(".")[0]) or modules.get(name)

    for name, nbytes in named.items():
        module = module_of(name)
        parts[(module.part if module else part_of(name)).value] += nbytes
    towers = {name for name in weights if (module := module_of(name)) and not module.loaded}
    footprint = WeightFootprint(
        nbytes=sum(named.values()),
        by_part=parts,
        parameters=sum(module.elements + module.bias for module in modules.values()),
        sizes=Counter(size for name, size in weights.items() if name not in towers),
        basis="exact" if trace.checkpoint.tensors and not trace.quantize else "traced",
        plan=plan,
        unloaded_by_part={Part.VISION.value: parts[Part.VISION.value]} if towers else {},
    )
    method = None if trace.quantize else trace.unread_format(device)
    if method is None and trace.checkpoint.tensors is None and plan is None:
        return bounded_by_name(footprint, trace.checkpoint.id, model.dtype)
    if method is None:
        return footprint
    text = (
        f"quantisation method {method!r}: how mlx-lm stores it is not described; the"
        " weights are bounded by the unquantised model"
    )
    return bounded(footprint, "dequantised", text)
