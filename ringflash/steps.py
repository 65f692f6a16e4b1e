"""What a rank does step by step, and about how long that takes: the rows of explain's report."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringflash import rates
from ringflash.plan import Course, Plan, Turn


@dataclass(frozen=True)
class StepReport:
    """One step of one rank: the blocks attended, their visible pairs per head, and bytes that set out meanwhile and come in.

    Blocks are of keys; of a backward pass in which rows travel, of rows. grad_bytes_*: what backward sends and receives in that
    step besides, as float32 dK and dV, or dQ. forward_ms, backward_ms: about how long the step takes, attending and moving
    side by side; None for kernels without figures (rates.py).
    """

    attends: tuple[int, ...]
    pairs: int
    bytes_sent: int
    bytes_received: int
    grad_bytes_sent: int
    grad_bytes_received: int
    forward_ms: float | None = None
    backward_ms: float | None = None


def reports(
    plan: Plan, course: Course, rank: int, *, per_token: int, grads_per_token: int, every: bool = False
) -> list[tuple[StepReport, bool]]:
    """A rank's steps of a pass, each with whether something of it crosses host borders.

    per_token: bytes of what travels of a token; grads_per_token: of its float32 gradients. every: all blocks move, padded to
    the longest, where any does.
    """
    lengths, rows = plan.lengths(course), len(plan.rows)
    work = [plan.work(block)[rank] for block in range(plan.size)] if course.rows else plan.work(rank)

    def moved(hops: tuple[tuple[int, int], ...], nbytes: int, any_moves: bool) -> int:
        if every:
            return (plan.size - 1) * max(lengths) * nbytes * any_moves
        return sum(lengths[block] * nbytes for block, _ in hops)

    def away(turn: Turn) -> bool:
        return any(plan.hosts[other] != plan.hosts[rank] for hops in turn.departing[:4] for _, other in hops)

    return [
        (
            StepReport(
                attends=turn.attend,
                pairs=sum(int(work[block]) for block in turn.attend) // rows,
                bytes_sent=moved(turn.departing.sends, per_token, turn.hops.moves),
                bytes_received=moved(turn.departing.recvs, per_token, turn.hops.moves),
                grad_bytes_sent=moved(turn.departing.grad_sends, grads_per_token, turn.hops.grad_moves),
                grad_bytes_received=moved(turn.departing.grad_recvs, grads_per_token, turn.hops.grad_moves),
            ),
            away(turn),
        )
        for turn in course.turns[rank]
    ]


def timed(step: StepReport, kernel: str, transport: str, *, flops: int, away: bool) -> StepReport:
    """The step with what it takes, about: the longer of attending and moving; with "allgather", which brings all keys before
    they are attended, that after the other.
    """
    forward, backward = (rates.attend_ms(kernel, flops, backward=back) for back in (False, True))
    if forward is None or backward is None:
        return step
    there, grads = max(step.bytes_sent, step.bytes_received), max(step.grad_bytes_sent, step.grad_bytes_received)
    moving, home, both = (rates.move_ms(transport, nbytes, between_hosts=away) for nbytes in (there, grads, there + grads))
    if transport == "allgather":
        return replace(step, forward_ms=moving + forward, backward_ms=moving + max(backward, home))
    return replace(step, forward_ms=max(forward, moving), backward_ms=max(backward, both))


def links(
    plan: Plan, rank: int, *, per_token: int, grads_per_token: int, rows: tuple[int, int] = (0, 0), every: bool = False
) -> tuple[tuple[int, int, int], ...]:
    """(other rank, bytes sent to it in forward, in backward).

    per_token, grads_per_token: of keys, as in reports; rows: the same two of rows. every: as in reports.
    """
    if every and any(step.transfers for step in plan.forward.steps):
        longest = max(plan.kv_layout.lengths)
        others = [other for other in range(plan.size) if other != rank]
        return tuple((other, longest * per_token, longest * (per_token + grads_per_token)) for other in others)
    sent: dict[int, list[int]] = {}
    home = rows if plan.backward.rows else (per_token, grads_per_token)
    for course, backward, nbytes in ((plan.forward, 0, (per_token, 0)), (plan.backward, 1, home)):
        lengths = plan.lengths(course)
        for hops in (turn.departing for turn in course.turns[rank]):
            for moves, each in zip((hops.sends, hops.grad_sends if backward else ()), nbytes, strict=True):
                for block, to in moves:
                    sent.setdefault(to, [0, 0])[backward] += lengths[block] * each
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
