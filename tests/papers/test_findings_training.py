"""Findings about training: delays counted and runs trained by code of these tests alone."""

import functools

import numpy as np
import pytest
import xarray as xr

from figures.findings import gradient_noise as figure_of_noise
from figures.kit.rules import faults
from pipejax.analysis import op_times
from pipejax.plots import style
from sweeps.findings import delays, gradient_noise
from sweeps.kit.claims import COUNTED, judge
from sweeps.pipedream.schemes import build_until
from sweeps.pipedream.settings import Problem, Setting

ROUNDS = 8  # microbatches for each stage: their middle half is steady


def one_f_one_b(stages, microbatches):
    """The order of each stage: S - s forwards, then a backward and a forward in turn."""
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage, microbatches)
        order = [("F", stage, m) for m in range(ahead)]
        for m in range(microbatches):
            order.append(("B", stage, m))
            if m + ahead < microbatches:
                order.append(("F", stage, m + ahead))
        orders.append(order)
    return orders


def starts_of(orders, op, message):
    """Run the orders: when each op starts, in whole units of time."""
    stages, starts, free, done = len(orders), {}, [0] * len(orders), [0] * len(orders)
    while any(count < len(order) for count, order in zip(done, orders, strict=True)):
        for stage, order in enumerate(orders):
            while done[stage] < len(order):
                kind, _, m = order[done[stage]]
                before = stage - 1 if kind == "F" else stage + 1
                if kind == "B" and stage == stages - 1:
                    arrives = starts.get(("F", stage, m), -1) + op
                elif before < 0:
                    arrives = 0
                elif (kind, before, m) in starts:
                    arrives = starts[kind, before, m] + op + message
                else:
                    break
                starts[order[done[stage]]] = max(arrives, free[stage])
                free[stage] = starts[order[done[stage]]] + op
                done[stage] += 1
    return starts


