"""In-order queues cost time though messages are free: where, how much, and what repairs it.

A queue of transfers holds back one that is ready behind one that is not. Without SEND and RECV
cells transfers stand in the order of the message-free run with F = 1, B = 2 on every stage; where
stages take other times, that order is not the one in which they become ready. All messages take no
time here, so what a schedule loses against delay links is the order alone.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import xarray as xr

import pipejax as pj
from pipejax.files import provenance
from pipejax.typing import Float, NumpyArray
from sweeps.kit.claims import BY_CONSTRUCTION, OURS, Claim, Threshold, Verdict
from sweeps.kit.command import write

STORE = "finding_queues.zarr"
QUEUES = ("worker", "pair", "direction")
SLOTS = {"F": 1, "B": 2}
CASES: Mapping[str, Mapping[str, Any]] = {
    "gpipe": {},
    "1f1b": {},
    "eager-1f1b": {},
    "interleaved-1f1b": {"stages_per_worker": 2},
    "looped-bfs": {"stages_per_worker": 2},
    "chimera": {"slots": SLOTS},
    "chimera-asymmetric": {"slots": SLOTS},
    "hanayo": {"waves": 2, "slots": SLOTS},
    "zb-h1": {},
    "zb-v": {},
    "dualpipe": {},
    "dualpipe-v": {},
}
SIZES = ((4, 8), (4, 16), (8, 16), (8, 32))
BACKWARDS = (1.0, 2.0, 3.0)  # of a forward
EQUAL = "equal"
DRAWS, SPREADS = 4, (0.05, 0.2, 0.6)  # of the logarithm
REPAIRED_SIZES, REPAIRED_BACKWARD = ((4, 8), (8, 16)), 2.0  # where the order is drawn anew
SHOWN = (8, 16)  # size of asymmetric Chimera
SHARES = np.linspace(1.0, 4.0, 31)  # of the second half of its stages, in those of the first


def shapes(stages: int) -> dict[str, Float[NumpyArray, " stages"]]:
    """Times of stages in ways that real ones are unequal, most of them 1.

    Args:
      stages: their number.

    Returns:
      Times by name: a dear last stage (head and loss), a cheap first one, halves 1:2 and 2:1, and
      scatter.

    Example:
      >>> shapes(4)["last x1.5"].tolist()
      [1.0, 1.0, 1.0, 1.5]
    """
    times = {EQUAL: np.ones(stages)}
    for factor in (1.25, 1.5, 2.0, 3.0):
        times[f"last x{factor:g}"] = np.append(np.ones(stages - 1), factor)
    times["first x0.5"] = np.append(0.5, np.ones(stages - 1))
    half = np.arange(stages) < stages // 2
    times |= {"halves 1:2": np.where(half, 1.0, 2.0), "halves 2:1": np.where(half, 2.0, 1.0)}
    rng = np.random.default_rng(0)
    for spread in SPREADS:
        for k in range(DRAWS):
            times[f"scatter {spread:g}, {k}"] = np.exp(spread * rng.standard_normal(stages))
    return times


def sweep() -> xr.Dataset:
    """Run all with free messages.

    Returns:
      loss, the share by which a step is longer than by delay, by (schedule, size, backward, shape,
      queues); repaired, the same with a queue per worker in the order in which transfers become
      ready, by (schedule, repaired_size, shape); makespan of asymmetric Chimera [slots, F = 1] by
      (share, run), in the orders drawn for these shares: by delay, queued as it stands, repaired.
    """
    loss = [[_losses(_table(case, *size)) for size in SIZES] for case in CASES]
    repaired = [
        [_repaired_losses(_table(case, *size)) for size in REPAIRED_SIZES] for case in CASES
    ]
    return xr.Dataset(
        {
            "loss": (("schedule", "size", "backward", "shape", "queues"), np.array(loss)),
            "repaired": (("schedule", "repaired_size", "shape"), np.array(repaired)),
            "makespan": (("share", "run"), [_asymmetric(share) for share in SHARES]),
        },
        coords={
            "schedule": list(CASES),
            "size": [f"{p} x {m}" for p, m in SIZES],
            "backward": list(BACKWARDS),
            "shape": list(shapes(2)),
            "queues": list(QUEUES),
            "repaired_size": [f"{p} x {m}" for p, m in REPAIRED_SIZES],
            "share": SHARES,
            "run": ["delay", "queue", "repaired"],
        },
        attrs={
            "title": "what in-order queues cost with free messages",
            "default order": "of the message-free run with F = 1, B = 2 on every stage",
            **provenance(),
        },
    )


def _table(case: str, workers: int, microbatches: int, **options: Any) -> pj.ScheduleTable:
    sizes = {"num_workers": workers, "num_microbatches": microbatches}
    return pj.schedules.build(case, **sizes, **CASES[case], **options)


def _costs(forward: Float[NumpyArray, "..."], backward: Any) -> pj.Costs:
    """Costs with free messages; W is half of a backward."""
    half = backward / 2 * forward
    return pj.Costs(
        forward=forward,
        backward=2 * half,
        input_grad=half,
        weight_grad=half,
        transmit=np.zeros(forward.shape[:-1]),
    )


def _times(table: pj.ScheduleTable) -> Float[NumpyArray, "shapes stages"]:
    """Times of its stages in each shape, on top of its own shares."""
    return np.array(list(shapes(table.num_stages).values())) * np.asarray(table.stage_shares)


def _losses(table: pj.ScheduleTable) -> Float[NumpyArray, "backwards shapes queues"]:
    times = _times(table)
    many = np.tile(times, (len(BACKWARDS), 1))
    costs = _costs(many, np.repeat(BACKWARDS, len(times))[:, None])
    delay = np.asarray(pj.makespans(pj.lower(table), costs))
    links = (pj.Links("rendezvous", queues=queues) for queues in QUEUES)
    runs = [np.asarray(pj.makespans(pj.lower(table, link=link), costs)) for link in links]
    return (np.stack(runs, axis=-1) / delay[:, None] - 1).reshape(len(BACKWARDS), len(times), -1)


def _repaired_losses(table: pj.ScheduleTable) -> list[float]:
    """The same with a queue per worker, in the order in which transfers become ready."""
    losses = []
    for forward in _times(table):
        delay, _, repaired = _runs(table, _costs(forward, REPAIRED_BACKWARD))
        losses.append(repaired / delay - 1)
    return losses


def _runs(table: pj.ScheduleTable, costs: pj.Costs) -> tuple[float, float, float]:
    """Makespans by delay, with a queue per worker as it stands, and in the order of readiness."""
    free = pj.evaluate(table, costs)
    sent = free.program.messages
    # free messages arrive when their op ends; ties as in the default order
    order = np.lexsort((sent.microbatch, sent.stage, sent.sender, free.message_finish))
    ordered = pj.links.insert_transfers(table, order)
    queue, repaired = (pj.evaluate(t, costs, link="rendezvous").makespan for t in (table, ordered))
    return free.makespan, queue, repaired


def _asymmetric(share: float) -> tuple[float, float, float]:
    workers, microbatches = SHOWN
    shares = [1.0] * (workers // 2) + [share] * (workers // 2)
    table = _table("chimera-asymmetric", workers, microbatches, stage_shares=shares)
    return _runs(table, _costs(np.asarray(table.stage_shares), REPAIRED_BACKWARD))


Data = Mapping[str, xr.Dataset]
SAME = Threshold(1e-9, "equal but for rounding: within 1e-9", "ours: float64")
TWO = 2.0  # of the second half of the stages: asymmetric Chimera as published


def _example(data: Data) -> Verdict:
    """Asymmetric Chimera 8 x 16, 1:2: longer in its own order, not in the other."""
    at = data["finding_queues"].makespan.sel(share=TWO, method="nearest")
    free, queue, repaired = (float(at.sel(run=run)) for run in at.run.values)
    holds = queue > free * (1 + SAME.value) and repaired <= free * (1 + SAME.value)
    return Verdict(
        f"{free:.1f} slots by delay, {queue:.1f} in the queue, {repaired:.1f} in the other order",
        holds,
        "" if holds else "the queue costs nothing, or the other order is no better",
    )


def _by_pair(data: Data) -> Verdict:
    """No run is longer with a queue for each pair of workers."""
    loss = data["finding_queues"].loss.sel(queues="pair")
    count = int((loss > SAME.value).sum())
    return Verdict(f"{count} of {loss.size} runs are longer", not count)


def _everywhere(data: Data) -> Verdict:
    """Every schedule loses at some shape with a queue per worker."""
    loss = data["finding_queues"].loss.sel(queues="worker")
    unequal = loss.sel(shape=loss["shape"] != EQUAL)
    largest = unequal.max(("size", "backward", "shape"))
    loses = largest > SAME.value
    worst = largest.isel(schedule=int(largest.argmax("schedule")))
    return Verdict(
        f"{int(loses.sum())} of {loses.size}, at {int((unequal > SAME.value).sum())} of "
        f"{unequal.size} runs; most {100 * float(worst):.1f} %, {worst.schedule.item()}",
        bool(loses.all()),
        "" if bool(loses.all()) else "one schedule never waits",
    )


def _drawn_for(data: Data) -> Verdict:
    """Equal stages and B = 2F, which the default order is drawn with."""
    loss = data["finding_queues"].loss.sel(shape=EQUAL, backward=REPAIRED_BACKWARD)
    loss = loss.drop_sel(schedule="chimera-asymmetric")  # its own stages are unequal
    return Verdict(f"longer by {float(loss.max()):.1e} at most", bool((loss <= SAME.value).all()))


def _repaired(data: Data) -> Verdict:
    """Transfers in the order in which they become ready."""
    loss = data["finding_queues"].repaired
    return Verdict(
        f"longer by {float(loss.max()):.1e} at most, {loss.size} runs",
        bool((loss <= SAME.value).all()),
    )


READY = (
    "in that order each transfer is ready after all before it in its queues, and none takes time: "
    "it starts when it is ready, as by delay"
)
PAIR = (
    "what holds a transfer back comes from its sender, earlier, or from its receiver: an op that "
    "ended before in the run that gives the order, so the consumer stands behind it and waits for "
    "it anyway"
)


def _claims() -> Iterator[Claim]:
    """The claims; their figure is one."""
    for number, text, check, kind, why in (
        ("f1", "asymmetric Chimera 8 x 16, B = 2F, messages that take no time: its default order "
         "costs time, that of readiness none", _example, OURS, ""),
        ("f2", "with a queue per worker every schedule loses at some unequal times of stages",
         _everywhere, OURS, ""),
        ("f3", "with a queue for each pair of workers no schedule loses, at any times of ops",
         _by_pair, BY_CONSTRUCTION, PAIR),
        ("f4", "with equal stages and B = 2F no queue costs time", _drawn_for, BY_CONSTRUCTION,
         READY),
        ("f5", "in the order in which they become ready transfers cost no time", _repaired,
         BY_CONSTRUCTION, READY),
    ):  # fmt: skip
        yield Claim(number, text, "", "finding_queues.pdf", check, kind, why, thresholds=(SAME,))


CLAIMS = tuple(_claims())


def main() -> None:
    """Write the dataset."""
    jax.config.update("jax_enable_x64", True)
    write(__doc__ or "", sweep, lambda data: f"{data.loss.size + data.repaired.size} runs")


if __name__ == "__main__":
    main()
