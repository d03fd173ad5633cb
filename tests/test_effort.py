"""Searches that end by what they have done: one answer on any machine, never below a start."""

import threading

import numpy as np
import pytest

import pipejax as pj

ROUNDING = 1e-9
OFFLOADS = ("ada-offload", "pipe-offload")
HEURISTICS = ("1f1b", "zero-bubble", "zb-1p", "zb-h1", "zb-2p", "zb-h2", *OFFLOADS)


def get_told(table, costs, **options):
    """Return the effort and rows at each value of a search, and its end."""
    message, news = [], {}
    last = pj.optimize(table, costs, **options, on_best=message.append)
    for single in message:
        news.setdefault(single.value, (single.best.effort, [*map(list, single.best.table.rows())]))
    return news, (last.lower_bound, last.evaluated, last.stopped, last.best.effort)


def pipe_with_link(microbatches):
    table = pj.schedules.build("1f1b", num_workers=3, num_microbatches=microbatches)
    costs = pj.Costs(
        forward=[3.0, 4.0, 3.5], input_grad=[3.0, 3.5, 4.0], weight_grad=2.0, offload=6.0, load=5.0
    )
    return table, costs


@pytest.mark.parametrize("name", ["1f1b", "hanayo"])  # with offloads; of two stages per worker
def test_the_same_effort_finds_the_same_beside_a_busy_machine(name):
    table, costs = pipe_with_link(6)
    options = {"memory_limit": 2.5, "offload": True, "effort": 0.4}
    if name == "hanayo":
        table = pj.schedules.build(name, num_workers=3, num_microbatches=8)
        costs = pj.Costs.uniform(table, forward=3.0, input_grad=4.0, weight_grad=2.0, transfer=0.5)
        options |= {"memory_limit": 4.0, "offload": False}
    alone, over = get_told(table, costs, **options), threading.Event()

    def compute():
        while not over.is_set():
            np.sort(np.arange(10**6) % 97)  # this holds no lock of the interpreter

    others = [threading.Thread(target=compute) for _ in range(2)]
    for other in others:
        other.start()
    try:
        nearby = get_told(table, costs, **options)
    finally:
        over.set()
        for other in others:
            other.join()
    assert len(alone[0]) > 1
    assert nearby == alone


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("seed", range(8))
def test_no_answer_is_worse_than_a_schedule_of_the_literature(seed):
    """However little is to be done, and however times, limits and links differ by stage."""
    rng = np.random.default_rng(seed)
    size = {"num_workers": int(rng.integers(2, 6)), "num_microbatches": int(rng.integers(4, 10))}
    table = pj.schedules.build("gpipe", **size)  # the worst of starts
    shape = size["num_workers"] if rng.random() < 0.5 else None  # by stage
    times = {letter: rng.uniform(1.0, 3.0, shape) for letter in ("F", "I", "W")}
    transfer, has_link = float(rng.uniform(0.0, 0.5)), bool(rng.random() < 0.6)
    away = rng.choice([0.5, 1.0, 3.0]) * times["F"] if has_link else 0.0
    costs = pj.Costs(
        forward=times["F"],
        input_grad=times["I"],
        weight_grad=times["W"],
        transmit=transfer,
        offload=away,
        load=away,
    )
    limit, share = size["num_workers"] * float(rng.choice([0.5, 1.0, 1.5])), 0.29
    arguments = {"memory_limit": limit, "weight_share": share}
    result = pj.optimize(table, costs, **arguments, offload=has_link, effort=1e-6)
    specific = {"transfer": transfer, "slots": {k: float(np.mean(t)) for k, t in times.items()}}
    specific |= {**arguments, "offload": away if has_link else None}
    fitting = 0
    for name in HEURISTICS:
        takes = {*pj.schedules.find(name).options, "slots"}
        options = {k: value for k, value in specific.items() if k in takes}
        for part in (0.5, 1.0) if name == "pipe-offload" and has_link else (None,):
            options |= {} if part is None else {"offload_share": part}
            if name == "pipe-offload" and not has_link:
                options["offload_share"] = 0.0
            run = pj.evaluate(pj.schedules.build(name, **size, **options), costs)
            held = pj.analysis.activation_memory(run, weight_share=share)
            if held.peak.max() <= limit * (1 + ROUNDING):
                fitting += 1
                assert result.value <= run.makespan * (1 + ROUNDING), (name, part)
    assert fitting or limit < size["num_workers"]


def test_what_ended_a_search_is_said():
    table, costs = pipe_with_link(12)
    result = pj.optimize(table, costs, memory_limit=1.5, offload=True, effort=0.3)
    assert result.stopped == "effort"
    assert result.best.effort == pytest.approx(0.3, abs=0.2)
    capped = pj.optimize(table, costs, memory_limit=1.5, offload=True, effort=1e6, time_limit=0.5)
    assert capped.stopped == "time"