def counted(starts, stages, microbatches, op):
    """Every delay of the middle half: block updates from what was read to the update."""
    updates = sorted((start + op, s, m) for (kind, s, m), start in starts.items() if kind == "B")
    number = {(s, m): k for k, (_, s, m) in enumerate(updates)}
    ends = np.array([end for end, _, _ in updates])
    steady = range(microbatches // 4, microbatches - microbatches // 4)
    return [
        number[stage, m] - np.searchsorted(ends, starts["F", read, m], side="right")
        for stage in range(stages)
        for m in steady
        for read in range(stages)
    ]


@pytest.fixture(scope="module")
def delayed():
    return delays.sweep(stages=(2, 5, 8))


@pytest.mark.parametrize(
    ("case", "message"),
    [("free messages", 0), ("message 1/8", 1), ("message 3/4", 6), ("message 5/4", 10)],
)
def test_delays_are_those_of_an_own_event_loop(delayed, case, message):
    for stages in map(int, delayed.stages.values):
        microbatches = ROUNDS * stages
        starts = starts_of(one_f_one_b(stages, microbatches), 8, message)
        found = counted(starts, stages, microbatches, 8)
        at = delayed.sel(case=case, stages=stages)
        assert max(found) == int(at.max_delay)
        assert float(at.mean_delay) == pytest.approx(np.mean(found), rel=1e-12)


@functools.cache
def timeline(stages, microbatches):
    """Slots of PipeDream that limits only what enters, as the source has it; ops by slot."""
    ended, nexts, last, slots = {}, {"F": [0] * stages, "B": [0] * stages}, [""] * stages, []
    while nexts["B"][0] < microbatches:
        now, ops = len(slots), []
        for stage in range(stages):
            f, b = nexts["F"][stage], nexts["B"][stage]
            source = ("F", stage, b) if stage == stages - 1 else ("B", stage + 1, b)
            ready = {"B": ended.get(source, now) < now}
            if stage:
                ready["F"] = ended.get(("F", stage - 1, f), now) < now
            else:
                ready["F"] = f < microbatches and f - b < stages  # b have left the pipe
            wanted = "F" if last[stage] == "B" and ready["F"] else "B"
            kind = wanted if ready[wanted] else "F" if ready["F"] else ""
            if kind:
                ops.append((kind, stage, nexts[kind][stage]))
        for kind, stage, m in ops:
            ended[kind, stage, m] = now
            nexts[kind][stage] += 1
            last[stage] = kind
        slots.append(ops)
    return slots


class Examples:
    """Logistic regression as the authors draw it, in NumPy; labels are 0 and 1."""

    def __init__(self, problem, seed=0):
        random = np.random.default_rng(seed)
        count = problem.num_batches * problem.batch_size
        self.x = random.normal(size=(count, problem.dimension))
        chance = 1 / (1 + np.exp(-(self.x @ random.normal(size=problem.dimension))))
        self.y = random.binomial(1, chance).astype(float)
        self.size, self.batches = problem.batch_size, problem.num_batches
        self.noise, self.random = problem.noise, np.random.default_rng(seed + 1)

    def value(self, w):
        z = self.x @ w
        return np.mean(np.logaddexp(0, z) - z * self.y) + 0.5e-4 * w @ w

    def rows(self, m):
        at = (m % self.batches) * self.size
        return self.x[at : at + self.size], self.y[at : at + self.size]

    def gradient(self, w, z, m, part):
        """Of the coordinates of a stage, at the logits of the mixed model."""
        x, y = self.rows(m)
        exact = x[:, part].T @ ((1 / (1 + np.exp(-z)) - y) / self.size) + 1e-4 * w
        return exact + self.noise * self.random.normal(size=w.shape)


def own_pipedream(examples, stages, microbatches, step_size):
    w = np.zeros(examples.x.shape[1])
    parts = np.split(np.arange(w.size), stages)
    stash, logits = {}, {}
    for ops in timeline(stages, microbatches):
        for kind, stage, m in ops:
            if kind == "F":
                stash[stage, m] = w[parts[stage]].copy()
                seen = examples.rows(m)[0][:, parts[stage]] @ stash[stage, m]
                logits[m] = logits.get(m, 0) + seen
        for kind, stage, m in ops:  # updates end with the slot
            if kind == "B":
                read = stash.pop((stage, m))
                w[parts[stage]] -= step_size * examples.gradient(read, logits[m], m, parts[stage])
    return examples.value(w)


def own_local_sgd(examples, runs, local_steps, microbatches, step_size):
    models = np.zeros((runs, examples.x.shape[1]))
    for m in range(microbatches):
        w, whole = models[m % runs], slice(None)
        w -= step_size * examples.gradient(w, examples.rows(m)[0] @ w, m, whole)
        if (m + 1) % (runs * local_steps) == 0:
            models[:] = models.mean(axis=0)
    return examples.value(models.mean(axis=0))


SMALL = Problem("logistic regression", 8, num_batches=5, batch_size=2)


@pytest.mark.parametrize("name", gradient_noise.SCHEMES)
def test_ends_are_those_of_own_loops_without_noise(name):
    tried, stages = gradient_noise.SCHEMES[name], 4
    table = build_until(tried.method, stages, 80.0, **tried.options)
    until = float(op_times(table)[1].max())
    setting = Setting(stages, SMALL, until, (), seeds=(0,))
    found = gradient_noise._ends(tried, setting, [0.0]).sel(noise=0.0, read="last model")
    step_size, count = float(found.step_size), table.num_microbatches
    examples = Examples(SMALL)
    own = (
        own_pipedream(examples, stages, count, step_size)
        if name == gradient_noise.PIPEDREAM
        else own_local_sgd(examples, stages, 5, count, step_size)
    )
    assert float(found.end.item()) == pytest.approx(own, rel=1e-9)


def test_own_loops_find_that_noise_decides():
    """16 stages, half of the published time: PipeDream ends below without noise, LocalSGD with it."""
    quiet, noisy = (gradient_noise.RUN_5._replace(noise=noise) for noise in (0.0, 0.5))

    def local_sgd(problem):
        return [own_local_sgd(Examples(problem), 16, 5, 640, 2.0**k) for k in (-4, -3, -2, -1)]

    assert own_pipedream(Examples(quiet), 16, 787, 2.0**-5) < min(local_sgd(quiet))
    tried = [own_pipedream(Examples(noisy), 16, 787, 2.0**k) for k in (-6, -5)]
    assert min(local_sgd(noisy)) < min(tried)


def longer(data, case, name):
    data["finding_delays"][name].loc[{"case": case, "stages": 9}] += 1


def crossed(data, scheme, **where):
    data["finding_gradient_noise"]["end"].loc[{"scheme": scheme, "seed": 0, **where}] *= 20


def flat(data):
    end = data["finding_gradient_noise"]["end"]
    at = {"scheme": gradient_noise.LOCAL_SGD, "noise": 0.0}
    end.loc[{**at, "stages": 64}] = end.sel({**at, "stages": 32}).values


MUTATIONS = {
    "e1": lambda data: longer(data, "first stage limited", "max_delay"),
    "e2": lambda data: longer(data, "free messages", "mean_delay"),
    "e3": lambda data: longer(data, "message 3/4", "max_delay"),
    "e4": lambda data: longer(data, "message 4", "mean_delay"),
    "c1": lambda data: crossed(data, gradient_noise.PIPEDREAM, noise=0.0, stages=16),
    "c2": lambda data: crossed(data, gradient_noise.LOCAL_SGD, noise=0.2, stages=32),
    "c3": flat,
}
CLAIMS = (*delays.CLAIMS, *gradient_noise.CLAIMS)


def found_so():
    """Data in which every claim holds."""
    stages = np.arange(2, 10)
    largest, mean = delays.largest(stages), delays.mean(stages)
    free = dict.fromkeys((*delays.FREE, *delays.ELSEWHERE), (largest, mean))
    short = dict.fromkeys(delays.SHORT, (delays.largest(stages, ties=False), mean))
    late = (delays.largest(stages, ties=False), delays.mean(stages, late=True))
    counts = free | short | dict.fromkeys(delays.LONG, late)
    axes = ("case", "stages")
    counted_ = xr.Dataset(
        {
            "max_delay": (axes, np.stack([one for one, _ in counts.values()])),
            "mean_delay": (axes, np.stack([one for _, one in counts.values()])),
        },
        coords={"case": list(counts), "stages": stages},
    )
    depth, noise = np.array([4, 8, 16, 32, 64]), np.array(gradient_noise.NOISES)
    pipedream = np.tile(1e-3 + 0.03 * noise, (len(depth), 1))
    falls = 1.5e-3 + 1e-5 * depth[:, None] + 1e-4 * noise * (64 - depth[:, None])
    ends = np.stack([pipedream, falls])[None, ..., None] * np.ones((2, 1, 1, 1, 3))
    trained = xr.Dataset(
        {
            "end": (("read", "scheme", "stages", "noise", "seed"), ends),
            "crossing": (("read", "stages"), np.full((2, len(depth)), 0.05)),
        },
        coords={
            "read": list(gradient_noise.READS),
            "scheme": list(gradient_noise.SCHEMES),
            "stages": depth,
            "noise": noise,
            "seed": [0, 1, 2],
        },
        attrs={"slots": 3180.0},
    )
    return {"finding_delays": counted_, "finding_gradient_noise": trained}


def test_all_claims_hold_where_they_were_found():
    rows = judge(CLAIMS, found_so())
    assert {row["verdict"] for row in rows if row["kind"] in COUNTED} == {"holds"}
    assert {row["number"] for row in rows if row["kind"] in COUNTED} == set(MUTATIONS)


@pytest.mark.parametrize("number", MUTATIONS)
def test_a_claim_fails_when_its_data_contradict_it(number):
    data = found_so()
    MUTATIONS[number](data)
    (row,) = judge([one for one in CLAIMS if one.number == number], data)
    assert row["verdict"] == "fails"
    assert row["reason"]


def test_noise_at_which_both_end_alike():
    lead, noises = np.log([1.5, 1.2, 0.8]), np.array([0.0, 0.1, 0.3])
    share = np.log(1.2) / np.log(1.2 / 0.8)
    assert gradient_noise._crossing(lead, noises) == pytest.approx(0.1 + 0.2 * share)
    assert np.isnan(gradient_noise._crossing(lead[:2], noises[:2]))


def test_figure_of_gradient_noise():
    style.use()
    data = found_so()["finding_gradient_noise"]
    figure = figure_of_noise.draw(data)["finding_gradient_noise"]
    drawn = {line.get_label(): line for line in figure.axes[0].lines}
    median = data.end.sel(read="last model", stages=8, scheme="pipedream").median("seed")
    np.testing.assert_array_equal(drawn["PipeDream"].get_ydata(), median)
    assert drawn["both end alike"].get_xdata() == [0.05, 0.05]
    assert not faults(figure)
