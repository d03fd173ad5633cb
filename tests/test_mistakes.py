"""The list of mistakes: hostile command lines and misuses of the library, each as it stands.

`data/mistakes.json` holds small files by name, command lines with words that the one line on stderr
must have, and expressions with the error that they must raise.
"""

import json
import re
from pathlib import Path

import pytest

import pipejax as pj

LIST = json.loads((Path(__file__).parent / "data" / "mistakes.json").read_text())


@pytest.fixture(scope="module")
def things():
    """What misuses are made of, by name."""
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
    costs = pj.Costs(forward=1.0, backward=2.0)
    model = pj.load_model("gpt-22b")
    return {
        "pj": pj,
        "table": table,
        "costs": costs,
        "program": pj.lower(table),
        "evaluation": pj.evaluate(table, costs),
        "model": model,
        "workload": pj.Workload(model, minibatch=8),
        "system": pj.load_system("h100"),
    }


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("misuse", LIST["misuses"], ids=lambda misuse: misuse["expression"])
def test_a_misuse_is_refused_at_the_door(misuse, things, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kind = {"TypeError": TypeError, "ValueError": ValueError}[misuse["error"]]
    with pytest.raises(kind) as raised:
        eval(misuse["expression"], things)
    message = str(raised.value).splitlines()[0]
    assert [word for word in misuse["says"] if word not in message] == [], message
    assert not list(tmp_path.iterdir())


def test_the_list_is_long_and_says_something_of_all():
    assert len(LIST["misuses"]) >= 60
    called = {re.match(r"pj\.(\w+)", misuse["expression"])[1] for misuse in LIST["misuses"]}
    results = {"Evaluation", "InfeasibleError", "Program", "ScheduleError", "Model", "System"}
    parts = {"Op", "Phase", "training"}  # a table looks at its ops; training is looked at there
    assert called == set(pj.__all__) - results - parts
