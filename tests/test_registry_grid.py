"""Registered schedules at many sizes: legal, with published bubbles and activations."""

import pytest
from legal_sizes import SLICED, is_legal

import pipejax as pj
from pipejax.analysis.comparison.comparison import closed_form
from pipejax.schedules import REGISTRY
from pipejax.schedules.cells.ops import COMPUTE, Phase

LINKS = [pj.Links(model) for model in ("delay", "queued", "blocking")]
LINKS += [pj.Links("rendezvous", queues=queues) for queues in ("worker", "pair", "direction")]
LINKS += [pj.Links("rendezvous", queues=q, posting="program") for q in ("worker", "direction")]
LINKS += [pj.Links(model, shared_links="pairs") for model in ("queued", "rendezvous")]
OPTIONS = {"ada-offload": {"memory_limit": 2}}
TIMES = {  # of F, I and W, by what a form assumes
    "F = B": (1.0, 0.5, 0.5),
    "F = I = W": (1.0, 1.0, 1.0),
    "": (1.0, 1.25, 0.5),
}


def sizes(workers, microbatches):
    """Sizes (P, M) as functions of P."""
    return [(p, m) for p in workers for m in dict.fromkeys(microbatches(p))]


def check(name, p, m, links):
    if not is_legal(name, p, m):
        return
    options = OPTIONS.get(name, {})
    table = pj.schedules.build(name, num_workers=p, num_microbatches=m, **options)
    # the search for a table's schedule skips builders without this option
    assert Phase.O not in table.used_phases or "offload" in REGISTRY[name].options
    done = table.ops.take(table.ops.phase == pj.Phase.F)
    assert len(done.cell) == table.num_stages * m * table.grammar.slices
    assert set(table.ops.phase.tolist()) & {*COMPUTE}
    for link in links:
        if link.posting == "early" or name not in SLICED:
            pj.lower(table, link=link)  # a deadlock is an error
    form, shape = closed_form(table)
    if not form.holds(shape):
        return
    f, i, w = next(times for what, times in TIMES.items() if what in form.assumes)
    run = pj.evaluate(table, pj.Costs(forward=f, input_grad=i, weight_grad=w, offload=0.0))
    for printed, result in (
        (form.bubble_ratio, run.bubble_ratio),
        (form.span_bubble_ratio, run.span_bubble_ratio),
    ):
        if printed is not None:
            assert result == pytest.approx(printed[1](shape), abs=1e-12)
    if form.in_flight is not None and (name != "chimera" or m == p):
        assert run.peak_in_flight.max() == max(form.in_flight[1](shape, r) for r in range(p))


@pytest.mark.parametrize("name", REGISTRY)
def test_small_sizes(name):
    for p, m in sizes((2, 3, 4), lambda p: (1, p, 2 * p, 3 * p)):
        check(name, p, m, [LINKS[(p + m + k) % len(LINKS)] for k in range(3)])


@pytest.mark.slow
@pytest.mark.parametrize("p", [2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("name", REGISTRY)
def test_all_sizes(name, p):
    for _, m in sizes((p,), lambda p: (*range(1, 2 * p + 1), 3 * p, 8 * p)):
        check(name, p, m, LINKS)
