"""Measured-like runs with one fault: ops and messages that scatter by 3 %, and gaps before ops."""

import itertools

import numpy as np

import pipejax as pj
from pipejax.traces.record import OPS

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "v-half")
WORKERS = (2, 4)
KINDS = ("worker", "stage", "link", "microbatch", "step", "clock")
STEPS, MICROBATCHES = 4, 8
SLOW, NOISE, GAP = 1.3, 0.03, 0.01  # the last two of an op
MESSAGE = 0.5  # of an op
PHASES = {"F": "forward", "I": "input_grad", "W": "weight_grad", "B": "backward"}


def tables():
    for name, workers in itertools.product(SCHEDULES, WORKERS):
        yield pj.schedules.build(name, num_workers=workers, num_microbatches=MICROBATCHES)


def run(table, kind, seed):
    """Return a trace with a fault, and what it is of; healthy if the kind is None."""
    random = np.random.default_rng(seed)
    workers, stages, count = table.num_workers, table.num_stages, table.num_microbatches
    placement = table.placement[0]
    factor, message = np.ones((STEPS, stages, count)), np.ones((2, 1, stages - 1, 1))
    ahead, late, name = np.zeros(workers), np.zeros(STEPS), None
    if kind == "worker":
        name = int(random.integers(workers))
        factor[:, placement == name] *= SLOW
    elif kind == "stage":
        name = int(random.integers(stages))
        factor[:, name] *= SLOW
    elif kind == "link":
        name = int(random.integers(workers - 1)) + np.arange(2)[:: random.choice([-1, 1])]
        for boundary, direction in itertools.product(range(stages - 1), range(2)):
            ends = placement[[boundary, boundary + 1]][:: 1 - 2 * direction]
            if np.array_equal(ends, name):
                message[direction, 0, boundary] *= SLOW
        name = "worker {} to {}".format(*name)
    elif kind == "microbatch":
        name, step = int(random.integers(count)), int(random.integers(2 * STEPS))
        if step < STEPS:  # in one of them, else in all
            factor[step, :, name] *= SLOW
            name = f"{name} in step {step}"
        else:
            factor[:, :, name] *= SLOW
    elif kind == "step":
        name = int(random.integers(1, STEPS))
        if random.integers(2):
            factor[name] *= SLOW
        else:
            late[name] = SLOW
    elif kind == "clock":
        name = int(random.integers(1 if workers == 2 else 0, workers))
        ahead[name] = SLOW * random.choice([-1, 1])
    return _recorded(table, random, factor, message, ahead, late), str(name)


def _recorded(table, random, factor, message, ahead, late):
    """Run all steps one behind the other."""
    parts, begin = [], 0.0
    shape = table.num_stages, table.num_microbatches
    phases = {op.phase.name for row in table.rows() for cell in row for op in cell}
    has = {name: 1.0 for name in OPS if name in phases}
    for step in range(STEPS):
        took = {k: factor[step] * random.lognormal(0, NOISE, shape) for k in has}
        gaps = {k: random.exponential(GAP, shape) for k in has}
        transmit = message * MESSAGE * random.lognormal(0, NOISE, (*message.shape[:3], shape[1]))
        costs = pj.Costs(**{PHASES[k]: took[k] + gaps[k] for k in has}, transmit=transmit)
        trace = pj.traces.record_runs([pj.evaluate(table, costs)])
        gap = np.zeros(len(trace))
        for code, name in enumerate(trace.phases):
            is_own = trace.phase == code
            if is_own.any():
                gap[is_own] = gaps[name][trace.stage[is_own], trace.microbatch[is_own]]
        begin += late[step]
        parts.append((trace, step, trace.start + gap + begin, trace.end + begin))
        begin += float(trace.end.max()) + random.exponential(GAP)
    names = ("replica", "worker", "stage", "phase", "microbatch")
    columns = {x: np.concatenate([getattr(trace, x) for trace, *_ in parts]) for x in names}
    columns["step"] = np.concatenate([np.full(len(trace), step) for trace, step, *_ in parts])
    for at, name in ((2, "start"), (3, "end")):
        columns[name] = np.concatenate([part[at] for part in parts]) + ahead[columns["worker"]]
    return pj.traces.Trace.from_columns(columns, OPS)


def find_suspects(trace):
    right, offsets = pj.traces.aligned(trace)
    return pj.traces.suspects(pj.traces.replay(pj.traces.find_pipelines(right)), offsets)
