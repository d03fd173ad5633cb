"""A scenario as a command line is read back as itself, and parts of one are what its record says."""

import dataclasses
import itertools
import json
import random
import shlex

import numpy as np
import pytest
from daily import read_cases, with_cases

import pipejax as pj
from pipejax.cli.options.catalogue import CATALOGUE, flag
from pipejax.cli.options.option import value_kinds
from pipejax.cli.options.scenario import command_line, scenario_options
from pipejax.cli.options.tables import SizedRunOptions
from pipejax.costing import (
    CostsFile,
    GivenTimes,
    HostTimes,
    Microbatches,
    ModelCosts,
    PairFactor,
    RecomputeCells,
    RecomputedAgain,
    ScaledTimes,
    ShardingCells,
    SlotCosts,
    SlowWorkers,
    TableFile,
)
from pipejax.schedules.table.links import LINKS

NAMES = {flag(name): name for name in CATALOGUE}
FIELDS = {field.name: field for field in dataclasses.fields(SizedRunOptions)}


def read(line):
    """Read a command line into a scenario, as the program does, without its checks of effects."""
    words, values = shlex.split(line)[2:], {}
    while words:
        name = NAMES[words.pop(0)]
        kinds = value_kinds(FIELDS[name].type)
        convert = int if int in kinds else float if float in kinds else str
        values[name] = True if bool in kinds else convert(words.pop(0))
    return SizedRunOptions(**values).scenario()


