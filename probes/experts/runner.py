"""Run a model with none, all or some of its experts in memory: the child's part."""

import gc
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import CheckpointError, InputError
from memfit.estimators.base.files import printable
from memfit.estimators.base.units import Bytes, Count
from memfit.estimators.base.workload import Workload
from memfit.estimators.plans.experts.recording import RecordedRun
from memfit.estimators.runtimes.measurement import Run
from memfit.probes.agreement import Agreement, compared, greedy, prefill
from memfit.probes.experts import prepacked
from memfit.probes.experts.expert_files import ExpertFiles
from memfit.probes.experts.slots import Policy, Steps, attach, keep_only
from memfit.probes.experts.switches import (
    LoggedModel,
    Recorded,
    RouterOnly,
    Routing,
    RunLog,
    Switch,
    retyped,
    support_16_bits_on_cpu,
    switches_of,
)
from memfit.probes.loading import load_model, memory_errors
from memfit.probes.model_runner import ModelRunner
from memfit.probes.run_monitor import ReportFigures
from memfit.probes.tokenize_prompt import texts_ids


class ExpertSetup(Struct, frozen=True, kw_only=True):
    """Which experts a process has in memory."""

    mode: Literal["routers", "full", "slots"]
    kept: tuple[tuple[int, ...], ...] = ()
    """With ``slots``, the experts of each layer in the order of their slots."""
    pinned: tuple[tuple[int, ...], ...] = ()
    policy: Policy = "load"
    pack: str | None = None
    """A prepacked directory to load from."""


class ExpertLayerInfo(Struct, frozen=True, kw_only=True):
    """The routed experts of one layer of the loaded model."""

    layer: Count
    experts: Count
    nbytes: Bytes
    """Bytes of all experts."""
    largest_nbytes: Bytes
    """Bytes of the largest stacked tensor."""
    unreadable: str | None
    """A tensor that no single expert can be read from, None when there is none."""


class LayerRouting(Struct, frozen=True, kw_only=True):
    """How often each expert of a layer was used: pairs of an expert and a number."""

    layer: Count
    top_k: Count
    tokens: tuple[tuple[Count, Count], ...]
    prompts: tuple[tuple[Count, Count], ...]


