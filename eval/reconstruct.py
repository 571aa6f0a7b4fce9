"""Evaluates a trained run: `python -m eval.reconstruct RUN [--data PATH]` prints one JSON object.

The measures are in `softvq.metrics`, and the loop over the images in `softvq.evaluation`.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import tyro

from softvq import checkpoint
from softvq.autoencoder import Autoencoder
from softvq.data import DataConfig, load_images
from softvq.evaluation import evaluate, evaluate_without
from softvq.metrics import Reconstruction, load_perceptual
from softvq.program import find_device, parse_flags, run_program, stored_data


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What to evaluate, and on which images."""

    run: Annotated[str, tyro.conf.Positional]
    """Run folder."""
    data: str = ""
    """A data set by name, a folder or a zip, of which the test split is taken; by default the one
    that the run was trained on."""
    test_images: int = 0
    """Number of images; 0 is all."""
    lpips_weights: str = ""
    """File of torchvision's AlexNet for LPIPS; by default the one in torchvision's cache."""
    device: str = "cpu"
    """Where to compute."""


def reconstruct(evaluation: Evaluation) -> dict[str, Any]:
    """The measures of the test split. Raises ValueError for a run or data that cannot be used."""
    device = find_device(evaluation.device)
    model = load_run(evaluation.run, device)
    trained_on = stored_data(evaluation.run)
    if not (trained_on or evaluation.data):
        raise ValueError(f"{evaluation.run} does not say what it was trained on; give --data")
    trained_on = trained_on or DataConfig()
    data = replace(
        trained_on,
        source=evaluation.data or trained_on.source,
        test_images=evaluation.test_images,
    )
    perceptual = load_perceptual(evaluation.lpips_weights)
    images = load_images(data, "test")
    soft, hard = (Reconstruction(perceptual, model.config.channels).to(device) for _ in range(2))
    return {
        "run": evaluation.run,
        "data": images.description,
        "images": len(images),
        **evaluate(model, images, soft, hard),
        **evaluate_without(model, images, soft),
        "absent": hard.absent,
    }


def load_run(run: str, device: torch.device) -> Autoencoder:
    """The model of a run, which may be one of a peer, in eval mode."""
    try:
        return checkpoint.load(run, device)
    except checkpoint.UnknownConfig:
        with suppress(ImportError):
            import eval.peers  # noqa: F401  # slow, and of a package that need not be there
        return checkpoint.load(run, device)


def main(arguments: Sequence[str]) -> int:
    """The program; returns its exit status."""

    def action() -> dict[str, Any]:
        return reconstruct(
            parse_flags(lambda: tyro.cli(Evaluation, args=arguments, description=__doc__))
        )

    return run_program(action)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