class Draw:
    """Random parts of scenarios."""

    def __init__(self, seed, folder):
        self.rng = random.Random(seed)
        self.folder = folder

    def maybe(self, value, share=0.5):
        return value if self.rng.random() < share else None

    def number(self, low=0.0, high=2.0):
        return self.rng.choice([round(self.rng.uniform(low, high), 2), self.rng.uniform(low, high)])

    def seconds(self):
        return self.rng.choice([0.5, 1.0, 2e-3, 4e-5, 1 / 3, self.rng.uniform(0, 3)])

    def numbers(self, count=3):
        return tuple(self.number(0.1) for _ in range(self.rng.choice([1, count])))

    def places(self, count):
        return tuple(self.rng.sample(range(count), count))

    def links(self):
        pick = self.rng.choice
        model = pick(LINKS)
        fields = {"host_links": pick([(), ((0, 1), (2, 3))])}
        fields["pair_links"] = pick([(), {(0, 1): "queued", (1, 0): "delay"}])
        if model != "delay":
            fields["shared_links"] = pick([(), "pairs", (((0, 1), (1, 0)), ((2, 3),))])
        if model == "rendezvous":
            fields["queues"] = pick(["worker", "pair", "direction"])
            fields["posting"] = pick(["early", "program"])
            fields["eager_below"] = pick([0.0, self.seconds()])
        return pj.Links(model, **fields)

    def schedule(self):
        if self.rng.random() < 0.2:
            repair = self.maybe("torch-1f1b", 0.2)
            return {"schedule": TableFile(str(self.folder / "a table.csv"), repair)}
        names = "1f1b", "gpipe", "interleaved-1f1b", "hanayo", "zb-v", "ada-offload"
        name = self.rng.choice(names)
        size = {"num_workers": self.rng.randint(1, 9), "num_microbatches": self.rng.randint(1, 99)}
        options = {}
        if name == "interleaved-1f1b":
            options["stages_per_worker"] = self.rng.randint(1, 4)
        if name == "hanayo":
            options["waves"] = self.rng.randint(1, 3)
        if name == "zb-v" and self.rng.random() < 0.5:
            times = {"F": self.number(0.1), "I": self.number(0.1), "W": self.number(0.1)}
            options["slots"] = times | {"B": self.number(0.1)}
            options["transfer"] = self.number()
        if name == "ada-offload":
            options["memory_limit"] = float(self.rng.randint(1, 9))
            options["offload"] = self.rng.choice([self.number(), [self.number(), 1.0]])
        return {"schedule": name, **size, "options": options}

    def given_times(self):
        times = {"forward": self.seconds(), "backward": self.seconds()}
        if self.rng.random() < 0.5:
            times = {"forward": 1.0, "input_grad": self.seconds(), "weight_grad": self.seconds()}
        times |= {"update": self.seconds()} if self.rng.random() < 0.3 else {}
        times |= {"Xy": self.seconds()} if self.rng.random() < 0.1 else {}
        nodes = self.rng.choice([(), (2,), (2, 4)])
        names = self.rng.choice([(), ("transmit",), ("latency",), ("latency", "transmit")])
        messages = tuple({name: self.seconds() for name in names} for _ in range(len(nodes) + 1))
        per_worker = self.rng.random() < 0.3
        stages = None if per_worker else self.maybe(self.rng.randint(1, 9), 0.3)
        places = self.places(4) if nodes and self.rng.random() < 0.5 else ()
        return GivenTimes(times, messages, per_worker, nodes, stages=stages, places=places)

    def model_costs(self, lengths):
        pick = self.rng.choice
        fields = {
            "tensor_parallel": pick([1, 2, 4]),
            "data_parallel": pick([1, 2]),
            "zero": pick([0, 1, 3]),
            "overlap": pick([0.0, 0.25, 1.0, self.number(0, 1)]),
            "tensor_overlap": pick([0.0, 0.5, 1.0]),
            "recompute": pick(["none", "selective", "full", "block:2", "layernorm+mlp"]),
            "precision": pick(["bf16", "fp8"]),
            "embedding_units": pick([0, 1]),
            "weight_share": self.maybe(self.number(0, 1), 0.3),
            "worker_places": pick([(), self.places(4)]),
        }
        fields["sequence_parallel"] = fields["tensor_parallel"] > 1 and pick([False, True])
        if fields["recompute"] == "full":
            fields["recompute_again"] = pick([False, True])
        if not fields["embedding_units"] and self.rng.random() < 0.2:
            fields["pipeline_layout"] = "E|t*32|L"
        files, stack = {"model": "llama3-8b", "system": "h100"}, ""
        model = pj.load_model("llama3-8b")
        if not lengths and self.rng.random() < 0.3:
            model = dataclasses.replace(model, sequence=self.rng.choice([512, 4096]))
        if launcher := self.maybe(pick(["Megatron-LM", "Megatron-Bridge", "torchtitan"]), 0.3):
            files["launcher"] = launcher
            model = dataclasses.replace(model, gradient_bytes=4.0)
            if launcher == "torchtitan":
                stack = "torchtitan-2024-eager"
                model = pj.load_stack(stack).model(model)
                fields |= {"sequence_parallel": True, "recompute_again": True}
                fields["expert_tensor_parallel"] = 1
        workload = pj.Workload(model, self.rng.randint(1, 64), **fields)
        system = pj.load_system("h100")
        system = pj.load_stack(stack).on(system) if stack else system
        return ModelCosts(workload, system, stack=stack, lengths=lengths), files

    def scenario(self):
        pick, edits = self.rng.choice, []
        fields = self.schedule() | {"link": self.links()}
        if self.rng.random() < 0.1:
            edits = [RecomputeCells()] if self.rng.random() < 0.5 else []
            return pj.Scenario(**fields, costs=SlotCosts(), edits=tuple(edits))
        lengths = self.maybe((3.0, 1.0, 2.0), 0.2)
        way = pick(["times", "file", "model"])
        files = {}
        if way == "times":
            costs = self.given_times()
        elif way == "file":
            costs = CostsFile(str(self.folder / "costs.json"), stages=self.maybe(4))
        else:
            costs, files = self.model_costs(lengths)
        files |= {"lengths": str(self.folder / "lengths.json")} if lengths else {}
        is_model = way == "model"
        lookahead = pick([(), (1,), (0, 2)])
        sharding = ShardingCells(pick([None, "net"]), lookahead, pick([(), (2,)]))
        host = HostTimes(self.numbers(), self.maybe(self.numbers()), is_model)
        host = HostTimes(None) if is_model and self.rng.random() < 0.5 else host
        microbatches = Microbatches(
            None if is_model else lengths,
            None if lengths else self.maybe(self.numbers(), 0.3),
            self.maybe(self.places(3), 0.3),
        )
        choices = [
            self.maybe(RecomputeCells(), 0.2),
            None if sharding == ShardingCells() else sharding,
            None if is_model and lengths else self.maybe(host, 0.3),
            None if microbatches == Microbatches() else microbatches,
            None if is_model else self.maybe(RecomputedAgain(), 0.2),
            self.maybe(PairFactor(self.number(0, 1)), 0.2),
            self.maybe(
                SlowWorkers({k: self.number(0.5) for k in {self.rng.randint(0, 3), 2}}), 0.3
            ),
            self.maybe(ScaledTimes(pick(["F*2", "compute@stage2*0.61,transmit*0.5"])), 0.3),
        ]
        edits = tuple(filter(None, choices))
        return pj.Scenario(**fields, costs=costs, edits=edits, files=files)


