"""Findings: each against computations of its own, and one change of the data that contradicts it."""

import functools
import math
from itertools import product
from pathlib import Path

import jax
import numpy as np
import optpipe_data as made
import pytest
import reference
import xarray as xr
from contradictions import check_contradictions, scaled, verdicts
from legal_sizes import build
from ortools.sat.python import cp_model

import pipejax as pj
from figures.findings import (
    gradient_noise as figure_of_noise,
    links as links_figure,
    offload as offload_figure,
    queues as queues_figure,
    regimes as regimes_figure,
)
from figures.kit.rules import faults
from pipejax.training import replay
from sweeps.findings import claims, delays, gradient_noise, links, offload, queues, regimes
from sweeps.kit.claims import COUNTED, judge
from sweeps.optpipe.cases import METHODS, NO_LINK, Pipe, Setting
from sweeps.pipedream.schemes import build_until, make_objectives
from sweeps.pipedream.settings import Problem, Setting as TrainingSetting
from sweeps.tabular.settings import draw

SEED = 20260101
DOUBLE = {"F": 1.0, "B": 2.0}
STRONGEST = Setting(Pipe("1.5B", 4, 24), 8, 0.75, NO_LINK)  # three activations


def texts(table):
    def text(cell):
        ops = ";".join(map(str, cell))
        return ops if len(cell) == 1 else f"({ops})OVERLAP_F_B"

    return [[text(cell) for cell in row if cell] for row in table.rows()]


def played(table, times, message, link="delay", scope="worker"):
    """The event loop on times of a microbatch on a worker."""
    durations = {(x, s): t * p for x, t in times.items() for s, p in enumerate(table.worker_parts)}
    places = product((0, 1), range(table.num_pipes), range(table.num_stages - 1))
    costs = reference.Costs(durations, {}, dict.fromkeys(places, message))
    return reference.Run(texts(table), table.pipe_of_microbatch.tolist(), costs, link, scope)


# (a) GPipe and 1F1B
def by_hand(name, workers, microbatches):
    """Rows of GPipe and of 1F1B, written for this test alone."""
    rows = []
    for w in range(workers):
        forwards, backwards = ([f"{w}{x}{m}" for m in range(microbatches)] for x in "FB")
        ahead = microbatches if name == "gpipe" else min(workers - 1 - w, microbatches)
        pairs = zip(forwards[ahead:], backwards, strict=False)
        rest = backwards[microbatches - ahead :]
        rows.append([*forwards[:ahead], *(op for pair in pairs for op in pair), *rest])
    return rows


def row_values(rows, forward, backward, message, link="delay", scope="worker"):
    times = {"F": forward, "B": backward}
    return played(pj.ScheduleTable.from_rows(rows), times, message, link, scope).makespan


def test_the_example_by_the_event_loop():
    """8 x 16, B = 2F, c = F."""
    rows, models = [by_hand(name, 8, 16) for name in links.COMPARED], "delay blocking rendezvous"
    runs = {link: [row_values(r, 1.0, 2.0, 1.0, link) for r in rows] for link in models.split()}
    assert runs == {"delay": [83, 109], "blocking": [113, 112], "rendezvous": [132, 117]}


@pytest.mark.parametrize("link", links.ONE_SUM)
def test_messages_on_the_critical_path(link):
    rng = np.random.default_rng(SEED)
    for _ in range(20):
        workers, microbatches = (int(rng.integers(low, 8)) for low in (2, 1))
        forward, backward, message = rng.exponential(1.0, 3)
        for name in links.COMPARED:
            count = links.expected_messages(name, link, workers, microbatches)
            expected = (microbatches + workers - 1) * (forward + backward) + count * message
            rows = by_hand(name, workers, microbatches)
            result = row_values(rows, forward, backward, message, link)
            assert result == pytest.approx(expected, rel=1e-12), (name, workers, microbatches)


