"""An upper bound on the memory of mlx_vlm.server with images, and its flags that fit.

The server runs the towers of new requests and up to eight of their prompts together, and decodes up
to 32 requests. Sources: mlx_vlm/server/generation.py (ResponseGenerator), mlx_vlm/generate/ar.py
(BatchGenerator) and common.py, mlx_vlm/vision_cache.py.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import ServerSettings, Workload
from memfit.estimators.images.processor import image_plan
from memfit.estimators.mlx.arrivals import ServedRequest
from memfit.estimators.plans.server.plan import check_lengths, settings_to_run
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.server import ServerMoment, ServerPlan
from memfit.estimators.runtimes.held import held_limit
from memfit.estimators.runtimes.mlx_lm_commands import image_server_command
from memfit.estimators.runtimes.registry import runtime_summary
from memfit.estimators.runtimes.runtime import judge
from memfit.estimators.sizing.advise import converting
from memfit.estimators.sizing.estimate import ALONE, assumption_notes, device_summary
from memfit.estimators.sizing.run_limits import ending_notes, run_limits, tightened
from memfit.estimators.sizing.search import PREFILL_STEPS, first_fitting, halves
from memfit.estimators.sizing.server_bound import need_of, server_moment
from memfit.estimators.sizing.sized_model import SizedModel, error_bytes_of
from memfit.estimators.workspace.vision import array_bytes, embedded_bytes, has_formula, vision_work

PREFILLED = 8
"""Prompts that are prefilled together (DEFAULT_PREFILL_BATCH_SIZE)."""
DECODED = 32
"""Requests that decode together (DEFAULT_COMPLETION_BATCH_SIZE)."""
CACHES_FEATURES = frozenset(
    {"clef", "deepseek_v4", "gemma4", "gemma4_unified", "indic_ocr", "qwen3_5", "qwen3_5_moe"}
)
"""Classes that keep features of images in the server's cache, or inherit from one that does."""


def plan_image_server(
    sized: SizedModel, workload: Workload, settings: ServerSettings, *, clients: int
) -> ServerPlan:
    """Return what mlx_vlm.server takes at most with ``clients`` requests like ``workload`` open.

    Raises:
        InputError: when a request is longer than the model's context.
        UnsupportedError: when mlx-vlm cannot run the workload, or with KV bits.
    """
    check_lengths(sized, [ServedRequest(workload.prompt_tokens, workload.max_tokens)])
    if workload.kv_bits is not None:
        raise UnsupportedError(
            "mlx_vlm.server quantises caches of batches in its own way: leave out KV bits"
        )
    server = _ImageServer(sized, workload, clients)
    most = min(settings.max_num_seqs or clients, clients)
    settings = replace(settings, max_num_seqs=most, prompt_cache_size=0)
    largest = server.largest(settings)
    verdict, _ = judge(need_of(largest), sized.device)
    limits = run_limits(sized, workload, serving=True)
    if sized.device:  # when mlx_vlm.server clears is not described
        limits = (*held_limit(largest.needed_bytes, None, sized.device), *limits)
    better, chosen = settings_to_run(
        sized,
        verdict,
        settings,
        lambda _: first_fitting(tuple(server.cheaper(settings)), server.fits),
    )
    return ServerPlan(
        server="mlx_vlm.server",
        model=sized.checkpoint.id,
        runtime=runtime_summary(sized.runtime_model.runtime),
        device=device_summary(sized.device) if sized.device else None,
        settings=settings,
        kv_bits=None,
        requests=clients,
        clients=clients,
        longest_prompt_tokens=workload.prompt_tokens,
        longest_generation_tokens=workload.max_tokens,
        images=workload.images or None,
        sequential=None,
        bound=largest,
        usual=None,
        mixes=(),
        idle_bytes=server.idle(settings),
        verdict=tightened(verdict, limits),
        limits=limits,
        waited=clients - (settings.max_num_seqs or clients),
        fitting=better,
        fitting_clients=clients if better else None,
        fitting_bound=server.largest(better) if better else None,
        fitting_mixes=(),
        commands=tuple(_commands(sized, chosen)) if chosen else (),
        notes=(*_notes(sized), *ending_notes(limits, of=ALONE)),
    )


