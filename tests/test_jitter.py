"""Runs with random durations: exact without spread, the same in parts, on the command line."""

import csv
import json
import sys

import jax
import numpy as np
import pytest
import scipy.stats
from daily import daily, with_cases
from jitter_cases import ALL, ONE, D, S, make_costs, sample_costs
from legal_sizes import build

import pipejax as pj
from pipejax.analysis.uncertainty.distributions import (
    DISTRIBUTIONS,
    KNOTS,
    LARGEST_SCORE,
    factor_table,
)
from pipejax.analysis.uncertainty.jitter import jitter_dataset
from pipejax.costs.costs import unchecked_costs
from pipejax.engine.pricing import price
from pipejax.engine.recurrence import critical_path
from pipejax.schedules import REGISTRY
from pipejax.schedules.table.links import LINKS

SIZE = ["--workers", "4", "--microbatches", "8", "--worker-times", "F=1,B=2", "--samples", "60"]
J = ["jitter", "--schedules", "gpipe,1f1b", *SIZE]
VARY = ["--op", "lognormal:0.2", "--worker", "uniform:0.1", "--message", "gamma:0.5"]
VARY += ["--straggler", "0.2:2", "--op-straggler", "0.05:3"]
COUNT = 20_000
WHERE = [("op", name) for name in DISTRIBUTIONS]
WHERE += [("worker", "gamma")]  # they come from the same table


@pytest.mark.parametrize("link", daily(LINKS))
def test_a_sample_can_be_looked_at(link):
    table = build("zb-h1" if "zb-h1" in REGISTRY else "interleaved-1f1b", 2, 4)
    costs = make_costs(table)
    run = pj.jitter(table, costs, ALL, samples=60, link=link)
    path = jax.jit(critical_path)
    for sample in (0, 59, run.worst_sample):
        finish = path(run.evaluation.program.preds, sample_costs(run, costs, sample)).finish
        assert float(finish.max()) == run.makespans[sample]
    assert run.makespans[run.worst_sample] == run.makespans.max() == run.worst


@pytest.mark.parametrize("max_bytes", [1, 1 << 28])
def test_a_step_lasts_as_long_as_the_slowest_of_its_replicas(max_bytes):
    """A sample is the longest of as many draws, whether or not these go through together."""
    table = build()
    costs = make_costs(table)
    single = pj.jitter(table, costs, ALL, samples=60)
    run = pj.jitter(table, costs, ALL, samples=20, replicas=3, max_bytes=max_bytes)
    by_replica = single.makespans.reshape(20, 3)
    assert run.makespans.tolist() == by_replica.max(axis=1).tolist()
    assert (run.draws - 3 * np.arange(20)).tolist() == by_replica.argmax(axis=1).tolist()
    assert (run.replicas, run.deterministic) == (3, single.deterministic)


def test_a_straggler_of_many_replicas_is_in_every_step(answer):
    model = ("--model", "gpt-22b", "--system", "a100", "--minibatch", 4, "--data-parallel", 64)
    line = ("jitter", "-S", "1f1b", "-P", 2, "-M", 4, *model, "--straggler", "0.05:2")
    result = answer(*line, "--samples", 20)
    assert (result["replicas"], result["samples"]) == (64, 20)
    (row,) = result["rows"]
    assert row["quantiles"]["p50"] > 1.5 * row["deterministic"]
    (alone,) = answer(*line, "--samples", 20, "--replicas", 1)["rows"]
    assert alone["quantiles"]["p50"] == alone["deterministic"]


def test_seeds():
    table, costs = build(), pj.Costs(forward=1.0, backward=2.0, transmit=0.1)
    first, same, other = (pj.jitter(table, costs, ALL, samples=60, seed=s) for s in (5, 5, 6))
    assert first.makespans.tolist() == same.makespans.tolist()
    assert not np.isin(first.makespans, other.makespans).any()
    assert len(np.unique(first.makespans)) == 60


