"""Which layers attend over a window, as each mlx-lm model class finds out."""

from memfit.estimators.arch.fields import Fields

FULL, SLIDING = "full_attention", "sliding_attention"


def by_layer_types(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """``layer_types`` names each layer; without it all are full (mlx-lm llama.py)."""
    return _of_kinds(fields, fields.texts("layer_types", layers) or [FULL] * layers)


def by_layer_types_every_fourth_full(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """``layer_types``, or every fourth layer full; the class looks for both (mlx-lm olmo3.py)."""
    kinds = fields.texts("layer_types", layers)
    kinds = kinds or [SLIDING if (i + 1) % 4 else FULL for i in range(layers)]
    fields.require_kinds("layer_types", kinds, (FULL, SLIDING), (SLIDING,))
    return _of_kinds(fields, kinds)


def by_interval(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Every ``sliding_window_pattern``-th layer is full (mlx-lm cohere2.py and gemma3_text.py)."""
    interval = fields.count("sliding_window_pattern")
    if interval > layers:
        raise fields.fail(
            "sliding_window_pattern",
            f"{interval} leaves none of {layers} layers full; the model class needs one",
        )
    window = fields.count("sliding_window")
    return tuple(window if (i + 1) % interval else None for i in range(layers))


def by_letters(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """A text such as LLLG repeats over the layers; none means all full (mlx-lm exaone4.py)."""
    pattern = fields.text("sliding_window_pattern", "")
    if not pattern:
        return (None,) * layers
    letters = [pattern[i % len(pattern)] for i in range(layers)]
    if set(letters) != {"L", "G"}:
        raise fields.fail(
            "sliding_window_pattern",
            f"expected L and G, both among the {layers} layers, got {pattern[:20]!r}",
        )
    window = fields.count("sliding_window")
    return tuple(window if letter == "L" else None for letter in letters)


def _of_kinds(fields: Fields, kinds: list[str]) -> tuple[int | None, ...]:
    fields.require_kinds("layer_types", kinds, (FULL, SLIDING), (FULL,))
    if SLIDING not in kinds:
        return (None,) * len(kinds)
    window = fields.count("sliding_window")
    return tuple(window if kind == SLIDING else None for kind in kinds)
