"""Posting, waits for a SEND, shared links and collectives, on tables small enough to do by hand."""

import dataclasses

import jax
import numpy as np
import pytest
import reference
import strategies
from daily import read_cases, with_cases
from hypothesis import given, strategies as st
from legal_sizes import WHOLE

import pipejax as pj
from pipejax.schedules.cells.ops import WAIT_SEND
from pipejax.schedules.table.links import (
    LINKS,
    format_pair_links,
    format_pairs,
    parse_pair_links,
    parse_pairs,
)

F, B, X = 1.0, 2.0, 3.0
COSTS = pj.Costs(forward=F, backward=B, transmit=X)
PAIRS = pj.Links("queued", shared_links="pairs")
# worker 0's queue has the first gradient before the second activation
CROSSED = [
    ["0F0", "0SEND_F0", "0F1", "0RECV_B0", "0SEND_F1", "0B0", "0RECV_B1", "0B1"],
    ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"],
]
CHIMERA = pj.schedules.build("chimera", num_workers=2, num_microbatches=2)


def makespan(table, link, costs=COSTS):
    return pj.evaluate(table, costs, link=link).makespan


def table(*rows):
    return pj.ScheduleTable.from_rows([row.split() for row in rows])


@pytest.mark.parametrize("queues", ["worker", "pair", "direction"])
def test_gpipe_with_posting_by_program(queues):  # M (F + c): the next RECV is posted after an F
    count, c = 5, 0.5
    gpipe = pj.schedules.build("gpipe", num_workers=2, num_microbatches=count)
    costs = pj.Costs(forward=F, backward=B, transmit=c)
    early = F + c + count * F + count * B + c + B
    assert makespan(gpipe, pj.Links("rendezvous", queues), costs) == early
    late = F + count * (c + F) + B + count * (c + B)
    assert makespan(gpipe, pj.Links("rendezvous", queues, posting="program"), costs) == late


def test_wait_holds_the_row():  # 0F1 starts when the first activation has arrived
    bare = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    other = "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1"
    free, held = table(bare, other), table(bare.replace("0F1 ", "0WAIT_SEND_F0 0F1 "), other)
    costs = pj.Costs(forward=5.0, backward=B, transmit=X)
    # worker 1 has run its first forward before the second activation arrives
    after = 5 + max(B + X, 2 * B) + X + B
    assert makespan(free, "rendezvous", costs) == (5 + 5 + X) + after
    assert makespan(held, "rendezvous", costs) == (5 + X) + (5 + X) + after
    assert makespan(held, "delay", costs) == makespan(free, "delay", costs)
    # waits of its own, where they delay nothing
    result = pj.search.messages(held, costs, iterations=0)
    assert (result.baselines["own"], result.value) == (31, 28)
    assert int(np.isin(result.best.table.phase, WAIT_SEND).sum()) == 4


def test_a_wait_that_ends_last_does_not_lengthen_the_span():
    rows = [
        "0F0 0SEND_F0 0RECV_B0 0B0 1RECV_F1 1F1 1B1 1SEND_B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 0F1 0SEND_F1 0RECV_B1 0B1",
    ]
    placed = {"placement": [[0, 1], [1, 0]], "pipe_of_microbatch": [0, 1]}
    costs = pj.Costs(forward=F, backward=np.array([0.5, B]), transmit=X)
    for wait in ("", " 1WAIT_SEND_B1"):
        both = pj.ScheduleTable.from_rows([(rows[0] + wait).split(), rows[1].split()], **placed)
        # worker 1's own span begins F + X later and ends X + 0.5 later
        last = pj.evaluate(both, costs, link="rendezvous")
        assert last.max_span == last.makespan - X - 0.5


def test_an_offload_behind_a_wait():  # blocking holds the next op back, but no offload
    for wait in ("", "0WAIT_SEND_F0 "):
        row = f"0F0 0SEND_F0 {wait}0O0 0WAIT_O0 0RECV_B0 0L0 0B0"
        held = table(row, "1RECV_F0 1F0 1B0 1SEND_B0")
        costs = pj.Costs(forward=F, backward=B, offload=1.0, transmit=X)
        run = pj.evaluate(held, costs, link="blocking")
        assert run.start[0][row.split().index("0O0")] == F


