"""Published closed forms against exact ones, and the table of them in the documentation."""

from pathlib import Path

import pytest

from sweeps.published.forms import FORMS, judge, rows

PAGE = Path(__file__).parents[2] / "docs" / "formula.md"


def test_published_forms_hold_where_the_page_says():
    text = PAGE.read_text()
    for form, holds, where in rows():
        assert holds, form.schedule
        assert f"| {form.schedule} | {form.text} | {where} |" in text


@pytest.mark.parametrize("k", range(len(FORMS)))
def test_another_sum_is_none_of_the_form(k):
    counts = FORMS[k].counts
    wrong = FORMS[k]._replace(counts=lambda p, m: [counts(p, m)[0] + 1, *counts(p, m)[1:]])
    assert not judge(wrong._replace(is_facet=True), 4, 8).holds
