"""The cache of a prompt, stored and restored by real models of mlx-lm in this process."""

import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.base.errors import CheckpointError, InputError
from memfit.estimators.base.reading.request_trace import TraceRequest
from memfit.estimators.base.unfinished import UNFINISHED
from memfit.estimators.base.units import Units
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.plans.offload.cache_tiers import Tiers, simulate
from memfit.estimators.plans.offload.session_cache import storage_of
from memfit.estimators.results.offload import Speeds
from memfit.estimators.runtimes.measurement import Way
from memfit.estimators.sizing.opening import size
from memfit.probes.agreement import Agreement
from memfit.probes.prompt_caches import stored
from memfit.probes.prompt_caches.answer import Room, cache_answer
from memfit.probes.prompt_caches.conversations import StoredForm
from memfit.probes.prompt_caches.planned import simulated_differences
from memfit.probes.prompt_caches.result import CacheRestore, Conversation, StoredCache
from memfit.probes.prompt_caches.runner import CacheFile, CacheRunner, Restored
from memfit.probes.prompt_caches.trials import StoredFile, tried
from tests.checkpoints import CASES, Recipe, save_checkpoint
from tests.selection import QUICK_CONFIGS

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm", reason="the models that run are mlx-lm's")

TOKENS, STEP, GENERATED = 40, 16, 3
WAYS: tuple[Way, ...] = ("as-stored", "bulk", "freeing", "lazy")


class Store:
    """A model that has stored its cache in a directory."""

    def __init__(self, case: str, directory: Path, bits: tuple[int, ...] = (16, 8)) -> None:
        self.directory, self.reference = directory, directory / "reference.safetensors"
        path = directory / case
        # MLX's CPU backend does not multiply stacked experts in 16 bits.
        has_experts = "experts" in (CASES / f"{case}.json").read_text()
        save_checkpoint(path, Recipe(case, 4 if has_experts else None, has_tokenizer=False))
        self.runner = CacheRunner(path, None, lambda figures: None)
        self.runner.prompt(None, TOKENS + 1)
        self.runner.load()
        files = tuple(CacheFile(path=self.file(each), bits=each, write=True) for each in bits)
        if files:
            self.filled = self.runner.store(TOKENS, STEP, GENERATED, files, self.reference, "model")

    def file(self, bits: int) -> Path:
        return self.directory / stored.file_name("model", TOKENS, bits)

    def own(self) -> list[Any]:
        return self.runner.caches(Workload(prompt_tokens=1))

    def metadata(self) -> dict[str, str]:
        found: Any = mx.load(str(self.file(16)), return_metadata=True)
        return {
            name.removeprefix("0."): value
            for name, value in found[1].items()
            if name.startswith("0.")
        }

    def restored(self, bits: int, way: Way, fingerprint: str = "model") -> Restored:
        return self.runner.restore(self.file(bits), way, TOKENS, self.reference, fingerprint)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store("qwen3", tmp_path_factory.mktemp("dense"))


def test_a_cache_in_all_its_bits_continues_bit_by_bit(dense: Store) -> None:
    found = dense.restored(16, "as-stored")
    assert found.agreement.identical
    assert found.agreement.perplexity == found.agreement.reference_perplexity > 1
    assert found.cache_bytes == dense.filled.cache_bytes
    assert found.peak_bytes == dense.filled.cache_bytes
    assert not list(dense.directory.glob(f"{UNFINISHED}*"))


def test_each_way_restores_the_same_cache_with_its_own_peak(dense: Store) -> None:
    found = {way: dense.restored(8, way) for way in WAYS}
    whole, [_, eight] = dense.filled.cache_bytes, dense.filled.files
    assert eight.exact == (None,) * eight.layers
    assert found["as-stored"].cache_bytes == found["as-stored"].peak_bytes < whole
    dequantised = [found[way] for way in WAYS[1:]]
    assert {each.cache_bytes for each in dequantised} == {whole}
    assert len({repr(each.agreement) for each in dequantised}) == 1
    assert not dequantised[0].agreement.identical
    # All stored layers and all dequantised ones are held at once only in bulk.
    assert found["bulk"].peak_bytes >= whole + found["as-stored"].cache_bytes
    for way in WAYS[2:]:
        assert found[way].peak_bytes < found["bulk"].peak_bytes
    read = found["lazy"].read_bytes
    assert read is None or read >= (eight.nbytes or 0)


