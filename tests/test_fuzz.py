"""Flags and configurations of every kind end in success or in one clean line, and memory does not
grow. What each flag does is tested elsewhere.
"""

import copy
import json
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import softvq
import train_vqvae
from models import MODELS
from softvq import checkpoint
from softvq.hierarchical import build_autoencoder
from softvq.program import run_program
from softvq.quantizers import EMAVQ, DDCLCodebook, StraightThroughVQ
from softvq.training import Experiment

pytestmark = pytest.mark.slow
EXAMPLES = settings(
    max_examples=500,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
VALUES = (
    *("0", "1", "2", "7", "-1", "0.5", "1e-3", "-0.1", "1e400", "nan", "inf", "1e9", "4294967296"),
    *(
        "",
        " ",
        "None",
        "True",
        "auto",
        "data",
        "uniform",
        "full",
        "detached",
        "float32",
        "bfloat16",
    ),
    *("[1, 2]", "{}", "--", "-x", "ä", "\x00", "../..", "a b"),
)


def flags_of(config: object, prefix: str) -> list[str]:
    """The flag of every option of a configuration, as tyro names them."""
    found = []
    for field in fields(config):  # pyright: ignore[reportArgumentType]
        value, name = getattr(config, field.name), f"{prefix}{field.name.replace('_', '-')}"
        found += flags_of(value, f"{name}.") if is_dataclass(value) else [f"--{name}"]
    return found


def all_flags(experiment: Experiment) -> list[str]:
    return [
        *flags_of(experiment.model, "model."),
        *flags_of(experiment.data, "data."),
        *flags_of(experiment.train, "train."),
        *("--out", "--device", "--lpips-weights", "--tensorboard", "--speed", "--model", "-h2"),
    ]


def assert_one_line(status: int, captured) -> None:
    assert status == 2
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


@EXAMPLES
@given(st.data())
def test_flags_end_in_a_run_or_in_one_line_and_status_2(capsys, data):
    model = data.draw(st.sampled_from([*MODELS, "photos-dcl", "", "--out"]))
    flags = all_flags(MODELS.get(model, MODELS["photos-ddcl"]))
    given_flags = data.draw(
        st.lists(st.tuples(st.sampled_from(flags), st.sampled_from(VALUES)), max_size=3)
    )
    arguments = [model, *(part for pair in given_flags for part in pair)]
    status = run_program(lambda: train_vqvae.parse(arguments)[1].out)
    captured = capsys.readouterr()
    if status == 0:
        assert json.loads(captured.out)
    else:
        assert_one_line(status, captured)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    quantizer = softvq.DDCLConfig(dim=2, codebook_size=4)
    config = softvq.VQVAEConfig(hidden=4, residual_hidden=2, quantizer=quantizer)
    softvq.save_model(folder, build_autoencoder(config))
    return folder


def places(content: object, path: tuple = ()) -> list[tuple]:
    """The path to every value in nested dicts."""
    if not isinstance(content, dict):
        return [path]
    return [path, *(deep for key in content for deep in places(content[key], (*path, key)))]


@EXAMPLES
@given(st.data())
def test_a_changed_configuration_loads_or_is_refused(run, tmp_path_factory, capsys, data):
    content = checkpoint.read_json(run / checkpoint.CONFIG)
    changed = copy.deepcopy(content)
    *parents, last = data.draw(st.sampled_from(places(content)[1:]))
    part = changed
    for key in parents:
        part = part[key]
    values = st.sampled_from(
        [0, 1, -1, 2, 1.5, 1e30, "", "DDCLConfig", "EMAConfig", None, True, [], {}, [1], {"a": 1}]
    )
    if data.draw(st.booleans()):
        part[last] = data.draw(values)
    else:
        part.pop(last)
    folder = tmp_path_factory.mktemp("changed")
    checkpoint.write_json(folder / checkpoint.CONFIG, changed)
    (folder / checkpoint.MODEL).write_bytes((run / checkpoint.MODEL).read_bytes())

    def reconstruct() -> list:
        return softvq.load(folder)(torch.zeros(1, 3, 8, 8)).reconstruction.tolist()

    status = run_program(reconstruct)
    captured = capsys.readouterr()
    if status == 0:
        expected = softvq.load(run)(torch.zeros(1, 3, 8, 8)).reconstruction.tolist()
        assert json.loads(captured.out) == expected
    else:
        assert_one_line(status, captured)


@pytest.mark.parametrize("method", [DDCLCodebook, StraightThroughVQ, EMAVQ])
def test_two_thousand_steps_take_no_more_memory_than_the_first(method):
    torch.manual_seed(0)
    codebook = method(dim=16, codebook_size=64)
    encoder = torch.nn.Linear(16, 16)
    optimizer = torch.optim.Adam([*encoder.parameters(), *codebook.parameters()])

    def resident_mib() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

    def steps(count: int) -> float:
        for _ in range(count):
            quantized, _, loss = codebook(encoder(torch.randn(512, 16)))
            optimizer.zero_grad()
            (quantized.square().mean() + loss).backward()
            optimizer.step()
        return resident_mib()

    first = steps(300)
    assert steps(2000) - first < 8
