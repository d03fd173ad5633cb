"""Tables of claims: verdicts in words, what counts, what is refused."""

import json

import pytest
from daily import with_cases

from sweeps.kit import claims


def claim(number, holds, kind=claims.PUBLISHED, *, reason="another metric", depends="", paper=""):
    published = "1" if kind == claims.PUBLISHED else ""
    why = "" if kind in (claims.PUBLISHED, claims.OURS) else "a theorem"
    verdict = claims.Verdict("2", holds, reason, depends)
    return claims.Claim(number, "text", published, "", lambda _: verdict, kind, why, paper)


ROWS = (
    *(claim("1", True), claim("2", False), claim("3", None)),
    *(claim("4", None, depends="the opponent"), claim("5", True, paper="Another")),
    *(claim("6", True, claims.OURS), claim("7", False, claims.OURS)),
    *(claim("8", True, claims.BY_CONSTRUCTION), claim("9", True, claims.FITTED)),
    *(claim("10", False, claims.READING), claim("11", None, claims.SHOWN)),
)


def test_verdicts():
    assert [row["verdict"] for row in claims.judge(ROWS, None)] == [
        *("reproduced", "differs", "open", "depends on the opponent", "reproduced", "holds"),
        *("fails", "follows by construction", "fitted", "fails so read", "shown"),
    ]


def test_only_what_can_fail_is_counted_and_each_paper_by_itself():
    assert claims.counted(claims.judge(ROWS, None)) == (
        "reproduced 1, differs 1, open 1, depends on the opponent 1, of 4 published claims; "
        "Another: reproduced 1, of 1 published claims; holds 1, fails 1, of 2 statements of our own; "
        "not counted: follows by construction 1, fitted 1, fails so read 1, shown 1"
    )


@with_cases(
    "kind holds",
    (claims.BY_CONSTRUCTION, False),
    (claims.BY_CONSTRUCTION, None),
    (claims.FITTED, False),
    (claims.SHOWN, True),
)
def test_a_kind_says_which_verdicts_it_can_have(kind, holds):
    with pytest.raises(ValueError, match=f"claim 9 is '{kind}', but what came out is {holds}: 2"):
        claims.judge([claim("9", holds, kind)], None)


def test_what_is_not_counted_says_why_and_what_is_has_a_published_figure():
    with pytest.raises(ValueError, match=r"claim 9 is not counted \(fitted\): say why"):
        claims.judge([claim("9", True, claims.FITTED)._replace(why="")], None)
    with pytest.raises(ValueError, match="claim 9 has no published figure"):
        claims.judge([claim("9", True)._replace(published="")], None)


@pytest.mark.parametrize("holds", [False, None])
@pytest.mark.parametrize("kind", [claims.PUBLISHED, claims.OURS])
def test_a_claim_that_does_not_hold_needs_a_reason(tmp_path, holds, kind):
    rows = claims.judge([claim("9", holds, kind, reason=""), claim("8", True)], None)
    with pytest.raises(SystemExit, match=r"error: no reason is given why these do not hold: 9$"):
        claims.show(rows, tmp_path / "claims.json")
    assert json.loads((tmp_path / "claims.json").read_text()) == rows


def test_the_table_is_printed_and_kept(tmp_path, capsys):
    within = claims.Threshold(2.0, "within a factor of 2", "ours")
    rows = claims.judge([*ROWS, claim("12", True)._replace(thresholds=(within,))], None)
    assert rows[-1]["thresholds"] == "within a factor of 2 (ours)"
    assert rows[-4]["reason"] == "a theorem; another metric"
    claims.show(rows, tmp_path / "claims.json")
    assert json.loads((tmp_path / "claims.json").read_text()) == rows
    printed = " ".join(capsys.readouterr().out.split())
    assert "(own)" in printed
    assert "reproduced 2, differs 1" in printed
