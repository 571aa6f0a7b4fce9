"""A trained token readout on disk, with the tokens that lie nearest to each of its prototypes.

`eval.text` writes them and `eval.explain` reads them; a folder holds `config.json`,
`model.safetensors` and `prototypes.json`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from eval.corpus import Corpus
from eval.features import Encoder, TokenFeatures
from softvq.checkpoint import (
    MODEL,
    decode_config,
    load_weights,
    read_config,
    read_json,
    read_tensors,
    write_config,
    write_json,
    write_tensors,
)
from softvq.quantizers import DDCLCodebook, codebooks
from softvq.readout import DDCLReadout, DDCLReadoutConfig

PROTOTYPES, CENTER = "prototypes.json", "center.safetensors"

# Tokens shown for a prototype, and words on each side of one
_SHOWN = 8
_CONTEXT = 4
_SHOWN_OF_EACH = {"distance", "before", "token", "after"}
# Training documents that are searched for them
_SEARCHED = 1000


@dataclass(frozen=True)
class EncoderConfig:
    """The encoder that a readout was trained on."""

    name: str
    """Name or folder; empty for the default."""
    max_tokens: int
    """Tokens of a document that are read."""
    fingerprint: str
    """Hash of weights, configuration and tokenizer."""


@dataclass(frozen=True)
class SavedReadout:
    """What `load_readout` gives."""

    layer: DDCLReadout
    """In eval mode."""
    center: Float[Tensor, "d"]
    """What the readout's tokens are centred by."""
    encoder: EncoderConfig
    prototypes: list[list[dict[str, Any]]]
    """For each prototype of the first head, the nearest training tokens with their context."""


def claim(folder: Path, layer: DDCLReadout, corpus: Corpus) -> None:
    """Writes `config.json`. Raises ValueError if the folder holds another readout."""
    encoder = EncoderConfig(
        corpus.given_encoder, corpus.encoder.max_tokens, corpus.encoder.fingerprint()
    )
    write_config(folder, readout=layer.config, encoder=encoder)


def save_readout(folder: Path, layer: DDCLReadout, corpus: Corpus, train: TokenFeatures) -> None:
    """Writes weights, centre and the nearest tokens, after `claim`."""
    assert train.center is not None  # as eval.text makes it
    write_tensors(folder / MODEL, layer.state_dict())
    write_tensors(folder / CENTER, {"center": train.center})
    near = nearest_tokens(layer, corpus.encoder, train, corpus.train_documents.texts[:_SEARCHED])
    write_json(folder / PROTOTYPES, near)


def load_readout(folder: str) -> SavedReadout:
    """Raises ValueError for a folder that `eval.text --out` did not write, or a damaged one."""
    config = read_config(folder)
    if not {"readout", "encoder"} <= config.keys():
        raise ValueError(f"{folder} holds no text readout; eval.text --out writes one")
    encoder = decode_config(config["encoder"], EncoderConfig)
    layer = DDCLReadout.from_config(decode_config(config["readout"], DDCLReadoutConfig))
    load_weights(layer, Path(folder) / MODEL)
    tensors, _ = read_tensors(Path(folder) / CENTER)
    prototypes = read_json(Path(folder) / PROTOTYPES)
    center = tensors.get("center")
    if center is None or center.shape != (layer.config.dim,):
        raise ValueError(f"{Path(folder) / CENTER} does not fit the readout")
    if not _are_tokens(prototypes, layer.config.codebook_size):
        raise ValueError(f"{Path(folder) / PROTOTYPES} does not fit the readout")
    return SavedReadout(layer.eval(), center, encoder, prototypes)


def _are_tokens(content: Any, count: int) -> bool:
    """Whether `content` has the form that `nearest_tokens` gives for `count` prototypes."""
    lists = isinstance(content, list) and len(content) == count
    return lists and all(
        isinstance(near, list)
        and all(isinstance(token, dict) and token.keys() == _SHOWN_OF_EACH for token in near)
        for near in content
    )


@torch.no_grad()
def nearest_tokens(
    layer: DDCLReadout, encoder: Encoder, features: TokenFeatures, texts: Sequence[str]
) -> list[list[dict[str, Any]]]:
    """For each prototype of the first head the nearest tokens, no two from one document.

    `texts` are the first documents of `features`. Special tokens are not shown.
    """
    (codebook, *_) = codebooks(layer)
    assert isinstance(codebook, DDCLCodebook)
    ids = encoder.tokenize(texts)
    special = set(encoder.tokenizer.all_special_ids)
    found: list[list[tuple[float, int, int]]] = [[] for _ in range(codebook.codebook_size)]
    for number, row in enumerate(ids):
        x, _ = features.padded([number])
        distances = torch.cdist(x[0, :, : codebook.dim], codebook.prototypes).square()
        distances[[token in special for token in row]] = torch.inf
        values, positions = distances.min(0)
        for near, value, position in zip(found, values.tolist(), positions.tolist(), strict=True):
            if value < float("inf"):
                near.append((value, number, position))
    return [
        [
            {"distance": value, **context(encoder, ids[number], position)}
            for value, number, position in sorted(near)[:_SHOWN]
        ]
        for near in found
    ]


def context(encoder: Encoder, ids: Sequence[int], position: int) -> dict[str, str]:
    """A token and the text before and after it, a few tokens wide."""
    special = set(encoder.tokenizer.all_special_ids)

    def text(part: Sequence[int]) -> str:
        return encoder.tokenizer.decode([token for token in part if token not in special]).strip()

    before, after = max(0, position - _CONTEXT), position + 1
    return {
        "before": text(ids[before:position]),
        "token": text(ids[position:after]),
        "after": text(ids[after : after + _CONTEXT]),
    }
