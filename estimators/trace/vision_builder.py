"""A model of mlx-vlm built from its config, as it would be loaded, without computing anything.

Classes are those of the installed mlx-vlm; ``model_file`` of a config is never followed.
"""

from collections.abc import Mapping
from typing import Any

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.files import printable
from memfit.estimators.trace.class_description import DescribedClass
from memfit.estimators.trace.declared_format import packed_block, quantize_modules
from memfit.estimators.trace.libraries import PrivateLibrary
from memfit.estimators.trace.model_builder import (
    cast_for_conversion,
    cast_parameters,
    class_errors,
    few_modules,
    loaded,
    reject_own_code,
    settings_of,
)

# Classes with a head that ``sanitize`` makes of the embedding where a checkpoint has none.
_TIE_THE_HEAD = ("gemma3",)
_MODULES = ("text", "vision", "perceiver", "projector", "audio")


def build_vision(
    library: PrivateLibrary,
    config: Mapping[str, Any],
    name: str,
    *,
    dtype: str,
    arrays: dict[str, Any] | None = None,
    quantize: Quantization | None = None,
) -> Any:
    """Return mlx-vlm's model, loaded from ``arrays`` or, without them, cast to ``dtype``.

    ``quantize`` then converts it as mlx_vlm.convert would.
    ``name`` is the name of the config in messages. Call it inside `tracing`.

    Raises:
        UnsupportedError: when mlx-vlm has no such class, the class rejects config or tensors, or
            it does not generate text token by token.
    """
    reject_own_code(config, name)
    nn = library.load("mlx.nn")
    with class_errors(name, config, "mlx-vlm"), few_modules(nn, config, name):
        utils = library.load("mlx_vlm.utils")
        settings = settings_of(utils, config)
        if arrays is not None:
            model = loaded(utils, settings, arrays)
        else:
            model = made(utils, nn, settings, dtype)
        _require_language_model(library, model, config, name)
        if quantize:
            if arrays is not None:
                cast_for_conversion(model, config)
            model, _ = library.load("mlx_vlm.quant_utils").quantize_model(
                model,
                {},
                quantize.group_size,
                quantize.bits,
                mode=quantize.mode,
                quant_predicate=mlx_vlm_class(utils, model).predicate,
            )
        return model


def mlx_vlm_class(utils: Any, model: Any) -> DescribedClass:
    """Return a model of mlx-vlm with what mlx_vlm.convert asks of each module (convert.py)."""
    own = getattr(model, "quant_predicate", None) or (lambda *_: True)
    language = model.language_model

    def predicate(path: str, module: Any) -> Any:
        return not utils.skip_multimodal_module(path) and own(path, module)

    # Of some classes the layers are those of the model inside.
    layers = language.layers if hasattr(language, "layers") else language.model.layers
    return DescribedClass(model, layers, hasattr(language, "make_cache"), predicate, True)


def _require_language_model(
    library: PrivateLibrary, model: Any, config: Mapping[str, Any], name: str
) -> None:
    kind = printable(config.get("model_type"))
    text = f"{name}: mlx-vlm's class for model_type {kind}"
    if not hasattr(model, "language_model") or not hasattr(model, "get_input_embeddings"):
        raise UnsupportedError(f"{text} has no language model")
    diffusion = library.load("mlx_vlm.generate.diffusion")
    if diffusion.is_diffusion_model(model) and not hasattr(model, "diffusion_decoder_logits"):
        raise UnsupportedError(f"{text} generates by its own diffusion, which is not described")


def made(utils: Any, nn: Any, config: dict[str, Any], dtype: str) -> Any:
    """Return a model of the class's own parameters, in the order of load_model and convert."""
    module, _ = utils.get_model_and_args(config)
    has_audio = "audio_config" in config
    config.setdefault("text_config", config.pop("llm_config", {}))
    config.setdefault("vision_config", {})
    config.setdefault("audio_config", {})
    settings = module.ModelConfig.from_dict(config)
    settings = utils.update_module_configs(settings, module, config, _MODULES)
    model = module.Model(settings)
    if not has_audio:  # load_model takes out what a checkpoint does not have
        for name in [name for name in model if "audio" in name]:
            setattr(model, name, None)
    cast_parameters(model, dtype)
    if config["model_type"] in _TIE_THE_HEAD and config.get("tie_word_embeddings", True):
        model.language_model.lm_head.weight = model.language_model.model.embed_tokens.weight
    if block := packed_block(config):
        # Older conversions say there whether they have left the towers as they are.
        towers = (config["vision_config"] or {}).get("skip_vision") is False
        own = getattr(model, "quant_predicate", None) or (lambda *_: True)

        def is_quantised(path: str, module: Any) -> Any:
            """As mlx_vlm.convert does (convert.py, base_quant_predicate; quant_utils.py)."""
            return (towers or not utils.skip_multimodal_module(path)) and own(path, module)

        quantize_modules(nn, model, block, is_quantised)
    model.eval()
    return model
