"""How well clusters agree with classes: accuracy one-to-one and by majority, NMI, ARI.

The clusters come from the programs; classes are used here alone.
"""

import warnings
from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from sklearn.metrics.cluster import contingency_matrix
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

# Starts of k-means, of which the best is kept
_STARTS = 10


def one_to_one_accuracy(classes: Sequence[int], clusters: Sequence[int]) -> float:
    """Share of documents whose cluster stands for their class, under the best such pairing.

    In [0, 1]. Every cluster stands for at most one class and every class for one cluster, found by
    the Hungarian method; with more clusters than classes the rest are counted as wrong.
    """
    table = contingency_matrix(classes, clusters)
    rows, columns = linear_sum_assignment(table, maximize=True)
    return float(table[rows, columns].sum() / table.sum())


def majority_accuracy(classes: Sequence[int], clusters: Sequence[int]) -> float:
    """Share of documents in the most frequent class of their cluster (purity), in (0, 1].

    Rises with the number of clusters whatever they are, to 1 for one document in each.
    """
    table = contingency_matrix(classes, clusters)
    return float(table.max(0).sum() / table.sum())


def agreement(classes: Sequence[int], clusters: Sequence[int]) -> dict[str, float]:
    """The two accuracies, NMI (arithmetic mean), ARI, and the number of clusters in use."""
    return {
        "accuracy": one_to_one_accuracy(classes, clusters),
        "majority": majority_accuracy(classes, clusters),
        "nmi": float(normalized_mutual_info_score(classes, clusters)),
        "ari": float(adjusted_rand_score(classes, clusters)),
        "clusters": len(set(clusters)),
    }


def build_kmeans(k: int, seed: int) -> KMeans:
    """k-means that keeps the best of 10 starts."""
    # scikit-learn's signature has the default "auto" alone.
    return KMeans(k, n_init=_STARTS, random_state=seed)  # pyright: ignore[reportArgumentType]


def kmeans(train: Tensor, test: Tensor, k: int, seed: int) -> tuple[list[int], list[int]]:
    """Clusters of the rows of both, by k-means on `train` alone (the best of 10 starts).

    Fewer than k if `train` has fewer distinct rows.
    """
    with warnings.catch_warnings():
        # The report says how many clusters there are.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = build_kmeans(k, seed).fit(train.numpy())
    assert model.labels_ is not None
    return model.labels_.tolist(), np.asarray(model.predict(test.numpy())).tolist()


def probe(
    train: Tensor, train_classes: Sequence[int], test: Tensor, test_classes: Sequence[int]
) -> float:
    """Accuracy on `test` of logistic regression (L2, C = 1) on standardised rows of `train`.

    Raises ValueError if the training rows are all of one class.
    """
    if len(set(train_classes)) < 2:
        raise ValueError("a probe needs two classes among the training documents, got one")
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    model.fit(train.numpy(), np.asarray(train_classes))
    return float(model.score(test.numpy(), np.asarray(test_classes)))
