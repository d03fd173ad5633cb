"""Encoders before a model: an event loop of the tests, closed forms, and bubbles that are filled."""

import numpy as np
import pytest
from legal_sizes import build
from reference import assert_runs, parsed, texts

import pipejax as pj


def to_waits(encoders, entry, stages):
    """A forward waits for those before it, of the model's first stage all encoders' last ones."""
    first = encoders * entry
    durations = [entry * (e + 1) - 1 for e in range(encoders)]

    def before(stage):
        if stage == first:
            return durations
        return [stage - 1] if stage > first or stage % entry else []

    def waits(letters, stage, m):
        if letters == "F":
            return [(("F", other, m), True) for other in before(stage)]
        after = [other for other in range(stages) if stage in before(other)]
        return [(("F", stage, m), False), *((("B", other, m), True) for other in after)]

    return waits


@pytest.mark.parametrize("name", ["encoders-1f1b", "filled-encoders"])
@pytest.mark.parametrize(("encoders", "entry"), [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_runs_as_the_event_loop(name, encoders, entry):
    rng = np.random.default_rng(encoders)
    for workers, microbatches in ((4, 1), (6, 3), (6, 8)):
        if name == "encoders-1f1b" and encoders * entry >= workers:
            continue
        options = {"encoders": encoders, "encoder_stages": entry}
        table = build(name, workers, microbatches, **options)
        times = {"F": rng.integers(1, 20) / 8, "B": rng.integers(1, 20) / 8}
        waits = to_waits(encoders, entry, table.num_stages)
        costs = pj.Costs(forward=times["F"], backward=times["B"], transmit=0.25)
        assert_runs(table, costs, waits)


@pytest.mark.parametrize("encoders", [1, 2, 3])
@pytest.mark.parametrize(("entry", "model"), [(1, 1), (1, 4), (2, 3), (3, 2)])
def test_encoders_side_by_side_are_one_chain_with_the_model(encoders, entry, model):
    """1F1B of K + L stages takes (M + K + L - 1)(F + B), however many encoders there are."""
    for microbatches in (1, 4, 9):
        workers = encoders * entry + model
        options = {"encoders": encoders, "encoder_stages": entry}
        table = build("encoders-1f1b", workers, microbatches, **options)
        result = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))
        assert result.makespan == 3.0 * (microbatches + entry + model - 1)
        chain = [entry + model - k for k in range(entry)] * encoders
        held = [min(n, microbatches) for n in [*chain, *range(model, 0, -1)]]
        assert result.peak_in_flight.tolist() == held


def filled_run(workers, microbatches, encoders, depth, share, **options):
    options |= {"encoders": encoders, "encoder_stages": depth, "encoder_share": share}
    table = build("filled-encoders", workers, microbatches, **options)
    parts = np.array([share] * (encoders * depth) + [1.0] * workers)
    return pj.evaluate(table, pj.Costs(forward=parts, backward=2 * parts))


@pytest.mark.parametrize("rounds", [2, 6])
@pytest.mark.parametrize(("workers", "entry", "share"), [(4, 1, 0.5), (4, 2, 0.25), (8, 2, 0.5)])
def test_bubbles_take_in_work_of_encoders(workers, rounds, entry, share):
    """A step is longer than the model alone by less than what each worker does for encoders."""
    microbatches = rounds * workers
    result = filled_run(workers, microbatches, 2, entry, share)
    alone = 3.0 * (microbatches + workers - 1)
    work = result.busy - 3.0 * microbatches
    assert work.sum() == pytest.approx(3.0 * share * microbatches * 2 * entry)
    assert result.makespan - alone < work.mean()
    assert result.makespan >= result.busy.max()


def test_filled_bubbles_of_the_example():
    """12 s of work more on each worker, 6 s more of the step: 9 s of bubble become 3."""
    result = filled_run(4, 16, 2, 1, 0.5)
    assert (result.makespan, result.busy.tolist()) == (63.0, [60.0] * 4)


@pytest.mark.parametrize("held", [1, 2, 3, None])
@pytest.mark.parametrize("entry", [1, 2])
def test_encoders_hold_no_more_than_they_may(entry, held):
    if held is not None and held < entry:
        return
    options = {"held": held, "encoder_stages": entry, "encoders": 2}
    table = build("filled-encoders", 4, 16, **options)
    copies = 4 // entry
    largest = []
    for row in parsed(texts(table)):
        level = dict.fromkeys(range(2 * entry), 0)
        for letters, stage, _ in row:
            if stage < 2 * entry:
                level[stage] += 1 if letters == "F" else -1
                largest.append(level[stage])
    assert max(largest) == (16 // copies if held is None else held)
