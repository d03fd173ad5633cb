"""Random durations: of the stated distributions, and each factor where it belongs."""

import sys

import numpy as np
import pytest
import scipy.stats
from daily import daily
from jitter_cases import ALL, ONE, D, S, build, make_costs, sample_costs

import pipejax as pj
from pipejax.analysis.uncertainty.distributions import (
    DISTRIBUTIONS,
    KNOTS,
    LARGEST_SCORE,
    factor_table,
)
from pipejax.engine.pricing import price

COUNT = 20_000


def get_factors(run, costs, sample):
    """Factors of a sample by (phase, stage, microbatch or worker), and of messages."""
    program, ones = run.evaluation.program, {}
    priced, sample_of_costs = price(program, costs), sample_costs(run, costs, sample)
    for v in range(1, program.num_nodes):
        phase = pj.Phase(int(program.phase[v])).name
        at_end = phase == "U" and program.microbatch[v] < 0
        last = -1 - program.worker[v] if at_end else program.microbatch[v]
        key = (phase, int(program.stage[v]), int(last))
        if priced.duration[v] > 0:
            ones[key] = sample_of_costs.duration[v] / priced.duration[v]
    sent = program.messages
    for k in range(len(sent.producer)):
        key = (pj.Phase(int(sent.phase[k])).name, int(sent.stage[k]), int(sent.microbatch[k]))
        where = np.nonzero(np.asarray(program.lag_index)[sent.consumer[k]] == sent.lag_index[k])[0]
        for place in where:
            lag = priced.lag[sent.consumer[k], place]
            source = program.preds[sent.consumer[k], place]
            if lag > 0 and source in (sent.producer[k], sent.carrier[k]):
                factor = sample_of_costs.lag[sent.consumer[k], place] / lag
                assert ones.setdefault(key, factor) == pytest.approx(factor)  # L as X
    return ones


THEIRS = {  # the same distribution in SciPy
    "lognormal": lambda s: scipy.stats.lognorm(np.sqrt(np.log1p(s**2)), scale=(1 + s**2) ** -0.5),
    "gamma": lambda s: scipy.stats.gamma(s**-2, scale=s * s),
    "normal": lambda s: scipy.stats.truncnorm(-1 / s, 1 / s, 1, s),
    "uniform": lambda s: scipy.stats.uniform(1 - s * 3**0.5, 2 * s * 3**0.5),
    "exponential": lambda s: scipy.stats.expon(1 - s, s),
}


@pytest.mark.parametrize("name", list(DISTRIBUTIONS))
@pytest.mark.parametrize("part", [0.02, 0.5, 1.0])
def test_tables_have_mean_one_and_the_stated_spread(name, part):
    spread = part * DISTRIBUTIONS[name].largest
    scores = np.linspace(-LARGEST_SCORE, LARGEST_SCORE, 8 * (KNOTS - 1) + 1)
    weight = np.exp(-(scores**2) / 2)
    weight /= weight.sum()
    knots = np.linspace(-LARGEST_SCORE, LARGEST_SCORE, KNOTS)
    factors = np.interp(scores, knots, factor_table(D(name, spread)).astype(float))
    mean = weight @ factors
    assert mean == pytest.approx(1, abs=2e-6)
    assert np.sqrt(weight @ (factors - mean) ** 2) == pytest.approx(spread, rel=6e-4)
    assert factors.min() >= 0
    assert THEIRS[name](spread).mean() == pytest.approx(1)


WHERE = [("op", name) for name in DISTRIBUTIONS]
WHERE += [("worker", "gamma")]  # they come from the same table


@pytest.mark.parametrize(("where", "name"), daily(WHERE))
def test_factors_have_the_named_distribution(where, name):
    spread = DISTRIBUTIONS[name].largest / 2
    run = pj.jitter(
        ONE,
        pj.Costs(forward=1.0, backward=0.0),
        pj.analysis.Jitter(**{where: D(name, spread)}),
        samples=COUNT,
        seed=3,
    )
    assert scipy.stats.kstest(run.makespans, THEIRS[name](spread).cdf).pvalue > 1e-3
    assert run.mean == pytest.approx(1, abs=4 * spread / COUNT**0.5)
    assert run.makespans.std() == pytest.approx(spread, rel=0.1)


