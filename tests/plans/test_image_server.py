"""mlx_vlm.server with images: the bound against its own generator, and the flags that fit."""

import time
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from msgspec.structs import replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.images import Images, ImageSize
from memfit.estimators.base.workload import ServerSettings, Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.images.processor import image_plan, with_image_tokens
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.devices import find_device
from memfit.estimators.machine.host import detect_host
from memfit.estimators.plans.server.images import CACHES_FEATURES, plan_image_server
from memfit.estimators.runtimes.registry import get_runtime
from memfit.estimators.runtimes.source import MethodSetting
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.opening import with_weight_bits
from memfit.estimators.sizing.sized_model import SizedModel
from tests.mlx_memory import settled_bytes
from tests.trace.vision_cases import QWEN2_VL

needs_mlx_vlm = pytest.mark.skipif(find_spec("mlx_vlm") is None, reason="the server is mlx-vlm's")
SAMPLE = Path(__file__).parents[2] / "sample_configs" / "qwen3.5-27b.yaml"
IMAGE = Images(images=(ImageSize(448, 336),))


def sized_for_images(
    reference: str | Checkpoint, device: Device | None, method: MethodSetting = "formula"
) -> SizedModel:
    catalog = Catalog()
    name = reference if isinstance(reference, str) else catalog.add(reference)
    runtime = get_runtime("mlx-vlm")
    return catalog.sized(name, device=device, method=method, runtime=runtime, margin_bytes=0)


def test_a_smaller_step_fits_before_fewer_requests_do() -> None:
    sized = with_weight_bits(sized_for_images(str(SAMPLE), find_device("m4-max-64")), 4)
    run = Workload(prompt_tokens=8000, max_tokens=500, images=IMAGE)
    run = with_image_tokens(sized.checkpoint, run)
    plan = plan_image_server(sized, run, ServerSettings(), clients=40)
    assert (plan.verdict, plan.server) == ("exceeds", "mlx_vlm.server")
    assert plan.bound.prefilled_prompts + plan.bound.decoding_requests == 32
    assert plan.fitting is not None
    assert plan.fitting_bound is not None
    assert (plan.fitting.prefill_step, plan.fitting.max_num_seqs) == (512, 40)
    assert "--prefill-step-size 512 --max-num-seqs 40 " in plan.commands[-1]
    # 196 tokens of features of 5120 numbers in bf16, of as many requests as the cache has room for.
    once = plan_image_server(sized, run, ServerSettings(vision_cache_size=1), clients=40)
    kept = plan.bound.images_bytes - once.bound.images_bytes
    assert kept == 19 * (run.image_tokens - 2) * 5120 * 2
    with pytest.raises(UnsupportedError, match="leave out KV bits"):
        plan_image_server(sized, replace(run, kv_bits=8), ServerSettings(), clients=2)


@needs_mlx_vlm
def test_classes_that_cache_features_are_known() -> None:
    spec = find_spec("mlx_vlm")
    assert spec is not None
    models = Path(str(spec.origin)).parent / "models"
    files = (path for path in models.glob("*/*.py") if "vision_cache.put" in path.read_text())
    found = {path.parent.name for path in files}
    assert found <= CACHES_FEATURES


class _Quiet:
    """In place of tokenizer, stopping criteria and texts: every request runs to its end."""

    def __init__(self, *_: Any) -> None:
        pass

    def __call__(self, _: Any) -> bool:
        return False

    def add_eos_token_ids(self, _: Any) -> None:
        pass

    def advance(self, *_: Any) -> str:
        return ""

    @property
    def stopping_criteria(self) -> "_Quiet":
        return self


def _served(config: dict[str, Any], images: Images, text_tokens: int, count: int) -> int:
    """Return the peak of the server's generator above the model, for requests of 20 tokens."""
    import mlx.core as mx
    import mlx.nn as nn
    import mlx_vlm.server.generation as server
    import mlx_vlm.utils as utils
    from mlx_vlm.vision_cache import VisionFeatureCache

    from memfit.estimators.trace.vision_builder import made
    from memfit.estimators.trace.vision_inputs import inputs

    plan = image_plan(Checkpoint("m", "local", config, "config.json"), images)
    model = made(utils, nn, config, "BF16")
    mx.eval(model.parameters())

    class Generator(server.ResponseGenerator):  # type: ignore[misc]
        has_begun = False

        def _collect_pending_requests(self, **given: Any) -> Any:
            while not self.has_begun and self.requests.qsize() < count:
                time.sleep(0.01)
            self.has_begun = True
            return super()._collect_pending_requests(**given)

        def _preprocess_request(self, *_: Any, **__: Any) -> dict[str, Any]:
            prompt = Workload(prompt_tokens=plan.token_count + text_tokens)
            given = inputs(self.model, plan, prompt)
            own = {name: mx.contiguous(array) for name, array in given.items()}
            mx.eval(own)
            return own

    def ask() -> None:
        asked = server.GenerationArguments(max_tokens=20, temperature=0.0)
        list(generator.generate("", images=[""], args=asked)[1])

    with pytest.MonkeyPatch.context() as patch:
        loaded = (model, _Quiet(), model.config)
        patch.setattr(server, "load_model_resources", lambda *_: loaded)
        patch.setattr(server, "resolve_eos_token_ids", lambda *_: ())
        patch.setattr(server, "make_streaming_detokenizer", lambda _: None)
        patch.setattr(server, "_ServerTokenStreamer", _Quiet)
        generator = Generator("model", vision_cache=VisionFeatureCache(20))
        generator.wait_until_ready()
        before = settled_bytes()
        clients = [Thread(target=ask) for _ in range(count)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        peak = mx.get_peak_memory() - before
        generator.stop_and_join()
    return int(peak)


@needs_mlx_vlm
@pytest.mark.exhaustive
def test_the_real_server_takes_at_most_the_bound() -> None:
    pytest.importorskip("uvicorn")
    config = {**QWEN2_VL, "torch_dtype": "bfloat16"}
    sized = sized_for_images(Checkpoint("m", "local", config, "m"), detect_host(), method="trace")
    run = Workload(prompt_tokens=100, max_tokens=20, images=IMAGE)
    run = with_image_tokens(sized.checkpoint, run)
    largest = plan_image_server(sized, run, ServerSettings(), clients=3).bound
    bound = largest.needed_bytes - largest.weights_bytes
    assert 0.75 * bound < _served(config, IMAGE, 100, 3) < 1.02 * bound
