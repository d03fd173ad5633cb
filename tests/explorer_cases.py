"""Shared by the tests of the explorer, in a browser too: tables with costs of every kind."""

import base64
import json
import re
import zlib

import numpy as np
from grammar_tables import TABLES, grammar_table

import pipejax as pj
from pipejax.plots.explorer.payload import Explored

TIMES = {"forward": 1.0, "backward": 2.0}
BY_STAGE = {"forward": [1.0, 1.5, 2.0], "input_grad": 1.1, "weight_grad": 0.7, "latency": 0.1}
BY_MICROBATCH = {"forward": np.arange(1.0, 13.0).reshape(3, 4), "backward": 2.0}
BUILT = {
    "alike": ("1f1b", {**TIMES, "transmit": 0.25}),
    "tiny": ("gpipe", {"forward": 1e-300, "backward": 2e-300}),
    "free messages": ("gpipe", TIMES),
    "by stage": ("zb-h1", {**BY_STAGE, "transmit": 0.3}),
    "by microbatch": ("1f1b", {**BY_MICROBATCH, "transmit": 0.5}),
    "an update": ("1f1b", {**TIMES, "transmit": 0.5, "all_reduce": 3.0, "update": 0.5}),
    "within": ("pipedream", {**TIMES, "update": 0.5, "all_reduce": 0.25, "transmit": 0.1}),
}
PAIRS = ["0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2", ",1F0,1B0,1F1,1B1,1F2,1B2"]
ROWS = {
    "pairs": (PAIRS, {**TIMES, "transmit": 0.3}),
    "offloads": (["0F0,0O0,0WAIT_O0,0F1,0B1,0L0,0B0"], {**TIMES, "offload": 1.5}),
}
CROSSED = (  # a deadlock under rendezvous
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
    "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1",
)
GIVEN = [*BUILT, *ROWS, *TABLES]  # fused pairs, host links and grammars of their own among them


def unpack(packed):
    """Read arrays of a page back, as the page does."""
    content, place, arrays = zlib.decompress(base64.b64decode(packed["data"])), 0, {}
    for name, kind, size, is_steps in packed["arrays"]:
        array = np.frombuffer(content, np.dtype(kind).newbyteorder("<"), size, place)
        place += array.nbytes
        if is_steps:  # from one entry to the next, of those that are not 0
            array = array.astype(np.int64)
            array[array != 0] = np.cumsum(array[array != 0] - (array[array != 0] > 0))
        arrays[name] = array
    return arrays


def build_case(name):
    if name in TABLES:
        return grammar_table(name)
    if name in ROWS:
        rows, costs = ROWS[name]
        rows = [row.split(",") for row in rows]
        return pj.ScheduleTable.from_rows(rows), pj.Costs(**costs)
    schedule, costs = BUILT[name]
    return pj.schedules.build(schedule, num_workers=3, num_microbatches=4), pj.Costs(**costs)


def explored(table, costs, link="delay", limits=None):
    return Explored(pj.evaluate(table, costs, link=link), limits=limits)


def get_scene(text):
    pattern = r'<script type="application/json" id="scene">(.*?)</script>'
    return json.loads(re.search(pattern, text, re.DOTALL)[1])


def run_of_page(schedule, factors, model):
    """A plain reading of the page: costs times factors, then the recurrence; finish of each node."""
    costs = schedule["costs"]
    arrays = unpack(costs)
    scale = np.array([1.0, *factors])
    vector = arrays["base"] * scale[arrays["kind"]]
    if costs["firstPair"] >= 0:
        pairs = arrays["pair"].reshape(-1, 2)
        both = vector[pairs]
        durations = both.max(axis=1) + arrays["overlap"] * both.min(axis=1)
        vector[costs["firstPair"] : costs["firstPair"] + len(pairs)] = durations
    links = (len(vector) - costs["firstLink"]) // 3
    latency, transmit, _ = vector[costs["firstLink"] :].reshape(3, links)
    vector[len(vector) - links :] = latency + transmit
    program = unpack(schedule["programs"][model])
    finish, back = np.zeros(len(program["degree"])), program["back"].tolist()
    edge = 0
    for node, degree in enumerate(program["degree"].tolist()):
        edges = range(edge, edge + degree)
        arrivals = [finish[node - back[e]] + vector[program["lag"][e]] for e in edges]
        finish[node] = max(arrivals, default=0.0) + vector[program["durations"][node]]
        edge += degree
    return finish, vector, program
