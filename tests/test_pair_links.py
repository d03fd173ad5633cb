"""Link models per pair of workers and messages that are buffered, on tables done by hand."""

import dataclasses

import jax
import numpy as np
import pytest
from test_posting import COSTS, B, F, X, makespan, table

import pipejax as pj
from pipejax.schedules.table.links import format_pair_links, parse_pair_links

GPIPE = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
THREE = pj.schedules.build("gpipe", num_workers=3, num_microbatches=2)


def test_each_pair_follows_its_own_model():
    # 0-1 transmits one by one, 1-2 does not: 1F1 starts at F + 2X and all behind it X later
    links = pj.Links("delay", pair_links={(0, 1): "queued"})
    last_forward = (F + 2 * X) + F + X + F
    # gradients leave worker 2 B apart and worker 1 X apart
    first_gradient = last_forward + B + X + B
    assert makespan(THREE, links) == first_gradient + X + X + B
    swapped = dataclasses.replace(links, model="queued", pair_links={(1, 2): "delay"})
    assert makespan(THREE, swapped) == makespan(THREE, links)
    assert makespan(THREE, "delay") < makespan(THREE, links) <= makespan(THREE, "queued")


def test_a_pair_stands_for_both_directions_unless_the_other_is_named():
    delay, queued = makespan(GPIPE, "delay"), makespan(GPIPE, "queued")
    for pair in ((0, 1), (1, 0)):
        assert makespan(GPIPE, pj.Links("delay", pair_links={pair: "queued"})) == queued
    one_way = {(0, 1): "queued", (1, 0): "delay"}
    result = makespan(GPIPE, pj.Links("blocking", pair_links=one_way))
    assert result == makespan(
        GPIPE, pj.Links("queued", pair_links={(1, 0): "delay", (0, 1): "queued"})
    )
    assert delay < result < queued


def test_buffered_messages_do_not_meet():
    # activations are small and leave at once, gradients are posted by the program
    transmit = np.array([[[0.5]], [[X]]])
    costs = pj.Costs(forward=F, backward=B, transmit=transmit)
    links = pj.Links("rendezvous", posting="program", eager_below=1.0)
    # 1F1 runs behind 1F0; the second gradient is posted when 0B0 has ended
    assert makespan(GPIPE, links, costs) == (F + 0.5) + 2 * F + B + X + B + X + B
    # without buffers the second activation is posted when 1F0 has ended
    met = dataclasses.replace(links, eager_below=0.0)
    assert makespan(GPIPE, met, costs) == makespan(GPIPE, links, costs) + 0.5
    at_it = dataclasses.replace(links, eager_below=0.5)  # at the time is not below it
    assert makespan(GPIPE, at_it, costs) == makespan(GPIPE, met, costs)
    sent = pj.evaluate(GPIPE, costs, link=links).program.messages
    assert sent.eager.tolist() == [op == pj.Phase.SEND_F for op in sent.phase.tolist()]


def test_buffered_messages_are_queued_among_themselves():
    all_buffered = pj.Links("rendezvous", eager_below=2 * X)
    assert makespan(GPIPE, all_buffered) == makespan(GPIPE, "queued")


def test_no_row_waits_for_what_is_buffered():
    rows = "0F0 0SEND_F0 0WAIT_SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    held = table(rows, "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1")
    links = pj.Links("rendezvous", eager_below=2 * X)
    assert makespan(held, "rendezvous") > makespan(held, links) == makespan(held, "queued")


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_a_sharding_cell_does_not_wait_for_blocking_messages(seconds):
    posts = {"posting": "program", "pair_links": {(0, 1): "rendezvous"}}
    rows = [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1SEND_F0 1UNSHARD 1RECV_F1 1F1 1SEND_F1 "
        "1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1",
        "2RECV_F0 2F0 2RECV_F1 2F1 2B0 2SEND_B0 2B1 2SEND_B1",
    ]
    costs = dataclasses.replace(COSTS, unshard=seconds)
    run = pj.evaluate(table(*rows), costs, link=pj.Links("blocking", **posts))
    # the second transfer is posted when the cell ends; 1F1 waits for it, not for the first message
    second = (F + X) + F + seconds + X
    assert run.start[1, rows[1].split().index("1F1")] == second
    assert pj.verify(pj.certificate(run)).ok


EAGER = pj.Links("rendezvous", eager_below=1.0)
SMALL = pj.Costs(forward=F, backward=B, transmit=np.array([[[0.5]], [[X]]]))
OTHER = r"transmit time of 0SEND_F0 is not below eager_below = 1 s.*lower the table for these costs"


def test_a_program_is_for_its_eager_messages():
    program = pj.lower(GPIPE, link=EAGER, costs=SMALL)
    assert pj.makespan(program, SMALL) == makespan(GPIPE, EAGER, SMALL)
    for run in (pj.makespan, pj.finish_times, pj.analysis.slack):
        with pytest.raises(ValueError, match=OTHER):
            run(program, COSTS)
    with pytest.raises(ValueError, match="transmit time of 1SEND_B0 is below eager_below = 1 s"):
        pj.makespan(program, pj.Costs(forward=F, backward=B, transmit=0.5))
    with pytest.raises(ValueError, match=r"eager_below = 1 s needs known costs: .* got costs=None"):
        pj.lower(GPIPE, link=EAGER)


