"""Training along a timeline against an event loop that stashes weights in dictionaries."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from daily import daily, read_cases, with_cases

import pipejax as pj
from pipejax.training import (
    batch_order,
    nesterov_quadratic,
    random_logistic,
    random_quadratic,
    replay,
    spectral_quadratic,
    sweep_replay,
)
from pipejax.training.training_run import gradient_noise
from sweeps.pipedream.language_model import language_model

UNIT = pj.Costs(forward=1.0, backward=1.0)


def build(name="pipedream", p=4, m=24, **options):
    return pj.schedules.build(name, num_workers=p, num_microbatches=m, **options)


class Linear:
    """Stages of a linear model in NumPy: forward adds a part of the sum, backward returns it."""

    def __init__(self, objective, slope):
        self.objective, self.slope = objective, slope

    def forward(self, stage, w, activation, batch):
        x = np.asarray(self.objective.features[batch])[:, stage]
        return x @ w + (0.0 if activation is None else activation), x

    def backward(self, stage, x, options):
        return x.T @ options, options

    def last(self, activation, batch):
        targets = np.asarray(self.objective.targets[batch])
        return self.slope(activation, targets) / len(targets)


class ByJax:
    """Stages of any objective: a forward, and a vjp of one stage with the weights it has kept."""

    def __init__(self, objective):
        self.objective = objective
        stages = range(objective.num_stages)
        self.forwards = [jax.jit(functools.partial(objective.stage, s)) for s in stages]
        self.pulls = [jax.jit(functools.partial(self.pull, s)) for s in range(objective.num_stages)]

    def pull(self, stage, w, activation, batch, options):
        run = functools.partial(self.objective.stage, stage)
        if stage == 0:  # characters have no gradient
            return jax.vjp(lambda w: run(w, activation, batch), w)[1](options)[0], options
        return jax.vjp(lambda w, x: run(w, x, batch), w, activation)[1](options)

    def forward(self, stage, w, activation, batch):
        batch, w = self.objective.batch(batch), jnp.asarray(w)
        activation = self.objective.input(batch) if activation is None else activation
        return self.forwards[stage](w, activation, batch), (w, activation, batch)

    def backward(self, stage, stash, options):
        return self.pulls[stage](*stash, options)

    def last(self, activation, batch):
        return jax.grad(self.objective.loss)(activation, self.objective.batch(batch))


def stash_and_update(objective, stages, table, step_size, seed, costs=UNIT):
    """Run the ops one by one in order of time. Yields (time, model) after every update."""
    run = pj.evaluate(table, costs)
    ops = sorted(
        (run.start[w, t], run.finish[w, t], w, t, cell[0])
        for w, row in enumerate(table.rows())
        for t, cell in enumerate(row)
        if cell
    )
    order = batch_order(seed, table.num_microbatches, objective.num_batches).tolist()
    rule, last = table.weights, table.num_stages - 1
    start = np.asarray(objective.init(jax.random.key(np.uint32(seed), impl="threefry2x32")))
    versions = {(r, s): [start[s]] for r in range(rule.runs) for s in range(last + 1)}
    stash, inputs, gradients, pending, built = {}, {}, {}, {}, {}
    groups = {}  # microbatch of a stage: how many updates of its run precede the one that takes it
    for stage in range(last + 1):
        count = {}
        for cell in list(table.rows())[stage]:
            for op in cell:
                r = op.microbatch % rule.runs
                if op.phase is pj.Phase.B:
                    groups[stage, op.microbatch] = count.get(r, 0)
                elif op.phase is pj.Phase.U:
                    count[r] = count.get(r, 0) + 1
    for _, finish, _, _, (phase, s, m) in ops:
        version = versions[m % rule.runs, s]
        if phase is pj.Phase.F:
            v = len(version) - 1 if rule.lag is None else max(groups[s, m] - rule.lag, 0)
            out, stash[s, m] = stages.forward(s, version[v], inputs.pop((s, m), None), order[m])
            if s == last:
                gradients[s, m] = stages.last(out, order[m])
            inputs[s + 1, m] = out
        elif phase is pj.Phase.B:
            result, back = stages.backward(s, stash.pop((s, m)), gradients.pop((s, m)))
            gradients[s - 1, m] = back
            pending.setdefault((m % rule.runs, s), []).append(np.asarray(result))
        else:
            collected = pending.pop((m % rule.runs, s))
            version.append(version[-1] - step_size * np.mean(collected, axis=0))
            built[s] = built.get(s, 0) + 1
            if rule.runs > 1 and built[s] % rule.round_size == 0:
                mean = np.mean([versions[r, s][-1] for r in range(rule.runs)], axis=0)
                for r in range(rule.runs):
                    versions[r, s][-1] = mean
            yield (
                finish,
                np.array(
                    [
                        np.mean([versions[r, s][-1] for r in range(rule.runs)], axis=0)
                        for s in range(last + 1)
                    ]
                ),
            )


LEAST_SQUARES, SIGMOID = (lambda z, y: z - y), (lambda z, y: -y / (1 + np.exp(y * z)))
OBJECTIVES = {
    "random": lambda: random_quadratic(4, dimension=8, seed=1),
    "spectrum": lambda: spectral_quadratic(4, spectrum=[0.1, 0.2, 0.5, 0.7, 1, 1, 1.5, 2], seed=1),
    "nesterov": lambda: nesterov_quadratic(4, dimension=8, condition_number=50.0, seed=1),
    "logistic": lambda: random_logistic(4, dimension=8, seed=1),
    "language": lambda: language_model(
        4, width=4, heads=2, context=3, text="to be or not to be, that is " * 9, seed=1
    ),
}
TABLES = {
    "pipedream": ("pipedream", {}),
    "2bw": ("pipedream-2bw", {"accumulation": 5}),
    "local": ("local-sgd", {"local_steps": 2}),
    "two runs": ("local-sgd", {"runs": 2, "local_steps": 3}),
}


# every objective with stale weights, one with all tables
CASES = [
    *((name, "pipedream") for name in OBJECTIVES if name != "language"),
    pytest.param("language", "pipedream", marks=pytest.mark.slow),
    *(("random", case) for case in TABLES if case != "pipedream"),
    ("nesterov", "local"),
    ("logistic", "local"),
]


def get_stages(name, objective):
    if name == "language":
        return ByJax(objective)
    if name == "logistic":
        return Logistic(objective)
    return Linear(objective, LEAST_SQUARES)


class Logistic(Linear):
    """The regularisation belongs to each stage: it is not a function of the sum."""

    def __init__(self, objective):
        super().__init__(objective, SIGMOID)

    def forward(self, stage, w, activation, batch):
        out, x = super().forward(stage, w, activation, batch)
        return out, (x, w)

    def backward(self, stage, stash, options):
        x, w = stash
        return x.T @ options + self.objective.l2 * w, options


@pytest.mark.parametrize(("name", "case"), daily(CASES))
def test_equals_an_event_loop_that_stashes_weights(name, case):
    trained = OBJECTIVES[name]()
    table = build(TABLES[case][0], **TABLES[case][1])
    step_size = 0.02 if name == "nesterov" else 0.1
    *_, (end, blocks) = stash_and_update(trained, get_stages(name, trained), table, step_size, 3)
    run = replay(trained, table, step_size=step_size, seed=3, times=4)
    assert run.time[-1] == end
    np.testing.assert_allclose(run.blocks, blocks, rtol=1e-10, atol=1e-10)
    gap = trained.gap(jnp.asarray(blocks))
    np.testing.assert_allclose(run.gap[-1], gap, rtol=1e-10, atol=1e-10)


SLOW = pj.Costs(forward=np.array([1.0, 3.0, 0.5, 2.0]), backward=2.0, transmit=1.7)


@with_cases("case costs", ("pipedream", UNIT), *((case, SLOW) for case in TABLES))
def test_samples_see_the_model_of_their_time(case, costs):
    table = build(TABLES[case][0], **TABLES[case][1])
    trained = OBJECTIVES["random"]()
    history = list(stash_and_update(trained, Linear(trained, LEAST_SQUARES), table, 0.1, 0, costs))
    times = np.linspace(0, history[-1][0], 12)
    run = replay(trained, table, step_size=0.1, seed=0, costs=costs, times=times)
    for time, gap, update in zip(times, run.gap, run.update, strict=True):
        done = [blocks for end, blocks in history if end <= time + 1e-9]
        # events are sorted by their start: the model of a time is that of all updates until then
        assert update == len(done)
        blocks = latest(history, time, trained)
        np.testing.assert_allclose(gap, trained.gap(jnp.asarray(blocks)), rtol=1e-10)


def latest(history, time, trained):
    before = [blocks for end, blocks in sorted(history, key=lambda x: x[0]) if end <= time + 1e-9]
    return before[-1] if before else np.zeros((trained.num_stages, 2))


@with_cases("name p options", *read_cases("test_without_staleness_it_is_sgd"))
def test_without_staleness_it_is_sgd(name, p, options):
    trained = random_quadratic(p, dimension=6, num_batches=20, seed=2)
    for batches, noise in (("epochs", 0.0), ("cyclic", 0.5)):
        w, losses = np.zeros(6), []
        for number, batch in enumerate(batch_order(5, 30, 20, batches)):
            x = np.asarray(trained.features[batch]).reshape(10, 6)
            residual = x @ w - np.asarray(trained.targets[batch])
            losses.append(residual @ residual / 20)
            samples = np.ravel(gradient_noise(5, number, (p, 6 // p), float))
            w -= 0.1 * (x.T @ residual / 10 + noise * samples)
        table, arguments = build(name, p, 30, **options), {"batches": batches, "noise": noise}
        run = replay(trained, table, step_size=0.1, seed=5, times=3, **arguments)
        near = 1e-6 if noise else 1e-10  # noise is drawn in single precision
        np.testing.assert_allclose(np.ravel(run.blocks), w, rtol=near)
        expected = [np.nan, *np.reshape(losses, (3, 10)).mean(axis=1)]
        np.testing.assert_allclose(run.loss, expected, rtol=near)


def test_a_sample_without_a_gradient_has_no_loss():
    table, trained = build(m=4), OBJECTIVES["random"]()
    run = replay(trained, table, step_size=0.1, seed=0, times=np.arange(15.0), batches="cyclic")
    # first updates end where B does, on the last stage: at 5, 7, 9 and 11
    assert np.flatnonzero(np.isfinite(run.loss)).tolist() == [5, 7, 9, 11]
    np.testing.assert_allclose(run.loss[5], trained.batch_loss(jnp.zeros((4, 2)), trained.batch(0)))


def test_values_are_gaps_above_the_minimum():
    trained = OBJECTIVES["logistic"]()
    run = replay(trained, build(), step_size=0.5, seed=0, times=2)
    np.testing.assert_allclose(run.value[0], np.log(2))
    np.testing.assert_allclose(run.value[-1], trained.value(run.blocks))


@pytest.mark.slow
@with_cases(
    "name options step_size printed",
    ("pipedream", {"admission": "first-stage"}, 1 / 256, 2.731247),
    ("local-sgd", {"local_steps": 2}, 1 / 32, 19.51762),
    ("local-sgd", {"local_steps": 5}, 1 / 32, 22.50372),
    ("local-sgd", {"local_steps": 30}, 1 / 256, 268.6527),
)
def test_nesterovs_quadratic_ends_where_the_published_log_says(name, options, step_size, printed):
    # notebooks/minibatch_sgd.ipynb of github.com/vectozavr/randomized-pipedream (arXiv:2606.03498)
    shape = {"dimension": 512, "condition_number": 401.0, "strong_convexity": 0.01, "seed": 0}
    trained = nesterov_quadratic(16, **shape, minimiser="normal", num_batches=120, batch_size=5)
    table, times = build(name, 16, 600, **options), np.array([0.0, 1229.0])
    run = replay(trained, table, step_size=step_size, seed=0, times=times, batches="cyclic")
    assert run.gap[0] == pytest.approx(471.1622, rel=1e-6)
    assert run.gap[-1] == pytest.approx(printed, rel=1e-6)


def test_every_epoch_takes_every_batch_once():
    order = batch_order(7, 25, 10)
    assert [sorted(order[k : k + 10].tolist()) for k in (0, 10)] == [list(range(10))] * 2
    assert len(order) == 25
    assert not np.array_equal(order[:10], order[10:20])
    assert np.array_equal(order, batch_order(7, 25, 10))
    assert batch_order(7, 25, 10, "cyclic").tolist() == [*range(10), *range(10), *range(5)]


def test_a_sweep_is_its_single_runs():
    objectives = [random_quadratic(4, dimension=8, seed=seed) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *objectives)
    table = build(m=40)
    runs = sweep_replay(stacked, table, step_sizes=[0.1, 50.0], seeds=[4, 5], times=5)
    assert runs.diverged.tolist() == [[False, False], [True, True]]
    assert runs.reported.mask[1].all()
    assert not runs.reported.mask[0].any()
    for k, (trained, seed) in enumerate(zip(objectives, (4, 5), strict=True)):
        single = replay(trained, table, step_size=0.1, seed=seed, times=5)
        np.testing.assert_allclose(runs.gap[0, k], single.gap, rtol=1e-12)
        np.testing.assert_allclose(runs.blocks[0, k], single.blocks, rtol=1e-12)
        assert single.time.tolist() == runs.time.tolist()


def test_machines_change_times_and_not_the_gradients():
    trained, table = OBJECTIVES["random"](), build(m=40)
    slow = dataclasses.replace(UNIT, transmit=5.0)
    options = {"step_size": 0.1, "seed": 0, "times": 3}
    ends = [replay(trained, table, costs=costs, **options) for costs in (UNIT, slow)]
    assert ends[1].time[-1] > ends[0].time[-1]
    np.testing.assert_allclose(ends[0].blocks, ends[1].blocks, rtol=1e-12)
