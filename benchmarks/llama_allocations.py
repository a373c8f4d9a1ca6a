"""Record what llama.cpp says it allocates, for the models of tests/gguf/allocations.json.

Each entry's metadata and tensors become a GGUF file with a hole as data. llama.cpp loads it
without allocating (`no_alloc`) on the CPU, or on it and a GPU that computes nothing
(`benchmarks/llama_gpu.py`), makes a context for every run of the entry, and logs the buffers that
it would allocate; the figures are read from these lines. xllamacpp carries llama.cpp
as one library with its C interface, and its version 2026.10.11549 is build b11549. In an
environment with memfit:

    pip install xllamacpp==2026.10.11549
    python benchmarks/llama_allocations.py          # exits with 1 when a figure differs
    python benchmarks/llama_allocations.py --write  # records llama.cpp's figures

For another architecture, write an entry with metadata, the tensors as far as they are known and the
runs wanted, with any figures: the printed errors of the loader name each tensor that is missing
or has another shape.
"""

import ctypes
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.llama_gpu import Gpu  # noqa: E402
from tests.gguf.writing import Allocation, Recorded, recorded, write  # noqa: E402

FILE = ROOT / "tests" / "gguf" / "allocations.json"
TYPES = {"f16": 1, "q8_0": 8}  # ggml_type


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class ModelParams(ctypes.Structure):
    _fields_ = (
        *_fields("devices tensor_buft_overrides", ctypes.c_void_p),
        *_fields("n_gpu_layers split_mode load_mode lazy_mode main_gpu", ctypes.c_int32),
        *_fields("tensor_split progress_callback progress_callback_user_data", ctypes.c_void_p),
        *_fields("kv_overrides", ctypes.c_void_p),
        *_fields("vocab_only check_tensors use_extra_bufts no_host no_alloc", ctypes.c_bool),
        *_fields("load_mtp", ctypes.c_bool),
    )


class ContextParams(ctypes.Structure):
    """struct llama_context_params; this build has a pointer more in front of its switches."""

    _fields_ = (
        *_fields("n_ctx n_batch n_ubatch n_seq_max n_rs_seq", ctypes.c_uint32),
        *_fields("n_outputs_max n_outputs_max_per_seq", ctypes.c_uint32),
        *_fields("n_threads n_threads_batch", ctypes.c_int32),
        *_fields("ctx_type rope_scaling_type pooling_type attention_type", ctypes.c_int32),
        *_fields("flash_attn_type", ctypes.c_int32),
        *_fields("rope_freq_base rope_freq_scale yarn_ext_factor", ctypes.c_float),
        *_fields("yarn_attn_factor yarn_beta_fast yarn_beta_slow", ctypes.c_float),
        *_fields("yarn_orig_ctx", ctypes.c_uint32),
        *_fields("defrag_thold", ctypes.c_float),
        *_fields("cb_eval cb_eval_user_data", ctypes.c_void_p),
        *_fields("type_k type_v", ctypes.c_int32),
        *_fields("abort_callback abort_callback_data one_more", ctypes.c_void_p),
        *_fields("embeddings offload_kqv no_perf op_offload swa_full kv_unified", ctypes.c_bool),
        *_fields("samplers", ctypes.c_void_p),
        *_fields("n_samplers", ctypes.c_size_t),
        *_fields("ctx_other", ctypes.c_void_p),
    )