def test_one_load_at_a_time_takes_less_than_two_at_once(dense: Store) -> None:
    file = dense.file(8)
    trials = dense.runner.tried(file, "bulk", TOKENS, GENERATED, "model")
    held = dense.restored(8, "bulk").cache_bytes
    # At once both stored forms are there next to what is dequantised, else only one's.
    difference = trials.at_once.peak_bytes - trials.one_at_a_time.peak_bytes
    assert difference > 0
    assert trials.one_at_a_time.peak_bytes > 2 * held
    assert trials.one_at_a_time.first_ns < trials.one_at_a_time.both_ns
    assert trials.at_once.first_ns == trials.at_once.both_ns
    assert (trials.file_bytes, trials.decoded_tokens) == (file.stat().st_size, GENERATED)
    assert trials.saves > 0 < trials.save_ns
    # Nothing of the trials stays, and the file is as it was.
    assert not list(dense.directory.glob(f"{UNFINISHED}*"))
    assert stored.checked_sha256(file)


def test_a_save_in_the_background_that_fails_is_an_error(dense: Store, tmp_path: Path) -> None:
    file = tmp_path / dense.file(8).name
    shutil.copyfile(dense.file(8), file)
    metadata, before = dense.metadata(), set(threading.enumerate())
    found = StoredFile(file, "as-stored", dense.own, metadata, lambda figures: None)

    def decode(caches: list[Any]) -> int:
        for thread in set(threading.enumerate()) - before:  # the one that saves
            while thread.is_alive():
                for folder in tmp_path.glob(f"{UNFINISHED}*"):
                    shutil.rmtree(folder, ignore_errors=True)
                thread.join(0.01)
        return 1

    with pytest.raises(InputError, match=r"cannot be written|no such file"):
        tried(found, decode, GENERATED)


def test_what_cannot_be_quantised_is_stored_exactly(tmp_path: Path) -> None:
    found = Store("gemma3_text", tmp_path)
    assert found.restored(16, "as-stored").agreement.identical
    [_, eight] = found.filled.files
    assert {reason for reason in eight.exact if reason} == {
        "RotatingKVCache: mlx-lm does not quantise it"
    }
    assert None in eight.exact
    assert found.restored(8, "lazy").cache_bytes == found.filled.cache_bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", sorted(QUICK_CONFIGS))
def test_the_caches_of_every_kind_of_layer_are_stored_and_restored(
    case: str, tmp_path: Path
) -> None:
    found = Store(case, tmp_path)
    assert found.restored(16, "as-stored").agreement.identical
    if found.filled.files[1].nbytes is not None:
        assert found.restored(8, "lazy").cache_bytes == found.filled.cache_bytes


def test_a_file_that_is_not_what_was_stored_is_refused_by_name(
    dense: Store, tmp_path: Path
) -> None:
    path, checksum = tmp_path / "cache.safetensors", tmp_path / "cache.safetensors.sha256"
    content, line = dense.file(16).read_bytes(), dense.file(16).name + ".sha256"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cache\.safetensors: was not stored by memfit"):
        stored.checked_sha256(path)
    shutil.copy(dense.directory / line, checksum)
    assert stored.checked_sha256(path) in checksum.read_text()
    for changed in (content[:-1], content[:-1] + bytes([content[-1] ^ 1]), b""):
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"cache\.safetensors: is cut short or was"):
            stored.checked_sha256(path)
    checksum.write_text("none")
    with pytest.raises(CheckpointError, match=r"\.sha256: is not a checksum"):
        stored.checked_sha256(path)


def test_a_cache_of_another_model_is_refused_by_name(dense: Store, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="of another model or prompt"):
        dense.restored(16, "lazy", "other")
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    path = tmp_path / "cache.safetensors"
    caches = stored.read(dense.file(16), dense.own(), dense.metadata())
    with pytest.raises(CheckpointError, match="not those of the model"):
        stored.read(dense.file(16), [RotatingKVCache(8)] * len(caches), dense.metadata())
    with pytest.raises(CheckpointError, match="not those of the model"):
        stored.read(dense.file(16), [KVCache()], dense.metadata())
    path.write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match="mlx-lm cannot read it"):
        stored.read(path, [], {})


