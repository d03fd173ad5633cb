"""Objectives in stages: against compositions, finite differences and what is known of them."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_cases import OBJECTIVES, SIZES, S, rows

import pipejax.training as pt
from pipejax.training.objective import gram
from sweeps.pipedream.language_model import language_model

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
    np.testing.assert_allclose(
        jnp.einsum("sw,sw->s", gradient, direction),
        (above - below) / (2 * step),
        rtol=1e-6,
        atol=1e-9,
    )


@pytest.mark.parametrize("name", LINEAR)
def test_batches_mean_the_objective(name):
    objective = OBJECTIVES[name]()
    blocks = somewhere(objective)
    batch_gradient, whole = jax.jit(pt.batch_gradient), jax.jit(jax.grad(objective.value))
    gradients = [batch_gradient(objective, blocks, objective.batch(i)) for i in range(5)]
    np.testing.assert_allclose(np.mean(gradients, 0), whole(blocks), rtol=1e-10)


def test_value_of_a_quadratic_is_written_out():
    quadratic = OBJECTIVES["random"]()
    x, y = rows(quadratic)
    w = np.asarray(somewhere(quadratic)).ravel()
    assert quadratic.gap(w.reshape(S, 2)) == pytest.approx(((x @ w - y) ** 2).mean() / 2)


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
    objective = pt.nesterov_quadratic(
        S, strong_convexity=0.01, minimiser="normal", seed=0, **options
    )
    nearby = np.eye(6, k=1) + np.eye(6, k=-1)
    np.testing.assert_allclose(gram(objective), 2.01 * np.eye(6) - nearby, atol=1e-12)
    x, y = rows(objective)
    optimum = np.linalg.lstsq(x, y, rcond=None)[0]
    other = pt.nesterov_quadratic(S, strong_convexity=0.01, minimiser="normal", seed=1, **options)
    assert not np.allclose(optimum, np.linalg.lstsq(*rows(other), rcond=None)[0])
    assert 0.1 < np.mean(optimum**2) < 10


@pytest.mark.parametrize("make", [pt.random_quadratic, pt.random_logistic])
def test_features_say_how_many_stages_and_batches_there_are(make):
    objective = make(3, dimension=6, num_batches=5, batch_size=2, seed=0)
    more = {"l2": objective.l2} if isinstance(objective, pt.Logistic) else {}
    changed = type(objective)(objective.features, objective.targets, objective.minimum, **more)
    assert (changed.num_stages, changed.num_batches) == (3, 5)
    options = type(objective)(
        objective.features, objective.targets, objective.minimum, 3, 5, **more
    )
    assert len({*map(jax.tree.structure, (changed, options, objective))}) == 1
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), changed, objective)
    assert (stacked.num_stages, stacked.num_batches) == (3, 5)
    assert jax.tree.map(lambda leaf: None, changed).num_stages == 3  # leaves without a shape


def test_seeds_decide():
    first, again, other = (OBJECTIVES["random"](seed) for seed in (0, 0, 1))
    assert jnp.array_equal(first.features, again.features)
    assert not jnp.array_equal(first.features, other.features)


COUNT = "a whole number of at least 1"
WRONG = [  # argument, value and what it must be, or the whole message
    (pt.random_quadratic, "dimension", 7, "a multiple of num_stages 3"),
    (pt.random_quadratic, "dimension", 0, COUNT),
    (pt.random_quadratic, "num_batches", 1.5, COUNT),
    (pt.random_logistic, "batch_size", 0, COUNT),
    (pt.random_logistic, "seed", -1, "a whole number of at least 0"),
    (pt.random_logistic, "l2", 0.0, "a finite number above 0"),
    (pt.nesterov_quadratic, "condition_number", 1.0, "a finite number above 1"),
    (pt.nesterov_quadratic, "strong_convexity", 0.0, "a finite number above 0"),
    (pt.nesterov_quadratic, "minimiser", "zero", "one of solved, normal"),
    (
        pt.nesterov_quadratic,
        "num_batches",
        1,
        "num_batches * batch_size must be at least the dimension 6, got 4",
    ),
    (pt.spectral_quadratic, "spectrum", [1.0, 0.0, 1.0], "finite numbers above 0"),
    (pt.spectral_quadratic, "spectrum", [1.0, 1.0], "dimension must be a multiple of num_stages 3"),
    (language_model, "num_stages", 2, "at least 3"),
    (language_model, "heads", 3, "width must be a multiple of heads 3, got 16"),
    (language_model, "text", "too short", "text must have more than 160 characters, got 9"),
]


@pytest.mark.parametrize(("make", "name", "value", "rule"), WRONG)
@pytest.mark.usefixtures("unchecked")
def test_mistakes_of_objectives(make, name, value, rule):
    takes = inspect.signature(make).parameters
    options = {"num_stages": S, **SIZES, "seed": 0, "condition_number": 5.0, name: value}
    message = rule if " must " in rule else f"{name} must be {rule}, got {value!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**{name: value for name, value in options.items() if name in takes})


def test_smoothness_of_a_language_model_is_unknown():
    with pytest.raises(
        ValueError, match="objective must be one Quadratic or Logistic, got LanguageModel"
    ):
        pt.smoothness(OBJECTIVES["language"]())
