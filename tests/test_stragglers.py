"""Slow workers: a factor reaches the ops of its worker and no others, in every kind of table."""

import jax
import numpy as np
import pytest
import reference
import strategies

import pipejax as pj


class SlowRun(reference.Run):
    def __init__(self, factors, *arguments, **more):
        self.factors = factors
        super().__init__(*arguments, **more)

    def _run(self):
        for event in self.durations:
            if self.letters(event) not in ("", "O", "L", "WAIT_O", *strategies.SHARDING):
                self.durations[event] *= self.factors[event[0]]
            elif event[0] == "U":
                self.durations[event] *= self.factors[event[2]]
        super()._run()


def test_copies_of_a_stage_are_as_slow_as_their_workers(data):
    table = pj.schedules.build("chimera", num_workers=4, num_microbatches=4)
    costs = pj.Costs(forward=1.0, backward=2.0, update=0.5)
    costs = pj.costing.scaled_costs(costs, table, workers={1: 3.0})
    run = pj.evaluate(table, costs)
    assert run.busy.tolist() == [13.0, 39.0, 13.0, 13.0]
    updates = (run.program.phase == pj.Phase.U) & (run.program.worker >= 0)
    assert (
        run.node_duration[updates].tolist()
        == np.where(run.program.worker[updates] == 1, 1.5, 0.5).tolist()
    )
    rules = pj.costing.scaled_costs(pj.Costs(forward=1.0, backward=2.0), table, "compute@worker1*3")
    plain = pj.costing.scaled_costs(pj.Costs(forward=1.0, backward=2.0), table, workers={1: 3.0})
    assert np.array_equal(rules.forward, plain.forward)
    split = pj.read_table(data / "DualPipeV_4_8.csv")  # its fused pairs have a time of their own
    paired = pj.Costs(forward=1.0, backward=2.0, pair=2.5)
    slow = pj.evaluate(split, pj.costing.scaled_costs(paired, split, workers={2: 2.0}))
    ratio = slow.busy / pj.evaluate(split, paired).busy
    assert ratio.tolist() == [1.0, 1.0, 2.0, 1.0]


def test_factors_are_differentiable():
    """The derivative by a worker's factor is what the worker has of the critical path."""
    table = pj.schedules.build("chimera", num_workers=4, num_microbatches=4)
    costs, program = pj.Costs(forward=1.0, backward=2.0, transmit=0.125), pj.lower(table)

    def total(factors):
        return pj.makespan(program, pj.costing.scaled_costs(costs, table, workers=factors))

    factors = np.array([1.0, 1.3, 1.1, 1.7])
    with jax.enable_x64(True):
        slopes = jax.grad(total)(factors)
    run = pj.evaluate(table, pj.costing.scaled_costs(costs, table, workers=factors))
    on_path = run.critical & (run.program.worker >= 0)
    workers, seconds = run.program.worker[on_path], run.node_duration[on_path]
    expected = np.bincount(workers, seconds, minlength=4) / factors
    assert np.asarray(slopes) == pytest.approx(expected)


MODEL = {"minibatch": 8, "tensor_parallel": 8}


@pytest.mark.parametrize("name", ["1f1b", "chimera"])
def test_a_model_has_slow_workers_too(name):
    table = pj.schedules.build(name, num_workers=4, num_microbatches=4)
    system, model = pj.load_system("h100"), pj.load_model("gpt-22b")
    plain = pj.Workload(model, **MODEL)
    slow = pj.Workload(model, **MODEL, stragglers={2: 1.5})
    assert hash(slow.stragglers) == hash(((2, 1.5),))
    run = pj.evaluate(table, pj.stage_costs(slow, system, table))
    by_hand = pj.costing.scaled_costs(pj.stage_costs(plain, system, table), table, workers={2: 1.5})
    assert run.makespan == pj.evaluate(table, by_hand).makespan
    report = pj.step_report(run, slow, system)
    assert sum(report.breakdown.values()) == pytest.approx(run.step_time)
    with pytest.raises(ValueError, match="priced"):
        pj.step_report(run, plain, system)
    lengths = [2048, 1024, 1024, 2048]
    result = pj.stage_costs(slow, system, table, lengths=lengths)
    whole = pj.costing.scaled_costs(
        pj.stage_costs(plain, system, table, lengths=lengths), table, workers={2: 1.5}
    )
    assert jax.tree.all(jax.tree.map(np.array_equal, result, whole))


def test_slow_workers_on_the_command_line(answer, tmp_path):
    base = ["evaluate", "-s", "chimera", "-P", 4, "-M", 4, "-T", "F=1,B=2"]
    assert answer(*base, "--stragglers", "1=3,2=1.5")["busy"] == [12.0, 36.0, 18.0, 12.0]
    file = tmp_path / "costs.json"
    file.write_text('{"unit": "seconds", "F": 1, "B": 2, "stragglers": {"1": 3}}')
    message = ["evaluate", "-s", "1f1b", "-P", 4, "-M", 4, "--costs", file]
    assert answer(*message, "--stragglers", "1=2")["busy"] == [12.0, 72.0, 12.0, 12.0]
    model = ["--model", "gpt-22b", "--system", "h100", "--minibatch", 4]
    result = answer(*base[:-2], *model, "--stragglers", "1=3")
    assert result["busy"][1] == pytest.approx(3 * result["busy"][2])
    assert sum(result["breakdown"].values()) == pytest.approx(result["makespan"])