@pytest.mark.parametrize(("bits", "named"), [(16, 8), (8, 16), (8, 4)])
def test_a_cache_of_other_bits_than_its_name_says_is_refused(
    dense: Store, tmp_path: Path, bits: int, named: int
) -> None:
    path = tmp_path / stored.file_name("model", TOKENS, named)
    shutil.copy(dense.file(bits), path)
    with pytest.raises(CheckpointError, match=f"says {named} bits, a cache in it has {bits}"):
        stored.read(path, dense.own(), dense.metadata())


def test_nothing_is_left_where_a_cache_cannot_be_written(dense: Store, tmp_path: Path) -> None:
    (tmp_path / "cache.safetensors").mkdir()
    (tmp_path / "cache.safetensors" / "file").touch()
    with pytest.raises(InputError, match=r"cache\.safetensors: cannot be written"):
        stored.save(tmp_path / "cache.safetensors", dense.own(), {})
    assert not list(tmp_path.glob(f"{UNFINISHED}*"))


# A process that is killed at some line of Python, while it stores, replaces, restores and removes
# conversations. What it has finished is in its log.
KILLED = """
import os, shutil, signal, sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import KVCache
from memfit.probes.prompt_caches import stored
from memfit.probes.prompt_caches.conversations import ConversationFiles, StoredForm

directory, log, step = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
LEFT = {"one": {"0-8"}, "two": {"0-8", "1-8"}, "longer": {"0-16", "1-8"}, "less": {"0-16"}}
BETWEEN = {"one": "two", "two": "longer", "longer": "less"}

def caches(tokens):
    rows = mx.ones((1, 2, tokens, 64))
    return [KVCache.from_state((rows, rows, tokens))]

def serve(line):
    def killing(frame, event, argument):
        nonlocal line
        name = frame.f_code.co_filename
        if event == "line" and ("memfit" in name or "mlx" in name):
            line -= 1
            if not line:
                os.kill(os.getpid(), signal.SIGKILL)
        return killing

    def done(what):
        with log.open("a") as file:
            file.write(what + " ")

    files, says = ConversationFiles(directory), {"a": "b"}
    sys.settrace(killing)
    files.write("first", 8, caches(8), says)
    done("one")
    files.write("second", 8, caches(8), says)
    done("two")
    files.write("first", 16, caches(16), says)
    done("longer")
    stored.checked_sha256(files.path("first"))
    mx.eval([cache.state for cache in stored.read(files.path("first"), [KVCache()], says)])
    files.delete("second")
    done("less")
    os._exit(0)

line, kills = 1, 0
while True:
    directory.mkdir()
    log.write_text("")
    if not (child := os.fork()):
        serve(line)
    _, status = os.waitpid(child, 0)
    there = {path.stem for path in directory.glob("[0-9]*.safetensors")}
    for name in there:
        stored.checked_sha256(directory / f"{name}.safetensors")
    finished = (log.read_text().split() or [""])[-1]
    kept = LEFT.get(finished, set())
    following = LEFT.get(BETWEEN.get(finished, ""), kept)
    # Of what was stored, only what the next step replaces or removes may be gone, and a
    # conversation that is replaced is there before and after.
    assert there >= kept & following, (there, finished)
    assert finished != "two" or there & {"0-8", "0-16"}, there
    assert there <= kept | following | {"0-8"}, (there, finished)
    shutil.rmtree(directory)
    if not status:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    kills, line = kills + 1, line + step
print(kills)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("step", "kills"), [(330, 3), pytest.param(4, 200, marks=pytest.mark.exhaustive)]
)
def test_a_killed_process_loses_no_stored_conversation(
    tmp_path: Path, step: int, kills: int
) -> None:
    arguments = (str(tmp_path / "caches"), str(tmp_path / "log"), str(step))
    ran = subprocess.run(
        (sys.executable, "-c", KILLED, *arguments), capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) >= kills


TURNS = [
    TraceRequest(*turn)
    for turn in (
        *(
            (60, 4, "a"),
            (70, 2, "a"),
            (90, 3, "b"),
            (30, 0, "c"),
            (80, 5, "a"),
            (100, 3, "b"),
            (31, 2, "c"),
        ),
        # Two that are cut, where that can be done.
        *((50, 3, "a"), (110, 2, "b"), (20, 4, "c")),
    )
]


@pytest.mark.parametrize(
    ("case", "bits", "way"),
    [
        ("gemma3_text", 8, "freeing"),
        pytest.param("qwen3", 16, "as-stored", marks=pytest.mark.exhaustive),
        pytest.param("qwen3", 4, "as-stored", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_next", 8, "bulk", marks=pytest.mark.exhaustive),
        pytest.param("deepseek_v2", 8, "lazy", marks=pytest.mark.exhaustive),
    ],
)
def test_conversations_are_served_as_they_are_planned(
    case: str, bits: int, way: Way, tmp_path: Path
) -> None:
    runner = Store(case, tmp_path, ()).runner
    model = size(open_checkpoint(str(tmp_path / case)), device=None).model
    storage = storage_of(model, bits=bits, group_size=64, prefill_step=STEP)
    largest = max(storage.stored_bytes(turn.total_tokens) for turn in TURNS)
    room, directory = Tiers(largest * 3 // 2, 2 * largest), tmp_path / "conversations"
    directory.mkdir()
    form = StoredForm("model", bits, way, STEP)
    found = runner.replay(tuple(TURNS), room, form, directory, None)
    planned, served = simulate(TURNS, storage, room, Speeds()), found.simulation
    assert simulated_differences(planned, served) == ()
    assert min(served.hot, served.warm, served.cold) > 0
    assert 0 < planned.read_bytes < served.read_bytes
    assert found.peak_bytes >= served.largest_hot_bytes
    assert set(found.first_token_ns) == {"hot", "warm", "cold", "new"}
    left = {path.suffix for path in directory.iterdir()}
    assert left <= {".safetensors", ".sha256"}


ROOM = Room(110, 200, None, 100, 4, None)


def conversation(tokens: int, warm: int, cold: int, same: int = 4, bits: int = 8) -> Conversation:
    agreement = Agreement(
        tokens=4,
        same_tokens=same,
        leading_tokens=same,
        mean_divergence=0.0,
        largest_difference=0.0,
        perplexity=1.5,
        reference_perplexity=1.5,
        identical=False,
    )
    restore = CacheRestore(
        way="lazy",
        status="measured",
        reason=None,
        peak_bytes=10,
        planned_peak_bytes=10,
        cache_bytes=8,
        read_bytes=4,
        from_disk=True,
        restore_ns=warm,
        first_token_ns=warm,
        agreement=agreement,
    )
    file = StoredCache(
        bits=bits,
        held_bytes=8,
        planned_held_bytes=8,
        file_bytes=4,
        sha256="0" * 64,
        write_ns=1,
        exact_layers=0,
        quantised_layers=1,
        restores=(restore,),
    )
    return Conversation(
        tokens=tokens,
        cache_bytes=8,
        prefill_peak_bytes=9,
        prefill_ns=cold,
        first_token_ns=cold,
        stored=(file,),
    )


@pytest.mark.parametrize(
    ("points", "shortest"),
    [
        (((100, 50, 20), (200, 60, 90)), 150),  # 30 slower, then 30 faster
        (((100, 50, 21), (200, 60, 91)), 149),
        (((100, 50, 60), (200, 60, 90)), 100),
        (((100, 50, 20), (200, 60, 60)), None),
    ],
)
def test_the_shortest_conversation_is_where_the_times_cross(
    points: tuple[tuple[int, int, int], ...], shortest: int | None
) -> None:
    given = [conversation(*point) for point in points]
    found = cache_answer(given, ROOM, agreement_percent=95, units=Units.GB)
    assert (found.bits, found.way, found.shortest_tokens) == (8, "lazy", shortest)
    # 10 of 110 bytes are of the restore; a conversation takes 8 in memory, 4 on the disk.
    assert found.hot_bytes == 100
    assert (found.hot_conversations, found.warm_conversations) == (12, 25)


def test_bits_that_do_not_agree_are_not_the_answer() -> None:
    found = cache_answer(
        [conversation(9, 1, 2, same=3)], ROOM, agreement_percent=80, units=Units.GB
    )
    assert (found.bits, found.shortest_tokens) == (None, None)