def test_who_is_never_slower():
    rng = np.random.default_rng(SEED)
    scopes = {links.PER_WORKER: "worker", links.PER_PAIR: "pair", links.PER_DIRECTION: "direction"}
    for _ in range(5):
        workers, rounds = int(rng.integers(3, 5)), int(rng.integers(2, 4))
        forward, more, message = rng.exponential(1.0, 3)
        rows = [by_hand(name, workers, rounds * workers) for name in links.COMPARED]

        def later(link, rows=rows, times=(forward, forward + more, message)):
            model = link if link not in scopes else "rendezvous"
            scope = scopes.get(link, "worker")
            gpipe, other = (row_values(row, *times, model, scope) for row in rows)
            return other - gpipe

        assert min(later("delay"), later(links.PER_PAIR)) > -1e-9
        assert max(map(later, ("blocking", links.PER_WORKER, links.PER_DIRECTION))) < 1e-9
        border = 2 * rounds * message - (rounds * workers - 1) * (2 * forward + more)
        assert (later("queued") > 0) == (border < 0)  # of 2M c against P(M - 1)(F + B), by P


@pytest.mark.parametrize("link", links.LINKS)
def test_the_checker_confirms_both_forms(link):
    for name in links.COMPARED:
        table = build(name, 8, 16)
        form = pj.formula(pj.lower(table, link=links.LINKS[link], step_end=False), ("F", "B", "c"))
        result = pj.verify(form.certificate(table))
        assert form.exact
        assert result.ok, result.problems


# (d) regimes
@functools.cache
def waited(case, workers, microbatches, link):
    """A table and a run of it, whose messages take 1."""
    table = draw(case, workers, microbatches)
    return played(table, DOUBLE, 1.0, link), table


def longest(run, table, forward, backward, message):
    """Makespans at many times at once: the longest paths through what a run waited for."""
    times = {"F": forward, "B": backward}
    ends = {}
    for user in run.end:  # in the order in which they ran
        durations = message
        if user not in run.messages:
            cell = run.table.rows[user[0]][user[1]]
            durations = sum(table.worker_parts[s] * times[x] for x, s, _ in cell)
        starts = [ends[other] + lag * message for other, lag in run.waits[user]]
        ends[user] = np.max([np.zeros_like(message), *starts], axis=0) + durations
    return np.max(list(ends.values()), axis=0)


def swept(module, **constants):
    """Sweep a finding with other constants of its module."""
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        for name, value in constants.items():
            patch.setattr(module, name, value)
        return module.sweep()


@pytest.fixture(scope="module")
def regime_data():
    """The maps on few points, with accelerators where this test puts them."""
    size, axes = (len(regimes.PAIRS), len(regimes.ACCELERATORS)), ("pair", "system")
    values = {"backward_of": 2.0, "message_of": 1e-3}
    values = {name: (axes, np.full(size, value)) for name, value in values.items()}
    coords = {name: ("pair", ["", ""]) for name in ("one", "other", "facets")}
    coords |= {"pair": list(regimes.PAIRS), "system": list(regimes.ACCELERATORS)}
    places = {"tabular_sweep": lambda points, setting: xr.Dataset(values, coords)}
    times = {"BACKWARDS": np.linspace(0.5, 4.0, 8), "MESSAGES": np.geomspace(1e-4, 10.0, 9)}
    return swept(regimes, EVEN=(2, 4, 6), DEPTHS=(4, 8), **times, **places)


@pytest.mark.parametrize("pair", regimes.PAIRS)
@pytest.mark.parametrize("link", regimes.LINKS)
def test_the_inequalities_at_400_points(regime_data, pair, link):
    rng = np.random.default_rng(SEED)
    backward, message = rng.uniform(0.2, 4.0, 400), 10 ** rng.uniform(-3, 1, 400)
    pair_cases = regimes.PAIRS[pair]
    sizes = pair_cases.workers, pair_cases.microbatches, link
    runs = [waited(case, *sizes) for case in pair_cases[:2]]
    first, second = (longest(*run, np.ones(400), backward, message) for run in runs)
    text = regimes.holds_at(regime_data, pair, link, backward, message)
    np.testing.assert_array_equal(text, first <= second * (1 + 1e-12))
    assert 20 < text.sum() < 380


