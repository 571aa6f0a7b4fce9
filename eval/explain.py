"""A document or an image in terms of prototypes: `python -m eval.explain RUN --text "..."`.

RUN is a folder that `eval.text --out` wrote, or for `--image` a run folder of `train_vqvae`. Prints
one JSON object, and writes one HTML page without scripts or links; its markup is in `eval.page`.
"""

import base64
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from einops import rearrange
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from eval.features import Encoder, TokenFeatures, default_encoder
from eval.page import page
from eval.prototypes import context, load_readout
from eval.reconstruct import load_run
from eval.report import check_out_file
from softvq import checkpoint
from softvq.data import to_float
from softvq.image_files import decode_all, one_file
from softvq.program import find_device, parse_flags, run_program
from softvq.quantizers import codebooks

# Margin around a patch that is shown with it, in strides
_MARGIN = 0.5
# Height and width of a shown patch in pixels of the page
_SHOWN = 96


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Options of the program."""

    run: Annotated[str, tyro.conf.Positional]
    """Folder of a trained text readout or, with `--image`, of a trained autoencoder."""
    text: str = ""
    """The document itself."""
    file: str = ""
    """A UTF-8 text file that holds the document."""
    image: str = ""
    """An image file."""
    html: str = "explanation.html"
    """The page that is written."""
    most: int = 5
    """Prototypes that are shown, those with the largest shares."""
    examples: int = 6
    """Tokens or patches of the input that are shown for each."""
    device: str = "cpu"
    """Where to compute."""

    def __post_init__(self) -> None:
        if sum(map(bool, (self.text, self.file, self.image))) != 1:
            raise ValueError("exactly one of --text, --file and --image must be given")
        check_out_file(Path(self.html), "html")
        for name in ("most", "examples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def explain(explanation: Explanation) -> dict[str, Any]:
    """Shares of the prototypes and what stands for each; writes the page.

    Raises ValueError for a run, a document or an image that cannot be used.
    """
    if explanation.image:
        result = _image(explanation)
    else:
        result = _document(explanation, explanation.text or _read(Path(explanation.file)))
    checkpoint.write_text(Path(explanation.html), page(result))
    # The pictures are in the page; in the JSON they would only bury the rest.
    for level in result["levels"]:
        for prototype in level["prototypes"]:
            for example in prototype["here"]:
                example.pop("picture", None)
    result.pop("picture", None)
    return {**result, "html": explanation.html}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


@torch.no_grad()
def _document(explanation: Explanation, text: str) -> dict[str, Any]:
    if not text.strip():
        raise ValueError("the document holds no text")
    saved = load_readout(explanation.run)
    name = saved.encoder.name or default_encoder()
    device = find_device(explanation.device)
    encoder = Encoder(name, saved.encoder.max_tokens, device)
    if encoder.fingerprint() != saved.encoder.fingerprint:
        raise ValueError(f"{name} is not the encoder that {explanation.run} was trained on")
    (ids,) = encoder.tokenize([text.strip()])
    hidden, mask = encoder.encode([ids])
    rows = TokenFeatures.of_rows(hidden[mask].half().cpu()).centered(saved.center)
    tokens, _ = rows.padded(range(len(ids)))
    output = saved.layer(rearrange(tokens, "n 1 d -> 1 n d"))
    weights = output.weights[0, :, 0]  # n k
    special = set(encoder.tokenizer.all_special_ids)
    words = [position for position, token in enumerate(ids) if token not in special]

    def here(k: int) -> list[dict[str, Any]]:
        """Tokens that have more of this prototype than of any other, most of it first."""
        own = [n for n in words if int(weights[n].argmax()) == k]
        own.sort(key=lambda n: -weights[n, k].item())
        return [
            {"weight": weights[n, k].item(), **context(encoder, ids, n)}
            for n in own[: explanation.examples]
        ]

    prototypes = [
        {"prototype": k, "share": share, "here": here(k), "training": saved.prototypes[k]}
        for k, share in _largest(output.histogram[0, 0], explanation.most)
    ]
    level = {"name": "tokens", "prototypes": prototypes}
    return {"run": explanation.run, "text": text.strip(), "tokens": len(ids), "levels": [level]}


def _largest(shares: Float[Tensor, "k"], most: int) -> list[tuple[int, float]]:
    """The prototypes with the largest shares, and these."""
    values, indices = shares.sort(descending=True, stable=True)
    return [(int(k), float(v)) for k, v in zip(indices[:most], values[:most], strict=True) if v > 0]


@torch.no_grad()
def _image(explanation: Explanation) -> dict[str, Any]:
    device = find_device(explanation.device)
    model = load_run(explanation.run, device)
    stored = checkpoint.read_config(explanation.run).get("data") or {}
    pixels = _pixels(Path(explanation.image), int(stored.get("image_size", 32)))
    if pixels.shape[0] != model.config.channels:
        raise ValueError(f"the model reads images of {model.config.channels} channels, not RGB")
    x = to_float(pixels[None]).to(device)
    levels = []
    for index, (codebook, assignment) in enumerate(
        zip(codebooks(model), model.encode(x), strict=True)
    ):
        z = model.latents(x, index)
        grid = assignment.indices[0].cpu()
        distances = torch.cdist(z.flatten(0, 2).float(), codebook.prototypes.float()).square().cpu()
        stride = model.stride // 2**index  # every further level is twice as fine
        prototypes = [
            {
                "prototype": k,
                "share": share,
                "here": _patches(pixels, grid, distances, k, stride, explanation.examples),
            }
            for k, share in _largest(assignment.usage.cpu() / grid.numel(), explanation.most)
        ]
        levels.append({"name": f"level {index + 1}", "prototypes": prototypes})
    return {
        "run": explanation.run,
        "image": explanation.image,
        "picture": _data_uri(pixels),
        "levels": levels,
    }


def _pixels(path: Path, size: int) -> UInt8[Tensor, "c h w"]:
    """The image as the run's data set would have it. Raises ValueError that names the file."""
    if not path.is_file():
        fault = "is no image file" if path.exists() else "does not exist"
        raise ValueError(f"{path} {fault}")
    (batch,) = decode_all(one_file(path, size), workers=0)
    return batch[0]