def test_a_batch_has_one_set_of_eager_messages():
    program = pj.lower(GPIPE, link=EAGER, costs=SMALL)
    rows = [np.array([[[x]], [[X]]]) for x in (0.0, 0.5, 0.75)]
    result = pj.makespans(program, pj.Costs(forward=F, backward=B, transmit=np.stack(rows)))
    one_by_one = [makespan(GPIPE, EAGER, pj.Costs(forward=F, backward=B, transmit=x)) for x in rows]
    assert result.tolist() == one_by_one
    rows.append(np.array([[[1.0]], [[X]]]))
    for run in (pj.makespans, pj.makespans_and_grad):
        with pytest.raises(ValueError, match=OTHER):
            run(program, pj.Costs(forward=F, backward=B, transmit=np.stack(rows)))


def test_each_microbatch_has_a_size_of_its_own():
    transmit = np.array([0.5, X]).reshape(1, 1, 1, 2)
    costs = pj.Costs(forward=F, backward=B, transmit=transmit)
    run = pj.evaluate(GPIPE, costs, link=EAGER)
    assert run.program.messages.eager.tolist() == [m == 0 for m in run.program.messages.microbatch]
    assert pj.makespan(pj.lower(GPIPE, link=EAGER, costs=costs), costs) == run.makespan
    with pytest.raises(ValueError, match="0SEND_F1 is below"):
        pj.makespan(
            pj.lower(GPIPE, link=EAGER, costs=costs), dataclasses.replace(costs, transmit=0.5)
        )


def test_a_message_of_a_fused_pair_is_of_its_own_pipe():
    transmit = np.array([[[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]], [[2.0, 2.0, 2.0], [1.0, 1.0, 1.0]]])
    costs = pj.Costs(forward=F, backward=B, transmit=transmit)
    fused = pj.schedules.build("dualpipe", num_workers=4, num_microbatches=8)
    links = pj.Links("rendezvous", eager_below=1.5)
    result = pj.makespan(pj.lower(fused, link=links, costs=costs), costs)
    assert result == makespan(fused, links, costs)


def test_what_a_trace_hides_is_refused():
    program = pj.lower(GPIPE, link=EAGER, costs=SMALL)

    def evaluate_form(forward, transmit):
        return pj.makespan(program, pj.Costs(forward=forward, backward=B, transmit=transmit))

    single = SMALL.transmit
    assert jax.grad(evaluate_form, argnums=1)(F, single).tolist() == pytest.approx(
        np.array([[[1.0]], [[2.0]]])
    )
    assert float(jax.jit(lambda forward: evaluate_form(forward, single))(F)) == makespan(
        GPIPE, EAGER, SMALL
    )
    hidden = "transmit is traced: which messages lie below eager_below cannot be seen"
    with pytest.raises(ValueError, match=hidden):
        jax.jit(evaluate_form)(F, single)
    with pytest.raises(ValueError, match=hidden):
        jax.vmap(evaluate_form, in_axes=(None, 0))(F, single[None])
    with pytest.raises(ValueError, match=OTHER):
        jax.grad(evaluate_form, argnums=1)(F, single * 4)


def test_posting_and_shared_links_need_one_pair_that_knows_them():
    for more in ({"posting": "program"}, {"eager_below": 1.0}, {"shared_links": "pairs"}):
        assert pj.Links("delay", pair_links={(0, 1): "rendezvous"}, **more)
        with pytest.raises(ValueError, match="link model"):
            pj.Links("delay", pair_links={(0, 1): "delay"}, **more)
    with pytest.raises(ValueError, match="pair_links names worker 7: workers are 0 to 1"):
        pj.lower(GPIPE, link=pj.Links(pair_links={(0, 7): "queued"}))


def test_a_message_under_delay_uses_no_shared_link():
    links = pj.Links("queued", shared_links="pairs", pair_links={(1, 2): "delay"})
    expected = (F + 2 * X) + F + X + F + B + X + B + X + X + B
    assert makespan(THREE, links) == expected


def test_text_of_pair_links():
    for text in ("0-1=rendezvous", "0-1=queued,1-0=delay,2-3=blocking"):
        assert format_pair_links(parse_pair_links(text, "x")) == text
    assert (
        pj.Links(pair_links={(2, 3): "Queued", (0, 1): "delay"}).text
        == "delay (0-1=delay,2-3=queued)"
    )
    for text in ("", "0-1", "0=queued", "0-1-2=queued", "0-1=queued,", "a-b=queued", "0-1=3"):
        with pytest.raises(ValueError, match="--pair-links: expected pairs of workers and link"):
            parse_pair_links(text, "--pair-links")


