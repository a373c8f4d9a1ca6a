"""llama-server and llama-cli (llama.cpp b11549, common/arg.cpp and tools/server)."""

from typing import Any

from memfit.estimators.arch.fields import MAX_LAYERS
from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.questions.programs.program import (
    Given,
    Program,
    Settings,
    Undescribed,
    count_of,
    present,
)

_SLOTS = 4  # tools/server/server.cpp: without -np the slots share one cache
_DRAFTED = 3  # common/common.h, --spec-draft-n-max
_SEVERAL = "several GPUs are not described"
_HOST = "what it keeps on the host is not described; --n-cpu-moe and -ngl are"
_DRAFT = "the draft model is sized with all its layers on the GPU and a cache in f16"
_MODEL = "it changes the model"
_TAKEN = {
    "-m": "model",
    "-hf": "repository",
    "-hff": "file",
    "-c": "context",
    "-np": "slots",
    "-b": "batch_size",
    "-ub": "microbatch",
    "-ctk": "cache_type_k",
    "-ctv": "cache_type_v",
    "-fa": "flash",
    "-kvu": "unified",
    "--no-kv-unified": "!unified",
    "--swa-full": "swa_full",
    "-ngl": "gpu_layers",
    "-ncmoe": "n_cpu_moe",
    "-cmoe": "cpu_moe",
    "-ot": "override_tensor",
    "-nkvo": "!kv_offload",
    "--no-mmproj-offload": "!mmproj_offload",
    "-fit": "fit",
    "-mm": "mmproj",
    "--no-mmproj": "!mmproj_auto",
    "--spec-draft-model": "draft",
    "--spec-draft-n-max": "drafted",
    "--spec-type": "spec_type",
    "-cram": "cache_ram",
}
_UNDESCRIBED = {
    "-ncffn": Undescribed(_HOST, ("0",)),
    "--no-op-offload": Undescribed(_HOST),
    "--moe-cache-mib": Undescribed(_HOST, ("0",)),
    "-mmdev": Undescribed(_HOST),
    "-sm": Undescribed(_SEVERAL, ("none", "layer")),
    "-ts": Undescribed(_SEVERAL, ("1",)),
    "-dev": Undescribed(_SEVERAL),
    "--rpc": Undescribed(_SEVERAL),
    "-fitt": Undescribed("1024 MiB stay free by --fit", ("1024",)),
    "-fitc": Undescribed("--fit keeps a context of 4096", ("4096",)),
    "--kv-unified-per-slot": Undescribed("a limit of each slot is not described"),
    "-mu": Undescribed("download the file, and give it with -m"),
    "-mmu": Undescribed("download the file, and give it with -mm"),
    "-dr": Undescribed("models of Docker Hub are not read"),
    "--override-kv": Undescribed(_MODEL),
    "--lora": Undescribed("adapters in GGUF are not read"),
    "--lora-scaled": Undescribed("adapters in GGUF are not read"),
    "--control-vector": Undescribed(_MODEL),
    "--control-vector-scaled": Undescribed(_MODEL),
    "--embedding": Undescribed("encoders are not described"),
    "--rerank": Undescribed("encoders are not described"),
    "-bs": Undescribed("samplers on the GPU are not described"),
    "--spec-default": Undescribed("drafts by it are not described"),
    "--spec-draft-hf": Undescribed("give the draft model's file with -md"),
    "--spec-draft-type-k": Undescribed(_DRAFT, ("f16",)),
    "--spec-draft-type-v": Undescribed(_DRAFT, ("f16",)),
    "--spec-draft-ngl": Undescribed(_DRAFT, ("all", "auto", "99", "999")),
    "--spec-draft-cpu-moe": Undescribed(_DRAFT),
    "--spec-draft-n-cpu-moe": Undescribed(_DRAFT, ("0",)),
    "--spec-draft-override-tensor": Undescribed(_DRAFT),
    "--spec-draft-device": Undescribed(_SEVERAL),
    "--models-dir": Undescribed("a router of several models is not described"),
    "--models-preset": Undescribed("a router of several models is not described"),
}
_NOTED = {
    "-lm": "how the file is read changes what stays of it in the host's memory, not what is sized",
    "-lzm": "how the file is read changes what stays of it in the host's memory, not what is sized",
}
_ON, _OFF = ("on", "1", "true", "enabled"), ("off", "0", "false", "disabled")  # common/arg.cpp


def _server(given: Given) -> Settings:
    given = {"slots": "-1", "cache_ram": "8192", **given}
    slots = count_of(given, "slots", "-np", least=-1)
    notes = []
    if slots == -1:
        given = {"unified": True, **given, "slots": str(_SLOTS)}
        notes.append(f"-np is not given: {_SLOTS} slots, which share one cache")
    if given["cache_ram"] != "0":
        limit = "without a limit" if given["cache_ram"] == "-1" else f"{given['cache_ram']} MiB"
        notes.append(
            f"not counted: prompts that llama-server keeps in the host's memory, {limit} (-cram)"
        )
    return _settings(given, notes)


