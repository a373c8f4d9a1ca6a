"""The tickets of one model and one workload, as text for a scenario, for Python or for Swift."""

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.files import printable
from memfit.estimators.base.workload import Workload
from memfit.estimators.results.estimate import DeviceSummary, Estimate
from memfit.estimators.sizing.measurement_lookup import workload_words

TicketForm = Literal["yaml", "python", "swift"]


class Tickets(Struct, frozen=True, kw_only=True):
    """Bytes of a reservation and of a request, which add up to the peak of the run."""

    weights_bytes: int
    """Reserved for as long as the model is loaded."""
    cache_bytes: int
    """Caches and states, for as long as a request runs."""
    prefill_bytes: int
    """The rest of the peak, until the first token."""
    source: str
    """What they are of, and where they come from."""
    device: DeviceSummary | None

    def text(self, form: TicketForm) -> str:
        """Return them in a form; each is complete and runs as it is."""
        return _FORMS[form](self)

    def comment(self, mark: str) -> str:
        """Return what they are of, and what holds without Metal, as lines of a comment."""
        lines = [self.source]
        if self.device and self.device.backend != "metal":
            backend = self.device.backend.upper()
            lines.append(f"{backend} has no wired limit: the tickets admit, and set nothing")
        return "\n".join(f"{mark} {line}" for line in lines)


def tickets_of(
    *,
    model: str,
    workload: Workload,
    basis: str,
    parts: tuple[int, int],
    peak_bytes: int,
    device: DeviceSummary | None,
) -> Tickets:
    """Return the tickets of a peak; ``parts`` are its bytes of weights and of caches."""
    weights, caches = parts
    return Tickets(
        weights_bytes=weights,
        cache_bytes=caches,
        prefill_bytes=max(0, peak_bytes - weights - caches),
        source=f"{printable(model)}, {workload_words(workload)}, {basis}",
        device=device,
    )


def estimated_tickets(estimate: Estimate) -> Tickets:
    """Return the tickets of an estimate.

    Raises:
        UnsupportedError: for a runtime without MLX's wired limit, or that does not load the model.
    """
    runtime, of = estimate.runtime, estimate.components
    if not runtime.mlx_version:
        raise UnsupportedError(f"tickets are for MLX's wired limit; {runtime.name} is not on MLX")
    if estimate.refusal:
        raise UnsupportedError(f"there are no tickets: {estimate.refusal.reason}")
    return tickets_of(
        model=estimate.model.id,
        workload=estimate.workload,
        basis=f"by estimate, {of.workspace.basis}",
        parts=(of.weights.resident_bytes, of.kv.bytes + of.ssm.bytes),
        peak_bytes=estimate.peak_bytes,
        device=estimate.device,
    )


def _yaml(tickets: Tickets) -> str:
    """A scenario of one request that prefills for 10 s and runs for a minute."""
    return f"""\
{tickets.comment("#")}
# Times are an example: prefill_runs is the time to the first token, runs that of the request.
schema: memfit.wired-scenario/1
{_machine(tickets.device)}\
policies:
  serving: {{kind: sum}}
tickets:
  - {{name: weights, policy: serving, kind: reservation, size: {tickets.weights_bytes}B}}
  - name: request
    policy: serving
    size: {tickets.cache_bytes}B
    prefill: {tickets.prefill_bytes}B
    prefill_runs: 10s
    start: 0s
    runs: 60s
"""


def _machine(device: DeviceSummary | None) -> str:
    if device is None:
        return ""
    if device.source == "table":
        return f"device: {device.name}\n"
    mode = "" if device.backend == "metal" else "mode: policy-only\n"
    return f"working_set: {device.working_set_bytes}B\n{mode}"


# A request has one ticket for its caches and its prefill: two requests that each held their caches
# and waited for room to prefill would wait for ever.
def _python(tickets: Tickets) -> str:
    """The manager of `memfit.probes.wired`."""
    return f"""\
{tickets.comment("#")}
from memfit.estimators.guard.ledger import Ticket
from memfit.estimators.guard.policies import SumPolicy
from memfit.probes.wired import WiredMemoryManager

WEIGHTS = {tickets.weights_bytes}
CACHE = {tickets.cache_bytes}
PREFILL = {tickets.prefill_bytes}

manager = WiredMemoryManager()  # one for the process
policy = SumPolicy()  # or BudgetPolicy(WEIGHTS + PREFILL), and a ticket of CACHE for each


async def load():
    await manager.start(Ticket(policy, WEIGHTS, kind="reservation"))


async def answer(generate):
    async with manager.holding(Ticket(policy, CACHE + PREFILL)):
        return await generate()
"""


def _swift(tickets: Tickets) -> str:
    """The policies of mlx-swift-lm, which are named in full: mlx-swift has one of the same name.

    Sources: mlx-swift Source/MLX/WiredMemory.swift (ticket(size:manager:kind:), start());
    mlx-swift-lm Libraries/MLXLMCommon/WiredMemoryPolicies.swift (WiredSumPolicy(cap:),
    WiredBudgetPolicy(baseBytes:cap:id:)).
    """
    return f"""\
{tickets.comment("//")}
import MLX
import MLXLMCommon

let weightBytes = {tickets.weights_bytes}
let cacheBytes = {tickets.cache_bytes}
let prefillBytes = {tickets.prefill_bytes}

// Start the reservation when the model is loaded: _ = await weights.start()
let policy = MLXLMCommon.WiredSumPolicy()
let weights = policy.ticket(size: weightBytes, kind: .reservation)
// For each request, as wiredMemoryTicket: of generate.
let request = policy.ticket(size: cacheBytes + prefillBytes, kind: .active)

// Or, where one request prefills at a time, one budget to which each request adds its caches. Keep
// the policy: another one is another group.
let budget = MLXLMCommon.WiredBudgetPolicy(baseBytes: weightBytes + prefillBytes)
let budgeted = budget.ticket(size: cacheBytes, kind: .active)
"""


_FORMS: dict[TicketForm, Callable[[Tickets], str]] = {
    "yaml": _yaml,
    "python": _python,
    "swift": _swift,
}
