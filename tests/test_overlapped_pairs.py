"""The overlap factor of fused pairs: one run, batches, derivatives, files, sweeps, commands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pipejax as pj
from pipejax.costs.costs import unchecked_costs

FACTORS = [0.0, 0.3, 1.0, 1.5]


def make_table(name="dualpipe", workers=4, microbatches=8):
    return pj.schedules.build(name, num_workers=workers, num_microbatches=microbatches)


def draw_samples(table, size, seed=0):
    rng = np.random.default_rng(seed)
    return rng.random((2, size, table.num_stages))


@pytest.mark.parametrize("factor", FACTORS)
def test_a_pair_takes_the_longer_op_and_part_of_the_shorter(factor):
    table = pj.ScheduleTable.from_rows([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]])
    for forward, backward in ((1.0, 2.0), (2.0, 1.0), (1.5, 1.5)):
        costs = pj.Costs(forward=forward, backward=backward, pair_factor=factor)
        pair = max(forward, backward) + factor * min(forward, backward)
        assert pj.evaluate(table, costs).makespan == forward + pair + backward


@pytest.mark.slow
def test_batches_are_their_single_runs():
    for name, factor in (("dualpipe", 0.3), ("dualpipe-v", 0.0)):
        table = make_table(name)
        program, times = pj.lower(table), draw_samples(table, 5)
        costs = pj.Costs(forward=times[0], backward=times[1], pair_factor=factor)
        alone = [
            pj.Costs(forward=f, backward=b, pair_factor=factor) for f, b in zip(*times, strict=True)
        ]
        expected = [pj.evaluate(table, single).makespan for single in alone]
        np.testing.assert_allclose(pj.makespans(program, costs), expected, rtol=1e-13)
        values, counts = pj.makespans_and_grad(program, costs)
        np.testing.assert_allclose(values, expected, rtol=1e-13)
        for k, single in enumerate(alone):
            result = jax.grad(pj.makespan, argnums=1)(program, jax.tree.map(jnp.asarray, single))
            for x in ("forward", "backward", "input_grad", "weight_grad", "pair_factor"):
                np.testing.assert_allclose(getattr(counts, x)[k], getattr(result, x), rtol=1e-12)


def test_the_factor_has_a_derivative():
    table = make_table()
    program, (forward, backward) = pj.lower(table), draw_samples(table, 3)

    def total(factor):
        costs = pj.Costs(forward=forward, backward=backward, pair_factor=factor)
        return pj.makespans(program, costs).sum()

    step = 1e-6
    slope = jax.grad(total)(jnp.full(3, 0.4)).sum()
    difference = (total(np.full(3, 0.4 + step)) - total(np.full(3, 0.4 - step))) / (2 * step)
    assert float(slope) == pytest.approx(float(difference), rel=1e-6)


def test_pair_and_its_factor_are_not_given_together():
    with pytest.raises(ValueError, match="pair and pair_factor both say"):
        pj.Costs(forward=1.0, backward=2.0, pair=2.0, pair_factor=0.5)
    with pytest.raises(ValueError, match="pair_factor makes no sum"):
        pj.formula(
            pj.lower(make_table()), {"x": unchecked_costs({"forward": 1.0, "pair_factor": 0.5})}
        )


def test_a_file_gives_it_without_a_unit(tmp_path):
    path, table = tmp_path / "costs.json", make_table()
    path.write_text('{"unit": "milliseconds", "F": 1, "B": 2, "pair_factor": 0.5}')
    costs = pj.read_costs(path, table)
    assert np.ravel(costs.pair_factor).tolist() == [0.5] * 4
    assert pj.Costs.per_worker(table, forward=1.0, backward=2.0, pair_factor=0.5).pair_factor == 0.5
    with pytest.raises(ValueError, match="unknown cost 'pair_factor'"):
        pj.costing.scaled_costs(costs, table, "pair_factor*2")


def test_the_option(answer, call):
    options = "evaluate", "-s", "dualpipe", "-P", 8, "-M", 20, "--stage-times", "F=1,B=2"
    assert answer(*options)["makespan"] == 66.0
    assert answer(*options, "--pair-factor", 0)["makespan"] == 52.0
    for more, message in (
        (("--pair-factor", -1), "--pair-factor must be a finite number of at least 0"),
        (("-s", "1f1b", "--pair-factor", 0.5), "no fused pair in 1f1b"),
    ):
        arguments = options if "-s" not in more else (options[0], *options[3:])
        code, _, text = call(*arguments, *more)
        assert code == 2
        assert message in text


ONE, SPLIT = "0F0,(0F1;0B0)OVERLAP_F_B,0B1", "0F0,(0F1;0I0)OVERLAP_F_B,0W0,0I1,0W1"
TWO = "0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1"
PAIR_TIMES = {  # rows, options and the makespan by hand
    # 0F0 1, the pair 2.5, 0B1 2
    "of a stage": (ONE, "--stage-times F=1,B=2,pair=2.5", 5.5),
    # 0F0 1, the pair 1.5, then 0W0, 0I1 and 0W1 of 1 each; units may differ
    "with a split backward": (SPLIT, "--stage-times F=1s,I=1,W=1,pair=1500ms", 5.5),
    # two stages on the worker take half each: F 1, B 2, pair 2.5; 1 + 1 + 2.5 + 2 + 1 + 2 + 2
    "of a worker": (TWO, "--worker-times F=2,B=4,pair=5", 11.5),
    # measured in one stage, so that each of two takes half: as above
    "of other stages": (TWO, "--stage-times F=2,B=4,pair=5 --measured-stages 1", 11.5),
    # all that the slow worker does takes twice as long: 2 (1 + 2.5 + 2)
    "on a slow worker": (ONE, "--stage-times F=1,B=2,pair=2.5 --stragglers 0=2", 11),
}


@pytest.mark.parametrize("case", PAIR_TIMES)
def test_the_time_of_a_pair_among_the_times(case, answer, tmp_path):
    row, options, seconds = PAIR_TIMES[case]
    path = tmp_path / "pairs.csv"
    path.write_text(row + "\n")
    assert answer("evaluate", "--table", path, *options.split())["makespan"] == seconds


@pytest.mark.parametrize(
    ("schedule", "times", "factor"),
    [("dualpipe-v", "F=1,I=1,W=1", 0.5), ("dualpipe", "F=1,B=2", 0.5), ("dualpipe", "F=2,B=2", 0)],
)
def test_a_pair_is_what_its_factor_says(schedule, times, factor, answer):
    """Max(F, B) + k min(F, B): 2 + 0.5 x 1 = 2.5, and 2 + 0 x 2 = 2."""
    pair = 2.5 if factor else 2
    options = "evaluate", "-s", schedule, "-P", 4, "-M", 10, "--stage-times"
    by_factor = answer(*options, times, "--pair-factor", factor)["makespan"]
    assert answer(*options, f"{times},pair={pair}")["makespan"] == by_factor


def test_compare_takes_the_time_of_a_pair_where_any_schedule_has_one(answer):
    """Under 1F1B it has no effect: (M + P - 1) (F + B) = 13 x 3 s."""
    options = "compare", "--schedules", "1f1b,dualpipe", "--workers", 4, "--microbatches", 10
    rows = answer(*options, "--worker-times", "F=1,B=2,pair=2.5")["rows"]
    assert {row["schedule"]: row["makespan"] for row in rows}["1f1b"] == 39


@pytest.mark.slow
def test_sweeps_take_it(tmp_path):
    grid = {"schedules": "dualpipe", "models": "gpt-22b", "systems": "h100", "workers": 4}
    grid |= {"minibatch": 8, "microbatch_size": 1, "tensor_parallel": 8}
    grid |= {"pair_factor": [0.25, 1.0], "outputs": ["bubble_ratio"]}
    swept = pj.run_sweep(grid, tmp_path / "out.zarr").load()
    system, model = pj.load_system("h100"), pj.load_model("gpt-22b")
    for k, factor in enumerate((0.25, 1.0)):
        workload = pj.Workload(model, 8, tensor_parallel=8, pair_factor=factor)
        run = pj.evaluate(make_table(), pj.stage_costs(workload, system, make_table()))
        assert np.ravel(swept["step_time"])[k] == pytest.approx(run.makespan, rel=1e-5)
        busy = run.busy.mean() / run.makespan
        assert np.ravel(swept["bubble_ratio"])[k] == pytest.approx(1 - busy, rel=1e-4)