@pytest.mark.parametrize("link", regimes.LINKS)
def test_the_checker_confirms_the_forms_of_both_pairs(link):
    for pair in regimes.PAIRS.values():
        for case in pair[:2]:
            table = draw(case, pair.workers, pair.microbatches)
            program = pj.lower(table, link=link, step_end=False)
            weights = pj.analysis.named_parameters(program, ("F", "B", "c"), table.worker_parts)
            form = pj.formula(program, weights)
            assert form.exact
            assert pj.verify(form.certificate(table)).ok


@pytest.mark.parametrize(("link", "border"), [("delay", 10 / 98), ("blocking", 25 / 270)])
def test_the_border_of_hanayo(link, border):
    """Both take equally long on it, and Hanayo longer behind it."""
    message = np.array([border - 1e-6, border, border + 1e-6])
    runs = [waited(case, 8, 8, link) for case in ("hanayo, 2 waves", "chimera")]
    first, second = (longest(*run, np.ones(3), 2 * np.ones(3), message) for run in runs)
    assert np.sign(np.round(first - second, 9)).tolist() == [-1, 0, 1]


@pytest.mark.parametrize(("workers", "microbatches"), [(4, 4), (4, 12), (6, 6)])
def test_the_published_form_of_chimera(workers, microbatches):
    table = build("chimera", workers, microbatches)
    for backward in (0.5, 0.9, 1.0, 1.1, 2.0):
        published = (microbatches + workers // 2 - 1) * (1 + backward)
        result = played(table, {"F": 1.0, "B": backward}, 0.0).makespan
        assert (abs(result - published) < 1e-9) == (backward == 1.0)


# (f) in-order queues
def test_queues_cost_time_with_free_messages():
    table = build("chimera-asymmetric", 8, 16, slots={"F": 1, "B": 2})
    free = played(table, DOUBLE, 0.0)
    makespans = {s: played(table, DOUBLE, 0.0, "rendezvous", s).makespan for s in queues.QUEUES}
    assert free.makespan == pytest.approx(57 + 1 / 3)
    assert makespans["worker"] == pytest.approx(60)
    assert makespans["pair"] == pytest.approx(free.makespan)
    costs = pj.Costs.per_worker(table, forward=1.0, backward=2.0)
    sent = pj.lower(table).messages
    ends = {op: free.end[cell] for op, cell in free.table.cell.items()}
    forth = sent.direction == 0
    keys = zip(forth, sent.stage.tolist(), sent.microbatch.tolist(), strict=True)
    ready = [ends["F" if is_forth else "B", stage, m] for is_forth, stage, m in keys]
    ordered = pj.links.insert_transfers(table, np.argsort(ready, kind="stable"))
    repaired = played(ordered, DOUBLE, 0.0, "rendezvous").makespan
    assert repaired == pytest.approx(free.makespan)
    assert pj.evaluate(ordered, costs, link="rendezvous").makespan == pytest.approx(repaired)


def test_a_queue_per_pair_costs_nothing_at_random_times():
    rng, result = np.random.default_rng(SEED), []
    for name in ("1f1b", "chimera", "interleaved-1f1b"):
        table = build(name, 4, 8)
        stages = rng.uniform(0.5, 1.5, table.num_stages)
        durations = {("F", s): t for s, t in enumerate(stages)}
        durations |= {("B", s): 2 * t for s, t in enumerate(stages)}
        pipes, costs = table.pipe_of_microbatch.tolist(), reference.Costs(durations, {}, {})
        models = ("delay", "worker"), ("rendezvous", "pair"), ("rendezvous", "worker")
        runs = [reference.Run(texts(table), pipes, costs, *model) for model in models]
        free, pair, worker = (run.makespan for run in runs)
        assert pair == pytest.approx(free, rel=1e-12)
        result.append(worker / free)
    assert max(result) > 1.001


# (b, g) one stage per worker under a memory limit
def replayed(table, times, message):
    """Makespan, and the most that a worker holds: times are of whole workers."""
    run = played(table, times, message)
    shares, stages = table.worker_parts, table.num_stages
    curves = run.held(shares, [STRONGEST.pipe.weight_share] * stages, [0.0] * stages)
    return run.makespan, max(level for curve in curves for _, level in curve)


def least(setting, seconds=20.0):
    """An integer program of one stage per worker: bound and status [us]."""
    times = {x: round(1e6 * setting.pipe.times[x]) for x in "FIW"}
    message, workers = round(1e6 * setting.pipe.message), setting.pipe.workers
    count, share = setting.microbatches, math.floor(1000 * setting.pipe.weight_share)
    horizon = 4 * (count + workers) * sum(times.values())
    model, start = cp_model.CpModel(), {}
    end = model.new_int_var(0, horizon, "end")
    for w in range(workers):
        rows, held, sizes = [], [], []
        for m in range(count):
            for x, durations in times.items():
                start[x, w, m] = model.new_int_var(0, horizon, "")
                rows.append(model.new_fixed_size_interval_var(start[x, w, m], durations, ""))
                if m:  # microbatches are alike
                    model.add(start[x, w, m] >= start[x, w, m - 1] + durations)
            back = start["I", w, m] + times["I"]
            done = start["W", w, m] + times["W"]
            model.add(start["I", w, m] >= start["F", w, m] + times["F"])
            model.add(start["W", w, m] >= back)
            model.add(end >= done)
            for first, last, size in ((start["F", w, m], back, 1000), (back, done, share)):
                length = model.new_int_var(0, horizon, "")
                held.append(model.new_interval_var(first, length, last, ""))
                sizes.append(size)
            if w:
                model.add(start["F", w, m] >= start["F", w - 1, m] + times["F"] + message)
                model.add(start["I", w - 1, m] >= start["I", w, m] + times["I"] + message)
        model.add_no_overlap(rows)
        model.add_cumulative(held, sizes, round(1000 * setting.activations))
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    return solver.best_objective_bound / 1e6, solver.status_name(status)


def test_the_strongest_instance():
    """Interleaved PipeOffload takes 458.2 ms, one stage per worker 532.2 at the least."""
    tables = METHODS["pipe-offload, interleaved"](STRONGEST)
    runs = [replayed(table, STRONGEST.pipe.times, STRONGEST.pipe.message) for table in tables]
    fitting = min(makespan for makespan, largest in runs if largest <= STRONGEST.activations + 1e-9)
    bound, status = least(STRONGEST)
    assert round(1e3 * fitting, 1) == 458.2
    assert (round(1e3 * bound, 1), status) == (532.2, "OPTIMAL")
    closed = offload.rounds_bound(STRONGEST)
    assert fitting < closed <= bound
    trip = 4 * (18.522 + 18.086) + 6 * 0.601
    assert closed == pytest.approx((3 * trip + 18.522 + 9.337) / 1e3)


@pytest.mark.parametrize(("count", "limit"), [(2, 0.5), (4, 0.75), (3, 2.0)])
def test_no_schedule_is_below_the_closed_bounds(count, limit):
    setting = Setting(Pipe("6.2B", 4, 24), count, limit, NO_LINK)
    bound, status = least(setting)
    assert status == "OPTIMAL"
    below = max(offload.fill_bound(setting), offload.rounds_bound(setting))
    assert 0.8 * bound < below <= bound + 1e-6


def test_what_is_read_off_the_grid():
    grid = made.grid()
    result = offload.sweep(grid)
    at = {"microbatches": 8, "limit": 0.5, "host_link": 1.0, "sharing": "own"}
    problem = result.sel(at).isel(model=0)
    ada = grid.makespan.sel({**at, "schedule": "ada-offload"}).isel(model=0)
    assert float(problem.ada) == float(ada)
    assert float(problem.interleaved / problem.best) == pytest.approx(1.9 / 1.18)
    pipe = made.PIPES[0]
    assert float(problem.fill) == offload.fill_bound(Setting(pipe, 8, 0.5, 1.0))
    assert float(result.rounds.sel(at | {"host_link": np.inf}).isel(model=0)) > 0
    assert result.best.notnull().equals(grid.solved)


# claims: one world in which all hold, and one change for each
@pytest.fixture(scope="module")
def link_data():
    counted = {"COUNTED_WORKERS": range(2, 5), "COUNTED_MICROBATCHES": range(1, 6)}
    times = {"BACKWARDS": (0.5, 2.0), "MESSAGES": np.array([1e-2, 1.0, 10.0])}
    return swept(links, WORKERS=(3, 8), ROUNDS=(1, 2), **counted, **times)


@pytest.fixture(scope="module")
def queue_data():
    cases = {name: queues.CASES[name] for name in ("1f1b", "chimera-asymmetric")}
    sizes = dict.fromkeys(("SIZES", "REPAIRED_SIZES"), ((4, 8),))
    return swept(queues, CASES=cases, SHARES=np.array([1.0, 2.0]), **sizes)


@pytest.fixture
def world(link_data, regime_data, queue_data):
    """Everything as found; of offloading, made-up values in times of interleaved PipeOffload."""
    times = {"interleaved": 1, "best": 1.2, "proven": 1.1, "ada": 1.2, "fill": 0.9, "rounds": 1.05}
    grid = offload.sweep(made.grid())
    made_up = {name: xr.full_like(grid[name], value) for name, value in times.items()}
    made_up["proven"].loc[{"limit": 2.0}] = times["ada"]  # of ample memory all is known
    result = {"links": link_data, "regimes": regime_data, "queues": queue_data}
    data = {f"finding_{name}": dataset.copy(deep=True) for name, dataset in result.items()}
    return data | {"finding_offload": grid.assign(made_up)}


MODULES = (links, offload, queues, regimes)
MINE = [claim for module in MODULES for claim in module.CLAIMS if claim.kind in COUNTED]


def spoil(data, change):
    if callable(change):
        change(data)
        return
    store, name, value, at = change
    data[f"finding_{store}"][name].loc[at] = value


COUNTED_AT = {"schedule": "1f1b", "counted_workers": 3, "counted_microbatches": 4}
MUTATIONS = {  # data, variable, value and where, one for each claim
    "a1": scaled("finding_links", "messages", more=1, **COUNTED_AT, counted_link="delay"),
    "a2": scaled("finding_links", "messages", more=1, **COUNTED_AT, counted_link="blocking"),
    "a3": ("links", "ratio", 0.99, {"link": "delay", "rounds": 2, "backward": 2, "message": 0.01}),
    "a4": ("links", "verdict", links.DEPENDS, {"link": links.PER_WORKER, "workers": 3}),
    "a5": ("links", "where_1f1b", "c >= F", {"link": "queued", "workers": 8, "rounds": 1}),
    "a6": ("links", "verdict", links.ONE_NEVER, {"link": links.PER_WORKER, "domain": links.ANY}),
    "a7": ("links", "ratio", 1.02, {"link": "blocking", "workers": 8, "rounds": 2, "message": 1.0}),
    "b1": ("offload", "proven", 0.99, {}),
    "b2": ("offload", "best", 1.0, {"limit": 0.5, "host_link": np.inf}),
    "d1": ("regimes", "border", 0.1, {"waves": 2, "workers_of_border": 8, "link": "delay"}),
    "d2": ("regimes", "ratio", 1.01, {"pair": "chimera", "link": "blocking", "backward": 2.0}),
    "d3": ("regimes", "message_of", 0.02, {"pair": "hanayo", "system": "h100"}),
    "d4": ("regimes", "border", 0.2, {"waves": 4, "link": "blocking", "workers_of_border": 4}),
    "d5": ("regimes", "published_where", "everywhere", {"even_workers": 6, "rounds": 2}),
    "f1": ("queues", "makespan", 60.0, {"share": 2.0, "run": "repaired"}),
    "f2": ("queues", "loss", 0.0, {"schedule": "1f1b"}),
    "g1": ("offload", "ada", 1.3, {"limit": 0.5}),
    "g2": ("offload", "proven", 1.1, {"limit": 2.0}),
}


def test_every_finding_holds_and_each_can_fail(world):
    assert set(MUTATIONS) == {claim.number for claim in MINE}
    assert {n for n, holds in verdicts(MINE, world).items() if not holds} == set()
    for number, change in MUTATIONS.items():
        data = {name: dataset.copy(deep=True) for name, dataset in world.items()}
        spoil(data, change)
        assert not verdicts(MINE, data)[number], number


def test_the_theorems_are_no_claims(world):
    rows = judge([claim for claim in queues.CLAIMS if claim.kind not in COUNTED], world)
    assert [row["verdict"] for row in rows] == ["follows by construction"] * 3
    world["finding_queues"].repaired[:] = 0.01
    with pytest.raises(ValueError, match="claim f5 is 'by construction'"):
        judge(queues.CLAIMS, world)


def test_all_modules_are_judged():
    files = {path.stem for path in Path("sweeps/findings").glob("*.py")} - {"__init__", "claims"}
    assert {store.removeprefix("finding_") for store in claims.STORES} == files
    assert len({claim.number for claim in claims.CLAIMS}) == len(claims.CLAIMS)


def test_every_figure_can_be_printed(world):
    scripts = (links_figure, offload_figure, queues_figure, regimes_figure)
    stores = ("finding_links", "finding_offload", "finding_queues", "finding_regimes")
    pairs = zip(scripts, stores, strict=True)
    figures = {k: v for script, store in pairs for k, v in script.draw(world[store]).items()}
    assert {name: faults(figure) for name, figure in figures.items()} == {n: [] for n in stores}
    shown = {claim.figure.removesuffix(".pdf") for claim in MINE} - {""}
    assert shown == set(figures)


# findings about training: closed forms of delays, ends of single runs
def test_counted_delays_are_those_of_the_closed_forms():
    rows = judge(delays.CLAIMS, {"finding_delays": delays.sweep(stages=(2, 5, 8))})
    assert {row["verdict"] for row in rows if row["kind"] in COUNTED} == {"holds"}


@pytest.mark.parametrize("name", gradient_noise.SCHEMES)
def test_ends_are_those_of_the_best_single_run(name):
    tried, until = gradient_noise.SCHEMES[name], 80.0
    problem = Problem("logistic regression", 8, num_batches=5, batch_size=2)
    setting = TrainingSetting(4, problem, until, (), seeds=(0,))
    result = gradient_noise._ends(tried, setting, [0.0]).sel(noise=0.0, read="last model")
    objective = jax.tree.map(lambda leaf: leaf[0], make_objectives(setting))
    table = build_until(tried.method, 4, until, **tried.options)
    how = {"seed": 0, "times": [0.0, until], "batches": "cyclic"}
    sizes = 2.0**tried.exponents
    runs = [replay(objective, table, step_size=size, **how) for size in sizes]
    ends = [float(run.value[-1]) for run in runs]
    assert float(result.end.item()) == pytest.approx(min(ends), rel=1e-9)
    assert float(result.step_size) == 2.0 ** tried.exponents[np.argmin(ends)]


def longer(case, name):
    return scaled("finding_delays", name, more=1, case=case, stages=9)


def crossed(scheme, **where):
    return scaled("finding_gradient_noise", "end", 20, scheme=scheme, seed=0, **where)


def flat(data):
    end = data["finding_gradient_noise"]["end"]
    at = {"scheme": gradient_noise.LOCAL_SGD, "noise": 0.0}
    end.loc[{**at, "stages": 64}] = end.sel({**at, "stages": 32}).values


TRAINING_MUTATIONS = {
    "e1": longer("first stage limited", "max_delay"),
    "e2": longer("free messages", "mean_delay"),
    "e3": longer("message 3/4", "max_delay"),
    "e4": longer("message 4", "mean_delay"),
    "c1": crossed(gradient_noise.PIPEDREAM, noise=0.0, stages=16),
    "c2": crossed(gradient_noise.LOCAL_SGD, noise=0.2, stages=32),
    "c3": flat,
}
TRAINING_CLAIMS = (*delays.CLAIMS, *gradient_noise.CLAIMS)


def found_so():
    """Data in which every claim holds."""
    stages = np.arange(2, 10)
    largest, mean = delays.largest(stages), delays.mean(stages)
    free = dict.fromkeys((*delays.FREE, *delays.ELSEWHERE), (largest, mean))
    short = dict.fromkeys(delays.SHORT, (delays.largest(stages, ties=False), mean))
    late = (delays.largest(stages, ties=False), delays.mean(stages, late=True))
    counts = free | short | dict.fromkeys(delays.LONG, late)
    axes = ("case", "stages")
    largest, mean = (np.stack(values) for values in zip(*counts.values(), strict=True))
    delay_data = {"max_delay": (axes, largest), "mean_delay": (axes, mean)}
    counts = xr.Dataset(delay_data, coords={"case": list(counts), "stages": stages})
    depth, noise = np.array([4, 8, 16, 32, 64]), np.array(gradient_noise.NOISES)
    pipedream = np.tile(1e-3 + 0.03 * noise, (len(depth), 1))
    falls = 1.5e-3 + 1e-5 * depth[:, None] + 1e-4 * noise * (64 - depth[:, None])
    ends = np.stack([pipedream, falls])[None, ..., None] * np.ones((2, 1, 1, 1, 3))
    values = {"end": (("read", "scheme", "stages", "noise", "seed"), ends)}
    values["crossing"] = (("read", "stages"), np.full((2, len(depth)), 0.05))
    coords = {"read": list(gradient_noise.READS), "scheme": list(gradient_noise.SCHEMES)}
    coords |= {"stages": depth, "noise": noise, "seed": [0, 1, 2]}
    trained = xr.Dataset(values, coords, {"slots": 3180.0})
    return {"finding_delays": counts, "finding_gradient_noise": trained}


def test_all_claims_hold_where_they_were_found():
    rows = judge(TRAINING_CLAIMS, found_so())
    assert {row["verdict"] for row in rows if row["kind"] in COUNTED} == {"holds"}


def test_a_claim_fails_when_its_data_contradict_it():
    check_contradictions(TRAINING_CLAIMS, TRAINING_MUTATIONS, found_so)


def test_noise_at_which_both_end_alike():
    lead, noises = np.log([1.5, 1.2, 0.8]), np.array([0.0, 0.1, 0.3])
    share = np.log(1.2) / np.log(1.2 / 0.8)
    assert gradient_noise._crossing(lead, noises) == pytest.approx(0.1 + 0.2 * share)
    assert np.isnan(gradient_noise._crossing(lead[:2], noises[:2]))


def test_figure_of_gradient_noise():
    data = found_so()["finding_gradient_noise"]
    figure = figure_of_noise.draw(data)["finding_gradient_noise"]
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    median = data.end.sel(read="last model", stages=8, scheme="pipedream").median("seed")
    np.testing.assert_array_equal(lines["PipeDream"].get_ydata(), median)
    assert lines["both end alike"].get_xdata() == [0.05, 0.05]
    assert not faults(figure)
