"""The small trained models in assets: they load, and give the figures of their reports again.

What trained them stands in the README.
"""

import os
from pathlib import Path

import pytest
import torch

import eval.peers
import softvq
from softvq import checkpoint
from softvq.data import DataConfig, load_images
from softvq.evaluation import evaluate
from softvq.metrics import Reconstruction

ROOT = Path(__file__).parent.parent / "assets"
RUNS = sorted(path.parent for path in ROOT.glob("*/*/config.json"))
WITH_WEIGHTS = [run for run in RUNS if (run / checkpoint.MODEL).exists()]


def name_of(run: Path) -> str:
    return f"{run.parent.name}/{run.name}"


@pytest.fixture(params=WITH_WEIGHTS, ids=name_of)
def run(request) -> Path:
    return request.param


def test_the_study_is_there_with_all_its_methods():
    methods = {type(softvq.load(run).quantizer) for run in WITH_WEIGHTS}
    ours = {softvq.DDCLCodebook, softvq.EMAVQ, softvq.StraightThroughVQ}
    assert methods == ours | {eval.peers.VectorQuantizeCodebook}


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_a_published_run_is_small_and_complete(run):
    report, records = checkpoint.read_json(run / "report.json"), checkpoint.read_records(run)
    assert run.name == f"{report['model']}-seed{report['seed']}"
    if run in WITH_WEIGHTS:
        model = softvq.load(run)
        assert sum(parameter.numel() for parameter in model.parameters()) == report["parameters"]
    assert [record["epoch"] for record in records] == list(range(1, report["epochs"] + 1))
    assert sum(path.stat().st_size for path in run.iterdir()) < 4e6
    # Not to the last digit: the report is made from another memory layout of the convolutions.
    assert records[-1]["test/psnr_hard"] == pytest.approx(report["test/psnr_hard"], abs=1e-3)


def test_a_published_model_gives_its_figures_again(run):
    folder = os.environ.get("SOFTVQ_TEST_DATA")
    if not folder:
        pytest.skip("SOFTVQ_TEST_DATA is not set")
    images = load_images(DataConfig(source=f"{folder}/cifar10.zip", workers=0), "test")
    report = checkpoint.read_json(run / "report.json")
    soft, hard = (Reconstruction(with_ssim=False) for _ in range(2))
    with torch.no_grad():
        record = evaluate(softvq.load(run), images, soft, hard)
    for key in ("test/psnr_soft", "test/psnr_hard", "test/utilisation", "test/perplexity"):
        assert record[key] == pytest.approx(report[key], rel=1e-4), key
