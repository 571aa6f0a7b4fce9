"""Two-level compression on planted topics: V, the split, agreement with the topics, collapse."""

import json

import pytest
import torch
from torch.testing import assert_close

from eval import hierarchy
from eval.features import TokenFeatures
from softvq.quantizers import codebooks


class _Documents:
    def __init__(self, labels: list[int]) -> None:
        self.labels = labels


class _Corpus:
    """Documents of ten tokens: four words of each topic, two of which are like another topic's."""

    def __init__(self, documents: int = 60) -> None:
        generator = torch.Generator().manual_seed(0)
        centers = 6 * torch.eye(6)
        self.labels = [number % 3 for number in range(documents)]
        kinds = torch.randint(2, (documents, 10), generator=generator)
        words = 2 * torch.tensor(self.labels)[:, None] + kinds
        x = centers[words] + 0.3 * torch.randn(documents, 10, 6, generator=generator)
        first = 10 * torch.arange(documents)
        places = torch.stack([0 * first, first, 0 * first + 10], 1)
        self.train = self.test = TokenFeatures((x.flatten(0, 1),), places)
        self.train_documents = self.test_documents = _Documents(self.labels)


def config(**options) -> hierarchy.Compression:
    return hierarchy.Compression(**{"sizes": (6, 3), "epochs": 3, "batch_size": 6, **options})


@pytest.fixture(scope="module")
def corpus() -> _Corpus:
    return _Corpus()


@pytest.mark.parametrize("temperatures", ["own", "shared"])
def test_every_epoch_has_the_exact_split_at_both_levels(corpus, temperatures):
    records = hierarchy.compress(config(), corpus, temperatures, 0)
    assert [record["epoch"] for record in records] == [1, 2, 3]
    for record in records:
        for level in ("level1", "level2"):
            assert record[f"{level}/split_violations"] == 0
            assert record[f"{level}/split_checks"] == 1
            assert record[f"{level}/variance"] >= 0
            total = record[f"{level}/variance"] + record[f"{level}/reconstruction"]
            assert record[f"{level}/loss"] == pytest.approx(total)
            assert 0 <= record[f"{level}/nmi"] <= record[f"{level}/majority"] <= 1
        same = record["level1/temperature"] == record["level2/temperature"]
        assert same == (temperatures == "shared")


def test_the_measures_are_those_of_the_plain_formulas(corpus):
    torch.manual_seed(0)
    model = hierarchy.build(config(), 6, steps=10)
    x, mask = corpus.train.padded(range(60))
    model(x, mask)
    model.eval()
    found = hierarchy.measure(model, corpus.test, corpus.labels)
    for level, codebook in enumerate(codebooks(model), start=1):
        distances = (x[..., None, :] - codebook.prototypes).square().sum(-1)
        q = (-distances / codebook.temperature).softmax(-1)
        assert found[f"level{level}/loss"] == pytest.approx(
            (q * distances).sum(-1).mean().item(), rel=1e-4
        )
        clusters = q.mean(1).argmax(-1).tolist()
        assert found[f"level{level}/clusters"] == len(set(clusters))
        z = x.flatten(0, 1)
        critical = 2 * torch.linalg.eigvalsh(torch.cov(z.T, correction=0))[-1]
        assert_close(
            torch.tensor(found[f"level{level}/temperature_ratio"]),
            (codebook.temperature / critical).detach(),
            rtol=1e-3,
            atol=0,
        )
        x = q @ codebook.prototypes


def test_the_program_reports_both_ways_to_set_temperatures(bert, word_file, tmp_path, capsys):
    given = ["--data", str(word_file), "--encoder", bert, "--cache", str(tmp_path / "cache")]
    given += ["--max-tokens", "12", "--sizes", "4", "2", "--epochs", "2", "--seeds", "0", "1"]
    given += ["--out", str(tmp_path / "result.json")]
    assert hierarchy.main(given) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((tmp_path / "result.json").read_text())
    for temperatures in ("own", "shared"):
        part = result[temperatures]
        assert [epoch["epoch"] for epoch in part["epochs"]] == [1, 2]
        assert part["last"]["level2/majority"]["sd"] >= 0
        assert part["last"]["level1/split_violations"]["mean"] == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--epochs", "0"], "epochs must be at least 1, got 0"),
        (["--sizes", "1", "4"], "sizes must be at least 2"),
        (["--hottest", "0.1", "--coldest", "0.5"], "start and end need 0 < end <= start"),
    ],
)
def test_a_users_mistake_is_one_line(bert, word_file, tmp_path, capsys, flags, message):
    given = ["--data", str(word_file), "--encoder", bert, "--cache", str(tmp_path / "cache")]
    assert hierarchy.main([*given, "--max-tokens", "12", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "Traceback" not in captured.err