def _cli(given: Given) -> Settings:
    return _settings(given, [])


def _settings(given: Given, notes: list[str]) -> Settings:
    slots = count_of(given, "slots", "-np", least=1) or 1
    values: dict[str, Any] = {"model": _model(given), "runtime": "llama.cpp", "batch": slots}
    is_fitted = _switch(given, "fit", "-fit") is not False
    context = count_of(given, "context", "-c")
    if context:
        values["ctx_size"] = str(context)
    else:
        # A context of 0 is not made smaller by --fit (common/arg.cpp).
        values["context"] = "auto" if is_fitted and context is None else "model"
    microbatch = count_of(given, "microbatch", "-ub")
    batch = count_of(given, "batch_size", "-b", least=1)
    if microbatch == 0:
        microbatch = batch or 2048  # llama-context.cpp: the batch
    values |= {
        "prefill_step": microbatch,
        "batch_size": None if batch is None else str(batch),
        "flash_attn": _switch(given, "flash", "-fa") is not False,
        "kv_unified": bool(given.get("unified")),
        "gpu_layers": _gpu_layers(given, is_fitted=is_fitted),
        "n_cpu_moe": "all" if given.get("cpu_moe") else given.get("n_cpu_moe"),
        **present(given, "cache_type_k", "cache_type_v", "swa_full", "mmproj", "draft"),
        **present(given, "override_tensor", "kv_offload", "mmproj_offload"),
        **_drafting(given),
    }
    if "repository" in given and given.get("mmproj_auto", True) and "mmproj" not in given:
        notes.append("not counted: a vision projector that -hf loads where there is one (-mm)")
    return Settings({name: each for name, each in values.items() if each is not None}, notes)


def _drafting(given: Given) -> dict[str, Any]:
    """Tokens that a draft model, or the file's own prediction layers, propose in a step.

    Raises:
        UnsupportedError: for another way to draft.
    """
    tokens = count_of(given, "drafted", "--spec-draft-n-max", least=1)
    kind = given.get("spec_type", "draft-simple" if "draft" in given else "none")
    if kind == "draft-mtp" and "draft" not in given:
        return {"mtp_tokens": tokens or _DRAFTED}
    if kind not in ("none", "draft-simple"):
        raise UnsupportedError(f"--spec-type {kind[:60]}: drafts by it are not described")
    return {"num_draft_tokens": tokens} if "draft" in given else {}


def _model(given: Given) -> str:
    if "repository" in given:
        name: str = given["repository"]
        return f"{name.partition(':')[0]}:{given['file']}" if "file" in given else name
    if "model" not in given:
        raise InputError("the line names no model: -m FILE, or -hf org/name:Q4_K_M")
    return str(given["model"])


def _gpu_layers(given: Given, *, is_fitted: bool) -> str | None:
    text = str(given.get("gpu_layers", "auto")).lower()
    if text in ("auto", "-1"):
        # --fit leaves layers where tensors were placed by hand (common/fit.cpp).
        return (
            "auto"
            if is_fitted and not given.keys() & {"n_cpu_moe", "cpu_moe", "override_tensor"}
            else None
        )
    if text in ("all", "-2"):
        return "all"
    layers = count_of({"gpu_layers": text}, "gpu_layers", "-ngl")
    assert layers is not None
    return str(min(layers, MAX_LAYERS))


def _switch(given: Given, name: str, flag: str) -> bool | None:
    """Whether a flag with on, off or auto is on, None for auto.

    Raises:
        InputError: when it is none of them.
    """
    text = str(given.get(name, "auto")).lower()
    if text not in (*_ON, *_OFF, "auto", "-1"):
        raise InputError(f"{flag} {text[:40]!r}: expected on, off or auto")
    return None if text in ("auto", "-1") else text in _ON


_COMMON: dict[str, Any] = {
    "source": "llama.cpp b11549",
    "noted": _NOTED,
    "has_dashes": True,
    "abbreviates": False,
    "bare": {"-fa": "on", "--flash-attn": "on"},
}
_OF_SERVERS = {
    *("-kvu", "--no-kv-unified", "--kv-unified-per-slot", "--embedding", "--rerank"),
    *("--models-dir", "--models-preset"),
}
PROGRAMS = (
    Program(
        name="llama-server",
        taken=_TAKEN,
        undescribed=_UNDESCRIBED,
        settings=_server,
        **_COMMON,
    ),
    Program(
        name="llama-cli",
        taken={flag: name for flag, name in _TAKEN.items() if flag not in _OF_SERVERS},
        undescribed={flag: why for flag, why in _UNDESCRIBED.items() if flag not in _OF_SERVERS},
        settings=_cli,
        **_COMMON,
    ),
)
