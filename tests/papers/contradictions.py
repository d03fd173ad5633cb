"""Changes of data that contradict claims: each claim that counts fails after its own."""

from sweeps.kit.claims import COUNTED, HOLDS, judge


def scaled(store, names, factor=1.0, more=0.0, **where):
    """Return a change of data: variables of a store, where labels say, times a factor, and more."""

    def change(data):
        for name in names.split():
            values = data[store][name]
            values.loc[where] = factor * values.loc[where] + more

    return change


def verdicts(claims, data):
    """Return whether each claim holds, by its number; one that fails must have a reason."""
    result = judge(claims, data)
    assert all(row["reason"] or row["verdict"] in HOLDS for row in result)
    return {row["number"]: row["verdict"] in HOLDS for row in result}


def check_contradictions(claims, changes, build_data):
    """Each claim that counts has a change of the data, after which it fails for a reason."""
    assert set(changes) == {claim.number for claim in claims if claim.kind in COUNTED}
    for claim in (claim for claim in claims if claim.number in changes):
        data = build_data()
        changes[claim.number](data)
        (row,) = judge([claim], data)
        assert row["verdict"] in ("differs", "fails"), claim.number
        assert row["reason"], claim.number
