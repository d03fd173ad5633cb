"""The explorer's page: what it holds is what the engine runs, and it needs nothing else."""

import json
import re

import numpy as np
import pytest
from daily import with_cases
from explorer_cases import CROSSED, GIVEN, build_case, explored, get_scene, run_of_page, unpack
from grammar_tables import grammar_table
from justhtml import JustHTML
from markupsafe import escape

import pipejax as pj
from pipejax.cli.commands import show
from pipejax.plots.explorer.payload import SCRIPTS, pack, page
from pipejax.schedules.table.links import LINKS


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", GIVEN)
def test_a_page_runs_as_the_engine_does(name, link):
    """At the factors that are given every finish time is equal to the last bit."""
    table, costs = build_case(name)
    scene = get_scene(page([explored(table, costs)]))
    (schedule,) = scene["schedules"]
    run = pj.evaluate(table, costs, link=link)
    finish, _, program = run_of_page(schedule, [f["initial"] for f in scene["factors"]], link)
    assert finish.max() == run.makespan
    cells = run.program.node_of_cell[run.program.node_of_cell > 0]
    assert np.isin(cells, program["op"]).all()
    assert (finish == run.node_finish).all()
    sent = unpack(schedule["messages"])
    ops = program["op"]
    carried = program["carrier"] > 0
    assert (ops[sent["producer"]] == run.program.messages.producer).all()
    assert (ops[sent["consumer"]] == run.program.messages.consumer).all()
    assert (program["carrier"][carried] == run.program.messages.carrier[carried]).all()


def test_factors_scale_what_is_given():
    table, costs = build_case("by stage")
    scene = get_scene(page([explored(table, costs)]))
    factors = {"F": 1.3, "I": 0.5, "W": 2.0, "latency": 3.0, "transmit": 0.0}
    assert [f["key"] for f in scene["factors"]] == [*factors]
    finish, _, _ = run_of_page(scene["schedules"][0], factors.values(), "rendezvous")
    times = {"forward": 1.3 * np.array([1.0, 1.5, 2.0]), "input_grad": 0.55, "weight_grad": 1.4}
    scaled = pj.Costs(**times, latency=0.1 * 3.0)
    expected = pj.evaluate(table, scaled, link="rendezvous").makespan
    assert finish.max() == pytest.approx(expected, rel=1e-12)


def test_messages_that_take_no_time_have_a_slider_that_stands_at_zero():
    table, costs = build_case("free messages")
    scene = get_scene(page([explored(table, costs)]))
    factor = {"key": "transmit", "name": "message", "initial": 0.0, "largest": 1.0}
    assert scene["factors"][-1] == factor
    finish, _, _ = run_of_page(scene["schedules"][0], [1, 1, 0.25], "blocking")
    timed = pj.Costs(forward=1.0, backward=2.0, transmit=0.25)
    assert finish.max() == pj.evaluate(table, timed, link="blocking").makespan


@pytest.mark.parametrize("name", ["alike", "by stage", "free messages", "by microbatch"])
def test_closed_forms_of_a_page_are_the_makespan(name):
    table, costs = build_case(name)
    scene = get_scene(page([explored(table, costs)]))
    (schedule,) = scene["schedules"]
    chosen = {f["key"]: 0.3 + k for k, f in enumerate(scene["factors"])}
    for link in LINKS:
        form = schedule["forms"][link]
        units = zip(form["parameters"], form["units"], strict=True)
        values = [unit * chosen[key] for key, unit in units]
        finish, _, _ = run_of_page(schedule, chosen.values(), link)
        largest = max(np.dot(facet, values) for facet in form["facets"])
        assert largest <= finish.max() * (1 + 1e-12)
        assert finish.max() * (1 - form["gap"]) <= largest * (1 + 1e-12)
        assert form["exact"] == (form["gap"] == 0)


