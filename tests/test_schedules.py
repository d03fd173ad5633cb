"""Builders, crossed over the registry: complete, legal, in order, and clear about what is not."""

import json

import numpy as np
import pytest

import pipejax as pj
from pipejax.schedules import REGISTRY
from pipejax.schedules.table.slot_simulation import slot_times
from pipejax.schedules.table.table_files import to_json

SIZES = [(p, m) for p in (1, 2, 3, 4, 6) for m in (1, 2, 3, 4, 7, 8, 12, 13)]
INSTANT = [pj.Phase[letter] for letter in ("U", "O", "L", "WAIT_O")]
BOTH_EVEN = ("chimera", "chimera-asymmetric")
OPTIONS = {
    "interleaved-1f1b": [{}, {"stages_per_worker": 3}],
    "hanayo": [{}, {"waves": 3}],
    "looped-bfs": [{"stages_per_worker": 4}],
    "zero-bubble": [{}, {"memory_limit": 2}],
    "ada-offload": [{"memory_limit": 2}],
    "pipe-offload": [{"offload_share": 1.0}],
}
CASES = [(name, options) for name in REGISTRY for options in OPTIONS.get(name, [{}])]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_builds_at_every_legal_size(name, options):
    for p, m in SIZES:
        if name in BOTH_EVEN and (p % 2 or m % 2):
            continue
        for slots in ({"F": 1, "B": 1}, {"F": 2, "B": 3})[: 1 + (m < 8)]:
            table = pj.schedules.build(
                name, num_workers=p, num_microbatches=m, slots=slots, **options
            )
            assert (table.num_workers, table.num_microbatches, table.name) == (p, m, name)
            pipe_of = table.pipe_of_microbatch
            for phase in (
                pj.Phase[letter] for letter in "FBIW"
            ):  # each stage in microbatch order, per pipe
                for w, row in enumerate(table.rows()):
                    order = [op for cell in row for op in cell if op.phase is phase]
                    for stage in {op.stage for op in order}:
                        for pipe in range(table.num_pipes):
                            mine = [
                                op.microbatch
                                for op in order
                                if op.stage == stage and pipe_of[op.microbatch] == pipe
                            ]
                            assert mine == sorted(mine), (name, p, m, w)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_columns_are_start_slots(name, options):
    table = pj.schedules.build(
        name, num_workers=4, num_microbatches=8, slots={"F": 1, "B": 2}, **options
    )
    if name == "chimera-asymmetric":
        return  # starts are no whole numbers there: columns are their order
    start, _ = slot_times(table)
    instant = np.isin(table.phase, INSTANT)  # they take no slot and stand in columns of their own
    slot = np.cumsum(~instant.any(axis=0)) - 1
    held = (table.phase != pj.Phase.IDLE) & ~instant
    assert np.array_equal(start[held], slot[np.nonzero(held)[1]])


ILLEGAL = {
    "unknown": (("1f2b", 4, 4, {}), "unknown schedule '1f2b': known are gpipe, 1f1b"),
    "no microbatch": (("gpipe", 4, 0, {}), "num_microbatches must be a whole number of at least 1"),
    "negative workers": (("1f1b", -1, 4, {}), "num_workers must be .* at least 1, got -1"),
    "half a worker": (("1f1b", 1.5, 4, {}), "num_workers must be a whole number"),
    "odd workers": (("chimera", 5, 4, {}), r"even number of workers \(2, 4, 6, ...\), got 5"),
    "odd microbatches": (("chimera", 4, 3, {}), "even number of microbatches .* got 3"),
    "odd asymmetric": (("chimera-asymmetric", 3, 4, {}), "chimera-asymmetric needs an even"),
    "no wave": (("hanayo", 4, 4, {"waves": 0}), "waves must be .* at least 1, got 0"),
    "half a wave": (("hanayo", 4, 4, {"waves": 1.5}), "waves must be a whole number .* got 1.5"),
    "waves as text": (("hanayo", 4, 4, {"waves": "2"}), "waves must be .* got '2'"),
    "share alone": (("chimera-asymmetric", 4, 4, {"stage_shares": 3}), "4 positive numbers, got 3"),
    "slot as text": (
        ("gpipe", 4, 4, {"slots": {"F": "1"}}),
        "F must be a finite number .* got '1'",
    ),
    "one stage": (("interleaved-1f1b", 4, 4, {"stages_per_worker": 1}), "at least 2 stages"),
    "wrong option": (("gpipe", 4, 4, {"waves": 2}), "gpipe takes no waves: its options are slots"),
    "shares": (("chimera-asymmetric", 4, 4, {"stage_shares": [1, 2]}), "needs 4 positive numbers"),
    "negative share": (("chimera-asymmetric", 2, 2, {"stage_shares": [1, -2]}), "2 positive"),
    "zero slot": (("gpipe", 4, 4, {"slots": {"F": 0, "B": 1}}), "slots"),
    "unknown slot": (("gpipe", 4, 4, {"slots": {"X": 1}}), "slots"),
}


@pytest.mark.parametrize("what", ILLEGAL)
@pytest.mark.usefixtures("unchecked")
def test_illegal_numbers_are_named(what):
    (name, p, m, options), message = ILLEGAL[what]
    with pytest.raises(ValueError, match=message):
        pj.schedules.build(name, num_workers=p, num_microbatches=m, **options)


@pytest.mark.usefixtures("unchecked")
def test_numbers_of_numpy_are_numbers():
    table = pj.schedules.build(
        "hanayo",
        num_workers=np.int64(2),
        num_microbatches=np.int32(3),
        waves=np.int8(1),
        slots={"F": np.float32(1), "B": np.int64(2)},
    )
    assert table.num_stages == 4
    assert json.loads(to_json(table))["slots"] == dict(table.slots)


@pytest.mark.parametrize(
    "slots", [{"F": 1e12, "B": 1e12 + 1}, {"F": 1e-7, "B": 3e-7}, {"F": 1e-12, "B": 2e-12}]
)
@pytest.mark.parametrize("name", ["1f1b", "chimera", "hanayo"])
def test_slots_of_any_size_are_drawn(name, slots):
    table = pj.schedules.build(name, num_workers=4, num_microbatches=8, slots=slots)
    assert table.num_slots < 1000
    smaller = {letter: size / slots["F"] for letter, size in slots.items()}
    same = pj.schedules.build(name, num_workers=4, num_microbatches=8, slots=smaller)
    for one, other in zip(table.rows(), same.rows(), strict=True):
        assert [c for c in one if c] == [c for c in other if c]


def test_asymmetric_shares_balance_workers():
    table = pj.schedules.build("chimera-asymmetric", num_workers=6, num_microbatches=6)
    shares = np.asarray(table.stage_shares)
    assert shares.mean() == pytest.approx(1)
    assert shares[-1] / shares[0] == pytest.approx(2)
    np.testing.assert_allclose(shares[table.placement].sum(axis=0)[[0, 2, 5]], 2)


def test_every_builder_names_its_source():
    for builder in REGISTRY.values():
        assert "arXiv" in builder.source
        assert builder.summary
