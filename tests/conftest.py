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
        return ImageArray(pixels, "noise", [""] * len(pixels))

    return make


@pytest.fixture
def model(tiny_config, noise_images):
    """A small VQ-VAE that is ready to be trained for eight steps."""
    import torch

    from softvq.autoencoder import VQVAE
    from softvq.training import prepare

    torch.manual_seed(0)
    model = VQVAE(tiny_config)
    prepare(model, noise_images(64), total_steps=8)
    return model


@pytest.fixture(
    params=[
        f"{method}-{levels}" for method in ("ddcl", "vq", "ema") for levels in ("flat", "2level")
    ]
)
def autoencoder(request):
    """Every architecture with every quantizer, started from noise, with statistics of its own."""
    import torch

    from softvq import hierarchical
    from softvq.autoencoder import LatentNorm, VQVAEConfig
    from softvq.quantizers import DDCLConfig, EMAConfig, StraightThroughConfig

    method, levels = request.param.split("-")
    codes = dict(dim=4, codebook_size=8)
    quantizer = {
        "ddcl": DDCLConfig(**codes),
        "vq": StraightThroughConfig(**codes, init="data"),
        "ema": EMAConfig(**codes),
    }[method]
    network = dict(hidden=8, residual_hidden=4, residual_blocks=1)
    config = VQVAEConfig(quantizer=quantizer, **network)
    if levels == "2level":
        config = hierarchical.HierarchicalVQVAEConfig(top=quantizer, bottom=quantizer, **network)
    torch.manual_seed(0)
    model = hierarchical.build_autoencoder(config)
    norms = [module for module in model.modules() if isinstance(module, LatentNorm)]
    for norm in norms:
        norm.momentum = 1.0
    model(torch.rand(8, 3, 24, 24) * 2 - 1)
    for norm in norms:
        norm.momentum = 0.1
    return model


@pytest.fixture
def naive_latents():
    """The formula of a model's latents of images."""
    from torch import nn

    def latents(model, x, train: bool):
        z = model.encoder(x)
        if isinstance(model.norm, nn.BatchNorm2d):
            mean, variance = model.norm.running_mean, model.norm.running_var
            if train:
                mean, variance = z.mean((0, 2, 3)), z.var((0, 2, 3), correction=0)
            z = (z - mean[:, None, None]) / (variance[:, None, None] + model.norm.eps).sqrt()
        return z.movedim(1, -1)

    return latents


@pytest.fixture
def naive_quantizer():
    """The formulas of (soft, hard, what the decoder of a training step sees, the loss)."""
    import torch

    from softvq.quantizers import DDCLCodebook, StraightThroughVQ

    def quantize(codebook, z):
        p, d = codebook.prototypes, codebook.dim
        distance = (z[..., None, :] - p).square().sum(-1)
        hard = p[distance.argmin(-1)]
        if isinstance(codebook, DDCLCodebook):
            q = torch.softmax(-distance / codebook.temperature.clone(), -1)
            soft, fixed = q @ p, q.detach()
            for_codes = (fixed * (z.detach()[..., None, :] - p).square().sum(-1)).sum(-1).mean()
            for_encoder = (fixed * (z[..., None, :] - p.detach()).square().sum(-1)).sum(-1).mean()
            usage = q.mean((0, 1, 2))
            loss = for_codes + 0.25 * (for_encoder - for_encoder.detach())
            loss = loss / d + 0.1 * (usage * (usage * len(p)).log()).sum()
            return soft, hard, soft + z + (hard - soft - z).detach(), loss
        loss = 0.25 * (z - hard.detach()).square().mean()
        if isinstance(codebook, StraightThroughVQ):
            loss = loss + (z.detach() - hard).square().mean()
        return hard, hard, z + (hard - z).detach(), loss

    return quantize


@pytest.fixture
def noise_pngs():
    """A function that makes n PNG files of noise, as bytes by name."""
    import io

    import numpy as np
    from PIL import Image

    def make(n: int, folder: str = "", size: int = 16) -> dict[str, bytes]:
        files = {}
        for seed in range(n):
            pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "PNG")
            files[f"{folder}{seed:03d}.png"] = buffer.getvalue()
        return files

    return make


@pytest.fixture
def store():
    """A function that writes files into a folder, or into a new zip if the path ends so."""
    import zipfile

    def write(path: Path, files: dict[str, bytes]) -> Path:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path, "w") as archive:
                for name, content in files.items():
                    archive.writestr(name, content)
            return path
        for name, content in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
        return path

    return write


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


@pytest.fixture(scope="session", params=["flat", "2level"])
def generative_run(request, tmp_path_factory) -> Path:
    """A run folder of a tokenizer with its first prototypes for 16 x 16 images of two classes, and
    a prior of one epoch in it."""
    import torch

    from softvq import DDCLConfig, HierarchicalVQVAEConfig, VQVAEConfig, checkpoint
    from softvq.data import DataConfig, load_images
    from softvq.hierarchical import build_autoencoder
    from softvq.prior.__main__ import Training, train_prior
    from softvq.prior.training import PriorTrainConfig
    from softvq.training import prepare

    codes = DDCLConfig(dim=4, codebook_size=6)
    config = {
        "flat": VQVAEConfig(quantizer=codes, hidden=8),
        "2level": HierarchicalVQVAEConfig(top=codes, bottom=codes, hidden=8),
    }[request.param]
    run = tmp_path_factory.mktemp(request.param)
    data = DataConfig(source="photos", image_size=16, train_images=16, test_images=8, workers=0)
    torch.manual_seed(0)
    model = build_autoencoder(config)
    prepare(model, load_images(data, "train"), 10)
    checkpoint.save_model(run, model, data=data)
    recipe = PriorTrainConfig(epochs=1, batch_size=8)
    small = dict(width=16, depth=1, heads=2, device="cpu")
    train_prior(Training(run=str(run), train=recipe, **small))
    return run


@pytest.fixture(scope="session")
def bert(tmp_path_factory) -> str:
    """Folder of a BERT of two layers and random weights, with a vocabulary of six words."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("bert")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = [*special, "red", "green", "blue", "cat", "dog", "bird"]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
    )
    transformers.BertModel(config).save_pretrained(folder)
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def word_file(tmp_path) -> Path:
    """Forty documents of a few words, whose class is told by them, for the `bert` above."""
    import json

    path = tmp_path / "documents.jsonl"
    kinds = ("red green blue", "cat dog bird")
    rows = [
        {
            "text": " ".join(f"{kinds[n % 2]} {kinds[n % 2]}".split()[n % 3 :]) + f" {n}",
            "label": "ab"[n % 2],
        }
        for n in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path
