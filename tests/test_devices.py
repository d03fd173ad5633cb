"""Batches over several devices and several processes give what one device gives."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipejax.engine.batched.interpreter import batch_sharding

TESTS = Path(__file__).parent
ON_SEVERAL = """
import jax, numpy as np, pipejax as pj
jax.config.update("jax_enable_x64", True)
assert jax.local_device_count() == {devices}
program = pj.lower(pj.schedules.build("chimera", num_workers=4, num_microbatches=8))
for size in {sizes}:
    rng = np.random.default_rng(size)
    forward, backward = rng.random((2, size, 4))
    costs = pj.Costs(forward=forward, backward=backward, transmit=rng.random(size), latency=0.1)
    for temperature in (None, 0.5)[: 1 + (size == 100)]:
        values, counts = pj.makespans_and_grad(program, costs, temperature=temperature)
        print(repr([float(np.sum(values)), float(np.sum(counts.backward)),
                    float(np.sum(counts.transmit[-1])), float(values[-1])]))
        assert values.shape == (size,) and counts.latency.shape == (size,)
    for unroll in (False, True)[: 1 + (size > 100)]:
        again = pj.makespans(program, costs, unroll=unroll)
        print(float(np.sum(again)))
        parts = pj.makespans(program, costs, unroll=unroll, max_bytes=100_000)
        np.testing.assert_allclose(parts, again)
    if size == 20_001:
        assert len(again.sharding.device_set) == {devices}
"""


def run(arguments, **environment):
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def output(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def numbers(lines):
    return np.concatenate([np.fromstring(line.strip("[]"), sep=",") for line in lines.splitlines()])


@pytest.mark.parametrize(
    "sizes", ["(20_001,)", pytest.param("(100, 20_001)", marks=pytest.mark.slow)]
)
def test_sharded_equals_unsharded(sizes, capsys):
    several = "--xla_force_host_platform_device_count=3"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {several}"
    result = output(run(["-c", ON_SEVERAL.format(devices=3, sizes=sizes)], XLA_FLAGS=flags))
    exec(ON_SEVERAL.format(devices=1, sizes=sizes), {})
    np.testing.assert_allclose(numbers(result), numbers(capsys.readouterr().out), rtol=1e-12)


@pytest.mark.slow
def test_two_processes_share_a_batch():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = str(TESTS / "two_processes.py")
    both = [run([script, port, number]) for number in "01"]
    lines = [output(process).split() for process in both]
    assert [line[:2] for line in lines] == [["process", "0:"], ["process", "1:"]]


def test_threads_keep_the_precision_of_their_caller():
    """A context of float64 belongs to one thread; the batch is shared by several."""
    code = """
import jax, numpy as np, pipejax as pj
table = pj.schedules.build("1f1b", num_workers=8, num_microbatches=64)
times = np.random.default_rng(0).uniform(1, 2, 20_000)
with jax.enable_x64(True):
    costs = pj.Costs(forward=times, backward=2.0)
    print(np.abs(np.asarray(pj.makespans(pj.lower(table), costs)) / (71 * (times + 2)) - 1).max())
"""
    assert float(output(run(["-c", code], XLA_FLAGS=""))) < 1e-14


def test_layouts_that_make_no_sense_are_refused():
    mesh = Mesh(np.array(jax.devices()[:1]), "x")
    leaf = jax.device_put(np.ones((4, 4)), NamedSharding(mesh, PartitionSpec(None, "x")))
    assert batch_sharding({"forward": leaf}) is None  # one device is no layout
    code = """
import jax, numpy as np, pipejax as pj
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), "x")
put = lambda spec: jax.device_put(np.ones((4, 4)), NamedSharding(mesh, spec))
program = pj.lower(pj.schedules.build("gpipe", num_workers=4, num_microbatches=2))
try:
    pj.makespans(program, pj.Costs(forward=put(P(None, "x")), backward=0.0))
except ValueError as error:
    print(error)
"""
    flags = "--xla_force_host_platform_device_count=2"
    assert "forward lies on several devices as" in output(run(["-c", code], XLA_FLAGS=flags))
