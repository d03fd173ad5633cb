"""A checker that knows docs/certificates.md alone agrees with `pj.verify` on true and forged files.

`EXAMPLES=500 pytest tests/test_second_checker.py` draws as many certificates, each with ten changes.
"""

import copy
import os
import sys
from pathlib import Path

import pytest
import second_checker
from certificate_cases import KINDS, written
from hypothesis import given, settings, strategies as st
from test_forged_certificates import WORDS, is_accepted, others, places, signed

import pipejax as pj

EXAMPLES = int(os.environ.get("EXAMPLES", "30"))
CHANGES = 10
SHARES = {"run": 0.5, "optimum": 0.1, "formula": 0.1}
SHARES |= {"run of a grammar": 0.2, "formula of a grammar": 0.1}


@st.composite
def mutants(draw, claimed):
    """A certificate with one place changed: its value, an entry less, one twice, two exchanged."""
    changed = copy.deepcopy(claimed)
    part = draw(st.sampled_from(["table", "costs", "claim", "proof", "proof"]))
    path, value = draw(st.sampled_from(list(places(claimed[part]))))
    inner = changed[part]
    for key in path[:-1]:
        inner = inner[key]
    last, how = path[-1], draw(st.sampled_from(["other", "other", "drop", "twice", "exchange"]))
    siblings = list(inner) if isinstance(inner, dict) else range(len(inner))
    if how == "other" and not isinstance(value, dict | list):
        inner[last] = draw(st.sampled_from(others(value)[:4] + others(value)[-8:]))
        if value in WORDS:
            inner[last] = draw(st.sampled_from(WORDS))
    elif how == "drop":
        inner.pop(last)
    elif how == "twice" and isinstance(inner, list):
        inner.insert(last, value)
    else:
        other = draw(st.sampled_from(siblings))
        inner[last], inner[other] = inner[other], inner[last]
    return signed(changed)


def test_a_report_agrees_with_its_certificate():
    table = pj.schedules.build("chimera", num_workers=2, num_microbatches=2)
    form = pj.formula(pj.lower(table, step_end=False))
    report = written(form.as_json() | {"certificate": form.certificate(table)})
    for key in ("parameters", "facets", "exact", "gap"):
        wrong = report | {key: [report[key]]}
        assert not is_accepted(wrong)
        assert second_checker.check(wrong) == ("fails", f"{key} of the report")
    assert is_accepted(report)
    assert second_checker.check(report) == ("holds", "")


@pytest.mark.parametrize("kind", KINDS)
def test_both_agree_on_certificates_and_mutants(kind):
    @settings(max_examples=max(1, round(EXAMPLES * SHARES[kind])))
    @given(claimed=KINDS[kind], data=st.data())
    def agree(claimed, data):
        assert second_checker.check(claimed) == ("holds", "")
        for _ in range(CHANGES):
            changed = data.draw(mutants(claimed))
            verdict, why = second_checker.check(changed)
            assert is_accepted(changed) == (verdict == "holds"), why

    agree()


def test_it_knows_nothing_of_pipejax():
    files = [*Path(second_checker.__file__).parent.glob("second_checker*.py")]
    lines = [line for path in files for line in path.read_text().splitlines()]
    imports = {line.split()[1] for line in lines if line.startswith(("import ", "from "))}
    own = {name for name in imports if name.startswith("second_checker")}
    assert imports - own <= {*sys.stdlib_module_names}
    assert len(own) == 5


def test_a_file_is_read_as_pipejax_writes_it(answer, tmp_path):
    path = tmp_path / "run.json"
    answer(
        *("evaluate", "--schedule", "zb-v", "--workers", 2, "--microbatches", 4),
        *("--stage-times", "F=1,I=1,W=1", "--comm", 0.5, "--certificate", path),
    )
    assert second_checker.check(second_checker.read(path)) == ("holds", "")
    assert pj.verify(path).ok
