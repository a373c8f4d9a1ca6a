"""Find the expert modules of a model of mlx-lm, and record what its routers choose."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from memfit.estimators.base.errors import InputError, UnsupportedError

_LAYER = re.compile(r"\.(\d+)\.")


class Switch(NamedTuple):
    """The routed experts of one layer."""

    layer: int
    path: str
    module: Any

    @property
    def experts(self) -> int:
        """How many experts there are."""
        return int(self.linears[0][1].num_experts)

    @property
    def linears(self) -> list[tuple[str, Any]]:
        """The stacked projections with their names, the output projection last."""
        return [(name, child) for name, child in self.module.children().items() if _is_stack(child)]

    @property
    def output_dims(self) -> int:
        """The length of an expert's output."""
        return int(self.linears[-1][1].output_dims)

    def arrays(self) -> Iterator[tuple[Any, str, str]]:
        """Yield each array of the experts: its projection, its name there, and its full name."""
        for child, linear in self.linears:
            for name in linear.parameters():
                yield linear, name, f"{self.path}.{child}.{name}"

    @property
    def nbytes(self) -> int:
        """Bytes of the experts that are stacked now."""
        return sum(linear[name].nbytes for linear, name, _ in self.arrays())


def switches_of(model: Any) -> list[Switch]:
    """Return a model's expert modules in the order of its layers; they are found by type.

    Raises:
        InputError: when it has none.
        UnsupportedError: when a layer has two.
    """
    found: dict[int, Switch] = {}
    for path, module in model.named_modules():
        if not _is_experts(module):
            continue
        number = _LAYER.search(path)
        layer = int(number[1]) if number else len(found)
        if layer in found:
            raise UnsupportedError(f"{path}: a second module of experts in layer {layer}")
        found[layer] = Switch(layer, path, module)
    if not found:
        raise InputError(
            "no layer has routed experts that its class stacks, as SwitchGLU does; give a mixture"
            " of experts"
        )
    return [found[layer] for layer in sorted(found)]


def retyped(module: Any, mixin: type, **attributes: Any) -> None:
    """Make a module an instance of a subclass that calls ``mixin`` first.

    The module keeps its place, its parameters and its own class as a base.
    """
    kind = type(module)
    module.__class__ = type(f"{mixin.__name__}{kind.__name__}", (mixin, kind), {})
    for name, value in attributes.items():
        setattr(module, name, value)


class Routing:
    """Router choices of one run: how many tokens and how many prompts used each expert."""

    def __init__(self, layers: list[int]) -> None:
        self.tokens: dict[int, Counter[int]] = {layer: Counter() for layer in layers}
        self.prompts: dict[int, Counter[int]] = {layer: Counter() for layer in layers}
        self.top_k: dict[int, int] = {}
        self._pending: list[tuple[int, Any]] = []
        self._used: dict[int, set[int]] = {}

    def add(self, layer: int, indices: Any) -> None:
        """Take the indices of a layer; they are not evaluated yet."""
        self.top_k[layer] = indices.shape[-1]
        self._pending.append((layer, indices))

    def count(self) -> None:
        """Count the indices, in one evaluation for all layers."""
        import mlx.core as mx

        mx.eval([indices for _, indices in self._pending])
        for layer, indices in self._pending:
            chosen = indices.flatten().tolist()
            self.tokens[layer].update(chosen)
            self._used.setdefault(layer, set()).update(chosen)
        self._pending.clear()

    def end_prompt(self) -> None:
        """Count each expert that the prompt used once."""
        for layer, used in self._used.items():
            self.prompts[layer].update(used)
        self._used.clear()


class RunLog:
    """Router choices of one run, in the order of its tokens."""

    def __init__(self, layers: list[int]) -> None:
        self.calls: list[int] = []
        self.choices: dict[int, list[int]] = {layer: [] for layer in layers}
        self._pending: list[tuple[int, Any]] = []

    def add(self, layer: int, indices: Any) -> None:
        """Take the indices of a layer; they are not evaluated yet."""
        self._pending.append((layer, indices))

    def end_call(self, tokens: int) -> None:
        """Read the indices of a call of the model."""
        import mlx.core as mx

        mx.eval([indices for _, indices in self._pending])
        self.calls.append(tokens)
        for layer, indices in self._pending:
            self.choices[layer].extend(indices.flatten().tolist())
        self._pending.clear()


class LoggedModel:
    """A model that reads its log after each call."""

    log: RunLog

    def __call__(self, inputs: Any, *arguments: Any, **more: Any) -> Any:
        output = super().__call__(inputs, *arguments, **more)  # type: ignore[misc]
        self.log.end_call(inputs.shape[-1])
        return output


class RouterOnly:
    """Experts that record the router's choice and return zeros: their weights are never read."""

    routing: Routing
    layer: int
    output_dims: int

    def __call__(self, x: Any, indices: Any) -> Any:
        import mlx.core as mx

        self.routing.add(self.layer, indices)
        return mx.zeros((*indices.shape, self.output_dims), x.dtype)


class Recorded:
    """Experts that record the router's choice."""

    routing: Routing | RunLog
    layer: int

    def __call__(self, x: Any, indices: Any) -> Any:
        self.routing.add(self.layer, indices)
        return super().__call__(x, indices)  # type: ignore[misc]


class Float32Linear:
    """Stacked 16-bit projections for MLX's CPU backend, which has ``gather_mm`` in float32 only."""

    def __call__(self, x: Any, indices: Any, sorted_indices: bool = False) -> Any:
        import mlx.core as mx

        weights: Any = self
        y = mx.gather_mm(
            x.astype(mx.float32),
            weights["weight"].swapaxes(-1, -2).astype(mx.float32),
            rhs_indices=indices,
            sorted_indices=sorted_indices,
        ).astype(x.dtype)
        if "bias" in weights:
            y = y + mx.expand_dims(weights["bias"][indices], -2)
        return y


def support_16_bits_on_cpu(switches: list[Switch]) -> bool:
    """Let 16-bit experts run on MLX's CPU backend; return whether any needed it."""
    import mlx.core as mx
    from mlx_lm.models.switch_layers import SwitchLinear

    if mx.default_device() != mx.Device(mx.cpu):
        return False
    found = [
        linear
        for switch in switches
        for _, linear in switch.linears
        if isinstance(linear, SwitchLinear) and linear["weight"].dtype != mx.float32
    ]
    for linear in found:
        retyped(linear, Float32Linear)
    return bool(found)


def _is_stack(module: Any) -> bool:
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    return isinstance(module, (SwitchLinear, QuantizedSwitchLinear))


def _is_experts(module: Any) -> bool:
    """Whether a class of mlx_lm.models.switch_layers, or one made from it, has stacked experts."""
    of_experts = any(
        kind.__module__.endswith("models.switch_layers") for kind in type(module).__mro__
    )
    return of_experts and any(_is_stack(child) for child in module.children().values())