class _Override(ctypes.Structure):
    """struct llama_model_tensor_buft_override."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


class Llama:
    """The library, with its log since the last call."""

    def __init__(self) -> None:
        """Load the library that pip installed."""
        import xllamacpp

        (path,) = Path(xllamacpp.__file__).parent.glob("xllamacpp.*.so")
        self._library = library = ctypes.CDLL(str(path))
        library.llama_model_default_params.restype = ModelParams
        library.llama_context_default_params.restype = ContextParams
        library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, ModelParams]
        library.llama_model_load_from_file.restype = ctypes.c_void_p
        library.llama_init_from_model.argtypes = [ctypes.c_void_p, ContextParams]
        library.llama_init_from_model.restype = ctypes.c_void_p
        library.llama_free.argtypes = library.llama_model_free.argtypes = [ctypes.c_void_p]
        self._lines: list[str] = []
        logger = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        self._log = logger(lambda _, text, __: self._lines.append(text.decode("utf-8", "replace")))
        library.llama_log_set(self._log, None)
        library.llama_backend_init()
        self._gpu = Gpu(library)
        default = library.llama_context_default_params()
        if (default.n_ctx, default.type_k, default.offload_kqv) != (512, TYPES["f16"], True):
            raise SystemExit("this library's structures are not those of build b11549")

    @property
    def log(self) -> str:
        """What it logged since the last call."""
        return "".join(self._lines)

    def runs(
        self, path: Path, wanted: tuple[Allocation, ...], *, allocates: bool = False
    ) -> list[Allocation]:
        """Return the runs with what llama.cpp logs of each.

        ``allocates``: buffers are made, which grow to the largest of the graphs that it reserves;
        without, they are those of the first (llama-context.cpp, sched_reserve).
        """
        return [self._run(str(path), run, allocates=allocates) for run in wanted]

    def _run(self, path: str, run: Allocation, *, allocates: bool) -> Allocation:
        model = self._model(path, run, allocates=allocates)
        params = self._library.llama_context_default_params()
        params.n_ctx, params.n_seq_max = run.context, run.sequences
        params.n_batch, params.n_ubatch = run.batch, run.microbatch
        params.type_k = params.type_v = TYPES[run.cache]
        params.swa_full, params.kv_unified = run.swa_full, run.unified
        params.n_outputs_max = run.outputs
        params.flash_attn_type = 1 if run.flash else 0
        params.offload_kqv = run.kv_offload
        self._lines.clear()
        context = self._library.llama_init_from_model(model, params)
        text = "".join(self._lines)
        if not context:
            raise SystemExit(f"{run}: {text[-500:]}")
        self._library.llama_free(context)
        self._library.llama_model_free(model)
        return read_log(text, run)

    def _model(self, path: str, run: Allocation, *, allocates: bool) -> int:
        """Load a model; without GPU layers there is no GPU at all."""
        params = self._library.llama_model_default_params()
        # The file is mapped into memory where buffers are made, so that its hole needs none.
        params.no_alloc, params.load_mode = not allocates, int(allocates)
        params.use_extra_bufts = False
        params.n_gpu_layers = run.gpu_layers or 0
        if run.gpu_layers is None:
            params.devices = ctypes.cast((ctypes.c_void_p * 1)(), ctypes.c_void_p)
        # common/common.h, LLM_FFN_EXPS_REGEX, as --n-cpu-moe has it for each layer.
        patterns = [
            rf"blk\.{index}\.ffn_(up|down|gate|gate_up)_(ch|)exps".encode()
            for index in range(run.host_experts)
        ]
        patterns += [run.overrides.encode()] if run.overrides else []
        host = self._library.ggml_backend_cpu_buffer_type()
        overrides = (_Override * (len(patterns) + 1))(*[_Override(text, host) for text in patterns])
        params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        self._lines.clear()
        model: int = self._library.llama_model_load_from_file(path.encode(), params)
        if not model:
            raise SystemExit(f"{path}: {''.join(self._lines)[-500:]}")
        return model


def read_log(text: str, run: Allocation) -> Allocation:
    """Return a run with the MiB of llama.cpp's log lines."""
    caches = re.findall(
        r"size = .*?\( *(\d+) cells, +(\d+) layers, .*?, K \(\w+\): +([\d.]+) MiB,"
        r" V \(\w+\): +([\d.]+) MiB",
        text,
    )
    states = re.findall(r"R \(\w+\): +([\d.]+) MiB, S \(\w+\): +([\d.]+) MiB", text)
    compute = dict(re.findall(r"(\w+) compute buffer size = +([\d.]+) MiB", text))
    output = re.findall(r"output buffer size = +([\d.]+) MiB", text)
    return run._replace(
        kv=[(int(c), int(n), float(k), float(v)) for c, n, k, v in caches],
        states=[float(part) for parts in states for part in parts],
        compute=float(compute["CPU"]),
        gpu=float(compute.get("GPU", 0)),
        output=float(output[0]),
    )


def as_recorded(run: Allocation) -> dict[str, Any]:
    """Return a run in the form of the file, without what is as in most."""
    plain: dict[str, Any] = json.loads(json.dumps(run._asdict()))
    defaults = Allocation._field_defaults
    return {
        key: value for key, value in plain.items() if key not in defaults or value != defaults[key]
    }


def again(llama: Llama, entry: Recorded, folder: Path) -> list[dict[str, Any]]:
    """Return the runs of an entry, repeated now."""
    metadata = {**entry.metadata, "tokenizer.ggml.model": "no_vocab"}
    path = write(folder / "model.gguf", metadata, entry.tensors)
    return [as_recorded(run) for run in llama.runs(path, entry.runs)]


def to_text(data: dict[str, Any]) -> str:
    """Return the file: metadata and tensors on a line each, and every run on its own."""
    entries = []
    for name, entry in data.items():
        runs = ",\n    ".join(json.dumps(run) for run in entry["runs"])
        metadata, tensors = (json.dumps(entry[key]) for key in ("metadata", "tensors"))
        entries.append(
            f'"{name}": {{\n  "metadata": {metadata},\n  "tensors": {tensors},\n'
            f'  "runs": [\n    {runs}\n  ]}}'
        )
    return "{\n" + ",\n".join(entries) + "\n}\n"


def main(*, record: bool) -> int:
    """Record, or compare; 1 when a figure differs."""
    llama, data, differing = Llama(), json.loads(FILE.read_text()), 0
    for name, entry in recorded().items():
        with tempfile.TemporaryDirectory() as folder:
            runs = again(llama, entry, Path(folder))
        known = data[name]["runs"]
        data[name]["runs"] = runs
        different = sum(run != before for run, before in zip(runs, known, strict=True))
        differing += different
        print(f"{name}: {len(runs)} runs, {different} not as recorded", flush=True)
    if record:
        FILE.write_text(to_text(data))
    return int(differing > 0)


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--write"]):
        raise SystemExit(__doc__)
    sys.exit(main(record=sys.argv[1:] == ["--write"]))
