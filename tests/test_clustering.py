"""How well clusters agree with classes, against all permutations and by hand."""

import itertools

import numpy as np
import pytest

from eval.clustering import clustering_scores


def naive_accuracy(labels, clusters) -> float:
    """The best of all one-to-one namings of the clusters."""
    names = range(max(*labels, *clusters) + 1)
    return max(
        np.mean([naming[c] == y for y, c in zip(labels, clusters, strict=True)])
        for naming in itertools.permutations(names)
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("clusters", [2, 4, 5])
def test_accuracy_is_the_best_of_all_permutations(seed, clusters):
    generator = np.random.default_rng(seed)
    labels, found = generator.integers(0, 4, 30), generator.integers(0, clusters, 30)
    scores = clustering_scores(labels, found)
    assert scores["accuracy"] == pytest.approx(naive_accuracy(labels, found))
    majority = sum(np.bincount(labels[found == c]).max() for c in np.unique(found)) / 30
    assert scores["majority"] == pytest.approx(majority)


def test_the_same_partition_scores_one_and_a_constant_its_largest_class():
    perfect = clustering_scores([0, 0, 1, 2], [7, 7, 3, 9])
    assert perfect == {"accuracy": 1.0, "majority": 1.0, "nmi": 1.0, "ari": 1.0, "clusters": 3}
    constant = clustering_scores([0, 0, 1, 2], [5, 5, 5, 5])
    assert constant == {"accuracy": 0.5, "majority": 0.5, "nmi": 0.0, "ari": 0.0, "clusters": 1}
    with pytest.raises(ValueError, match="got 2 and 1"):
        clustering_scores([0, 1], [0])
