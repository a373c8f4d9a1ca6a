"""A model of mlx-lm under a workload: its bytes, and the graphs of its calls.

Nothing is computed: the class is built from the config, and zero tokens are pushed through it.
Any thread may trace. Traces run one after another; other threads may use MLX and mlx-lm meanwhile
(isolation.py, docs/formulas.md).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple

from msgspec.structs import replace

from memfit.estimators.arch.model import Model
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.ranks import Parallel, Rank
from memfit.estimators.base.workload import ALL_PHASES, CallPhase, Recipe, Workload
from memfit.estimators.checkpoint.adapters import Adapter
from memfit.estimators.checkpoint.manifest import Tensor
from memfit.estimators.machine.device import Backend
from memfit.estimators.mlx.call_plan import PlannedCall, planned_calls
from memfit.estimators.trace.cache_stepper import STATE_CACHES, leaves, length_of
from memfit.estimators.trace.call_recorder import KeptCalls, Running, Sample
from memfit.estimators.trace.class_description import (
    FirstCall,
    describe,
    first_call,
    mlx_lm_class,
    watching,
)
from memfit.estimators.trace.declared_format import to_convert, unread_format
from memfit.estimators.trace.graph_format import Call, Trace
from memfit.estimators.trace.isolation import tracing
from memfit.estimators.trace.kernel_stubs import TraceTarget, library_for
from memfit.estimators.trace.leaves import Modules, caches_of
from memfit.estimators.trace.libraries import versions
from memfit.estimators.trace.load_recorder import record_load, record_share
from memfit.estimators.trace.model_builder import (
    arrays_of,
    build,
    class_errors,
    loaded,
    settings_of,
)
from memfit.estimators.trace.ranks import as_rank, parallel_of, share
from memfit.estimators.trace.recording import GraphError, TooLargeError
from memfit.estimators.trace.training_recorder import Training, record_training

FEW_TOKENS = Workload(prompt_tokens=64)
# The smallest group: it divides most widths.
_QUANTISED = replace(FEW_TOKENS, kv_bits=8, kv_group_size=32, quantized_kv_start=0)
# Runs that others may begin like: of a request, and of a few other prefill steps.
_BEGUN = 4


class TracedShapes(NamedTuple):
    """What mlx-lm's class holds when a workload ends."""

    weights: Mapping[str, int]
    """Bytes of each parameter by path."""
    kv_bytes: int
    """Allocated bytes of keys and values."""
    kv_held_bytes: int
    """Bytes of the tokens that are still needed."""
    ssm_bytes: int
    """Bytes of recurrent states."""
    allocated_tokens: int
    """Tokens that the longest buffer has room for."""
    held_tokens: int
    """Tokens of the longest buffer that are still needed."""
    largest_bytes: int
    """Bytes of the largest array that a cache holds."""
    unread_format: str | None
    """The quantisation method that the config declares and the weights are not sized in.

    Only without headers. The weights are then those of the dequantised model.
    """

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())