@pytest.fixture
def folder(tmp_path):
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    pj.write_table(table, tmp_path / "a table.csv")
    (tmp_path / "lengths.json").write_text("[3, 1, 2]")
    (tmp_path / "costs.json").write_text(json.dumps({"unit": "seconds", "F": 1, "B": 2}))
    return tmp_path


@pytest.mark.filterwarnings("ignore:.*(saves nothing without|has no unit and is read as seconds)")
@pytest.mark.parametrize("count", [500, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_scenario_is_read_from_its_command_line(count, folder):
    draw = Draw(count, folder)
    for _ in range(count):
        scenario = draw.scenario()
        line = command_line(scenario)
        assert read(line) == scenario, line


@pytest.mark.parametrize("value", ["plain", "null", "3", "true", "NaN", '"a', None, 3, True])
def test_options_without_a_flag_keep_their_type(value, tmp_path):
    build = "def build(num_workers, num_microbatches, kind):\n    return []\n"
    (tmp_path / "mine.py").write_text(build)
    options = {"kind": value}
    costs = GivenTimes({"forward": 1.0, "backward": 2.0})
    scenario = pj.Scenario(f"{tmp_path}/mine.py:build", 4, 8, costs=costs, options=options)
    assert read(command_line(scenario)).options == options


@with_cases(
    "changes message",
    ({"schedule": pj.ScheduleTable.from_rows([["0F0", "0B0"]])}, "is in no file"),
    ({"costs": pj.Costs(forward=1.0, backward=2.0)}, "costs are in no file"),
    ({"edits": (Microbatches(lengths=(1.0, 2.0)),)}, "lengths are in no file"),
    ({"options": {"depth": [1, 2]}}, "no option has a value with commas"),
)
def test_what_comes_from_no_file_has_no_command(changes, message):
    scenario = pj.Scenario("1f1b", 4, 8, costs=GivenTimes({"forward": 1.0, "backward": 2.0}))
    with pytest.raises(ValueError, match=message):
        command_line(scenario.replace(**changes))


@with_cases("fields message", *read_cases("test_a_workload_that_no_option_sets_has_no_command"))
def test_a_workload_that_no_option_sets_has_no_command(fields, message):
    model, system = pj.load_model("llama3-8b"), pj.load_system("h100")
    costs = ModelCosts(pj.Workload(model, 8, **fields), system)
    with pytest.raises(ValueError, match=message):
        command_line(pj.Scenario("1f1b", 4, 8, costs=costs))
    larger = dataclasses.replace(model, hidden=2 * model.hidden)
    scenario = pj.Scenario("1f1b", 4, 8, costs=ModelCosts(pj.Workload(larger, 8), system))
    with pytest.raises(ValueError, match="model llama3-8b differs from its file"):
        command_line(scenario)


def test_a_schedule_is_planned_for_its_scenario():
    costs = pj.Costs(forward=1.0, input_grad=1.2, weight_grad=0.3, transmit=0.2)
    scenario = pj.Scenario("zb-v", 4, 8, costs=costs)
    other = scenario.replace(num_microbatches=16)
    assert other.table().num_microbatches == 16
    pinned = scenario.pinned().with_edit(ScaledTimes("W*9"))
    assert pinned.table() is not scenario.table()
    assert pinned.plan_options() == scenario.plan_options()
    assert pinned.evaluate().makespan > scenario.evaluate().makespan
    assert scenario.evaluate() is scenario.evaluate()


def test_a_scenario_keeps_its_table_where_only_costs_change():
    costs = pj.Costs(forward=1.0, input_grad=1.0, weight_grad=1.0)
    scenario = pj.Scenario("zb-h1", 2, 4, costs=costs)
    slower = scenario.replace(costs=pj.Costs(forward=2.0, input_grad=2.0, weight_grad=2.0))
    for other in (slower, scenario.with_edit(ScaledTimes("F*9")), scenario.pinned()):
        assert other.table() is scenario.table()
    assert slower.evaluate().makespan == 2 * scenario.evaluate().makespan
    for change in ({"num_microbatches": 8}, {"num_workers": 4}, {"schedule": "zb-h2"}):
        assert scenario.replace(**change).table() is not scenario.table()
    recomputed = scenario.with_edit(RecomputeCells())
    assert (recomputed.table().phase == pj.Phase.R).sum() == 8
    assert recomputed.replace(costs=slower.costs).table() is recomputed.table()
    assert recomputed.replace(edits=()).table().used_phases == scenario.table().used_phases
    planned = pj.Scenario("zb-v", 2, 4, costs=costs)  # its order follows from the times
    assert planned.replace(costs=slower.costs).table() is not planned.table()


def test_edits_apply_in_one_order():
    costs = pj.Costs(forward=1.0, backward=2.0)
    edits = ScaledTimes("F@microbatch0*3"), Microbatches(scale=(1.0, 2.0), order=(1, 0))
    scenario = pj.Scenario("1f1b", 2, 2, costs=costs)
    for edit in edits:
        scenario = scenario.with_edit(edit)
    assert scenario.edits == edits[::-1]
    assert scenario.table_costs().forward.tolist() == [[6.0, 1.0]]
    scaled = {"microbatch_scale": "1,2", "microbatch_order": "1,0", "scale": "F@microbatch0*3"}
    options = scenario_options(scenario.replace(costs=SlotCosts()))
    assert options == {"schedule": "1f1b", "workers": 2, "microbatches": 2, **scaled}


@with_cases("options needed", *read_cases("options that save nothing"))
def test_options_that_save_nothing_are_named(call, options, needed):
    run = ("evaluate", "-s", "1f1b", "-P", 4, "-M", 8, "-m", "llama3-8b", "-y", "h100")
    run = (*run, "--minibatch", 8, "--json")
    _, out, warning = call(*run, *options.split())
    text = f"warning: {options} saves nothing without {needed} above 1\n"
    assert warning == (text if needed else "")
    if needed:
        shown, plain = json.loads(out), json.loads(call(*run)[1])
        assert shown["makespan"] == plain["makespan"]
        assert min(np.subtract(shown["memory_bytes"], plain["memory_bytes"])) >= 0


@with_cases(
    "workers per_node fields nodes",
    (8, 8, {}, [0] * 8),
    (8, 4, {}, [0] * 4 + [1] * 4),
    (8, 4, {"tensor_parallel": 2}, [0, 0, 1, 1, 2, 2, 3, 3]),
    (4, 4, {"data_parallel": 2}, [0, 0, 1, 1]),  # replicas of a stage are neighbours
    (4, 4, {"tensor_parallel": 4}, [0, 1, 2, 3]),
)
def test_nodes_of_places_need_no_price(workers, per_node, fields, nodes):
    system = dataclasses.replace(pj.load_system("a100"), gpus_per_node=per_node)
    workload = pj.Workload(pj.load_model("llama3-8b"), minibatch=8, **fields)
    scenario = pj.Scenario("1f1b", workers, 8, costs=ModelCosts(workload, system))
    assert scenario.place_nodes(scenario.table()).tolist() == nodes
    assert scenario.placed(scenario.table()).nodes.tolist() == nodes


def test_nodes_of_places_of_measured_times():
    times = GivenTimes(times={"forward": 1.0, "backward": 2.0}, messages=({}, {}), nodes=(3,))
    scenario = pj.Scenario("1f1b", 6, 8, costs=times)
    assert scenario.place_nodes(scenario.table()).tolist() == [0, 0, 0, 1, 1, 1]


@with_cases(
    "fields", *read_cases("test_schedules_that_share_prices_have_the_prices_of_their_own_tables")
)
def test_schedules_that_share_prices_have_the_prices_of_their_own_tables(fields):
    """One source prices all schedules; each table alone has the same costs."""
    workload = pj.Workload(pj.load_model("llama3-8b"), minibatch=16, **fields)
    system = pj.load_system("h100")
    source, num_priced = ModelCosts(workload, system), 0
    edits = (), (RecomputeCells(),), (ShardingCells(lookahead=(1,)),)
    names = [name for name, builder in pj.schedules.REGISTRY.items() if not builder.planned]
    for name, edit, count in itertools.product(names, edits, (8, 16)):
        try:
            scenario = pj.Scenario(name, 4, count, costs=source, edits=edit)
            table, costs = scenario.table(), scenario.table_costs()
        except ValueError:  # no such table, or whole weights
            continue
        alone = vars(pj.stage_costs(workload, system, table))
        for field, value in vars(costs).items():
            np.testing.assert_array_equal(value, alone[field], err_msg=f"{name} {edit} {field}")
        num_priced += 1
    assert num_priced > 20