class ExpertRunner(ModelRunner):
    """Measures one model with a part of its experts."""

    def __init__(
        self, path: Path, memory_limit_bytes: int | None, report: ReportFigures, setup: ExpertSetup
    ) -> None:
        super().__init__(path, memory_limit_bytes, report)
        self._setup = setup
        self._switches: list[Switch] = []
        self._prompts: list[list[int]] = []
        self._layers: list[ExpertLayerInfo] = []
        self._steps: Steps | None = None
        self._notes: list[str] = []

    def prompts(self, texts: Sequence[str]) -> list[int]:
        """Tokenise the texts; return the number of tokens of each.

        Raises:
            InputError: when a text is empty or cannot be tokenised.
        """
        self._prompts = texts_ids(self.path, texts)
        self.choose(0)
        return list(map(len, self._prompts))

    def choose(self, prompt: int) -> None:
        """Run this prompt from now on."""
        self._ids = self._prompts[prompt]

    def load_model(self) -> tuple[Any, dict[str, Any]]:
        """Return the model with the experts of the setup, and its config.

        Raises:
            UnsupportedError: when it has no routed experts, or one cannot be read alone.
        """
        import mlx.core as mx
        from mlx.utils import tree_flatten

        setup, self._switches = self._setup, []
        model, config = load_model(self.path, lazy=True)
        switches = self._switches = switches_of(model)
        files = ExpertFiles(self.path)
        self._layers = [_described(switch, files) for switch in switches]
        own = {id(linear[name]) for each in switches for linear, name, _ in each.arrays()}
        flat: Any = tree_flatten(model.parameters())
        if setup.pack:
            self._load_pack(model, Path(setup.pack))
        else:
            with memory_errors():
                mx.eval([array for _, array in flat if id(array) not in own])
            del flat
            self._load_experts()
        if setup.mode != "routers" and support_16_bits_on_cpu(switches):
            self._notes.append(
                "MLX's CPU backend multiplies stacked experts in float32: peaks and times include"
                " copies of the experts in float32, which a GPU does not make; the plan counts all"
                " of them, as a bound"
            )
        if setup.mode == "slots":
            experts = {each.layer: each.experts for each in self._layers}
            self._steps = Steps(setup.policy, experts)
            attach(model, switches, setup.kept, setup.pinned, steps=self._steps, files=files)
        return model, config

    def layers(self) -> tuple[tuple[ExpertLayerInfo, ...], tuple[str, ...]]:
        """Return the layers with experts of the loaded model, and notes on how it runs."""
        return tuple(self._layers), tuple(self._notes)

    def routing(self, prompts: tuple[int, ...], step: int) -> tuple[LayerRouting, ...]:
        """Run prompts, ``step`` tokens at a time; return what the routers chose."""
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache

        record = Routing([switch.layer for switch in self._switches])
        with self.errors(), memory_errors():
            self._recording(record)
            for index in prompts:
                caches = make_prompt_cache(self.model)
                ids = mx.array(self._prompts[index])
                for start in range(0, len(self._prompts[index]), step):
                    self.model(ids[None, start : start + step], cache=caches)
                    record.count()
                    mx.eval([cache.state for cache in caches])
                    self.report({})
                record.end_prompt()
        self._recording(None)
        return tuple(
            LayerRouting(
                layer=layer,
                top_k=record.top_k[layer],
                tokens=tuple(record.tokens[layer].items()),
                prompts=tuple(record.prompts[layer].items()),
            )
            for layer in record.tokens
        )

    def run(self, workload: Workload, wired_limit_bytes: int | None) -> Run:
        """Generate once; the figures of the slots are added to the run's."""
        if self._steps:
            for counts in self._steps.counts.values():
                counts.clear()
        run = super().run(workload, wired_limit_bytes)
        if self._steps is None:
            return run
        self._steps.end_run()
        more = [
            (f"{phase}_{name}", value)
            for phase, counts in self._steps.counts.items()
            for name, value in sorted(counts.items())
        ]
        return replace(run, more=(*run.more, *more))

    def record(self, workload: Workload) -> RecordedRun:
        """Generate once; return what the routers chose for every token of every call."""
        log = RunLog([switch.layer for switch in self._switches])
        with self.errors(), memory_errors():
            for switch in self._switches:
                retyped(switch.module, Recorded, routing=log, layer=switch.layer)
            retyped(self.model, LoggedModel, log=log)
            super().run(workload, None)
        if self._steps:
            self._steps.end_run()
        for module in (self.model, *(switch.module for switch in self._switches)):
            module.__class__ = type(module).__mro__[2]
        return RecordedRun(tuple(log.calls), tuple(map(tuple, log.choices.values())))

    def save_reference(self, file: Path, tokens: int, step: int) -> None:
        """Generate greedily, and save the logits for `agreement`."""
        import mlx.core as mx

        with self.errors(), memory_errors():
            logits, chosen = self._logits(tokens, step, None)
            mx.save_safetensors(str(file), {"logits": logits, "tokens": chosen})

    def agreement(self, file: Path, tokens: int, step: int) -> Agreement:
        """Compare the logits with saved ones, along their tokens."""
        import mlx.core as mx

        with self.errors(), memory_errors():
            saved: Any = mx.load(str(file))
            logits, _ = self._logits(tokens, step, saved["tokens"].tolist())
            return compared(logits, saved["logits"])

    def pack(self, directory: Path, manifest: prepacked.Manifest) -> prepacked.Manifest:
        """Write the loaded weights to a directory; return its manifest with the checksums.

        Raises:
            InputError: when it cannot be written.
            MachineError: when the disk is too full.
        """
        from mlx.utils import tree_flatten

        own = {name for switch in self._switches for _, _, name in switch.arrays()}
        flat: Any = dict(tree_flatten(self.model.parameters()))
        files = {
            prepacked.EXPERTS: {name: flat[name] for name in flat if name in own},
            prepacked.OTHERS: {name: flat[name] for name in flat if name not in own},
        }
        prepacked.require_room(directory, sum(array.nbytes for array in flat.values()))
        return prepacked.save(directory, files, manifest)

    def _load_experts(self) -> None:
        setup = self._setup
        for place, switch in enumerate(self._switches):
            if setup.mode == "routers":
                retyped(switch.module, RouterOnly, output_dims=switch.output_dims)
                for linear, name, _ in list(switch.arrays()):
                    del linear[name]
            else:
                kept = setup.kept[place] if setup.kept else range(switch.experts)
                keep_only(switch, kept)
            self.report({})

    def _load_pack(self, model: Any, directory: Path) -> None:
        import mlx.core as mx
        from mlx.utils import tree_flatten

        start = perf_counter_ns()
        arrays: dict[str, Any] = {}
        for name in (prepacked.EXPERTS, prepacked.OTHERS):
            loaded: Any = mx.load(str(directory / name))
            arrays |= loaded
        flat: Any = tree_flatten(model.parameters())
        if missing := {name for name, _ in flat}.symmetric_difference(arrays):
            raise CheckpointError(f"{printable(directory)}: {min(missing)}: no such parameter")
        model.load_weights(list(arrays.items()), strict=False)
        mx.eval(list(arrays.values()))
        self.report({"pack_ns": perf_counter_ns() - start})

    def _recording(self, record: Routing | None) -> None:
        for switch in self._switches:
            module = switch.module
            if self._setup.mode == "routers":
                module.routing, module.layer = record, switch.layer
            elif record:
                retyped(module, Recorded, routing=record, layer=switch.layer)
            else:
                module.__class__ = type(module).__mro__[2]

    def _logits(self, tokens: int, step: int, given: list[int] | None) -> tuple[Any, Any]:
        """The logits after the prompt and after each of the next tokens, greedy or given."""
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache

        if not self._ids:
            raise InputError("a comparison needs a prompt first")
        caches, ids = make_prompt_cache(self.model), mx.array(self._ids)
        last = len(self._ids) - 1
        prefill(self.model, caches, ids[:last], step, self.report)
        steps = islice(greedy(self.model, caches, ids[last:], given), tokens)
        rows, chosen = zip(*steps, strict=True)
        found = mx.stack(list(rows))
        mx.eval(found)
        if self._steps:
            self._steps.end_run()
        del caches
        gc.collect()
        return found, mx.array(list(chosen))


def _described(switch: Switch, files: ExpertFiles) -> ExpertLayerInfo:
    unreadable = (
        full_name
        for linear, name, full_name in switch.arrays()
        if not files.candidates(full_name, linear[name].shape, linear[name].dtype)
    )
    return ExpertLayerInfo(
        layer=switch.layer,
        experts=switch.experts,
        nbytes=switch.nbytes,
        largest_nbytes=max(linear[name].nbytes for linear, name, _ in switch.arrays()),
        unreadable=next(unreadable, None),
    )
