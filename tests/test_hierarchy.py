"""Two-level compression on planted topics: V, the split, agreement with the topics, collapse."""

import json

import pytest
import torch
from torch.testing import assert_close

from eval import hierarchy
from eval.cooling import Cooling
from eval.experiment import SplitCheck
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


COOLING = Cooling(coldest=0.05, steps=20, restarts=3)


@pytest.fixture(scope="module")
def corpus() -> _Corpus:
    return _Corpus()


def test_both_levels_are_cooled_to_where_their_schedule_ends(corpus):
    check = SplitCheck()
    found = hierarchy.compress((6, 3), COOLING, corpus, 0, check)
    # One cooling of the first level, two of the second, and two levels measured twice
    assert (check.checks, check.violations) == (3 * 20 * 3 + 4, 0)
    for record in found.values():
        for level in ("level1", "level2"):
            assert record[f"{level}/variance"] >= 0
            total = record[f"{level}/variance"] + record[f"{level}/reconstruction"]
            assert record[f"{level}/loss"] == pytest.approx(total)
            assert 0 <= record[f"{level}/nmi"] <= record[f"{level}/majority"] <= 1
        assert record["level1/temperature_ratio"] == pytest.approx(0.05, rel=1e-3)
    own, shared = found["own"], found["shared"]
    assert own["level2/temperature_ratio"] == pytest.approx(0.05, rel=1e-3)
    assert shared["level2/temperature"] == pytest.approx(shared["level1/temperature"])
    assert own["level2/temperature"] < shared["level2/temperature"]
    same = {key: value for key, value in own.items() if key.startswith("level1")}
    assert same == {key: value for key, value in shared.items() if key.startswith("level1")}
    assert own["level1/majority"] == 1  # six planted words, two for each topic


def test_the_ends_of_the_coolings_are_a_geometric_series():
    config = hierarchy.Compression(ends=2, cooling=Cooling(hottest=0.9, coldest=0.009))
    assert [cooling.coldest for cooling in config.coolings] == pytest.approx([0.09, 0.009])


def test_the_measures_are_those_of_the_plain_formulas(corpus):
    torch.manual_seed(0)
    model = hierarchy.build((6, 3), 6, COOLING)
    x, mask = corpus.train.padded(range(60))
    model(x, mask)
    model.eval()
    found = hierarchy.measure(model, corpus.test, corpus.labels, SplitCheck())
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
    given += ["--max-tokens", "12", "--sizes", "4", "2", "--ends", "2", "--seeds", "0", "1"]
    given += ["--cooling.steps", "5", "--cooling.restarts", "2", "--out", str(tmp_path)]
    assert hierarchy.main(given) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((tmp_path / "hierarchy.json").read_text())
    for temperatures in ("own", "shared"):
        ends = [part["coldest"] for part in result[temperatures]]
        assert ends == pytest.approx([0.5 * 0.002**0.5, 0.001])
        assert result[temperatures][-1]["level2/majority"]["sd"] >= 0
    assert result["split"]["violations"] == 0
    assert (tmp_path / "hierarchy.png").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ends", "0"], "ends must be positive and finite, got 0"),
        (["--sizes", "1", "4"], "sizes must be at least 2"),
        (["--cooling.coldest", "5"], "need 0 < coldest <= hottest"),
    ],
)
def test_a_users_mistake_is_one_line(bert, word_file, tmp_path, capsys, flags, message):
    given = ["--data", str(word_file), "--encoder", bert, "--cache", str(tmp_path / "cache")]
    assert hierarchy.main([*given, "--max-tokens", "12", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "Traceback" not in captured.err