def test_more_samples_parts_and_precision_change_no_sample():
    table, costs = build(), pj.Costs(forward=1.0, backward=2.0, transmit=0.1)
    done = []
    whole = pj.jitter(table, costs, ALL, samples=2800, link="queued")
    in_parts = {"max_bytes": 4 * 10**5, "on_progress": lambda *progress: done.append(progress)}
    parts = pj.jitter(table, costs, ALL, samples=2800, link="queued", **in_parts)
    few = pj.jitter(table, costs, ALL, samples=70, link="queued")
    assert done[-1] == (2800, 2800, "samples")
    assert done == sorted(done)
    assert len(done) > 20
    assert whole.makespans.tolist() == parts.makespans.tolist()
    assert whole.node_share.tolist() == parts.node_share.tolist()
    assert whole.message_share.tolist() == parts.message_share.tolist()
    assert whole.makespans[:70].tolist() == few.makespans.tolist()
    with jax.enable_x64(False):
        single = pj.jitter(table, costs, ALL, samples=2800, link="queued")
    assert whole.makespans.tolist() == single.makespans.tolist()


@pytest.mark.parametrize("replicas", [1, 3])
def test_critical_shares(replicas):
    table = pj.ScheduleTable.from_rows([["0F0", "0F1", "0B0", "0B1"]])
    run = pj.jitter(table, pj.Costs(forward=1.0, backward=2.0), ALL, samples=50)
    assert run.node_share[1:5].tolist() == [1.0] * 4  # one worker: every op is on the path
    two, costs = build("1f1b", 2, 4), pj.Costs(forward=1.0, backward=2.0, transmit=0.1)
    run = pj.jitter(two, costs, ALL, samples=30, replicas=replicas, max_bytes=1)
    program, path = run.evaluation.program, jax.jit(critical_path)
    on_path = [path(program.preds, sample_costs(run, costs, k)) for k in range(30)]
    assert run.node_share.tolist() == np.mean([p.nodes for p in on_path], axis=0).tolist()
    at = program.messages.consumer
    lags = np.mean([(p.edges & (program.lag_index > 0))[at].any(axis=1) for p in on_path], axis=0)
    assert run.message_share.tolist() == lags.tolist()
    assert 0 < run.node_share[program.node_of_cell[0, 1]] < 1


def test_what_does_not_fit_ranks_behind_what_does():
    uneven = pj.analysis.Jitter(op=pj.analysis.Distribution("gamma", 0.2))
    costs = [pj.Costs(forward=time, backward=2 * time) for time in (1.0, 2.0, 3.0)]
    runs = [pj.jitter(build(), cost, uneven, samples=32) for cost in costs]
    ranked = pj.analysis.robustness(runs, fits=[False, True, True])
    assert [row.makespan_rank for row in ranked] == [3, 1, 2]
    assert [row.fastest_share for row in ranked] == [0.0, 1.0, 0.0]
    assert [row.fits for row in ranked] == [False, True, True]
    nothing = pj.analysis.robustness(runs, fits=[False] * 3)
    assert [row.makespan_rank for row in nothing] == [1, 2, 3]
    assert [row.fastest_share for row in nothing] == [0.0] * 3
    with pytest.raises(ValueError, match="fits must have one entry for each of 3 runs"):
        pj.analysis.robustness(runs, fits=[True])


def test_the_command_ranks_by_memory_too(answer):
    options = "--model", "gpt-22b", "--system", "h100", "--minibatch", 16, "--tensor-parallel", 4
    size = "--workers", 4, "--microbatches", 8, "--samples", 4, "--op", "gamma:0.1"
    result = answer("jitter", "--schedules", "interleaved-1f1b,1f1b", *size, *options)["rows"]
    assert [row["fits"] for row in result] == [False, True]
    assert result[0]["deterministic"] < result[1]["deterministic"]
    assert [row["makespan_rank"] for row in result] == [2, 1]


