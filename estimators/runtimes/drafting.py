"""Whether mlx-lm takes a draft model for another, or mlx-vlm a head, and for a workload."""

from msgspec.structs import replace

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.registry import build_model
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.kinds import MTP_TARGETS, is_mtp_head
from memfit.estimators.checkpoint.tokenizer import tokenizer_size
from memfit.estimators.runtimes.interface import DraftFigures, RuntimeModel, Subject
from memfit.estimators.runtimes.source import Formula
from memfit.estimators.workspace.peak import prepared_model
from memfit.estimators.workspace.speculation import LoadedModel, head_moment
from memfit.estimators.workspace.vision import embedded_bytes

# Embeddings are padded: those of Qwen2.5 have 151,936 or 152,064 rows for 151,643 tokens; those of
# different tokenizers are rarely nearer than that (Mistral: 32,000 and 32,768).
_MOST_PADDING = 512


def require_same_vocabulary(target: Subject, draft: Subject) -> None:
    """Check what mlx_lm.generate compares: the sizes of both tokenizers (mlx_lm/generate.py, main).

    Without both, embeddings that differ by more than padding are of different tokenizers.

    Raises:
        UnsupportedError: when they differ.
    """
    own, other = tokenizer_size(target.checkpoint), tokenizer_size(draft.checkpoint)
    what, most = "tokenizers of", 0
    if own is None or other is None:
        what, most = "embeddings of", _MOST_PADDING
        own, other = target.model.vocab_size, draft.model.vocab_size
    if abs(own - other) > most:
        raise UnsupportedError(
            f"{draft.checkpoint.id}: cannot draft for {target.checkpoint.id}: {what} {other} and"
            f" {own} tokens; mlx_lm.generate takes a draft model with the same tokenizer only"
        )


def require_drafting(model: Model, workload: Workload) -> None:
    """Check that mlx-lm's loop takes a draft model for a target and a workload.

    Raises:
        UnsupportedError: when it rejects or ignores what is asked.
    """
    if any(True for _ in model.states()):
        raise UnsupportedError(
            f"{model.model_type}: mlx-lm rejects a draft model for it, because recurrent states"
            " cannot be trimmed after a rejected draft"
        )
    if workload.batch > 1:
        raise UnsupportedError("with a draft model mlx-lm generates one sequence: leave out batch")
    if workload.max_kv_size is not None:
        raise UnsupportedError("with a draft model mlx-lm ignores max_kv_size: leave it out")


def require_head(target: Subject, draft: Subject) -> None:
    """Check what mlx-vlm compares of a head and its target (drafters/__init__.py).

    Raises:
        UnsupportedError: for a language model, a target without such heads, or another size.
    """
    name = draft.checkpoint.id
    if not is_mtp_head(draft.checkpoint):
        raise UnsupportedError(
            f"{name}: mlx-vlm drafts with heads that read the target's hidden states, such as MTP"
            " layers, and not with another language model"
        )
    if target.model.model_type not in MTP_TARGETS:
        types = " and ".join(MTP_TARGETS)
        raise UnsupportedError(
            f"{name}: an MTP head for {types}, and the target's model_type is"
            f" {target.model.model_type}"
        )
    own, other = draft.model.hidden_size, target.model.hidden_size
    if own != other:
        raise UnsupportedError(
            f"{name}: an MTP head for a target of hidden size {own}, and that of"
            f" {target.checkpoint.id} is {other}: mlx-vlm leaves it out"
        )


def head_figures(
    runtime_model: RuntimeModel, workload: Workload, draft: RuntimeModel, tokens: int
) -> DraftFigures:
    """Return what a head takes beside its target in mlx_vlm.generate.

    While the target reads the prompt only the head's weights are there.

    Raises:
        UnsupportedError: for a batch or KV bits.
    """
    for is_set, name in ((workload.batch > 1, "batch"), (workload.kv_bits, "kv_bits")):
        if is_set:
            raise UnsupportedError(
                f"with a head that drafts {setting(name)} is not described for mlx-vlm: leave it"
                " out"
            )
    subject, versions = runtime_model.subject, runtime_model.runtime.versions
    model = subject.model
    if not isinstance(subject.source, Formula):  # its layers are described by a trace alone
        described = build_model(subject.checkpoint.config, subject.checkpoint.config_name)
        model = replace(described, dtype=model.dtype)
    target, head = (
        LoadedModel(
            prepared_model(layers, one.subject.footprint.plan, subject.device, versions),
            one.resident_bytes(),
        )
        for layers, one in ((model, runtime_model), (draft.subject.model, draft))
    )
    alone = runtime_model.figures(workload).moment
    step = head_moment(target, head, workload, tokens, kept=embedded_bytes(model, workload))
    most = alone.nbytes + head.resident_bytes
    if step is None or step.nbytes <= most:
        line = "the head's weights are there in all phases"
        return DraftFigures(head.resident_bytes, "derived", alone.phase, line)
    if workload.images:
        # What is kept of images stays to the end.
        kept = max(0, step.nbytes - target.resident_bytes - head.resident_bytes)
        return DraftFigures(head.resident_bytes + kept, "bound", "decode")
    return DraftFigures(
        step.nbytes - alone.nbytes,
        "derived",
        step.phase,
        f"{step.explanation}; in weights the head's and the states for a rollback too",
        workspace_bytes=step.workspace_bytes,
    )
