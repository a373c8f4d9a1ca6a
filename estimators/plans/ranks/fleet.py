"""A fleet of machines and the models that they are to run, placed by best fit."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.dtypes import converted
from memfit.estimators.base.errors import InputError, MemfitError
from memfit.estimators.base.ranks import Parallel
from memfit.estimators.base.reading.section import Section, read_yaml
from memfit.estimators.base.units import parse_count
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.devices import find_device
from memfit.estimators.plans.ranks.plan import SIZES, WAYS
from memfit.estimators.questions.target import Ranks
from memfit.estimators.results.estimate import RuntimeSummary
from memfit.estimators.results.ranks import FleetPlan, Leftover, Placement
from memfit.estimators.runtimes.registry import runtime_summary
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.ranks import ranked
from memfit.estimators.sizing.sized_model import require_loaded

SCHEMA = "memfit.fleet/1"
MAX_MACHINES = 10_000
MAX_MODELS = 10_000
_MAX_BYTES = 4 << 20


class FleetMachine(Struct, frozen=True):
    """Machines that are equal."""

    name: str
    device: Device
    count: int


class FleetModel(Struct, frozen=True):
    """A model, its workload, and how many copies of it run."""

    reference: str
    workload: Workload
    quantize: int | None
    copies: int


class Fleet(Struct, frozen=True):
    """What a file describes."""

    machines: tuple[FleetMachine, ...]
    models: tuple[FleetModel, ...]


def read_fleet(path: Path) -> Fleet:
    """Return the fleet of a file.

    Raises:
        CheckpointError: when there is no such file.
        ConfigError: when it is not YAML.
        InputError: when a key is wrong, or there are too many machines or models.
    """
    top = read_yaml(path, ("schema", "machines", "models"), limit=_MAX_BYTES)
    if top.values.get("schema") != SCHEMA:
        raise top.fail("schema" if "schema" in top else None, f"expected {SCHEMA}")
    machines = tuple(map(_machine, top.mappings("machines", ("name", "device", "count"))))
    keys = ("model", "context", "max_tokens", "quantize", "copies")
    models = tuple(map(_model, top.mappings("models", keys)))
    for key, count, most in (
        ("machines", sum(each.count for each in machines), MAX_MACHINES),
        ("models", sum(each.copies for each in models), MAX_MODELS),
    ):
        if not 0 < count <= most:
            raise top.fail(key, f"{count} of them: give from 1 to {most}")
    return Fleet(machines, models)


def _machine(values: Section) -> FleetMachine:
    text = values.text("device")
    try:
        device = find_device(text)
    except InputError as error:
        raise values.fail("device", str(error)) from None
    count = values.count("count", 1, most=MAX_MACHINES)
    return FleetMachine(values.text("name", device.name), device, count)


def _model(values: Section) -> FleetModel:
    def tokens(key: str, default: int) -> int:
        value = values.values.get(key, default)
        try:
            return value if type(value) is int else parse_count(str(value))
        except InputError as error:
            raise values.fail(key, str(error)) from None

    workload = Workload(prompt_tokens=tokens("context", 4096), max_tokens=tokens("max_tokens", 0))
    quantize = values.optional_count("quantize")
    return FleetModel(
        values.text("model"), workload, quantize, values.count("copies", 1, most=MAX_MODELS)
    )


def plan_fleet(fleet: Fleet, catalog: Catalog) -> FleetPlan:
    """Return where every copy of every model runs, the largest first."""
    rooms = _Rooms(fleet)
    needs = _Needs(catalog, tuple(rooms.devices.values()))
    order = sorted(fleet.models, key=lambda model: -needs.alone(model))
    placements = [_placed(model, needs, rooms) for model in order for _ in range(model.copies)]
    return FleetPlan(
        placements=tuple(placements),
        left=tuple(rooms.left()),
        runtimes=tuple(needs.runtimes),
        placed=sum(bool(each.machines) for each in placements),
    )


def _placed(model: FleetModel, needs: "_Needs", rooms: "_Rooms") -> Placement:
    unplaced = Placement(model=model.reference, machines=(), parallel=None, needed_bytes=None)
    if fault := needs.fault(model):
        return replace(unplaced, reason=fault)
    for size in (1, *SIZES):
        fitting = [
            (left, device, need, parallel)
            for device in rooms.devices
            for need, parallel in needs.over(model, rooms.devices[device], size)
            if (left := rooms.left_by(device, size, need)) is not None
        ]
        if fitting:
            # Best fit: where the least is left.
            _, device, need, parallel = min(fitting, key=lambda each: each[0])
            machines = rooms.take(device, size, need)
            return replace(unplaced, machines=machines, parallel=parallel, needed_bytes=need)
    reason = f"no machine and no {SIZES[-1]} equal ones have the room that is left for it"
    return replace(unplaced, needed_bytes=needs.alone(model), reason=reason)


_Need = tuple[int, Parallel | None]


class _Needs:
    """What models need on devices, each computed once."""

    def __init__(self, catalog: Catalog, devices: tuple[Device, ...]) -> None:
        self._catalog, self._devices = catalog, devices
        self._kept: dict[tuple[FleetModel, str, int], list[_Need]] = {}
        self._faults: dict[FleetModel, str] = {}
        self.runtimes: dict[RuntimeSummary, None] = {}

    def alone(self, model: FleetModel) -> int:
        """Return what it needs on one machine, 0 where it cannot be sized."""
        found = self.over(model, self._devices[0], 1)
        return found[0][0] if found else 0

    def fault(self, model: FleetModel) -> str:
        """Return why it cannot be sized, empty where it can."""
        self.alone(model)
        return self._faults.get(model, "")

    def over(self, model: FleetModel, device: Device, size: int) -> list[_Need]:
        """Return what each machine needs, by the number of them and the way they share it."""
        key = model, device.name, size
        if key not in self._kept:
            self._kept[key] = list(self._computed(model, device, size))
        return self._kept[key]

    def _computed(self, model: FleetModel, device: Device, size: int) -> Iterator[_Need]:
        plan = converted(model.quantize) if model.quantize else None
        sized = partial(self._catalog.sized, model.reference, quantize=plan, device=device)
        ways: tuple[Parallel | None, ...] = WAYS if size > 1 else (None,)
        for parallel in ways:
            try:
                ranks = Ranks(size, parallel) if parallel else None
                one = require_loaded(sized())
                self.runtimes[runtime_summary(one.runtime_model.runtime)] = None
                shared = ranked(one, ranks)
                yield (
                    shared.tightest(model.workload).requirement(model.workload).peak_bytes,
                    parallel,
                )
            except MemfitError as error:
                if size == 1:
                    self._faults[model] = str(error)


class _Rooms:
    """The room that is left on the machines of each device, ascending."""

    def __init__(self, fleet: Fleet) -> None:
        self.devices = {each.device.name: each.device for each in fleet.machines}
        self._rooms: dict[str, list[tuple[int, str]]] = {name: [] for name in self.devices}
        for each in fleet.machines:
            names = (
                [each.name]
                if each.count == 1
                else [f"{each.name}-{n + 1}" for n in range(each.count)]
            )
            whole = each.device.working_set_bytes
            self._rooms[each.device.name] += [(whole, name) for name in names]
        for rooms in self._rooms.values():
            rooms.sort()

    def left_by(self, device: str, size: int, need: int) -> int | None:
        """Return what is left on the fullest of ``size`` machines that have the room, or None."""
        rooms = self._rooms[device]
        first = bisect_left(rooms, (need, ""))
        return rooms[first][0] - need if first + size <= len(rooms) else None

    def take(self, device: str, size: int, need: int) -> tuple[str, ...]:
        """Use the machines with the least room that is enough; return their names."""
        rooms = self._rooms[device]
        first = bisect_left(rooms, (need, ""))
        taken, rooms[first : first + size] = rooms[first : first + size], []
        for room, name in taken:
            insort(rooms, (room - need, name))
        return tuple(name for _, name in taken)

    def left(self) -> Iterator[Leftover]:
        """Yield what is left, equal machines together, the most first."""
        for name, rooms in self._rooms.items():
            whole = self.devices[name].working_set_bytes
            counts = Counter(room for room, _ in rooms)
            for room in sorted(counts, reverse=True):
                yield Leftover(
                    device=name, machines=counts[room], working_set_bytes=whole, free_bytes=room
                )