class _ImageServer:
    """The server of one question, for any settings."""

    def __init__(self, sized: SizedModel, workload: Workload, clients: int) -> None:
        assert workload.images
        self._sized, self._workload, self._clients = sized, workload, clients
        checkpoint, model = sized.checkpoint, sized.model
        plan = image_plan(checkpoint, workload.images)
        self._pixels = sum(map(array_bytes, plan.arrays))
        self._embedded = embedded_bytes(model, workload)
        if has_formula(checkpoint, model):  # features of deep layers too
            versions = sized.runtime_model.runtime.versions
            packed = sized.footprint.plan is not None
            work = vision_work(
                checkpoint, model, plan, workload, sized.device, versions, is_packed=packed
            )
            self._embedded = work.kept - self._pixels
        self._features = 0
        if str(checkpoint.config.get("model_type")) in CACHES_FEATURES:
            count = sum(image.feature_count for image in plan.images)
            self._features = dtypes.nbytes(count * model.hidden_size, model.dtype)
        self.largest = cache(self._largest)

    def fits(self, settings: ServerSettings) -> bool:
        """Whether every moment leaves a tenth of the working set free."""
        return judge(need_of(self.largest(settings)), self._sized.device)[0] == "fits"

    def cheaper(self, settings: ServerSettings) -> Iterator[ServerSettings]:
        """Yield settings that take less, those that cost the least speed first."""
        most, cached = settings.max_num_seqs or self._clients, settings.vision_cache_size
        # The server cannot start a cache of no entries.
        for sequences in (most, *halves(most, 1)):
            for entries in (cached, *(halves(cached, 1) if self._features else ())):
                for step in PREFILL_STEPS:
                    if step <= settings.prefill_step:
                        yield replace(
                            settings,
                            prefill_step=step,
                            max_num_seqs=sequences,
                            vision_cache_size=entries,
                        )

    def idle(self, settings: ServerSettings) -> int:
        """What stays when all have ended: variables of the loop keep the last request's arrays."""
        kept = self._pixels + self._embedded + self._cached(settings)
        return self._sized.resident_bytes + kept

    def _cached(self, settings: ServerSettings) -> int:
        return settings.vision_cache_size * self._features

    def _largest(self, settings: ServerSettings) -> ServerMoment:
        most = settings.max_num_seqs or self._clients
        moments = [self._decoding(settings, min(most, DECODED))]
        prefilled = min(most, PREFILLED)
        moments.append(self._prefilling(settings, prefilled, min(most, DECODED) - prefilled))
        return max(moments, key=lambda moment: moment.needed_bytes)

    def _prefilling(self, settings: ServerSettings, rows: int, decoding: int) -> ServerMoment:
        """A batch from its towers to its first token, while other requests decode or wait."""
        sized = self._sized
        run = replace(self._workload, batch=rows, max_tokens=0, prefill_step=settings.prefill_step)
        moment = sized.figures_for(run).moment
        most = moment.nbytes if moment.prefill_bytes is None else moment.prefill_bytes
        # A request that has not begun holds its pixels in place of a cache and embeddings.
        kept = decoding * max(self._embedded, self._pixels - self._row_bytes)
        return self._answer(
            settings,
            prefill=(most - sized.resident_bytes, error_bytes_of(sized, run)),
            decoding=decoding,
            prompts=rows,
            images=kept + (self._clients - rows - decoding) * self._pixels,
        )

    def _decoding(self, settings: ServerSettings, rows: int) -> ServerMoment:
        """All decode; a prompt's embeddings stay until its request ends."""
        sized = self._sized
        run = replace(self._workload, batch=rows, images=UNSET, prefill_step=settings.prefill_step)
        moment = sized.figures_for(run).moment
        decode = moment.nbytes if moment.decode_bytes is None else moment.decode_bytes
        return self._answer(
            settings,
            prompts=0,
            decoding=rows,
            images=(self._clients - rows + 1) * self._pixels,
            logits=max(0, decode - sized.resident_bytes - rows * self._row_bytes),
        )

    def _answer(
        self, settings: ServerSettings, *, decoding: int, images: int, **parts: Any
    ) -> ServerMoment:
        sized, images = self._sized, images + self._cached(settings)
        weights, held = sized.resident_bytes, decoding * self._row_bytes
        return server_moment(
            weights, sized.margin_bytes, held, decoding=decoding, images=images, **parts
        )

    @property
    def _row_bytes(self) -> int:
        figures = self._sized.figures_for(replace(self._workload, images=UNSET))
        return figures.kv.nbytes + figures.ssm_bytes


def _commands(sized: SizedModel, settings: ServerSettings) -> Iterator[str]:
    return converting(sized, lambda model: [image_server_command(model, settings)])


def _notes(sized: SizedModel) -> Iterator[Note]:
    yield from assumption_notes(sized)
    yield Note(
        "info",
        "server-images",
        "an upper bound for requests with images of their own; prefix caches, which only the"
        " variable APC_ENABLED switches on, are not counted",
    )