def test_robustness_ranks():
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.2)
    names = "gpipe", "1f1b", "chimera", "gpipe"
    runs = [pj.jitter(build(name), costs, ALL, samples=60) for name in names]
    rows = pj.analysis.robustness(runs, quantile=0.9)
    assert [row.schedule for row in rows] == ["gpipe", "1f1b", "chimera", "gpipe"]
    assert rows[0] == rows[3]  # equals share ranks
    for row, run in zip(rows, runs, strict=True):
        assert row.makespan == np.quantile(run.makespans, 0.9)
        assert row.slowdown == row.makespan / row.deterministic
        assert row.makespan_rank == 1 + sum(other.makespan < row.makespan for other in rows)
        assert row.slowdown_rank == 1 + sum(other.slowdown < row.slowdown for other in rows)
        fastest = np.min([other.makespans for other in runs], axis=0)
        assert row.fastest_share == np.mean(run.makespans == fastest)
    short = pj.jitter(build(), costs, ALL, samples=10)
    for wrong, message in (([runs[0], short], "60 samples.* and .*|10 samples"), ([], "no run")):
        with pytest.raises(ValueError, match=message):
            pj.analysis.robustness(wrong)
    with pytest.raises(ValueError, match="quantile must be from 0 to 1, got 2"):
        pj.analysis.robustness(runs, quantile=2)


@with_cases(
    "costs message",
    (unchecked_costs({"forward": -1.0}), "forward must be finite"),
    (pj.Costs(forward=1.7e308, backward=0.0), "too large for a float"),
)
def test_costs_that_no_sample_can_have_are_refused(costs, message):
    with pytest.raises(ValueError, match=message):
        pj.jitter(ONE, costs, ALL, samples=99)


def test_nothing_takes_time():
    run = pj.jitter(build(), pj.Costs(forward=0.0, backward=0.0), ALL, samples=3)
    assert (run.makespans.tolist(), run.mean, run.slowdown(0.5)) == ([0.0] * 3, 0.0, 1.0)


def test_dataset_is_read_back(tmp_path):
    import xarray as xr

    costs = pj.Costs(forward=1.0, backward=2.0)
    runs = {n: pj.jitter(build(n), costs, ALL, samples=20, seed=4) for n in ("gpipe", "1f1b")}
    jitter_dataset(runs).to_zarr(tmp_path / "x.zarr", zarr_format=2)
    data = xr.open_zarr(tmp_path / "x.zarr").load()
    for name, run in runs.items():
        assert data.makespan.sel(schedule=name).values.tolist() == run.makespans.tolist()
        assert float(data.deterministic.sel(schedule=name)) == run.deterministic
    assert data.makespan.units == data.deterministic.units == "s"
    assert data.attrs["op_straggler"] == "0.05:3"
    assert (data.seed, data.workers, data.microbatches, data.link) == (4, 4, 8, "delay")
    other = pj.jitter(build(), costs, ALL, samples=20, seed=4, link="queued")
    with pytest.raises(ValueError, match="same links, workers and microbatches"):
        jitter_dataset({**runs, "other": other})


def test_command(call, tmp_path):
    out = tmp_path / "runs.zarr"
    code, text, _ = call(*J, *VARY, "--comm", "0.1", "--seed", "7", "--ops", "--out", out, "--json")
    assert code == 0
    assert text.count("\n") == 1
    result = json.loads(text)
    assert result["jitter"]["op"] == "lognormal:0.2"
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.1)
    for row, name in zip(result["rows"], ("gpipe", "1f1b"), strict=True):
        run = pj.jitter(build(name), costs, ALL, samples=60, seed=7)
        assert (row["schedule"], row["deterministic"]) == (name, run.deterministic)
        assert row["quantiles"] == {f"p{q}": run.quantile(q / 100) for q in (5, 50, 95, 99)}
        assert row["slowdowns"]["p95"] == run.slowdown(0.95)
        assert (row["worst"], row["worst_sample"]) == (run.worst, run.worst_sample)
        shares = {(op["worker"], op["op"]): op["critical_share"] for op in row["ops"]}
        assert len(shares) == 64
        node = run.evaluation.program.node_of_cell[0, 0]
        assert shares[0, "0F0"] == run.node_share[node] == 1
    assert sorted(row["makespan_rank"] for row in result["rows"]) == [1, 2]
    assert (out / ".zgroup").exists()
    assert call(*J, "--out", out)[0] == 2  # nothing is written over
    _, text, _ = call(*J, *VARY, "--ops", "--quantile", "0.9", "--details")
    run = pj.jitter(build(), pj.Costs(forward=1.0, backward=2.0), ALL, samples=60)
    assert "p90 slowdown" in text
    assert f"{run.quantile(0.9):.3g} s" in text
    assert f"{100 * (run.slowdown(0.9) - 1):.3g} %" in text


