"""Switches on the checks of the shape annotations for the whole suite, before softvq is imported.

The fixtures here are those that several test files share.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

# A second thread would only wait on tensors as small as those of the tests; torch reads this when
# it is imported, here and in the programs that the tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
install_import_hook("softvq", "beartype.beartype")


@pytest.fixture(scope="session")
def python():
    """A function that runs this Python in a process of its own and returns what it printed."""

    def run(*arguments: object, folder: Path = Path(__file__).parents[1], **environment: str):
        command = [sys.executable, *map(str, arguments)]
        result = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout, result.stderr

    return run


@pytest.fixture(params=["ddcl", "straight_through", "ema"])
def tiny_config(request):
    """A small VQ-VAE with 2 x 2 codes for an image of 8 x 8, once for each quantizer."""
    from softvq.autoencoder import VQVAEConfig
    from softvq.quantizers import REGISTRY

    options = REGISTRY[request.param].config_class(dim=4, codebook_size=8)
    return VQVAEConfig(
        quantizer=options,
        hidden=6,
        residual_blocks=1,
        residual_hidden=4,
        normalize=request.param == "ddcl",
    )


@pytest.fixture
def noise_images():
    """A function that makes n images of noise, an `ImageArray`."""
    import torch

    from softvq.data import ImageArray

    def make(n: int, size: int = 8, seed: int = 0) -> ImageArray:
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randint(0, 256, (n, 3, size, size), generator=generator, dtype=torch.uint8)
        return ImageArray(pixels, "noise")

    return make


class _Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def hostile(tmp_path):
    """The bytes of two pickles, plain and as torch saves it, and the path that both create."""
    import io

    import torch

    trace = tmp_path / "PWNED"
    file = io.BytesIO()
    torch.save(_Touch(trace), file)
    return (pickle.dumps(_Touch(trace)), file.getvalue()), trace
