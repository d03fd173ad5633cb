"""Prompts in chunks: forwards alone, and where to cut."""

import functools
import itertools
import json

import numpy as np
import pytest
import scipy.optimize
from legal_sizes import build

import pipejax as pj

RANDOM = 10_000
COMMAND = "tune", "chunks", "--workers", 4
KEYS = {"best", "value", "lower_bound", "gap", "baselines", "evaluated", "stopped"}


def make_table(workers, count, prompts=1):
    return build("chunked-prefill", workers, prompts, slices=count)


def first_token(cuts, workers, **times):
    """Return when the last stage ends the last chunk, of many cuts (cuts, chunks)."""
    cuts = np.asarray(cuts, float)
    times = {"per_prefix_token": 0.0, "latency": 0.0, "transmit_per_token": 0.0} | times
    names = ("fixed", "per_token", "per_pair", "per_prefix_token")
    a, b, c, g = (np.broadcast_to(times[name], workers) for name in names)
    ends, before = np.zeros((len(cuts), workers)), np.zeros(len(cuts))
    for n in cuts.T:
        comes = np.zeros(len(cuts))
        for s in range(workers):
            durations = a[s] + b[s] * n + c[s] * (n * before + n**2 / 2) + g[s] * before
            ends[:, s] = comes = np.maximum(ends[:, s], comes) + durations
            comes = comes + times["latency"] + times["transmit_per_token"] * n
        before = before + n
    return ends[:, -1]


def random_cuts(rng, tokens, count):
    ends = np.sort(rng.choice(tokens - 1, (RANDOM, count - 1)) + 1, axis=1)
    ends = np.concatenate([np.zeros((RANDOM, 1)), ends, np.full((RANDOM, 1), tokens)], axis=1)
    return np.diff(ends, axis=1)


def drawn_times(rng, workers, kind):
    """Like stages, unlike ones, both with messages, and both with prefixes that are read again."""
    shape = workers if kind % 2 else None
    times = {
        "fixed": 1e-3 * rng.uniform(0, 3, shape),
        "per_token": 1e-5 * rng.uniform(0.5, 2, shape),
        "per_pair": 1e-8 * rng.uniform(0, 1, shape),
    }
    if kind >= 2:
        times |= {"latency": 1e-4 * rng.uniform(), "transmit_per_token": 1e-6 * rng.uniform(0, 3)}
    if kind >= 4:
        times |= {"per_prefix_token": 1e-6 * rng.uniform(0, 3, shape)}
    return times


@pytest.mark.parametrize("kind", range(6))
def test_no_random_cut_is_shorter(kind):
    """Three of each kind: at least as short as the best of ten thousand."""
    rng = np.random.default_rng(kind)
    for _ in range(3):
        tokens, times = int(rng.integers(1000, 100_000)), drawn_times(rng, 4, kind)
        result = pj.search.chunks(tokens, 4, num_chunks=6, **times)
        assert sum(result.best.sizes) == tokens
        assert min(result.best.sizes) > 0
        (best_time,) = first_token([result.best.sizes], 4, **times)
        assert result.value == pytest.approx(best_time, rel=1e-12)
        assert result.value <= first_token(random_cuts(rng, tokens, 6), 4, **times).min()
        assert result.lower_bound <= result.value <= min(result.baselines.values())


def test_the_engine_runs_many_cuts_as_the_recurrence_does():
    rng = np.random.default_rng(0)
    cuts, times = random_cuts(rng, 5000, 6)[:500], drawn_times(rng, 4, 5)
    costs = pj.costing.chunk_costs(cuts, 4, **times)
    result = pj.makespans(pj.lower(make_table(4, 6)), costs, batch_size=len(cuts))
    np.testing.assert_allclose(result, first_token(cuts, 4, **times), rtol=1e-12)


def test_all_cuts_of_a_short_prompt():
    """None of all is shorter than the bound; what is found is the best of all but for little."""
    rng = np.random.default_rng(1)
    cuts = [np.diff([0, *ends, 14]) for ends in itertools.combinations(range(1, 14), 5)]
    for kind in range(6):
        times = drawn_times(rng, 4, kind) | {"per_token": 1e-3, "per_pair": 3e-4}
        if kind >= 4:
            times["per_prefix_token"] = [0.0, 2e-4, 3e-3, 1e-4]
        best = first_token(cuts, 4, **times).min()
        result = pj.search.chunks(14, 4, num_chunks=6, **times)
        assert result.lower_bound <= best * (1 + 1e-12)
        assert result.value == pytest.approx(best, rel=1e-12)


def test_how_many_chunks():
    """With equal stages only K a + (P - 1) t depends on the cut."""
    times = {"fixed": 1e-3, "per_token": 1e-5, "per_pair": 5e-9}
    result = pj.search.chunks(4096, 4, **times)
    work = 1e-5 * 4096 + 5e-9 * 4096**2 / 2
    least = min(k * 1e-3 + work + 3 * (1e-3 + work / k) for k in range(1, 65))
    assert result.lower_bound == pytest.approx(least)
    assert (result.gap < 1e-3, result.stopped) == (True, "gap")
    assert len(result.best.sizes) == result.best.table.grammar.slices
    assert pj.evaluate(result.best.table, result.best.costs).makespan == result.value


def test_a_search_ends_in_time():
    """No bound ends it if stages differ."""
    times = {"fixed": [1e-3, 2e-3], "per_token": [2e-5, 1e-5], "per_pair": 5e-9}
    result = pj.search.chunks(4096, 2, time_limit=0, **times)
    assert (result.stopped, len(result.best.sizes) > 1) == ("time", True)


