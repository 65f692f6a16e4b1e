"""What a rank does step by step, and about how long that takes: the rows of explain's report."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringflash import rates
from ringflash.plan import Course, Plan, Turn


@dataclass(frozen=True)
class StepReport:
    """One step of one rank: the blocks attended, their visible pairs per head, and bytes that set out meanwhile and come in.

    grad_bytes_*: what backward sends and receives in that step besides, as float32 dK and dV. forward_ms, backward_ms: about
    how long the step takes, attending and moving side by side; None for kernels without figures (rates.py).
    """

    attends: tuple[int, ...]
    pairs: int
    bytes_sent: int
    bytes_received: int
    grad_bytes_sent: int
    grad_bytes_received: int
    forward_ms: float | None = None
    backward_ms: float | None = None


def reports(plan: Plan, course: Course, rank: int, *, per_token: int, grads_per_token: int) -> list[tuple[StepReport, bool]]:
    """A rank's steps of a pass, each with whether something of it crosses host borders.

    per_token: bytes of K and V; grads_per_token: of float32 dK and dV.
    """
    work, rows = plan.work(rank), len(plan.rows)

    def moved(hops: tuple[tuple[int, int], ...], nbytes: int) -> int:
        return sum(plan.kv_layout.lengths[block] * nbytes for block, _ in hops)

    def away(turn: Turn) -> bool:
        return any(plan.hosts[other] != plan.hosts[rank] for hops in turn.departing[:4] for _, other in hops)

    return [
        (
            StepReport(
                attends=turn.attend,
                pairs=sum(int(work[block]) for block in turn.attend) // rows,
                bytes_sent=moved(turn.departing.sends, per_token),
                bytes_received=moved(turn.departing.recvs, per_token),
                grad_bytes_sent=moved(turn.departing.grad_sends, grads_per_token),
                grad_bytes_received=moved(turn.departing.grad_recvs, grads_per_token),
            ),
            away(turn),
        )
        for turn in course.turns[rank]
    ]


def timed(step: StepReport, kernel: str, transport: str, *, flops: int, away: bool) -> StepReport:
    """The step with what it takes, about: the longer of attending and moving."""
    forward, backward = (rates.attend_ms(kernel, flops, backward=back) for back in (False, True))
    if forward is None or backward is None:
        return step
    there, grads = max(step.bytes_sent, step.bytes_received), max(step.grad_bytes_sent, step.grad_bytes_received)
    moves = [rates.move_ms(transport, nbytes, between_hosts=away) for nbytes in (there, there + grads)]
    return replace(step, forward_ms=max(forward, moves[0]), backward_ms=max(backward, moves[1]))


def links(plan: Plan, rank: int, *, per_token: int, grads_per_token: int) -> tuple[tuple[int, int, int], ...]:
    """(other rank, bytes sent to it in forward, in backward); per_token as in reports."""
    sent: dict[int, list[int]] = {}
    for course, backward in ((plan.forward, False), (plan.backward, True)):
        for hops in (turn.departing for turn in course.turns[rank]):
            for moves, each in ((hops.sends, per_token), (hops.grad_sends if backward else (), grads_per_token)):
                for block, to in moves:
                    sent.setdefault(to, [0, 0])[backward] += plan.kv_layout.lengths[block] * each
    return tuple((to, there, back) for to, (there, back) in sorted(sent.items()))


def table(steps: Sequence[StepReport], name: str) -> list[str]:
    """Steps, one a line under a head."""
    timed = any(s.forward_ms is not None for s in steps)
    head = f"{name}  attends  visible pairs    sends  receives  backward also sends  receives"
    lines = [head + ("  about ms  backward" if timed else "")]
    for t, s in enumerate(steps):
        going_home = not s.attends and s.grad_bytes_sent + s.grad_bytes_received > 0
        blocks = "home" if going_home else ",".join(map(str, s.attends)) or "-"
        lines.append(
            f"{t:>4}  {blocks:>7}  {s.pairs:>13,}  {in_bytes(s.bytes_sent):>7}  {in_bytes(s.bytes_received):>8}"
            f"  {in_bytes(s.grad_bytes_sent):>19}  {in_bytes(s.grad_bytes_received):>8}{_times(s) if timed else ''}"
        )
    return lines


def _times(step: StepReport) -> str:
    return "".join(f"  {'-' if ms is None else f'{ms:.3g}':>8}" for ms in (step.forward_ms, step.backward_ms))


def in_bytes(n: int) -> str:
    """Bytes in the unit that keeps them short."""
    return shortened(n, 1024, ("B", "KiB", "MiB", "GiB"))


def shortened(n: float, base: int, units: tuple[str, ...]) -> str:
    """A number in the unit that keeps it short."""
    power = 0
    while n >= base and power < len(units) - 1:
        n, power = n / base, power + 1
    return f"{n:.4g} {units[power]}"