def test_command_marks_what_does_not_exist(call):
    _, text, _ = call("jitter", "-S", "1f1b,chimera", "--workers", "3", *SIZE[2:], "--json")
    rows = json.loads(text)["rows"]
    assert rows[0]["deterministic"] == 30.0
    assert "even number of workers" in rows[1]["error"]
    _, text, _ = call("jitter", "-S", "1f1b,chimera", "-P", "3", *SIZE[2:], "--ops", "-f", "csv")
    *tables, message = [list(csv.reader(part.splitlines())) for part in text.split("\n\n")[:-1]]
    for headers, *_ in (*tables, message):
        assert "" not in headers
        assert len({*headers}) == len(headers)
    assert message[1][0] == "chimera"
    assert "even number of workers" in message[1][1]


def test_samples_are_drawn(call, tmp_path):
    plot = tmp_path / "samples.svg"
    code, text, _ = call(*J, "--op", "lognormal:0.1", "--figure", plot)
    assert (code, f"wrote {plot}" in text) == (0, True)
    picture = plot.read_text()
    for word in ("step time [s]", "gpipe", "1f1b", "without jitter", "5th, 50th and 95th"):
        assert word in picture


def test_a_spread_may_be_percent(answer):
    result = answer(*J, "--op", "lognormal:5%", "--straggler", "1%:2")["jitter"]
    assert (result["op"], result["straggler"]) == ("lognormal:0.05", "0.01:2")


# random durations: of the stated distributions, and each factor where it belongs
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


@pytest.mark.parametrize(("where", "name"), daily(WHERE))
def test_factors_have_the_named_distribution(where, name):
    spread = DISTRIBUTIONS[name].largest / 2
    jitter = pj.analysis.Jitter(**{where: D(name, spread)})
    run = pj.jitter(ONE, pj.Costs(forward=1.0, backward=0.0), jitter, samples=COUNT, seed=3)
    assert scipy.stats.kstest(run.makespans, THEIRS[name](spread).cdf).pvalue > 1e-3
    assert run.mean == pytest.approx(1, abs=4 * spread / COUNT**0.5)
    assert run.makespans.std() == pytest.approx(spread, rel=0.1)


def test_stragglers_strike_as_often_as_stated():
    for where, ops in (("straggler", 1), ("op_straggler", 2)):
        jitter = pj.analysis.Jitter(**{where: S(0.1, 3.0)})
        run = pj.jitter(ONE, pj.Costs(forward=1.0, backward=1.0), jitter, samples=COUNT)
        struck = (run.makespans - 2) / 2 * ops / 2  # 0, or all ops at once; 0, 1 or 2 of them
        assert set(np.unique(struck)) == ({0, 1} if ops == 1 else {0, 1, 2})
        assert struck.mean() == pytest.approx(0.1 * ops, abs=4 * (0.09 * ops / COUNT) ** 0.5)
    jitter = pj.analysis.Jitter(straggler=S(1.0, 2.5))
    always = pj.jitter(ONE, pj.Costs(forward=1.0, backward=0.0), jitter, samples=5)
    assert always.makespans.tolist() == [2.5] * 5


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
    table = build(microbatches=4)
    costs = make_costs(table)

    def factors(**arguments):
        jitter = pj.analysis.Jitter(**arguments)
        return get_factors(pj.jitter(table, costs, jitter, samples=3, link=link), costs, 2)

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
    uniform = pj.analysis.Jitter(op=D("uniform", 0.3))
    run = pj.jitter(ONE, pj.Costs(forward=10.0, backward=0.0), uniform, samples=COUNT)
    for level in (0.05, 0.5, 0.95, 0.99):
        assert run.slowdown(level) == pytest.approx(1 - w + 2 * w * level, abs=0.015)
        assert run.quantile(level) == pytest.approx(10 * run.slowdown(level))
    assert run.quantile(1.0) == run.makespans.max()
