"""Tables of claims: verdicts in words, what counts, what is refused."""

import json

import pytest

from sweeps.kit.claims import Claim, Verdict, counted, judge, show


def claim(number, holds, *, published="1", reason="another metric", excludes=""):
    return Claim(number, "text", published, "", lambda _: Verdict("2", holds, reason), excludes)


ROWS = (
    claim("1", True),
    claim("2", False),
    claim("3", None),
    claim("4a", True, excludes="4b"),
    claim("4b", False),
    claim("5", True, published=""),
    claim("6", False, published=""),
)


def test_verdicts():
    assert [row["verdict"] for row in judge(ROWS, None)] == [
        "reproduced",
        "differs",
        "open",
        "exclusive",
        "exclusive",
        "holds",
        "fails",
    ]


def test_only_published_claims_are_counted():
    assert counted(judge(ROWS, None)) == (
        "1 of 5 published claims reproduced, 1 differ, 1 open, 2 exclude each other; "
        "1 of 2 statements of our own hold"
    )


@pytest.mark.parametrize("holds", [False, None])
@pytest.mark.parametrize("published", ["1", ""])
def test_a_claim_that_does_not_hold_needs_a_reason(tmp_path, holds, published):
    rows = judge([claim("9", holds, published=published, reason=""), claim("8", True)], None)
    with pytest.raises(SystemExit, match=r"error: no reason is given why these do not hold: 9$"):
        show(rows, tmp_path / "claims.json")
    assert json.loads((tmp_path / "claims.json").read_text()) == rows


def test_claims_that_exclude_each_other_need_a_reason_even_where_they_hold(tmp_path):
    rows = judge([claim("a", True, reason="", excludes="b"), claim("b", False)], None)
    with pytest.raises(SystemExit, match=r"hold: a$"):
        show(rows, tmp_path / "claims.json")
    with pytest.raises(ValueError, match="not listed: c"):
        judge([claim("a", True, excludes="c"), claim("b", False)], None)


def test_the_table_is_printed_and_kept(tmp_path, capsys):
    rows = judge(ROWS, None)
    show(rows, tmp_path / "claims.json")
    assert json.loads((tmp_path / "claims.json").read_text()) == rows
    printed = capsys.readouterr().out
    assert "(own)" in printed
    assert " ".join(printed.split()).count("1 of 5 published claims reproduced") == 1