@pytest.mark.parametrize("name", ["alike", "by stage", "offloads", "mixed", "vocabulary"])
def test_memory_of_a_page_is_that_of_the_run(name):
    """Changes in the order of the page: its steps are those of `activation_memory`."""
    table, costs = build_case(name)
    shown = explored(table, costs)
    (schedule,) = get_scene(page([shown]))["schedules"]
    held = unpack(schedule["memory"])
    ops = unpack(schedule["programs"]["delay"])["op"]
    node, at_end = ops[held["moment"] >> 1], held["moment"] & 1
    time = np.where(at_end, shown.run.node_finish[node], shown.run.node_start[node])
    memory = pj.analysis.activation_memory(shown.run)
    for worker in range(table.num_workers):
        is_own = held["worker"] == worker
        changes = held["change"] * held["size"][held["place"]]
        level = [np.sum(changes[is_own & (time <= t)]) for t in memory.curve(worker)[0]]
        assert np.allclose(level, memory.curve(worker)[1], atol=1e-12)


@pytest.mark.parametrize("name", ["by microbatch", "pairs", "an update"])
def test_a_recorded_run_stands_with_its_replay(name):
    """The page has its starts, and runs the replay as the engine does; all else is there once."""
    table, costs = build_case(name)
    shown = explored(table, costs)
    late = shown.run.start + np.arange(table.num_slots)
    scene = get_scene(page([shown._replace(name="replayed", recorded=late), shown]))
    replayed, other = scene["schedules"]
    assert (scene["title"], replayed["recorded"]["name"]) == ("3 schedules", "as it ran")
    starts = unpack(replayed["recorded"]["starts"])["start"]
    finish, _, program = run_of_page(replayed, [f["initial"] for f in scene["factors"]], "delay")
    assert (finish == shown.run.node_finish).all()
    run = shown.run
    node = {int(n): at for at, n in np.ndenumerate(run.program.node_of_cell) if n > 0}
    expected = [late[node[op]] if op in node else np.nan for op in program["op"].tolist()]
    np.testing.assert_array_equal(starts, expected)
    assert np.isfinite(starts).sum() == len(run.table.cells.phase[run.table.cells.phase > 0])
    assert replayed["forms"] == {}
    assert other["recorded"] is None


def test_a_recorded_step_of_a_hundred_thousand_ops_is_a_page_of_few_megabytes():
    """At random times, which cannot be packed: 8 bytes an op for what it took and for its start."""
    table = pj.schedules.build("1f1b", num_workers=64, num_microbatches=800)
    forward, backward, late = np.random.default_rng(0).lognormal(0.0, 0.1, (3, 64, 800))
    costs = pj.Costs(forward=forward, backward=backward, transmit=0.1)
    shown = explored(table, costs, link="blocking")
    recorded = shown.run.start + np.resize(late, shown.run.start.shape)
    assert (table.cells.phase > 0).sum() == 102_400
    assert len(page([shown._replace(recorded=recorded)])) < 4_000_000


def test_a_link_model_under_which_nothing_runs_says_why():
    rows = [row.split(",") for row in CROSSED]
    table = pj.ScheduleTable.from_rows(rows)
    scene = get_scene(page([explored(table, pj.Costs(forward=1.0, backward=2.0, transmit=0.1))]))
    (schedule,) = scene["schedules"]
    assert "deadlock" in schedule["programs"]["rendezvous"]["error"]
    assert "error" not in schedule["programs"]["queued"]
    assert "rendezvous" not in schedule["forms"]


@with_cases(
    "arrays",
    {"a": np.array([0, 1, -128, 127]), "b": np.array([1.5, -2.25])},
    {"a": np.arange(70_000), "b": np.array([300, -300])},
    {"a": np.array([0, 5, 5, 0, 0, 3, 4, -1, 0, -1]), "b": np.array([0])},
    {"a": np.array([], int), "b": np.array([], float)},
)
def test_packed_arrays_are_read_back(arrays):
    result = unpack(json.loads(json.dumps(pack(arrays, steps=("a",)))))
    for name, array in arrays.items():
        assert result[name].tolist() == array.tolist()


