"""The library as users see it: `import pipejax as pj` and nothing behind it."""

import jax
import numpy as np
import pytest

import pipejax as pj

LINKS = ("delay", "queued", "blocking", "rendezvous")
SCHEDULES = ("gpipe", "1f1b", "chimera", "zb-h1", "dualpipe-v")
UNEVEN = np.array([1.0, 1.5, 0.5, 1.25])


def build(name):
    return pj.schedules.build(name, num_workers=4, num_microbatches=8)


def stage_times(table, message=0.25):
    forward = np.resize(UNEVEN, table.num_stages)
    return pj.Costs(forward=forward, backward=2 * forward, transmit=message)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_uniform_pipeline_takes_what_the_textbook_says(name):
    run = pj.evaluate(build(name), pj.Costs(forward=1, backward=2))
    assert run.makespan == (8 + 4 - 1) * (1 + 2)  # (m + p - 1) (F + B)
    assert run.bubble_ratio == pytest.approx((4 - 1) / (8 + 4 - 1))  # (p - 1) / (m + p - 1)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_all_ways_to_a_makespan_agree(name, link, tmp_path):
    table = build(name)
    costs = stage_times(table)
    program, run = pj.lower(table, link=link), pj.evaluate(table, costs, link=link)
    assert float(pj.makespan(program, costs)) == run.makespan
    assert float(np.max(pj.finish_times(program, costs))) == run.makespan
    twice = jax.tree.map(lambda leaf: np.stack([leaf, 2 * np.asarray(leaf)]), costs)
    assert np.asarray(pj.makespans(program, twice)) == pytest.approx(
        [run.makespan, 2 * run.makespan], rel=1e-12
    )
    verdict = pj.verify(pj.certificate(run))
    assert verdict.ok
    assert verdict.makespan == pytest.approx(run.makespan, rel=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_gradient_times_its_costs_is_the_makespan(name):
    """Euler's identity: the step time is homogeneous of degree one in the costs."""
    table = build(name)
    costs = stage_times(table)
    batch = jax.tree.map(lambda leaf: np.asarray(leaf)[None], costs)
    makespans, slopes = pj.makespans_and_grad(pj.lower(table), batch, batch_size=1)
    products = jax.tree.map(lambda slope, cost: np.sum(slope * cost), slopes, batch)
    assert sum(jax.tree.leaves(products)) == pytest.approx(float(makespans[0]), rel=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_table_comes_back_from_its_file(name, tmp_path):
    table = build(name)
    pj.write_table(table, tmp_path / "table.json")
    again = pj.read_table(tmp_path / "table.json")
    costs = stage_times(table)
    assert pj.evaluate(again, costs).makespan == pj.evaluate(table, costs).makespan


def test_a_closed_form_gives_the_makespan_at_other_costs():
    form = pj.formula(pj.lower(build("1f1b")), ("F", "B", "c"))
    for forward, backward, message in [(1.0, 2.0, 0.0), (1.0, 1.0, 0.5), (0.5, 2.0, 3.0)]:
        costs = pj.Costs(forward=forward, backward=backward, transmit=message)
        value = form(F=forward, B=backward, c=message)
        assert value == pytest.approx(pj.evaluate(build("1f1b"), costs).makespan, rel=1e-12)


def test_a_model_on_a_system_has_costs_memory_and_reasons():
    table = build("1f1b")
    workload = pj.Workload(model=pj.load_model("gpt-22b"), minibatch=8, tensor_parallel=8)
    system = pj.load_system("a100")
    run = pj.evaluate(table, pj.stage_costs(workload, system, table))
    report = pj.step_report(run, workload, system)
    assert report.step_time >= run.makespan
    assert (pj.memory_bytes(workload, table) > 0).all()


def test_a_wrong_table_is_named():
    with pytest.raises(pj.ScheduleError, match=r"0F1"):
        pj.ScheduleTable.from_rows([["0F0", "0F1", "0B0"]])