def test_a_deadlock_names_the_models():
    crossed = table(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    )
    met = pj.Links("queued", pair_links={(0, 1): "rendezvous"})
    says = r"deadlock under queued \(0-1=rendezvous\) with one queue per worker.*0SEND_F1/1RECV_F1"
    with pytest.raises(pj.ScheduleError, match=says):
        pj.lower(crossed, link=met)
    one_way = pj.Links("queued", pair_links={(1, 0): "rendezvous", (0, 1): "queued"})
    assert makespan(crossed, one_way) > 0  # activations do not meet
    eager = pj.Links("rendezvous", eager_below=2 * X)
    assert makespan(crossed, eager) == makespan(crossed, "queued")


RUN = ["evaluate", "--schedule", "gpipe", "--workers", "2", "--microbatches", "2"]
RUN += ["--stage-times", "F=1,B=2", "--comm", "3"]


def test_the_command_line_takes_models_of_pairs(answer):
    result = answer(
        *RUN, "--pair-links", "0-1=Rendezvous", "--queues", "pair", "--posting", "program"
    )
    links = pj.Links(queues="pair", posting="program", pair_links={(0, 1): "rendezvous"})
    assert result["makespan"] == makespan(GPIPE, links)
    expected = ("delay", "0-1=rendezvous", "pair", "program")
    assert tuple(result[k] for k in ("link", "pair_links", "queues", "posting")) == expected
    result = answer(*RUN, "--link", "rendezvous", "--eager-below", "4s")
    assert (result["eager_below"], result["eager_messages"]) == (4.0, 4)
    assert result["makespan"] == makespan(GPIPE, "queued")
    assert not {"pair_links", "eager_below"} & set(answer(*RUN))


def test_a_pair_without_messages_is_refused_on_the_command_line(mistake):
    three = ["evaluate", "-s", "gpipe", "-P", "3", "-M", "2", "--stage-times", "F=1,B=2"]
    says = "--pair-links 0-2=rendezvous has no effect: no message goes between workers 0 and 2"
    assert says in mistake(*three, "--pair-links", "0-1=queued,0-2=rendezvous")
    assert makespan(THREE, pj.Links(pair_links={(0, 2): "queued"})) == makespan(THREE, "delay")


def test_searches_say_which_links_they_do_not_know(mistake):
    solves = ["optimize", *RUN[1:], "--memory-limit", "2", "--pair-links", "0-1=rendezvous"]
    assert "optimize knows no --pair-links, got '0-1=rendezvous'" in mistake(*solves)
    tunes = ["tune", "-s", "1f1b", "-P", "2", "-m", "gpt-22b", "-y", "h100", "--minibatch", "8"]
    tunes += ["--link", "rendezvous", "--eager-below"]
    assert "--eager-below must be 0, got 0.001: " in mistake(*tunes, "1e-3")


def test_a_sweep_groups_systems_by_their_eager_messages(tmp_path):
    options = {"schedules": "1f1b", "workers": 4, "minibatch": 8, "microbatch_size": 1}
    options |= {"models": "gpt-22b", "systems": "h100", "link": "rendezvous", "posting": "program"}
    options |= {"pair_links": ["", "0-1=queued"], "eager_below": [0.0, 3e-3], "dtype": "float64"}
    options["outputs"] = ["bubble_ratio"]
    options |= {"system": {"network": {"bandwidth_GB_per_s": [1, 10, 100]}, "node": {"gpus": 1}}}
    data = pj.run_sweep(options, tmp_path / "out.zarr").load()
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    workload = pj.Workload(pj.load_model("gpt-22b"), minibatch=8)
    count = set()
    for bandwidth in data["network.bandwidth"].values.tolist():
        machine = dataclasses.replace(pj.load_system("h100"), gpus_per_node=1)
        costs = pj.stage_costs(workload, machine.with_number("network.bandwidth", bandwidth), table)
        for pair, below in ((p, b) for p in options["pair_links"] for b in options["eager_below"]):
            named = parse_pair_links(pair, "x") if pair else ()
            links = pj.Links("rendezvous", posting="program", pair_links=named, eager_below=below)
            at = {"pair_links": pair, "eager_below": below, "network.bandwidth": bandwidth}
            run = pj.evaluate(table, costs, link=links)
            count.add(int(run.program.messages.eager.sum()))
            result = data["step_time"].squeeze(drop=True).sel(at)
            assert float(result) == pytest.approx(run.makespan, rel=1e-12)
    assert len(count) == 3  # none, all, and those of the other pairs


def test_what_cannot_follow_buffered_messages_refuses_them():
    run = pj.evaluate(GPIPE, SMALL, link=EAGER)
    with pytest.raises(ValueError, match="a closed form knows no eager_below"):
        pj.formula(run.program)
    with pytest.raises(ValueError, match="order knows no eager_below"):
        pj.search.messages(GPIPE, SMALL, link=EAGER)
    long = pj.schedules.build("gpipe", num_workers=2, num_microbatches=8)
    with pytest.raises(ValueError, match=OTHER):
        pj.cycle_time(pj.lower(long, link=EAGER, costs=SMALL), COSTS)
