"""Runs with one planted fault: it comes first, with its cost and an action of its owner."""

import re
from typing import NamedTuple

import numpy as np
import pytest
import trace_truth as truth
from daily import read_cases

import pipejax as pj

RUNS = 104
STEPS, OP, MESSAGE = 8, 0.01, 0.002
SCHEDULES = (
    *(("1f1b", 4, 8), ("gpipe", 4, 12), ("interleaved-1f1b", 4, 8), ("zb-h1", 4, 12)),
    *(("1f1b", 8, 16), ("looped-bfs", 2, 8), ("eager-1f1b", 4, 16), ("zb-v", 4, 12)),
)
NOISE = (0.0, 0.01, 0.02)
MACHINE = r"replace the machine of worker {worker}\b|layers away"
# place, name in the first line, action, by kind of fault; files with a clock for each rank do not
# tell the directions of a link apart
KINDS = read_cases("KINDS of test_trace_faults")


class Case(NamedTuple):
    """A run, and its fault."""

    table: pj.ScheduleTable
    form: str
    noise: float
    replicas: int
    kind: str
    place: dict[str, int]
    factor: float  # of its ops or messages
    seed: int
    warmup: float = 1.0  # factor of all ops of the first step


def draw_case(number):
    """Draw the fault of a run; its kind, schedule, form and noise follow from its number."""
    draw, kind = np.random.default_rng(number), [*KINDS][number % len(KINDS)]
    group = number // len(KINDS)
    name, workers, count = SCHEDULES[group % len(SCHEDULES)]
    table = pj.schedules.build(name, num_workers=workers, num_microbatches=count)
    replicas = int(draw.integers(2, 5)) if kind in ("machine", "replica") else 1
    forms = ["csv", "chrome", "parquet"]
    if replicas == 1 and kind != "late step":  # these restart the clock in every step
        forms.append("lists")
    stage_workers = table.placement[0]
    boundaries = np.flatnonzero(np.diff(stage_workers))  # between two workers
    boundary = int(draw.choice(boundaries))
    ends = stage_workers[[boundary, boundary + 1]].tolist()[:: draw.choice([-1, 1])]
    sizes = {"worker": workers, "stage": table.num_stages, "microbatch": count, "replica": replicas}
    place = {key: int(draw.integers(size)) for key, size in sizes.items()}
    place |= {"step": int(draw.integers(1, STEPS)), "source": ends[0], "target": ends[1]}
    place = {key: place[key] for key in KINDS[kind][0]}
    factor = float(draw.uniform(1.4, 3.0)) * (5 if kind == "link" else 1)
    form, noise = forms[group % len(forms)], NOISE[number % len(NOISE)]
    warmup = 1.6 if group % 2 and "step" not in place else 1.0
    return Case(table, form, noise, replicas, kind, place, factor, number, warmup)


def simulate(case):
    """Run all steps by the event loop; return slices, and the time of every step with its wait."""
    draw = np.random.default_rng(1000 + case.seed)
    slices, times, begin = [], [], 0.0
    for step in range(STEPS):
        late = 0.0
        if case.kind == "late step" and step == case.place["step"]:
            late = 10 * OP * (case.factor - 1)
        begin += OP * float(draw.uniform(0.2, 0.4)) + late
        ends = []
        for replica in range(case.replicas):

            def slow(numbers={"step": step, "replica": replica}, **place):  # noqa: B006
                is_same_kind = ("source" in place) == (case.kind == "link")
                is_hit = case.place.items() <= (numbers | place).items()
                is_warmup = numbers["step"] == 0 and "source" not in place
                is_planted = is_hit and is_same_kind and case.kind != "late step"
                return (case.warmup if is_warmup else 1) * (case.factor if is_planted else 1)

            ops = truth._loop(case.table, draw, OP, case.noise, MESSAGE, None, slow)
            slices += [
                op._replace(step=step, replica=replica, start=op.start + begin, end=op.end + begin)
                for op in ops
            ]
            ends.append(max(op.end for op in ops))
        times.append(max(ends) + late)
        begin += max(ends)
    return slices, np.array(times)


def write_case(case, folder):
    """Write the files of a run; return the cost of its fault: a step with it minus without [s]."""
    if case.form == "parquet":
        pytest.importorskip("pyarrow")
    slices, times = simulate(case)
    truth.write(folder, case.form, slices, case.table, "nothing", case.seed)
    costs = times - simulate(case._replace(factor=1.0))[1]
    usual = costs[int(case.warmup > 1) :]  # means leave a warm-up out
    return costs[case.place["step"]] if "step" in case.place else usual.mean()


@pytest.mark.parametrize("number", range(2 * len(KINDS)), ids=2 * [*KINDS])
def test_the_planted_fault_is_the_first_suspect(number, tmp_path):
    case = draw_case(number)
    cost = write_case(case, tmp_path)
    trace, _ = pj.traces.aligned(pj.traces.read(tmp_path))
    first = pj.traces.suspects(pj.traces.replay(pj.traces.find_pipelines(trace)))[0]
    # of one stage a worker, a slow stage is a slow worker
    place = {"worker": case.place["stage"]} if case.kind == "stage" else case.place
    assert {name: first.place[name] for name in first.place if name != "rank"} == place
    assert first.seconds == pytest.approx(cost, rel=0.02)


@pytest.mark.slow
def test_of_all_reports_95_percent_begin_with_the_fault_its_cost_and_an_action(tmp_path, call):
    failed = []
    for number in range(RUNS):
        case, folder = draw_case(number), tmp_path / str(number)
        folder.mkdir()
        cost = write_case(case, folder)
        code, text, _ = call("trace", str(folder), "--schedules", "1f1b")
        assert code == 0
        first, second, *_ = text.splitlines()
        place = dict(case.place)
        if case.kind == "link":
            place |= dict(zip(("low", "high"), sorted(place.values()), strict=True))
        if case.form == "lists" and "step" in place:
            place["step"] += 1  # as the writer counts
        _, name, action = (pattern for pattern in KINDS[case.kind])
        value, unit = re.search(r"costs ([\d.]+) (ms|s)\b", first).groups()
        seconds = float(value) * {"s": 1.0, "ms": 1e-3}[unit]
        is_right = (
            re.search(name.format(**place), first) is not None,
            seconds == pytest.approx(cost, rel=0.02),
            re.search(f"^fix: .*({action.format(**place)})", second) is not None,
        )
        if not all(is_right):
            failed.append((number, *is_right, first, second, cost))
    assert len(failed) <= 0.05 * RUNS, failed