class BuiltClass(ABC):
    """A library's class for a config, built once: what mlx-lm's and mlx-vlm's have in common.

    ``name`` is the name of the config in messages. With ``tensors`` the model is what the library
    would load from them; without, floating-point parameters are of ``dtype``. ``quantize`` then
    converts the model as the library's convert does, and ``adapter`` is added to it; with a
    ``rank`` it is that rank's part.

    Raises:
        MachineError: when MLX or the library is not installed.
        UnsupportedError: when the library has no class for the config, or the class fails on it.
    """

    library: ClassVar[str]
    """Its name in messages."""
    _installed: Callable[[], Mapping[str, str]]
    _unread_format: Callable[[Mapping[str, Any]], str | None]

    def __init__(
        self,
        config: Mapping[str, Any],
        backend: Backend,
        *,
        name: str = "config.json",
        dtype: str = "BF16",
        tensors: Iterable[Tensor] | None = None,
        quantize: Quantization | None = None,
        adapter: Adapter | None = None,
        rank: Rank | None = None,
    ) -> None:
        if quantize:
            config, tensors = to_convert(config, tensors)
        self._config, self._backend, self._name = config, backend, name
        self._dtype, self._quantize = dtype, quantize
        self._adapter, self._rank = adapter, rank
        # Headers list the packed tensors, so that no format has to be assumed.
        self.unread_format = None if tensors is not None else self._unread_format(config)
        """The quantisation method that the config declares and the weights are not sized in."""
        # It raises, with what to install, before anything is built.
        self.versions = self._installed()
        """The installed versions of MLX and the library."""
        self._tensors = None if tensors is None else list(tensors)
        with self._tracing():
            arrays = None if self._tensors is None else arrays_of(self._tensors)
            self._model = self._build(arrays, rank)
            self._modules = Modules(self._model)
            self.weights = self._inspect(arrays or {})
            """Bytes of each parameter by path."""

    @abstractmethod
    def _build(self, arrays: dict[str, Any] | None, rank: Rank | None) -> Any: ...

    def _inspect(self, _: Mapping[str, Any]) -> Mapping[str, int]:
        """Return the bytes of each parameter; the model was loaded from the arrays."""
        from mlx.utils import tree_flatten

        flat: Any = tree_flatten(self._model.parameters())
        return {path: array.nbytes for path, array in flat}

    @property
    def _model_type(self) -> str:
        return str(self._config["model_type"])

    @contextmanager
    def _tracing(self, workload: Workload = FEW_TOKENS) -> Iterator[None]:
        with (
            tracing(),
            as_rank(library_for(self._backend), self._rank),
            class_errors(self._name, self._config, self.library, batch=workload.batch),
        ):
            yield

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Name config and type where a graph cannot be recorded."""
        try:
            yield
        except GraphError as error:
            raise GraphError(f"{self._name}: {self._model_type}: {error}") from None


class TracedModel(BuiltClass):
    """mlx-lm's class for a config, built once for many workloads."""

    library = "mlx-lm"
    _installed = staticmethod(versions)
    _unread_format = staticmethod(unread_format)

    def _inspect(self, arrays: Mapping[str, Any]) -> Mapping[str, int]:
        self._load: Call | None = None
        self._kept = KeptCalls()
        self._begun: list[Running] = []
        self.loops_in_training = False
        """Whether the class loops over tokens when it is trained, known once it was recorded."""
        read = set(map(id, arrays.values()))
        weights = [leaf.array for leaf in self._modules.leaves() if leaf.role == "weight"]
        # Of other tensors ``load`` has to find out what they take on the way.
        is_read = read.issuperset(map(id, weights))
        # What a conversion has written is loaded as it is.
        self._unread = [] if is_read or self._quantize else self._tensors or []
        self._is_cut = not is_read and self._rank is not None and self._rank.parallel == "tensor"
        return super()._inspect(arrays)

    def _build(self, arrays: dict[str, Any] | None, rank: Rank | None) -> Any:
        return build(
            library_for(self._backend),
            self._config,
            self._name,
            dtype=self._dtype,
            arrays=arrays,
            quantize=self._quantize,
            adapter=self._adapter,
            rank=rank,
        )

    def _loaded(self, arrays: dict[str, Any]) -> Any:
        utils = library_for(self._backend).load("mlx_lm.utils")
        model = loaded(utils, settings_of(utils, self._config), arrays)
        share(model, self._rank)
        return model

    @property
    def layers(self) -> int:
        """Return how many layers the class has."""
        return len(self._model.layers)

    def parallel(self, requested: Parallel | None) -> Parallel:
        """Return how mlx-lm's sharded_load runs the class.

        Raises:
            UnsupportedError: when it has no method for it.
        """
        with self._tracing():
            return parallel_of(self._model, requested)

    def first_call(self) -> FirstCall:
        """Return what the class shows of itself in a call on a few tokens."""
        with self._tracing():
            switch = library_for(self._backend).load("mlx_lm.models.switch_layers")
            target = TraceTarget(backend=self._backend)
            running = Running(self._model, self._modules, FEW_TOKENS, target)
            with watching(switch) as seen:
                tokens = running.begin()
            # A call may leave other arrays in the modules (gemma3n.py).
            self._modules.restore()
            first = first_call(self._model, running.caches, seen, tokens)
            quantised = Running(self._model, self._modules, _QUANTISED, target)
            first = first._replace(kv_quantizable=quantised.runs_quantised())
            self._modules.restore()
            return first

    def describe(self, first: FirstCall) -> Model:
        """Return the description of a model that was built unquantised.

        Raises:
            UnsupportedError: also, for a cache or experts that are not described.
        """
        with self._tracing():
            of = mlx_lm_class(self._model)
            return describe(of, first, model_type=self._model_type, dtype=self._dtype)

    def shapes(self, workload: Workload) -> TracedShapes:
        """Return the bytes at the end of the workload; no graph is recorded."""
        # Shapes do not depend on which kernels are fused.
        target = TraceTarget(backend=self._backend)
        with self._tracing(workload):
            running = Running(self._model, self._modules, workload, target)
            running.finish()
            return self._shapes(running.caches, workload)

    def load(self, target: TraceTarget) -> Call | None:
        """Return the load of the tensors, None where all stay in memory as they are in files.

        Raises:
            GraphError: when its graph cannot be recorded.
        """
        if self._load is None and self._unread:
            with self._tracing():
                self._load = record_load(self._loaded, self._unread, target)
        elif self._load is None and self._is_cut and self._rank:
            with self._tracing():
                converted = self._tensors if self._quantize else None
                arrays = arrays_of(converted) if converted else None
                self._load = record_share(self._build(arrays, None), target, self._rank)
        return self._load

    def record(
        self,
        workload: Workload,
        target: TraceTarget,
        *,
        phases: Collection[CallPhase] = ALL_PHASES,
    ) -> tuple[Trace, TracedShapes]:
        """Return the graphs of a workload's calls, and the bytes at its end.

        Only those of ``phases`` are recorded, and the first where another takes on what it leaves.

        Raises:
            GraphError: also, when the graphs of the calls cannot be recorded.
        """
        first, *others = planned_calls(workload, target.versions)
        planned = [call for call in others if call.phase in phases]
        with self._tracing(workload):
            running = self._running(workload, target, first)
            if first.phase in phases or not planned or not running.skips(first, planned[0]):
                planned.insert(0, first)
            trace = self._trace(running, planned, target)
            running.skip_to_end()
            self._begun = [running, *self._begun][:_BEGUN]
            return trace, self._shapes(running.caches, workload)

    def _running(self, workload: Workload, target: TraceTarget, first: PlannedCall) -> Running:
        """Return one that has made the first call of a workload, or that is to make it."""
        for running in self._begun:
            if running.begins(workload, target, first):
                # Only to be taken again once all its calls were recorded.
                self._begun.remove(running)
                return running
        return Running(self._model, self._modules, workload, target, kept=self._kept)

    def record_planned(
        self,
        workload: Workload,
        target: TraceTarget,
        planned: Sequence[PlannedCall],
        sampled: Sample,
    ) -> Trace:
        """Return the graphs of calls that another loop makes of a workload.

        Raises:
            GraphError: also, when the graphs of the calls cannot be recorded.
        """
        with self._tracing():
            running = Running(self._model, self._modules, workload, target, sampled)
            return self._trace(running, planned, target)

    def record_training(
        self,
        recipe: Recipe,
        tokens: int,
        target: TraceTarget,
        *,
        validated: int | None = None,
        is_whole: bool = False,
        iterations: int | None = None,
        longest_loop: int | None = None,
    ) -> Training:
        """Return the steps of mlx-lm's trainer, as `training_recorder.record_training`.

        Those of a class that loops over tokens are always whole, unless its loops are shortened: an
        operation more or less changes the order of all, and the first step may be the largest.

        ``longest_loop`` is the most tokens of a batch that a loop is traced for whole.

        Raises:
            GraphError: also, when a step cannot be recorded.
        """
        loops = self.loops_in_training
        is_long = iterations is None and longest_loop is not None and tokens > longest_loop
        if loops and is_long:
            raise TooLargeError
        record = partial(record_training, self._model, recipe, tokens, target, validated=validated)
        with self._tracing():
            self._modules.restore()
            try:
                is_whole = is_whole or (loops and iterations is None)
                return record(is_whole=is_whole, loops=loops, iterations=iterations)
            except TooLargeError:
                self.loops_in_training = True
                if loops or is_long:
                    raise
                self._modules.restore()
                return record(is_whole=True, loops=True)
            finally:
                self._modules.restore()

    def _trace(
        self, running: Running, planned: Sequence[PlannedCall], target: TraceTarget
    ) -> Trace:
        with self._named_errors():
            calls = tuple(running.calls(planned))
        return Trace(
            model_type=self._model_type,
            backend=self._backend,
            versions=self.versions,
            weights=self.weights,
            calls=calls,
            mlx_version=target.versions.mlx,
        )

    def _shapes(self, caches: list[Any], workload: Workload) -> TracedShapes:
        total = workload.total_tokens
        kv = held = states = longest = needed = 0
        for cache in leaves(caches):
            # Recurrent states, which do not grow with the tokens.
            if type(cache).__name__ in STATE_CACHES:
                states += _bytes_of(cache)
                continue
            allocated = length_of(cache)
            if not allocated:
                continue
            # A window or chunk limits the tokens that are still needed.
            limit = getattr(cache, "max_size", getattr(cache, "chunk_size", total))
            kv += (nbytes := _bytes_of(cache))
            held += nbytes // allocated * min(total, limit)
            longest, needed = max(longest, allocated), max(needed, min(total, limit))
        return TracedShapes(
            weights=self.weights,
            kv_bytes=kv,
            kv_held_bytes=held,
            ssm_bytes=states,
            allocated_tokens=longest,
            held_tokens=needed,
            largest_bytes=max((leaf.array.nbytes for leaf in caches_of(caches)), default=0),
            unread_format=self.unread_format,
        )


def _bytes_of(cache: Any) -> int:
    # The caches of mlx-lm before 0.31.0 do not count themselves.
    own = getattr(cache, "nbytes", None)
    return sum(leaf.array.nbytes for leaf in caches_of([cache])) if own is None else int(own)