def test_a_page_refers_to_nothing_outside():
    table, costs = build_case("alike")
    name = '</script><b onclick="x">&{{ scene }}{% x %}'
    hostile = pj.ScheduleTable.from_rows([["0F0", "0B0"]], name=name)
    text = page([explored(table, costs), explored(hostile, costs)])
    outside = r"https?:|//\w+\.\w|\bimport\(|\bfetch\(|XMLHttp|WebSocket|@import|url\("
    assert not re.search(outside, text)
    assert re.findall(r'(?:src|href)="([^"]*)"', text) == ["data:,", "#side"]
    assert "default-src 'none'" in text
    assert JustHTML(text, collect_errors=True).errors == []
    assert text.count("</script>") == 2
    assert get_scene(text)["schedules"][1]["name"] == hostile.name
    alone = page([explored(hostile, costs)])
    assert escape(hostile.name) in alone
    assert alone.count("</script>") == 2


def test_every_script_of_the_page_is_listed():
    from pipejax.plots.explorer.payload import HERE

    assert {path.stem for path in HERE.glob("*.js")} == {*SCRIPTS}
    for place, name in enumerate(SCRIPTS):
        imported = re.findall(r'from "\./(\w+)\.js"', (HERE / f"{name}.js").read_text())
        assert {*imported} <= {*SCRIPTS[:place]}, name


def test_kinds_of_several_tables_have_codes_of_their_own():
    """And a name, a lane and a colour each; what two tables have alike comes once."""
    shown = [explored(*grammar_table(name)) for name in ("braid", "mixed", "braid")]
    scene = get_scene(page(shown))
    added = {int(code): p for code, p in scene["phases"].items() if int(code) >= len(pj.Phase)}
    letters = [phase["letter"] for phase in added.values()]
    assert letters == ["Fa", "Fd", "Fm", "Bm", "Bd", "Ba", "D", "X", "Z"]
    assert (added[27]["name"], added[27]["lane"]) == ("dispatch", "net")
    assert added[29]["fill"] == "#123456"
    assert len({phase["fill"] for phase in added.values()}) == len(added)
    assert {*unpack(scene["schedules"][1]["ops"])["phase"]} >= {27, 28, 29}
    names = {factor["key"]: factor["name"] for factor in scene["factors"]}
    assert names["Z"] == "router"


def test_a_page_has_what_can_be_chosen(answer, tmp_path, monkeypatch):
    monkeypatch.setattr(show, "WORKERS", (2, 4))
    monkeypatch.setattr(show, "MICROBATCHES", (4,))
    out = tmp_path / "x.html"
    asked = ["show", "-s", "1f1b", "-P", "4", "-M", "4", "--choose"]
    answer(*asked, "--worker-times", "F=1,B=2", "--out", out)
    scene = get_scene(out.read_text())
    entries = scene["choices"]
    assert {entry["workers"] for entry in entries} == {2, 4}
    interleaved = [e["stagesPerWorker"] for e in entries if e["name"] == "interleaved-1f1b"]
    assert sorted(interleaved) == [2, 2, 4, 4]
    assert {"F", "B", "I", "W"} <= {factor["key"] for factor in scene["factors"]}


def test_show_writes_a_page_of_several_schedules(call, answer, tmp_path):
    out = tmp_path / "x.html"
    arguments = ["show", "-P", "4", "-M", "6", "-W", "F=1,B=2", "--comm", "0.1"]
    result = answer(*arguments, "--schedules", "gpipe,1f1b,chimera", "--out", out)
    assert result["out"] == str(out)
    scene = get_scene(out.read_text())
    assert [s["name"] for s in scene["schedules"]] == ["gpipe", "1f1b", "chimera"]
    for row, schedule in zip(result["runs"], scene["schedules"], strict=True):
        finish, *_ = run_of_page(schedule, [f["initial"] for f in scene["factors"]], scene["link"])
        expected = answer("evaluate", "--schedule", row["schedule"], *arguments[1:])
        assert finish.max() == row["makespan"] == expected["makespan"]


def test_show_opens_the_page_at_what_is_asked_for(answer, tmp_path):
    out = tmp_path / "x.html"
    sizes = ["--workers", "4", "--microbatches", "6", "--stage-times", "F=1,B=2"]
    part = ["--from", "2", "--to", "8", "--messages", "--no-critical"]
    part += ["--labels", "a,b", "--title", "Both"]
    answer("show", "--schedules", "gpipe,1f1b", *sizes, *part, "--out", out)
    scene = get_scene(out.read_text())
    assert [schedule["name"] for schedule in scene["schedules"]] == ["a", "b"]
    assert "<title>Both, 4 workers, 6 microbatches</title>" in out.read_text()
    assert scene["view"] == [2.0, 8.0]
    assert scene["show"] == {"messages": True, "critical": False}


