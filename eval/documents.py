"""Labelled documents: SST-2, IMDB and 20 Newsgroups from a folder, or a file of your own.

What an encoder makes of them is in `eval.features`.
"""

import csv
import hashlib
import json
import lzma
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# Its public loader downloads, and keeps its data as a pickle.
from sklearn.datasets import _twenty_newsgroups as newsgroups

Split = Literal["train", "test"]

# Reviews of each label with a smaller id are the balanced subset of IMDB, 5,000 a split
_IMDB_SUBSET = 2500
# One document in so many of a file of your own is tested on
_TEST_SHARE = 5


@dataclass(frozen=True)
class Documents:
    """Texts with their labels."""

    texts: tuple[str, ...]
    """The documents, without white space around them, none empty."""
    labels: tuple[int, ...]
    """Index of each document's class."""
    classes: tuple[str, ...]
    """Names of the classes, those of the whole split."""
    empty: int
    """Documents that were left out because they hold no text."""

    def __len__(self) -> int:
        return len(self.texts)


def load_documents(data: str, root: str, split: Split, limit: int = 0) -> Documents:
    """The documents of a split in an order by hash, of which `limit` are taken (0 is all).

    `data` is sst2, imdb or 20newsgroups, which lie in a folder of that name in `root`, or a file
    whose name ends in .tsv or .jsonl, packed with .xz or not, with columns `text` (or `sentence`)
    and `label`; a fifth of such a file, chosen by hash of the text, is the test split. The test
    split of SST-2 is its dev set, since the labels of the other are not public; IMDB is the
    balanced subset `id < 2500`; 20 Newsgroups loses headers, footers and quotes.

    Raises ValueError for data that is missing, damaged, or has fewer than two classes.
    """
    if limit < 0:
        raise ValueError(f"the number of documents must be 0 (all) or more, got {limit}")
    if data in _SETS:
        folder = Path(root) / data
        if not folder.is_dir():
            raise ValueError(f"{data} is not in {root}: there is no folder {folder}")
        pairs, names = _SETS[data](folder, split)
    else:
        pairs, names = _own_file(Path(data), split)
    stripped = [(text.strip(), label) for text, label in pairs]
    kept = [(text, label) for text, label in stripped if text]
    if len(names) < 2 or not kept:
        raise ValueError(
            f"{data} has {len(kept)} documents in its {split} split, of {len(names)} classes; "
            "at least one document and two classes are needed"
        )
    unknown = {label for _, label in kept} - set(names)
    if unknown:
        raise ValueError(f"{data} has labels that are none of its classes: {min(unknown)!r}")
    kept.sort(key=lambda pair: hashlib.sha256(pair[0].encode()).digest())
    texts, labels = zip(*(kept[:limit] if limit else kept), strict=True)
    index = {name: number for number, name in enumerate(names)}
    return Documents(
        texts, tuple(index[label] for label in labels), tuple(names), len(stripped) - len(kept)
    )


Pairs = tuple[list[tuple[str, str]], Sequence[str]]


def _sst2(folder: Path, split: Split) -> Pairs:
    rows = _rows(folder / ("train.tsv" if split == "train" else "dev.tsv"))
    return _pairs(rows, folder), ("0", "1")


def _imdb(folder: Path, split: Split) -> Pairs:
    path = folder / f"{split}.jsonl.xz"
    try:
        rows = [row for row in _rows(path) if row["id"] < _IMDB_SUBSET]
    except (KeyError, TypeError):
        raise ValueError(f"{path} has a row without a number as id") from None
    return _pairs(rows, path), ("0", "1")


def _twenty_newsgroups(folder: Path, split: Split) -> Pairs:
    pairs = _pairs(_rows(folder / f"{split}.jsonl.xz"), folder)
    return [(_stripped(text), label) for text, label in pairs], [str(n) for n in range(20)]


def _stripped(post: str) -> str:
    """The post without header, footer and quotes, by the functions of scikit-learn's loader."""
    for strip in (
        newsgroups.strip_newsgroup_header,
        newsgroups.strip_newsgroup_footer,
        newsgroups.strip_newsgroup_quoting,
    ):
        post = strip(post)
    return post


_SETS: dict[str, Callable[[Path, Split], Pairs]] = {
    "sst2": _sst2,
    "imdb": _imdb,
    "20newsgroups": _twenty_newsgroups,
}


def _own_file(path: Path, split: Split) -> Pairs:
    pairs = _pairs(_rows(path), path)
    tested = {text for text, _ in pairs if _in_test(text)}
    chosen = [pair for pair in pairs if (pair[0] in tested) == (split == "test")]
    return chosen, sorted({label for _, label in pairs})


def _in_test(text: str) -> bool:
    return hashlib.sha256(text.strip().encode()).digest()[-1] % _TEST_SHARE == 0


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .tsv (without quoting) or .jsonl file, packed or not."""
    suffixes = [suffix for suffix in path.suffixes if suffix in (".tsv", ".jsonl", ".xz")]
    if suffixes not in ([".tsv"], [".jsonl"], [".tsv", ".xz"], [".jsonl", ".xz"]):
        raise ValueError(
            f"data must be {', '.join(_SETS)} or a .tsv or .jsonl file (.xz or not), got {path}"
        )
    try:
        with (
            lzma.open(path, "rt", encoding="utf-8")
            if ".xz" in suffixes
            else path.open(encoding="utf-8") as file
        ):
            return _parsed(file, suffixes[0])
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (OSError, lzma.LZMAError, EOFError, ValueError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _parsed(lines: Iterable[str], suffix: str) -> list[dict[str, Any]]:
    if suffix == ".tsv":
        return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [json.loads(line) for line in lines if line.strip()]


def _pairs(rows: Sequence[dict[str, Any]], source: Path) -> list[tuple[str, str]]:
    """Text and label of every row, the label as text whatever it was."""
    pairs = []
    for number, row in enumerate(rows, start=1):
        text = row.get("text", row.get("sentence")) if isinstance(row, dict) else None
        label = row.get("label") if isinstance(row, dict) else None
        if not isinstance(text, str) or not isinstance(label, str | int):
            raise ValueError(f"row {number} of {source} has no text (or sentence) with a label")
        pairs.append((text, str(label)))
    return pairs
