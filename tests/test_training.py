"""Randomized PipeDream and its bound: against plain NumPy loops, grids and hand calculations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from daily import read_cases, with_cases

import pipejax.training as pt
from pipejax.training.objective import gram
from pipejax.training.rpd import _longest_rest
from pipejax.training.training_run import drawn_stage, gradient_noise
from sweeps.pipedream.language_model import language_model

S = 3
SIZES = {"dimension": 6, "num_batches": 5, "batch_size": 4}
OBJECTIVES = {
    "random": lambda seed=0: pt.random_quadratic(S, **SIZES, seed=seed),
    "spectral": lambda: pt.spectral_quadratic(
        S, spectrum=[0.1, 0.5, 1, 1, 2, 4], num_batches=5, batch_size=4, seed=0
    ),
    "nesterov": lambda: pt.nesterov_quadratic(S, **SIZES, condition_number=50.0, seed=0),
    "logistic": lambda: pt.random_logistic(S, **SIZES, l2=1e-2, seed=0),
    "language": lambda: language_model(
        S + 1, width=4, context=6, num_batches=3, batch_size=2, seed=0
    ),
}


def rows(objective):
    """Examples and targets as plain arrays."""
    return np.asarray(objective.features).reshape(-1, 6), np.asarray(objective.targets).ravel()


UPDATES, EVERY = 60, 20


@pytest.fixture(scope="module")
def quadratic():
    return OBJECTIVES["random"]()


# Randomized PipeDream


def plain(objective, step_size, seed, delays, *, cyclic=False, noise=0.0):
    x, y = np.asarray(objective.features).reshape(5, 4, 6), np.asarray(objective.targets)
    draw = jax.jit(pt.draw, static_argnames=("num_stages", "num_batches"))
    models, largest, norms, losses = [np.zeros((S, 2))], 0.0, [], []
    everything, all_y = rows(objective)
    for k in range(UPDATES):
        choice = draw(seed, k, num_stages=S, num_batches=5, delays=delays)
        s, batch = int(choice.stage), k % 5 if cyclic else int(choice.batch)
        assert 0 <= int(choice.read.min()) <= int(choice.read.max()) <= k
        z = np.stack([models[j][i] for i, j in enumerate(np.asarray(choice.read))])
        residual = x[batch] @ z.ravel() - y[batch]
        losses.append(residual @ residual / 8)
        gradient = (x[batch].T @ residual / 4).reshape(S, 2)[s]
        gradient = gradient + noise * np.asarray(gradient_noise(seed, k, (2,), float))
        full = everything.T @ (everything @ models[-1].ravel() - all_y) / len(all_y)
        norms.append(full @ full)
        largest = max(largest, gradient @ gradient)
        new = models[-1].copy()
        new[s] -= step_size * gradient
        models.append(new)
    gaps = [((everything @ w.ravel() - all_y) ** 2).mean() / 2 for w in models[::EVERY]]
    loss = np.append(np.nan, np.reshape(losses, (-1, EVERY)).mean(axis=1))
    return gaps, models[-1], largest, np.mean(norms), loss


def table_of_delays(seed=0):
    return np.random.default_rng(seed).integers(0, 9, (S, 4, S)).astype(np.int32)


@with_cases(
    "arguments delays",
    ({}, 0),
    ({"delta": 7}, 7),
    ({"delays": table_of_delays()}, table_of_delays()),
    ({"delays": table_of_delays()[1]}, np.stack([table_of_delays()[1]] * S)),
    ({"delta": 7, "batches": "cyclic", "noise": 0.3}, 7),
    ids=["0", "7", "by stage", "for all", "noise"],
)
def test_against_plain_numpy(quadratic, arguments, delays):
    run = pt.randomized_pipedream(
        quadratic, step_size=0.1, seed=3, updates=UPDATES, interval=EVERY, norms=True, **arguments
    )
    law = {"cyclic": "batches" in arguments, "noise": arguments.get("noise", 0.0)}
    gaps, blocks, largest, norms, loss = plain(quadratic, 0.1, 3, delays, **law)
    assert run.update.tolist() == [0, 20, 40, 60]
    near = 1e-6 if "noise" in arguments else 1e-10  # noise is drawn in single precision
    np.testing.assert_allclose(run.gap, gaps, rtol=near)
    np.testing.assert_allclose(run.blocks, blocks, rtol=near)
    np.testing.assert_allclose(run.largest_squared_gradient, largest, rtol=near)
    np.testing.assert_allclose(run.mean_squared_gradient, norms, rtol=near)
    np.testing.assert_allclose(run.loss, loss, rtol=near)
    assert not run.diverged
    assert not run.reported.mask.any()


def test_draws_are_uniform_and_of_their_own():
    draw = jax.vmap(lambda k: pt.draw(0, k, num_stages=4, num_batches=5, delays=7))
    many = jax.jit(draw)(jnp.arange(8000))
    age = np.arange(8000)[:, None] - np.asarray(many.read)
    assert age[:8].max(axis=1).tolist() <= list(range(8))
    for values, count in [(many.stage, 4), (many.batch, 5), *((age[7:, s], 8) for s in range(4))]:
        expected = len(values) / count
        result = np.bincount(np.asarray(values), minlength=count)
        assert len(result) == count
        # chi-squared: 8 sigma of its own distribution at most
        assert ((result - expected) ** 2 / expected).sum() < count + 8 * np.sqrt(2 * count)
    columns = np.stack([np.asarray(many.stage), np.asarray(many.batch), *age.T])[:, 7:]
    assert np.abs(np.corrcoef(columns) - np.eye(6)).max() < 0.05


def test_noise_is_normal_and_of_its_own():
    noise_at = jax.jit(jax.vmap(lambda k: gradient_noise(0, k, (4,), float)))
    noise = np.asarray(noise_at(jnp.arange(8000)))
    assert np.abs(noise.mean(axis=0)).max() < 5 / np.sqrt(8000)
    assert np.abs(np.corrcoef(noise.T) - np.eye(4)).max() < 0.05
    share = [(np.abs(noise) < border).mean() for border in (0.6745, 1.9600)]
    np.testing.assert_allclose(share, [0.5, 0.95], atol=0.01)


def test_a_stage_alone_is_the_stage_of_the_draw():
    options = {"num_stages": 4, "num_batches": 5, "delays": 7}
    whole = jax.jit(jax.vmap(lambda k: pt.draw(3, k, **options).stage))(jnp.arange(60))
    assert jax.vmap(lambda k: drawn_stage(3, k, 4))(jnp.arange(60)).tolist() == whole.tolist()
    rest = _longest_rest(np.array([3], np.uint32), 60, 4)
    at = [[-1, *np.flatnonzero(whole == stage), 60] for stage in range(4)]
    starts = {(s, 0): s - 4 for s in range(4)}  # the start of stage s is update s - 4
    gaps = [
        np.diff([starts.get((s, k), n) for k, n in enumerate(updates)])
        for s, updates in enumerate(at)
    ]
    assert rest == max(map(max, gaps))


def test_sweeps_are_single_runs():
    stacked = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *(OBJECTIVES["random"](seed) for seed in range(2))
    )
    options = {"updates": UPDATES, "interval": EVERY, "norms": True}
    grid = {"step_sizes": [0.05, 0.1], "seeds": [8, 9], **options}
    runs = pt.sweep_randomized_pipedream(stacked, delta=[0, 7], **grid)
    assert runs.gap.shape == (2, 2, 2, 4)
    entry = pt.sweep_randomized_pipedream(stacked, delta=7, **grid)
    fields = ("gap", "blocks", "largest_squared_gradient", "mean_squared_gradient")
    for step, step_size in enumerate([0.05, 0.1]):
        for place, seed in enumerate([8, 9]):
            single = pt.randomized_pipedream(
                OBJECTIVES["random"](place), step_size=step_size, seed=seed, delta=7, **options
            )
            for name in fields:
                expected = getattr(single, name)
                for result in (getattr(runs, name)[1], getattr(entry, name)):
                    np.testing.assert_allclose(result[step, place], expected, rtol=1e-10)
    gaps, blocks, *_ = plain(OBJECTIVES["random"](1), 0.05, 9, 0)
    np.testing.assert_allclose(runs.gap[0, 0, 1], gaps, rtol=1e-10)
    np.testing.assert_allclose(runs.blocks[0, 0, 1], blocks, rtol=1e-10)


def test_a_gap_of_1000_times_the_start_is_divergence(quadratic):
    runs = pt.sweep_randomized_pipedream(
        quadratic, step_sizes=[1.0, 1.4, 1.6, 1.8, 2.0, 2.4], seeds=[0, 1], updates=60, interval=20
    )
    growth = np.asarray(runs.gap.max(axis=-1) / runs.gap[..., 0])
    assert np.isfinite(growth).all()
    assert runs.diverged.tolist() == (growth > 1000).tolist()
    assert growth[growth <= 1000].max() > 10  # both sides of the border are there
    assert growth[growth > 1000].min() < 1e5


# the bound


def get_bound(objective, run, step_size, updates, delta):
    largest = float(np.max(run.largest_squared_gradient)) ** 0.5
    steps = objective.num_stages, updates, step_size, pt.smoothness(objective)
    return pt.convergence_bound(*steps, largest, delta, float(np.max(run.gap[..., 0])))


@pytest.mark.parametrize("name", ["random", "logistic"])
def test_the_bound_holds(name):
    objective, sizes = OBJECTIVES[name](), [0.02, 0.1]
    options = {"step_sizes": sizes, "updates": UPDATES, "interval": EVERY, "delta": [0, 7, 20]}
    runs = pt.sweep_randomized_pipedream(objective, seeds=range(4), **options, norms=True)
    for d, delta in enumerate([0, 7, 20]):
        for step, step_size in enumerate(sizes):
            single = jax.tree.map(lambda leaf, at=(d, step): leaf[at], runs._replace(update=None))
            measured = float(np.mean(single.mean_squared_gradient))
            assert 0 < measured <= get_bound(objective, single, step_size, UPDATES, delta).total


@pytest.mark.parametrize(
    ("step_size", "delta", "arguments", "seeds"),
    [(0.0245, 400, {"delta": 400}, 1), (0.0154, 200, {"delays": np.full((1, 2), 200)}, 3)],
    ids=["up to", "always"],
)
def test_without_its_delay_term_the_bound_is_wrong(step_size, delta, arguments, seeds):
    # one curvature, one batch, and a step size just where late blocks stop the descent: the model
    # swings about the minimum and does not come closer
    flat = pt.spectral_quadratic(2, spectrum=[1.0] * 2, num_batches=1, batch_size=2, seed=0)
    options = {
        "step_sizes": [step_size],
        "seeds": range(seeds),
        "updates": 40_000,
        "interval": 8000,
    }
    runs = pt.sweep_randomized_pipedream(flat, **options, norms=True, **arguments)
    assert not runs.diverged.any()
    bound = get_bound(flat, runs, step_size, 40_000, delta)
    measured = float(runs.mean_squared_gradient.mean())
    assert 2 * (bound.start + bound.noise) < measured <= bound.total


def test_the_best_step_size_is_the_best_of_a_grid():
    options = {"updates": 1000, "smoothness": 2.0, "gradient_bound": 1.5, "gap": 3.0}
    options |= {"stages": np.array([2, 8])[:, None], "delta": np.array([0.0, 1.0, 60.0, 1e6])}
    best = pt.best_step_size(**options)
    assert best.shape == (2, 4)
    least = pt.convergence_bound(step_size=best, **options).total
    around = best * np.linspace(0.9, 1.1, 201)[:, None, None]
    grid = pt.convergence_bound(step_size=around, **options).total
    np.testing.assert_allclose(grid.min(axis=0), least, rtol=1e-12)
    assert (grid.argmin(axis=0) == 100).all()


def test_terms_by_hand_and_the_law():
    bound = pt.convergence_bound(4, 100, 0.5, 2.0, 3.0, 14, 5.0)
    assert [float(term) for term in bound] == [0.8, 36.0, 1764.0, 1800.8]
    delays = {2: 3, 3: 7, 4: 14, 5: 22, 6: 33, 7: 45, 8: 60, 16: 248, 32: 1008}
    assert {stages: pt.pipedream_delay(stages) for stages in delays} == delays
    gamma = np.sqrt(2 * 5.0 / (1e4 * 2.0)) / 3.0
    term = pt.convergence_bound(64, 1e4, gamma, 2.0, 3.0, pt.pipedream_delay(64), 5.0).delay
    law = pt.delay_term_law(64, np.array([1e4, 4e4]), smoothness=2.0, gap=5.0)
    np.testing.assert_allclose(law, [term, term / 4])
    ratio = [pt.delay_term_law(s, 1e4, smoothness=2.0, gap=5.0) / s**4 for s in (512, 1024)]
    assert ratio[1] / ratio[0] == pytest.approx(1, abs=2e-3)


# mistakes
THEORY = {"stages": 2, "updates": 9, "delta": 1}
THEORY |= dict.fromkeys(("smoothness", "gradient_bound", "gap"), 1.0)


def test_mistakes_with_stacked_objectives(quadratic):
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), quadratic)
    with pytest.raises(ValueError, match=r"got 3 seeds for a stack of shape \(2,\)"):
        pt.sweep_randomized_pipedream(stacked, step_sizes=[0.1], seeds=[0, 1, 2], updates=4)
    with pytest.raises(ValueError, match="objective must be a single one, got 2 stacked"):
        pt.randomized_pipedream(stacked, step_size=0.1, seed=0, updates=4)
    with pytest.raises(ValueError, match="must be one Quadratic or Logistic, got Quadratic"):
        pt.smoothness(stacked)
    with pytest.raises(ValueError, match="must be one Quadratic or Logistic, got LanguageModel"):
        pt.smoothness(OBJECTIVES["language"]())


@pytest.mark.parametrize("name", THEORY)
@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
@pytest.mark.usefixtures("unchecked")
def test_mistakes_of_the_bound(name, value):
    for function, more in ((pt.convergence_bound, {"step_size": 0.1}), (pt.best_step_size, {})):
        with pytest.raises(ValueError, match=f"{name} must be finite and .*, got {value}"):
            function(**{**THEORY, **more, name: np.float64(value).item()})


# Summaries of runs


def test_rules_choose_a_step_size():
    curves = np.array(
        [
            [9.0, 99.0, np.nan, 0.0],
            [9.0, 0.1, 0.5, 0.3],
            [9.0, 1.0, 1.9, 0.1],
            [9.0, 2.0, 1.0, 0.5],
            [9.0, 8.0, 7.0, 6.0],
        ]
    )
    sizes = [8.0, 4.0, 2.0, 1.0, 0.5]
    assert [pt.choose_step_size(curves, rule, sizes) for rule in pt.RULES] == [2, 1, 2]
    assert pt.choose_step_size(curves[::-1], "stable", sizes[::-1]) == 2
    assert pt.choose_step_size(curves[:2], "stable", sizes[:2]) is None
    assert pt.choose_step_size(curves[:1]) is None
    curves[2, 2] = 2.1
    assert pt.choose_step_size(curves, "stable", sizes) == 3


def test_summary_is_over_the_seeds():
    """Final gaps 1 and 3: mean 2, deviation sqrt(((1 - 2)^2 + (3 - 2)^2) / (2 - 1)) = sqrt(2)."""
    gap = np.array([[[4.0, 2.0, 1.0], [4.0, 4.0, 3.0]], [[4.0, 0.1, 0.1], [4.0, 9e9, 9e9]]])
    loss = np.full(gap.shape, [np.nan, 6.0, 5.0])
    diverged, ones = np.array([[False, False], [False, True]]), np.ones((2, 2))
    runs = pt.TrainingRun(range(3), gap, diverged, ones, ones, None, loss=loss, minimum=10 * ones)
    summary = pt.summarise(runs)
    assert summary.gap.tolist() == [[4.0, 3.0, 2.0], [None] * 3]
    assert summary.value.tolist() == [[14.0, 13.0, 12.0], [None] * 3]
    assert summary.loss.tolist() == [[None, 6.0, 5.0], [None] * 3]
    assert summary.final_gap.tolist() == [2.0, None]
    assert summary.spread.tolist() == [pytest.approx(np.sqrt(2)), None]
    assert (summary.diverged.tolist(), summary.best) == ([0, 1], 0)
    alone = runs._replace(gap=gap[:, :1], diverged=diverged[:, :1], loss=None, minimum=ones[:, :1])
    alone = pt.summarise(alone)
    assert alone.spread.tolist() == [None, None]
    assert (alone.loss.mask.all(), alone.best) == (True, 1)
    with pytest.raises(ValueError, match=r"axes \(step_sizes, seeds\), got .* \(2, 3\)"):
        pt.summarise(runs._replace(gap=gap[0]))


# Objectives in stages: against compositions, finite differences and what is known of them

LINEAR = [name for name in OBJECTIVES if name != "language"]


@pytest.fixture(scope="module", params=OBJECTIVES)
def objective(request):
    return OBJECTIVES[request.param]()


def somewhere(objective, seed=1):
    """Blocks that no objective starts from, padding left at 0."""
    start = objective.init(jax.random.key(seed))
    used = jnp.ones_like(start) if isinstance(objective, pt.Quadratic | pt.Logistic) else start != 0
    return start + 0.3 * used * jax.random.normal(jax.random.key(seed), start.shape, start.dtype)


def test_the_short_way_is_the_composition(objective):
    blocks, batch = somewhere(objective), objective.batch(2)
    short = jax.value_and_grad(lambda blocks: objective.batch_loss(blocks, batch))
    composed = jax.value_and_grad(
        lambda blocks: pt.TrainingObjective.batch_loss(objective, blocks, batch)
    )
    first, second = jax.jit(lambda blocks: (short(blocks), composed(blocks)))(blocks)
    np.testing.assert_allclose(first[0], second[0], rtol=1e-12)
    np.testing.assert_allclose(first[1], second[1], rtol=1e-9, atol=1e-13)


def test_gradients_are_finite_differences(objective):
    blocks, batch, step = somewhere(objective), objective.batch(1), 1e-6
    stages = range(objective.num_stages)
    direction = jax.random.normal(jax.random.key(5), blocks.shape, blocks.dtype)
    # along one block each; all losses in one call
    by_stage = jnp.stack([jnp.zeros_like(direction).at[s].set(direction[s]) for s in stages])
    loss = jax.vmap(lambda moved: objective.batch_loss(moved, batch))
    above, below = jax.jit(loss)(
        blocks[None] + step * jnp.stack([by_stage, -by_stage]).reshape(-1, *blocks.shape)
    ).reshape(2, -1)
    gradient = jax.jit(pt.batch_gradient)(objective, blocks, batch)
    slope, steps = jnp.einsum("sw,sw->s", gradient, direction), (above - below) / (2 * step)
    np.testing.assert_allclose(slope, steps, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", LINEAR)
def test_batches_mean_the_objective(name):
    objective = OBJECTIVES[name]()
    blocks = somewhere(objective)
    batch_gradient, whole = jax.jit(pt.batch_gradient), jax.jit(jax.grad(objective.value))
    gradients = [batch_gradient(objective, blocks, objective.batch(i)) for i in range(5)]
    np.testing.assert_allclose(np.mean(gradients, 0), whole(blocks), rtol=1e-10)


def test_spectra():
    spectral, nesterov = OBJECTIVES["spectral"](), OBJECTIVES["nesterov"]()
    np.testing.assert_allclose(np.linalg.eigvalsh(gram(spectral)), [0.1, 0.5, 1, 1, 2, 4])
    assert (np.abs(gram(spectral)) > 1e-6).all()  # turned, so no coordinate is on its own
    ends = np.sin(np.arange(1, 7) * np.pi / 14) ** 2
    np.testing.assert_allclose(np.linalg.eigvalsh(gram(nesterov)), 1 + 49 * ends)
    hessian = gram(nesterov)
    np.testing.assert_allclose(hessian, np.triu(np.tril(hessian, 1), -1), atol=1e-12)
    np.testing.assert_allclose(np.diag(hessian, 1), -49 / 4)
    # the gradient at w = 0 is -b
    gradient = jax.grad(nesterov.value)(jnp.zeros((S, 2))).ravel()
    np.testing.assert_allclose(gradient, [-49 / 4, 0, 0, 0, 0, 0], atol=1e-12)


@pytest.mark.parametrize("name", ["random", "spectral", "nesterov"])
def test_quadratics_end_at_nothing(name):
    objective = OBJECTIVES[name]()
    x, y = rows(objective)
    least = np.linalg.lstsq(x, y, rcond=None)[0]
    assert 0 <= objective.gap(jnp.asarray(least.reshape(S, 2))) < 1e-24
    assert pt.smoothness(objective) == pytest.approx(np.linalg.norm(x, 2) ** 2 / len(x))


def test_minimum_of_logistic_regression():
    objective = OBJECTIVES["logistic"]()
    x, y = rows(objective)
    assert set(y.tolist()) == {1.0, -1.0}
    w = np.zeros(6)
    for _ in range(20):  # Newton's method, written down once more
        p = 1 / (1 + np.exp(y * (x @ w)))
        hessian = (x.T * (p * (1 - p))) @ x / len(x) + 1e-2 * np.eye(6)
        w -= np.linalg.solve(hessian, -x.T @ (y * p) / len(x) + 1e-2 * w)
    least = np.log1p(np.exp(-y * (x @ w))).mean() + 1e-2 * w @ w / 2
    assert float(objective.minimum) == pytest.approx(least, rel=1e-13)
    steepest = np.linalg.norm(x, 2) ** 2 / len(x) / 4 + 1e-2
    assert pt.smoothness(objective) == pytest.approx(steepest)
    assert np.linalg.eigvalsh(hessian)[-1] <= steepest


def test_logistic_regression_says_when_it_finds_no_minimum(monkeypatch):
    monkeypatch.setattr("pipejax.training.linear_models.LARGEST_GRADIENT", 1e-30)
    with pytest.raises(RuntimeError, match="no minimum found: the gradient has norm"):
        OBJECTIVES["logistic"]()


@pytest.mark.slow
def test_the_language_model_learns_and_looks_only_back():
    make = {"width": 4, "context": 6, "num_batches": 3, "batch_size": 2, "seed": 0}
    model = language_model(S + 1, text="ab" * 100, **make)
    assert model.vocabulary == 2
    run = pt.randomized_pipedream(model, step_size=0.3, seed=0, updates=400, interval=400)
    assert run.gap[0] > 0.3
    assert run.gap[-1] < 0.1

    @jax.jit
    def predict(tokens):
        activation = model.input(tokens)
        for stage in range(model.num_stages):
            activation = model.stage(stage, run.blocks[stage], activation, tokens)
        return activation

    batch = model.batch(0)
    moved = np.abs(predict(batch) - predict(batch.at[:, 4].set(1 - batch[:, 4]))).max(axis=(0, 2))
    assert (moved == 0).tolist() == [True] * 4 + [False] * 2


def test_noise_spares_the_padding():
    model = OBJECTIVES["language"]()
    start, held = np.asarray(model.init(jax.random.key(0))), model.held()
    assert held.shape == start.shape
    assert (start[~held] == 0).all()
    assert np.count_nonzero(start[held]) > 0.9 * held.sum()
    run = pt.randomized_pipedream(model, step_size=0.1, seed=0, updates=20, interval=20, noise=1.0)
    assert (np.asarray(run.blocks)[~held] == 0).all()
    assert (np.asarray(run.blocks)[held] != start[held]).any(axis=None)


def test_nesterovs_quadratic_as_it_was_run():
    options = {"dimension": 6, "condition_number": 401.0, "num_batches": 5, "batch_size": 4}
    options |= {"strong_convexity": 0.01, "minimiser": "normal"}
    objective = pt.nesterov_quadratic(S, seed=0, **options)
    nearby = np.eye(6, k=1) + np.eye(6, k=-1)
    np.testing.assert_allclose(gram(objective), 2.01 * np.eye(6) - nearby, atol=1e-12)
    x, y = rows(objective)
    optimum = np.linalg.lstsq(x, y, rcond=None)[0]
    other = pt.nesterov_quadratic(S, seed=1, **options)
    assert not np.allclose(optimum, np.linalg.lstsq(*rows(other), rcond=None)[0])
    assert 0.1 < np.mean(optimum**2) < 10


@pytest.mark.parametrize("make", [pt.random_quadratic, pt.random_logistic])
def test_features_say_how_many_stages_and_batches_there_are(make):
    objective = make(3, dimension=6, num_batches=5, batch_size=2, seed=0)
    more = {"l2": objective.l2} if isinstance(objective, pt.Logistic) else {}
    changed = type(objective)(objective.features, objective.targets, objective.minimum, **more)
    assert (changed.num_stages, changed.num_batches) == (3, 5)
    leaves = objective.features, objective.targets, objective.minimum
    options = type(objective)(*leaves, 3, 5, **more)
    assert len({*map(jax.tree.structure, (changed, options, objective))}) == 1
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), changed, objective)
    assert (stacked.num_stages, stacked.num_batches) == (3, 5)
    assert jax.tree.map(lambda leaf: None, changed).num_stages == 3  # leaves without a shape


def test_seeds_decide():
    first, again, other = (OBJECTIVES["random"](seed) for seed in (0, 0, 1))
    assert jnp.array_equal(first.features, again.features)
    assert not jnp.array_equal(first.features, other.features)


@with_cases("change message", *read_cases("test_mistakes_of_a_language_model"))
@pytest.mark.usefixtures("unchecked")
def test_mistakes_of_a_language_model(change, message):
    options = {"num_stages": S, "num_batches": 5, "batch_size": 4, "seed": 0}
    with pytest.raises(ValueError, match=message):
        language_model(**options | change)
