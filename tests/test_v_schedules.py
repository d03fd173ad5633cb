"""V schedules against their published memory, bubbles and rows."""

import pytest
from test_published import RECORDS, records

import pipejax as pj
from pipejax.analysis.closed_forms import closed_form
from pipejax.schedules.table.held_activations import peak_in_flight

EQUAL = {"forward": 1.0, "input_grad": 1.0, "weight_grad": 1.0}
WORKERS = (2, 3, 4, 5, 8, 16)  # and all microbatches up to twice as many, some more


def built(name, workers, microbatches, **options):
    return pj.schedules.build(name, num_workers=workers, num_microbatches=microbatches, **options)


def span_idle(table):
    """Idle time in the longest span of a worker at F = I = W = 1, without messages."""
    run = pj.evaluate(table, pj.Costs(**EQUAL))
    return run.max_span - 6 * table.num_microbatches


@pytest.mark.parametrize("record", records("cm.unit."))
@pytest.mark.usefixtures("unchecked")
def test_published_bubbles_and_peaks(record):  # "any of 2p, 3p, 8p": all three
    setting, value = record["setting"], record["value"]
    for per_worker in (2, 3, 8):
        table = built(setting["schedule"].lower(), setting["p"], per_worker * setting["p"])
        assert span_idle(table) == value["bubble"]
        assert peak_in_flight(table).max() == value["peak_chunks"]


@pytest.mark.parametrize("name", ["v-half", "v-min"])
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.usefixtures("unchecked")
def test_closed_forms_hold_where_they_say(name, workers):
    every = 1 if workers < 8 else 5
    for m in (*range(1, 2 * workers + 1, every), 3 * workers, 8 * workers):
        table = built(name, workers, m)
        form, shape = closed_form(table)
        run = pj.evaluate(table, pj.Costs(**EQUAL))
        assert peak_in_flight(table).max() == form.in_flight[1](shape, 0)
        if form.holds(shape):
            published = form.span_bubble_ratio[1](shape)
            assert run.span_bubble_ratio == pytest.approx(published, abs=1e-12), m


def test_memory_is_what_the_authors_say():  # in microbatches, of two stages on a worker
    said = RECORDS["cm.hf"]["value"]
    assert (said["V-Min"], said["V-Half"]) == ("(p+4)//3", "(p+2)//2")
    for p in WORKERS:
        for name, microbatches in (("v-min", (p + 4) // 3), ("v-half", (p + 2) // 2)):
            assert peak_in_flight(built(name, p, 2 * p)).max() == 2 * microbatches
