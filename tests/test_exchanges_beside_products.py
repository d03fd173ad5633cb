"""Exchanges of tensor parallelism that a backward in one pass hides beside its products."""

import dataclasses

import numpy as np
import pytest

import pipejax as pj
from pipejax.costs.layers.collectives import collective_time
from pipejax.costs.layers.kernels import device_time
from pipejax.costs.layers.layer_ops import layer_ops
from pipejax.costs.model.layout import Group, Layout
from pipejax.costs.system.parts import Host, Kernels

H100 = dataclasses.replace(pj.load_system("h100"), kernels=Kernels(priced=1.0), host=Host())
MODEL = pj.load_model("gpt-22b")
TABLE = pj.schedules.build("1f1b", num_workers=4, num_microbatches=4)
LAYERS = MODEL.layers / 4
LAYOUT = Layout(tensor=8, sequence_parallel=1)


def costs(system, *, overlap):
    workload = pj.Workload(
        MODEL, 4, tensor_parallel=8, sequence_parallel=True, tensor_overlap=overlap
    )
    return pj.stage_costs(workload, system, TABLE)


def products(system, phase):
    ops = layer_ops(MODEL, LAYOUT)
    return sum(float(device_time(system, op, phase)) for op in ops if op.kind == "gemm")


def test_a_backward_in_one_pass_hides_exchanges_that_its_products_do_not_wait_for():
    apart, nearby = (costs(H100, overlap=overlap) for overlap in (False, True))
    volume = 2.0 * MODEL.sequence * MODEL.hidden  # bytes of the whole hidden state, b = 1
    group = Group(8.0, 8.0)
    hidden = (
        2
        * LAYERS
        * sum(  # both of a layer's, in I and in W
            float(collective_time(H100, kind, volume, group))
            for kind in ("reduce_scatter", "all_gather")
        )
    )
    middle = 1  # neither embedding nor head
    difference = np.asarray(apart.backward - nearby.backward)[middle]
    # beside an exchange, products take 1.189 times as long
    assert difference == pytest.approx(hidden / float(H100.contention.compute), rel=1e-9)
    for phase in ("forward", "input_grad", "weight_grad"):  # I alone has no W beside it
        np.testing.assert_array_equal(getattr(apart, phase), getattr(nearby, phase))


def test_what_is_longer_than_the_products_stays_exposed():
    slow = dataclasses.replace(H100, node=dataclasses.replace(H100.node, bandwidth=1e9))
    apart, nearby = (costs(slow, overlap=overlap) for overlap in (False, True))
    difference = np.asarray(apart.backward - nearby.backward)[1]
    both = products(slow, "input_grad") + products(slow, "weight_grad")
    assert difference == pytest.approx(LAYERS * both, rel=1e-9)


def test_gradients_and_tensor_parallelism_have_shares_of_their_own():
    layout = {"tensor_parallel": 8, "sequence_parallel": True, "data_parallel": 8, "zero": 1}
    shares = [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)]  # of gradients and weights, of products
    none, gradients, products = (
        pj.stage_costs(pj.Workload(MODEL, 4, **layout, overlap=a, tensor_overlap=b), H100, TABLE)
        for a, b in shares
    )
    np.testing.assert_array_equal(none.backward, gradients.backward)
    np.testing.assert_array_equal(none.all_reduce, products.all_reduce)
    assert (np.asarray(products.backward) < none.backward).all()
    assert (np.asarray(gradients.all_reduce) < none.all_reduce).any()