def test_both_directions_of_a_cable():
    rows = "0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"
    both = table(*rows)
    # each way of its own: gradients leave at 7, 10 and 13, and the last one costs X + B more
    assert makespan(both, "queued") == 13 + X + B
    # unit slots: activations are made at 1, 2, 3, gradients at 4, 7, 10; so three activations,
    # then three gradients, one after the other
    assert makespan(both, PAIRS) == F + 6 * X + B
    one_way = pj.Links("queued", shared_links=[[(0, 1)], [(1, 0)]])
    assert makespan(both, one_way) == makespan(both, "queued")
    assert makespan(both, pj.Links("queued", shared_links=[[(1, 0), (0, 1)]])) == F + 6 * X + B


def test_one_card_of_two_workers():  # 0 sends to 1 and 2 sends to 3 over one link, nothing else
    rows = [[f"{s}F0", f"{s}F1", f"{s}B0", f"{s}B1"] for s in range(3)]
    three = pj.ScheduleTable.from_rows(rows)
    card = pj.Links("queued", shared_links=(((0, 1), (1, 2)),))
    costs = pj.Costs(forward=F, backward=B, transmit=np.array([[[X, X]], [[0.0, 0.0]]]))
    # 0-1: 1 to 4 and 4 to 7; 1F0 ends at 5; without sharing 1-2: 5 to 8 and 8 to 11
    assert makespan(three, "queued", costs) == 11 + F + B + B + B + B
    # 1F0 ends at slot 2 as 0F1 does: worker 0 first, then 1-2 from 7 to 10 and from 10 to 13
    assert makespan(three, card, costs) == 13 + F + B + B + B + B


def test_all_reduces_of_a_worker_go_one_by_one():
    costs = pj.Costs(forward=F, backward=B, all_reduce=5.0)
    end = (F + F + B) + 5.0 + 5.0  # the first is made by the first backward, the second waits
    one_worker = table("0F0 1F0 1B0 0B0")
    updated = table("0F0 1F0 1B0 0B0 0U0 1U0")  # the update that comes first waits for both
    for entry in (one_worker, CHIMERA, updated):
        for link in LINKS:
            assert makespan(entry, link, costs) == end
    # the order is that of unit slots, whatever the times
    late = pj.Costs(forward=F, backward=B, all_reduce=np.array([1.0, 9.0]))
    assert makespan(one_worker, "delay", late) == (F + F + B) + 9.0 + 1.0


def test_all_reduces_use_shared_links():
    costs = pj.Costs(forward=F, backward=B, transmit=1.0, all_reduce=3.0)
    # 0F0 and 0F1 end at 1, their messages at 2; backwards 3 to 5, gradients 5 to 6, last ones
    # 6 to 8; stage 1 is reduced from 5 to 8, stage 0 after that
    assert makespan(CHIMERA, "queued", costs) == 8 + 3
    # one after the other: messages 1 to 2, 2 to 3; worker 1 runs 2 to 5, worker 0 3 to 6; in unit
    # slots both gradients are made at 4, worker 0's first: 6 to 7 and 7 to 8; stage 1 is reduced
    # from 8 to 11; the last backward ends at 10
    assert makespan(CHIMERA, PAIRS, costs) == 11 + 3
    apart = pj.Links("queued", shared_links=[[(0, 1)], [(1, 0)]])  # it uses both, each is free at 6
    assert makespan(CHIMERA, apart, costs) == 6 + 3 + 3


def test_an_order_that_shared_links_cannot_follow_is_a_deadlock():
    crossed = pj.ScheduleTable.from_rows(CROSSED)
    links = pj.Links("rendezvous", shared_links="pairs", posting="program")
    says = "one queue per worker and posting by program and shared links: .*0SEND_F1/1RECV_F1"
    with pytest.raises(pj.ScheduleError, match=f"deadlock under rendezvous with {says}"):
        pj.lower(crossed, link=links)
    free = reference.Costs({}, {}, {})
    with pytest.raises(reference.DeadlockError):
        reference.Run(CROSSED, [0, 0], free, "rendezvous", shared_links="pairs")
    assert makespan(crossed, PAIRS) > 0  # where the cells are not followed, it runs