def test_stragglers_strike_as_often_as_stated():
    for where, ops in (("straggler", 1), ("op_straggler", 2)):
        run = pj.jitter(
            ONE,
            pj.Costs(forward=1.0, backward=1.0),
            pj.analysis.Jitter(**{where: S(0.1, 3.0)}),
            samples=COUNT,
        )
        struck = (run.makespans - 2) / 2 * ops / 2  # 0, or all ops at once; 0, 1 or 2 of them
        assert set(np.unique(struck)) == ({0, 1} if ops == 1 else {0, 1, 2})
        assert struck.mean() == pytest.approx(0.1 * ops, abs=4 * (0.09 * ops / COUNT) ** 0.5)
    always = pj.jitter(
        ONE,
        pj.Costs(forward=1.0, backward=0.0),
        pj.analysis.Jitter(straggler=S(1.0, 2.5)),
        samples=5,
    )
    assert always.makespans.tolist() == [2.5] * 5


def test_jitter_makes_the_mean_longer():  # the makespan is convex in independent durations
    table, costs = build("1f1b"), pj.Costs(forward=1.0, backward=2.0, transmit=0.1)
    before = pj.evaluate(table, costs).makespan
    for spread in (0.05, 0.2, 0.5):
        mean = pj.jitter(table, costs, pj.analysis.Jitter(op=D("gamma", spread)), samples=2000).mean
        assert mean > before
        before = mean


def test_schedules_share_their_random_numbers():
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.25)
    ones = []
    for name in ("gpipe", "1f1b"):
        run = pj.jitter(build(name), costs, ALL, samples=9)
        ones.append(get_factors(run, costs, 7))
    assert ones[0] == pytest.approx(ones[1])
    assert len(set(ones[0].values())) == len(ones[0])
    worker = pj.analysis.Jitter(worker=D("lognormal", 0.3))
    factors = []
    for name in ("1f1b", "interleaved-1f1b"):
        run = pj.jitter(build(name), costs, worker, samples=9)
        program, sampled = run.evaluation.program, sample_costs(run, costs, 7)
        ratio = sampled.duration[1:] / price(program, costs).duration[1:]
        factors.append({int(w): float(r) for w, r in zip(program.worker[1:], ratio, strict=True)})
        assert len(set(ratio.round(12))) == 4
    assert factors[0] == pytest.approx(factors[1])


@pytest.mark.parametrize("link", ["delay", "queued", "rendezvous"])
def test_who_has_which_factor(link):
    table = build(p=4, m=4)
    costs = make_costs(table)

    def factors(**arguments):
        return get_factors(
            pj.jitter(table, costs, pj.analysis.Jitter(**arguments), samples=3, link=link), costs, 2
        )

    for chosen in ({"worker": D("gamma", 0.3)}, {"straggler": S(0.5, 2.0)}):
        stage_factors = {}
        for (phase, stage, _), factor in factors(**chosen).items():
            if phase in "FBU":
                assert stage_factors.setdefault(stage, factor) == pytest.approx(factor)
            else:  # messages and all-reduces are on no worker
                assert factor == 1
        assert len({round(factor, 9) for factor in stage_factors.values()}) > 1
    for chosen in ({"op": D("gamma", 0.3)}, {"message": D("gamma", 0.3)}):
        for (phase, _, _), factor in (random_data := factors(**chosen)).items():
            assert (factor != 1) == (phase.startswith("SEND") == ("message" in chosen))
        ones = [factor for factor in random_data.values() if factor != 1]
        assert len({round(factor, 9) for factor in ones}) == len(ones)
    both = factors(op=D("gamma", 0.3), message=D("gamma", 0.3)).values()
    assert len({round(factor, 9) for factor in both}) == len(both)


def test_lookup_is_a_line_between_knots():
    table = np.cumsum(np.random.default_rng(0).random(KNOTS)).astype(np.float32)
    scores = np.linspace(-5.5, 5.5, 999, dtype=np.float32)
    result = sys.modules["pipejax.analysis.uncertainty.jitter"]._look_up(table, scores[None])
    knots = np.linspace(-LARGEST_SCORE, LARGEST_SCORE, KNOTS)
    assert result[0] == pytest.approx(np.interp(scores, knots, table), rel=1e-5)


def test_quantiles_of_a_known_case():
    w = 0.3 * 3**0.5
    run = pj.jitter(
        ONE,
        pj.Costs(forward=10.0, backward=0.0),
        pj.analysis.Jitter(op=D("uniform", 0.3)),
        samples=COUNT,
    )
    for level in (0.05, 0.5, 0.95, 0.99):
        assert run.slowdown(level) == pytest.approx(1 - w + 2 * w * level, abs=0.015)
        assert run.quantile(level) == pytest.approx(10 * run.slowdown(level))
    assert run.quantile(1.0) == run.makespans.max()