def test_what_does_not_exist_is_said(answer, tmp_path):
    sizes = "show", "-S", "1f1b,chimera", "-P", 4, "-M", 3
    result = answer(*sizes, "--out", tmp_path / "x.html")
    assert [row["schedule"] for row in result["runs"]] == ["1f1b"]
    assert "even number" in result["missing"]["chimera"]


def test_a_model_draws_bytes_with_what_the_system_has_left(answer, tmp_path):
    out = tmp_path / "x.html"
    arguments = ["-m", "gpt-22b", "-y", "a100", "--minibatch", "8", "--tensor-parallel", "8"]
    sizes = ["--schedule", "1f1b", "--workers", "4", "--microbatches", "8"]
    answer("show", *sizes, *arguments, "--out", out)
    (schedule,) = get_scene(out.read_text())["schedules"]
    needs = answer("evaluate", *sizes, *arguments)
    system = pj.load_system("a100")
    static = np.array(needs["memory_bytes"]) - needs["activation_memory"]["peak"]
    assert schedule["memory"]["unit"] == "bytes"
    assert np.allclose(schedule["memory"]["limits"], float(system.memory_available) - static)
    assert np.allclose(schedule["memory"]["static"], static)
    step = schedule["step"]
    assert step["tokens"] / needs["makespan"] == pytest.approx(needs["tokens_per_second"])
    assert step["mfu_seconds"] / needs["makespan"] == pytest.approx(needs["mfu"])
    answer("show", *sizes, *arguments, "--memory-limit", "30GB", "--out", out, "--force")
    (asked,) = get_scene(out.read_text())["schedules"]
    assert np.allclose(asked["memory"]["limits"], 30e9 - static)


def test_a_limit_of_activations_is_drawn_under_any_schedule(answer, tmp_path):
    """And a schedule that knows a limit is planned for it."""
    out = tmp_path / "x.html"
    sizes = ["--workers", "4", "--microbatches", "8", "--memory-limit", "2.5"]
    answer("show", "--schedules", "1f1b,zero-bubble", *sizes, "--out", out)
    plain, planned = get_scene(out.read_text())["schedules"]
    assert plain["memory"]["limits"] == planned["memory"]["limits"] == [2.5] * 4
    held = unpack(planned["memory"])
    levels = np.cumsum(held["change"] * held["size"][held["place"]])  # ends at 0 on each worker
    assert 2 < levels.max() <= 2.5 + 1e-9


def test_show_draws_a_memory_limit(call, answer, tmp_path):
    """On the page, in a picture and in the terminal, which says who exceeds it."""
    page = tmp_path / "a.html"
    asked = ["-s", "1f1b", "-P", "3", "-M", "4", "--memory-limit", "2,2,1"]
    answer("show", *asked, "--out", page)
    shown = get_scene(page.read_text())["schedules"]
    assert shown[0]["memory"]["limits"] == [2, 2, 1]
    result = answer("show", *asked, "--memory", "--out", tmp_path / "a.svg")["activation_memory"]
    assert (result["memory_limit"], result["fits"]) == ([2, 2, 1], False)
    assert "dashed: limit 1 to 2" in (tmp_path / "a.svg").read_text()
    printed = call("show", *asked, "--memory")[1]
    assert "memory limit 1 to 2: exceeded, worker 0 holds 3\n" in printed
    assert "memory limit 3: kept" in call("show", *asked[:-1], "3", "--memory")[1]


def test_open_shows_the_page_in_the_browser(call, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    out = tmp_path / "a b.html"
    sizes = ["--schedule", "1f1b", "--workers", "2", "--microbatches", "2"]
    assert call("show", *sizes, "--out", out)[0] == 0
    assert opened == []
    assert call("show", *sizes, "--out", out, "--force", "--open")[0] == 0
    assert opened == [out.as_uri()]