def _patches(
    pixels: UInt8[Tensor, "c h w"],
    grid: Tensor,
    distances: Float[Tensor, "n k"],
    k: int,
    stride: int,
    most: int,
) -> list[dict[str, Any]]:
    """Patches whose most probable code is k, the nearest first, with a margin around each.

    What lies wholly in the padding of the image has none.
    """
    height, width = (-(-side // stride) for side in pixels.shape[1:])
    inside = torch.zeros_like(grid, dtype=torch.bool)
    inside[:height, :width] = True
    positions = ((grid == k) & inside).flatten().nonzero()[:, 0]
    positions = positions[distances[positions, k].argsort()][:most].tolist()
    margin = round(_MARGIN * stride)
    found = []
    for position in positions:
        row, column = divmod(position, grid.shape[1])
        top, left = row * stride, column * stride
        patch = pixels[
            :,
            max(0, top - margin) : top + stride + margin,
            max(0, left - margin) : left + stride + margin,
        ]
        found.append(
            {
                "row": row,
                "column": column,
                "distance": distances[position, k].item(),
                "picture": _data_uri(patch),
            }
        )
    return found


def _data_uri(pixels: UInt8[Tensor, "c h w"]) -> str:
    """The pixels, enlarged without smoothing, as a PNG within a URI."""
    array = np.ascontiguousarray(rearrange(pixels, "c h w -> h w c").numpy())
    image = Image.fromarray(array)
    factor = max(1, _SHOWN // max(image.size))
    image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def main(arguments: Sequence[str]) -> int:
    """The program; returns its exit status."""

    def action() -> dict[str, Any]:
        return explain(
            parse_flags(lambda: tyro.cli(Explanation, args=arguments, description=__doc__))
        )

    return run_program(action)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
