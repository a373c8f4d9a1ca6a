"""Options of other programs that memfit does not have, and what to write in their place."""

from collections.abc import Iterable, Sequence

_LEAVE = "it changes no memory that memfit counts: leave it out"
_SEQUENCES = "sequences at once are --batch, tokens computed at once --prefill-step"
FOREIGN = {
    **dict.fromkeys(("-b", "--batch-size"), _SEQUENCES),
    **dict.fromkeys(("-n", "--n-predict", "--predict"), "write --max-tokens"),
    **dict.fromkeys(("-fa",), "flash attention is on; --no-flash-attn turns it off"),
    **dict.fromkeys(("--dtype", "--quantization"), "the config says it: leave it out"),
    "--kv-unified": "sequences have caches of their own; write the context of each as --context",
    "--hf-file": "write it after the name: org/name:file.gguf",
    "--revision": "write it after the name: org/name@revision",
    **dict.fromkeys(("--n-cpu-moe-draft", "--gpu-layers-draft", "-ngld"), "drafts are on the GPU"),
    **dict.fromkeys(
        (
            *("--host", "--port", "-t", "--threads", "--temp", "--top-p", "--top-k", "--seed"),
            *("--trust-remote-code", "--jinja", "--no-mmap", "--mlock", "--api-key", "--log-level"),
            *("--chat-template", "--served-model-name", "--enable-prefix-caching"),
        ),
        _LEAVE,
    ),
}


def advice(error: Exception, known: Iterable[str], arguments: Sequence[str]) -> str:
    """Return what to write in place of an option that a command does not have, else nothing."""
    if "--parallel" in getattr(getattr(error, "param", None), "opts", ()):
        return "llama.cpp's number of sequences is -np"
    near: Sequence[str] | None = getattr(error, "possibilities", None)
    if not hasattr(error, "option_name"):
        return ""
    own = set(known)
    # Typer names only the first letter of an option with one dash.
    names = (word.partition("=")[0] for word in arguments)
    if name := next((name for name in names if name in FOREIGN and name not in own), ""):
        return f"{name}: {FOREIGN[name]}"
    return f"nearest: {', '.join(near)}" if near else ""