def test_a_deadlock_names_all_reduces():
    # Microbatches 0 and 1 go through workers 0, 1, 2 and back to 0, microbatch 2 through 3, 4, 5, 3.
    # In unit slots stage 3 is done at 9 and 1B0 ends at 10, so its message comes after the
    # all-reduce on the link; but worker 0's queue has it before the activation of 3F1.
    rows = ["0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1"]
    rows += ["0F2 3F2 3B2 0B2", "1F2 1B2", "2F2 2B2"]
    placed = {"placement": [[0, 1, 2, 0], [3, 4, 5, 3]], "pipe_of_microbatch": [0, 0, 1]}
    cells = [row.split() for row in rows]
    both = pj.links.insert_transfers(pj.ScheduleTable.from_rows(cells, **placed))
    cells = [[str(op) for cell in row for op in cell] for row in both.rows()]
    for row, moved, front in (
        (0, "0RECV_B0", "3F1"),
        (0, "3RECV_F1", "3F1"),
        (2, "2SEND_F1", "2RECV_B1"),
    ):
        cells[row].remove(moved)
        cells[row].insert(cells[row].index(front), moved)
    crossed = pj.ScheduleTable.from_rows(cells, **placed)
    assert makespan(crossed, "rendezvous") > 0
    links = pj.Links("rendezvous", shared_links=[[(0, 3), (3, 0), (1, 0)]])
    with pytest.raises(pj.ScheduleError, match=r"shared links: .*3A \(all-reduce\)") as caught:
        pj.lower(crossed, link=links)
    assert ">" in caught.value.grid
    assert makespan(both, links) > 0


@pytest.mark.parametrize("name", WHOLE)
def test_posting_by_program_is_that_of_the_cells_put_in(name):
    built = pj.schedules.build(name, num_workers=4, num_microbatches=8)
    costs = pj.Costs.uniform(built, forward=1.0, backward=2.0, transfer=0.3, offload=0.5)
    for queues in ("worker", "pair", "direction"):
        links = pj.Links("rendezvous", queues, posting="program")
        run = pj.evaluate(built, costs, link=links)
        assert run.makespan == makespan(pj.links.insert_transfers(built), links, costs)
        assert run.makespan >= makespan(built, "delay", costs)
        assert run.start.shape == (built.num_workers, built.num_slots)


def test_text_of_shared_links():
    for text in ("pairs", "0-1+1-0,2-3+1-3"):
        assert format_pairs(parse_pairs(text, "shared_links")) == text
    assert parse_pairs("0-1 + 1-0", "x") == (((0, 1), (1, 0)),)
    assert pj.Links("queued", shared_links="Pairs") == PAIRS
    for text in ("", "0", "0-1-2", "0-1,", "a-b", "0+1", "-1-2", "pair"):
        with pytest.raises(ValueError, match=r"--shared-links: expected pairs, or pairs of"):
            parse_pairs(text, "--shared-links")


@given(data=st.data())
def test_an_order_of_unit_slots_cannot_deadlock(data):  # all-reduces, updates in rows included
    any_table, _ = data.draw(strategies.tables())
    for model in ("queued", "blocking", "rendezvous"):
        more = data.draw(strategies.carried(model, any_table.num_workers))
        queues = data.draw(st.sampled_from(["worker", "pair", "direction"]))
        program = pj.lower(
            any_table,
            link=pj.Links(model, queues, **{**more, "posting": "early", "eager_below": 0.0}),
        )
        nodes = np.arange(program.num_nodes)[:, None]
        assert np.all(nodes >= program.preds)  # an order in which all can run


RUN = ["evaluate", "--schedule", "gpipe", "--workers", "2", "--microbatches", "5"]
RUN += ["--stage-times", "F=1,B=2", "--comm", "0.5"]


def test_the_command_line_posts_and_shares(answer):
    early = answer(*RUN, "--link", "rendezvous")
    assert early["makespan"] == 1 + 0.5 + 5 * 1 + 5 * 2 + 0.5 + 2
    assert not {"posting", "shared_links"} & set(early)
    late = answer(*RUN, "--link", "rendezvous", "--posting", "program")
    assert (late["makespan"], late["posting"]) == (1 + 5 * 1.5 + 2 + 5 * 2.5, "program")
    shared = answer(*RUN, "--link", "queued", "--shared-links", "0-1 + 1-0")
    assert shared["shared_links"] == "0-1+1-0"


@with_cases("schedule options warning", *read_cases("links that carry nothing"))
def test_links_that_carry_nothing_give_a_warning(call, schedule, options, warning):
    run = ["evaluate", "-s", schedule, "-P", "4", "-M", "8", "-T", "F=1,I=1,W=1"]
    code, _, err = call(*run, *options.split())
    assert (code, f"{warning} has no effect" in err) == (0, bool(warning))


def test_a_sweep_has_axes_of_posting_and_shared_links():
    grid = {"schedules": "1f1b", "workers": 2, "minibatch": 2, "microbatch_size": 1}
    grid |= {"models": "gpt-22b", "systems": "h100", "link": "rendezvous"}
    axes = {"posting": ["early", "program"], "shared_links": ["", "pairs", "0-1+1-0"]}
    assert pj.read_sweep(grid | axes).sizes == {"posting": 2, "shared_links": 3}