def test_sizes_are_of_multiples():
    times = {"fixed": 1e-3, "per_token": 1e-5, "per_pair": 5e-9}
    result = pj.search.chunks(10_000, 4, num_chunks=6, multiple=64, **times)
    *first, last = result.best.sizes
    assert [n % 64 for n in first] == [0] * 5
    assert last == 10_000 - sum(first)
    assert pj.search.chunks(3, 2, per_token=1.0, per_pair=0.0, num_chunks=3).best.sizes == (1, 1, 1)


def test_equal_chunks_pass_one_behind_another():
    for p, m, k in itertools.product((1, 2, 4), (1, 3), (1, 2, 5)):
        run = pj.evaluate(make_table(p, k, m), pj.Costs(forward=1.0))
        assert run.makespan == m * k + p - 1
        assert run.busy.tolist() == [m * k] * p


def as_sglang_cuts(tokens, per_token, per_pair, rule):
    """Chunks by the rule of its scheduler, of a runtime b L + c L^2 / 2 of a prefix."""
    first, sizes, done = rule["first_chunk"], [rule["first_chunk"]], rule["first_chunk"]
    target = per_token * first + per_pair * first**2 / 2
    while done < tokens:
        slope = per_token + per_pair * done
        alike = (np.sqrt(slope**2 + 2 * per_pair * target) - slope) / per_pair
        size = max(int(first + rule["smoothing"] * (alike - first)), first // 4)
        sizes.append(min(size // rule["multiple"] * rule["multiple"], tokens - done))
        done += sizes[-1]
    return sizes


def test_prefill_times_of_sglang_from_two_numbers(data):
    """Two rows and two numbers: what is left is that both rows lie on the model at all."""
    rule = json.loads((data / "sglang_prefill.json").read_text())
    rows, workers = rule["rows"], rule["pipeline"]
    tables = functools.cache(lambda count: make_table(workers, count))

    def predicted(numbers):
        per_token, per_pair = np.exp(numbers)
        for row in rows:
            sizes = as_sglang_cuts(row["tokens"], per_token, per_pair, rule)
            costs = pj.costing.chunk_costs(sizes, workers, per_token=per_token, per_pair=per_pair)
            yield pj.evaluate(tables(len(sizes)), costs).makespan

    measured = np.array([row["seconds"] for row in rows])
    off = lambda numbers: np.array([*predicted(numbers)]) / measured - 1  # noqa: E731
    fitted = scipy.optimize.least_squares(off, np.log([5e-6, 1e-9]), diff_step=1e-3)
    assert np.abs(off(fitted.x)).max() <= 0.02
    per_token, per_pair = np.exp(fitted.x)
    assert (per_token, per_pair) == pytest.approx((4.94e-6, 7.23e-10), rel=0.02)


def test_times_of_nothing_are_cut_too():
    result = pj.search.chunks(64, 3, fixed=0.0, per_token=0.0, per_pair=0.0, num_chunks=2)
    assert (result.value, result.stopped) == (0.0, "optimal")


# the command, and prefixes that are read again
def test_the_command_answers_as_all_searches_do(answer):
    times = {"fixed": 2e-3, "per_token": 5e-6, "per_pair": 7e-10, "per_prefix_token": 1e-6}
    options = "--prompt", 65_536, "--num-chunks", 6, "--stage-times", "a=2ms,b=5us,c=0.7ns,g=1us"
    result = answer(*COMMAND, *options)
    assert result.keys() >= KEYS
    (best_time,) = first_token([result["best"]["sizes"]], 4, **times)
    assert result["value"] == pytest.approx(best_time, rel=1e-12)
    assert result["value"] <= min(result["baselines"].values())
    assert result["best"]["ends"][-1] == 65_536
    # of the second chunk: 2 ms + 5 us n + 0.7 ns (n p + n^2 / 2) + 1 us p
    p, n = result["best"]["sizes"][:2]
    second = 2e-3 + 5e-6 * n + 7e-10 * (n * p + n**2 / 2) + 1e-6 * p
    assert result["best"]["seconds"][1] == pytest.approx(second)


def test_a_prefix_that_is_read_again_makes_chunks_fewer():
    """By hand, b = 1 and g = 1 of 4 tokens on one worker: each cut adds the tokens before it."""
    times = {"per_token": 1.0, "per_pair": 0.0, "per_prefix_token": 1.0}
    whole = pj.search.chunks(4, 1, **times)
    assert (whole.best.sizes, whole.value, whole.gap) == ((4,), 4.0, 0.0)
    # two chunks: the second reads 1 token at least
    assert pj.search.chunks(4, 1, num_chunks=2, **times).value == 5.0
    # three: 1 + 2
    assert pj.search.chunks(4, 1, num_chunks=3, **times).value == 7.0


def test_what_an_interrupt_leaves_is_said_after_each_number_of_chunks():
    answers = []
    times = {"fixed": 1e-3, "per_token": 1e-5, "per_pair": 5e-9, "per_prefix_token": 1e-4}
    result = pj.search.chunks(1000, 2, on_best=answers.append, **times)
    assert {interim.stopped for interim in answers} == {"interrupted"}
    assert answers[-1].value == result.value == min(interim.value for interim in answers)
    assert {interim.lower_bound for interim in answers} == {result.lower_bound}


def test_a_person_reads_the_time_and_the_chunks(call):
    options = "--prompt", 4096, "--num-chunks", 4, "--stage-times", "a=1ms,b=10us,c=5ns"
    code, out, _ = call(*COMMAND, *options, "--details")
    assert code == 0
    assert out.startswith("152 ms until the first token with 4 chunks of 723 to 1506 tokens")
    assert "equal sizes" in out
    assert "1506" in out
