"""How well clusters agree with classes, k-means, and a linear probe: what the methods are held to.

What made the clusters and features is in the experiments beside this file.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from sklearn.metrics.cluster import contingency_matrix
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor


def clustering_scores(
    labels: Int[np.ndarray, "n"] | Sequence[int], clusters: Int[np.ndarray, "n"] | Sequence[int]
) -> dict[str, int | float]:
    """Agreement of `clusters` with `labels`, any integers: 1 for the same partition.

    `accuracy`: share of members when each cluster stands for at most one class and each class for
    at most one cluster, matched as well as possible (Hungarian algorithm). `majority`: the same
    when every cluster stands for the class that most of its members have, which more clusters can
    only raise. `nmi`: normalised mutual information (arithmetic mean). `ari`: adjusted Rand index.
    `clusters`: how many have members.
    Raises ValueError for no members or lengths that differ.
    """
    if len(labels) != len(clusters) or len(labels) == 0:
        raise ValueError(
            f"labels and clusters must be as many, and some: got {len(labels)} and {len(clusters)}"
        )
    table = np.asarray(contingency_matrix(labels, clusters))
    rows, columns = linear_sum_assignment(table, maximize=True)
    return {
        "accuracy": float(table[rows, columns].sum() / len(labels)),
        "majority": float(table.max(0).sum() / len(labels)),
        "nmi": float(normalized_mutual_info_score(labels, clusters)),
        "ari": float(adjusted_rand_score(labels, clusters)),
        "clusters": len(set(np.asarray(clusters).tolist())),
    }


def kmeans(
    rows: Float[Tensor, "n d"], k: int, seed: int, restarts: int
) -> tuple[Callable[[Tensor], list[int]], float]:
    """k-means on the rows, the best of `restarts` starts by its own loss.

    Returns what finds the clusters of any rows, and the loss: the mean squared distance of the
    fitted rows to the centre of their cluster. Fewer than k clusters for fewer distinct rows.
    """
    options: dict[str, Any] = {"n_init": restarts, "random_state": seed}
    with warnings.catch_warnings():
        # The report says how many clusters there are.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = KMeans(k, **options).fit(rows.numpy())
    assert model.inertia_ is not None
    return (lambda x: np.asarray(model.predict(x.numpy())).tolist()), model.inertia_ / len(rows)


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