# Link models per pair of workers and messages that are buffered, on tables done by hand

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


def test_a_batch_has_one_set_of_eager_messages():
    program = pj.lower(GPIPE, link=EAGER, costs=SMALL)
    rows = [np.array([[[x]], [[X]]]) for x in (0.0, 0.5, 0.75)]
    result = pj.makespans(program, pj.Costs(forward=F, backward=B, transmit=np.stack(rows)))
    one_by_one = [makespan(GPIPE, EAGER, pj.Costs(forward=F, backward=B, transmit=x)) for x in rows]
    assert result.tolist() == one_by_one


def test_each_microbatch_has_a_size_of_its_own():
    transmit = np.array([0.5, X]).reshape(1, 1, 1, 2)
    costs = pj.Costs(forward=F, backward=B, transmit=transmit)
    run = pj.evaluate(GPIPE, costs, link=EAGER)
    assert run.program.messages.eager.tolist() == [m == 0 for m in run.program.messages.microbatch]
    program = pj.lower(GPIPE, link=EAGER, costs=costs)
    assert pj.makespan(program, costs) == run.makespan
    with pytest.raises(ValueError, match="0SEND_F1 is below"):
        pj.makespan(program, dataclasses.replace(costs, transmit=0.5))


def test_what_a_trace_hides_is_refused():
    program = pj.lower(GPIPE, link=EAGER, costs=SMALL)

    def evaluate_form(forward, transmit):
        return pj.makespan(program, pj.Costs(forward=forward, backward=B, transmit=transmit))

    single = SMALL.transmit
    assert jax.grad(evaluate_form, argnums=1)(F, single).tolist() == pytest.approx(
        np.array([[[1.0]], [[2.0]]])
    )
    seconds = jax.jit(lambda forward: evaluate_form(forward, single))(F)
    assert float(seconds) == makespan(GPIPE, EAGER, SMALL)
    hidden = "transmit is traced, so messages cannot be compared with eager_below"
    with pytest.raises(ValueError, match=hidden):
        jax.jit(evaluate_form)(F, single)
    with pytest.raises(ValueError, match=hidden):
        jax.vmap(evaluate_form, in_axes=(None, 0))(F, single[None])
    with pytest.raises(ValueError, match=OTHER):
        jax.grad(evaluate_form, argnums=1)(F, single * 4)


def test_posting_and_shared_links_need_one_pair_that_knows_them():
    for more in ({"posting": "program"}, {"eager_below": 1.0}, {"shared_links": "pairs"}):
        assert pj.Links("delay", pair_links={(0, 1): "rendezvous"}, **more)


def test_a_message_under_delay_uses_no_shared_link():
    links = pj.Links("queued", shared_links="pairs", pair_links={(1, 2): "delay"})
    expected = (F + 2 * X) + F + X + F + B + X + B + X + X + B
    assert makespan(THREE, links) == expected


def test_text_of_pair_links():
    for text in ("0-1=rendezvous", "0-1=queued,1-0=delay,2-3=blocking"):
        assert format_pair_links(parse_pair_links(text, "x")) == text
    links = pj.Links(pair_links={(2, 3): "Queued", (0, 1): "delay"})
    assert links.text == "delay (0-1=delay,2-3=queued)"
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


PAIR_RUN = ["evaluate", "--schedule", "gpipe", "--workers", "2", "--microbatches", "2"]
PAIR_RUN += ["--stage-times", "F=1,B=2", "--comm", "3"]


def test_the_command_line_takes_models_of_pairs(answer):
    pairs = "--pair-links", "0-1=Rendezvous", "--queues", "pair", "--posting", "program"
    result = answer(*PAIR_RUN, *pairs)
    links = pj.Links(queues="pair", posting="program", pair_links={(0, 1): "rendezvous"})
    assert result["makespan"] == makespan(GPIPE, links)
    expected = ("delay", "0-1=rendezvous", "pair", "program")
    assert tuple(result[k] for k in ("link", "pair_links", "queues", "posting")) == expected
    result = answer(*PAIR_RUN, "--link", "rendezvous", "--eager-below", "4s")
    assert (result["eager_below"], result["eager_messages"]) == (4.0, 4)
    assert result["makespan"] == makespan(GPIPE, "queued")
    assert not {"pair_links", "eager_below"} & set(answer(*PAIR_RUN))


def test_models_of_pairs_without_messages_change_nothing():
    assert makespan(THREE, pj.Links(pair_links={(0, 2): "queued"})) == makespan(THREE, "delay")
