"""The wheel: the library alone, with four dependencies, and enough to open a checkpoint.

It is built by pip from the checkout, as a user's pip would.
"""

import importlib.util
import json
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import torch

from softvq import VQVAE, DDCLConfig, VQVAEConfig, save_model

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, python) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Without it at hand, pip fetches hatchling from the registry
    here = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    python("-m", "pip", "wheel", ROOT, "--no-deps", "--quiet", "-w", folder, *here)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_ships_the_library_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"softvq", "softvq-0.1.0.dist-info"}
    shipped = {name for name in names if name.startswith("softvq/")}
    assert shipped == {str(path.relative_to(ROOT)) for path in (ROOT / "softvq").rglob("*.py")}
    assert wheel.name == "softvq-0.1.0-py3-none-any.whl"


def test_the_wheel_needs_five_packages_and_offers_the_rest_as_extras(wheel):
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("softvq-0.1.0.dist-info/METADATA").decode()
        names = archive.namelist()
    metadata = Parser().parsestr(text)
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    packages = {line.split(">")[0].split(";")[0].strip() for line in needed}
    assert packages == {"torch", "einops", "jaxtyping", "safetensors", "filelock"}
    assert {"train", "dev"} <= set(metadata.get_all("Provides-Extra"))
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "MIT"
    assert "softvq-0.1.0.dist-info/licenses/LICENSE" in names


def test_a_checkpoint_opens_with_nothing_but_the_wheel(wheel, tmp_path, python):
    library, run = tmp_path / "library", tmp_path / "run"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(library)
    torch.manual_seed(0)
    model = VQVAE(VQVAEConfig(quantizer=DDCLConfig(dim=4, codebook_size=8), hidden=8)).eval()
    save_model(run, model)
    code = """
import importlib.util, json, softvq, sys, torch
model = softvq.load(sys.argv[1])
output = model(torch.linspace(-1, 1, 192).reshape(1, 3, 8, 8)).reconstruction
absent = [importlib.util.find_spec(name) is None for name in ("models", "eval", "train_vqvae")]
print(json.dumps([softvq.__file__, absent, output.double().sum().item()]))
"""
    out, _ = python("-c", code, run, folder=tmp_path, PYTHONPATH=str(library))
    file, absent, total = json.loads(out)
    assert Path(file).is_relative_to(library)
    assert absent == [True, True, True]
    x = torch.linspace(-1, 1, 192).reshape(1, 3, 8, 8)
    assert total == model(x).reconstruction.double().sum().item()
