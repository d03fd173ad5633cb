"""Numbers of a system by name, under their priors, and back in a file."""

import json

import numpy as np
import pytest

import pipejax as pj
from pipejax.base.data_files import load_json
from pipejax.costs.system.parts import FIELDS, system_number, written_with
from pipejax.costs.system.system import data_file
from pipejax.search.calibration.parameters import (
    FITTED,
    PRIORS,
    parameters_with_priors,
    with_factors,
)


@pytest.fixture(scope="module")
def a100():
    return pj.load_system("a100")


def test_every_prior_is_of_a_number():
    assert set(FITTED) <= set(PRIORS) <= set(FIELDS)
    assert all(prior.spread > 0 for prior in PRIORS.values())


@pytest.mark.parametrize("name", sorted(PRIORS))
def test_a_number_is_put_where_it_is_read(a100, name):
    value = 1.25 if name == "kernels.sharpness" else 0.25
    assert system_number(a100.with_number(name, value), name) == value


def test_a_number_far_from_all_machines_gives_a_warning(a100):
    with pytest.warns(UserWarning, match="network.bandwidth is .* times below the smallest"):
        a100.with_number("network.bandwidth", 50.0)  # GB/s were meant
    with pytest.warns(UserWarning, match="compute.peak is .* times below the smallest"):
        a100.with_number("compute.peak", np.array([312.0, 3e14]))


def test_a_file_with_numbers_reads_back_as_the_system_with_them(a100, tmp_path):
    values = {"compute.peak": 2.5e14, "memory.latency": 3e-6, "node.efficiency": 0.625}
    path = tmp_path / "other.json"
    path.write_text(json.dumps(written_with(load_json(data_file("hardware", "a100", "")), values)))
    expected = a100
    for name, value in values.items():
        expected = expected.with_number(name, value)
    assert pj.load_system(path) == expected != a100


def test_whitened_parameters_are_numbers_within_their_limits(a100):
    parameters = with_factors(parameters_with_priors(a100, FITTED), ["layer"], 1.0)
    points = np.random.default_rng(0).standard_normal((5, len(parameters.names))) * 3
    values = parameters.values(points)
    assert (values > 0).all()
    assert (values < parameters.limit).all()
    np.testing.assert_allclose(
        parameters.values(np.zeros((1, len(parameters.names))))[0], parameters.centre
    )
    moved = (parameters.values(points + 1e-6) - parameters.values(points - 1e-6)) / 2e-6
    np.testing.assert_allclose(parameters.slopes(points), moved, rtol=1e-6)


def test_mistakes_are_named(a100):
    with pytest.raises(ValueError, match=r"unknown fit 'memory\.size'"):
        parameters_with_priors(a100, ["memory.size"])


def test_a_number_of_the_system_comes_before_that_of_others(a100):
    """The H100's file has 10 us from NCCL's constants, other machines 40."""
    name, h100 = "collectives.latency", pj.load_system("h100")
    for system, centre in ((h100, 1e-5), (pj.load_system("mid_nw_mid_cp"), 4e-5)):
        for general in (False, True):  # known better than step times tell
            assert parameters_with_priors(system, [name], general=general).centre.tolist() == [
                centre
            ]
    system_centre, others = (
        parameters_with_priors(a100, ["host.step"], general=g).centre[0] for g in (False, True)
    )
    assert (system_centre, others) == (a100.host.step, PRIORS["host.step"].centre)
    unsaid = a100.with_number("kernels.attention_efficiency", 1.0)  # a data sheet knows no losses
    name = "kernels.attention_efficiency"
    assert parameters_with_priors(unsaid, [name]).centre[0] == PRIORS[name].centre
