"""Options of a model: which one, and the conversion to size it with."""

from pathlib import Path
from typing import Annotated, ClassVar

from memfit.cli.options.completion import complete_model, complete_type
from memfit.cli.options.groups import Argument, Option, OptionGroup, parsed
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.quantization import DEFAULTS, Quantization, converted, parse_format

FORMATS = "BITS|mxfp4|nvfp4|mxfp8"
AsType = Annotated[
    str | None,
    Option(
        "--as",
        metavar="TYPE",
        help="Assume this model_type, such as llama, for an architecture that is not known.",
        autocompletion=complete_type,
    ),
]

AdapterDirectory = Annotated[
    Path | None,
    Option("--adapter", "--adapter-path", help="Include the LoRA adapter in this directory."),
]


class ModelOptions(OptionGroup, frozen=True, kw_only=True):
    """How models are converted before they are sized."""

    panel = "Model options"
    pasted: ClassVar[tuple[str, ...]] = ("quantises",)
    quantize: Annotated[
        str | None,
        Option(
            *("--quantize", "--q-bits"),
            metavar=FORMATS,
            help="Size the model as mlx_lm.convert would quantise it, such as 4 or 4bit.",
        ),
    ] = None
    group_size: Annotated[
        int | None, Option("--group-size", "--q-group-size", help="Group size for --quantize.")
    ] = None
    quant_mode: Annotated[
        str | None,
        Option(
            *("--quant-mode", "--q-mode"),
            help="Mode for --quantize: affine, mxfp4, nvfp4 or mxfp8.",
        ),
    ] = None
    quantises: Annotated[
        bool, Option("-q", help="Quantise to the default bits of the mode, as mlx_lm.convert -q.")
    ] = False

    def quantization(self) -> Quantization | None:
        """Return the conversion of --quantize, None when it was not given.

        Raises:
            InputError: for a format MLX does not have, or a group size or mode without bits.
        """
        found = parsed("--quantize", parse_format, self.quantize)
        if found is None:
            if not self.quantises:
                self._reject_settings()
                return None
            found = DEFAULTS.get(self.quant_mode or "affine", (4,))[0], "affine"
        bits, mode = found
        if self.quant_mode not in (None, mode) and mode != "affine":
            raise InputError(f"--quantize {mode} and --quant-mode {self.quant_mode}: give one")
        return converted(bits, self.group_size, self.quant_mode or mode)

    def _reject_settings(self) -> None:
        if self.group_size is not None or self.quant_mode is not None:
            raise InputError("--group-size and --quant-mode need --quantize BITS")


class NamedModel(ModelOptions, frozen=True, kw_only=True):
    """A model, as an argument or an option, and how it is converted."""

    pasted: ClassVar[tuple[str, ...]] = (*ModelOptions.pasted, "model_option")
    model: Annotated[
        str | None,
        Argument(
            metavar="MODEL",
            help="A directory, a file (.safetensors, .gguf, config.json, a sample), a sample's"
            " name, or on the Hub org/name, org/name:Q4_K_M or a URL.",
            show_default=False,
            autocompletion=complete_model,
        ),
    ] = None
    model_option: Annotated[
        str | None,
        Option(
            *("--model", "-m", "--hf-path", "-hf"),
            metavar="MODEL",
            help="The same, as an option.",
            autocompletion=complete_model,
        ),
    ] = None

    def reference(self) -> str:
        """Return what names the model.

        Raises:
            InputError: when it is not named, or twice.
        """
        if self.model is not None and self.model_option is not None:
            raise InputError("MODEL and --model both name the model: give one of them")
        found = self.model_option if self.model is None else self.model
        if found is None:
            raise InputError("MODEL is missing; name a directory, a file, or org/name on the Hub")
        return found
