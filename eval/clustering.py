"""How well clusters agree with classes: accuracy one to one, majority accuracy, NMI and ARI.

What made the clusters is in the experiments beside this file.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from sklearn.metrics.cluster import contingency_matrix


def clustering_scores(
    labels: Int[np.ndarray, "n"] | Sequence[int], clusters: Int[np.ndarray, "n"] | Sequence[int]
) -> dict[str, float]:
    """Agreement of `clusters` with `labels`, any integers; each is 1 for the same partition.

    `accuracy`: share of members when each cluster stands for at most one class and each class for
    at most one cluster, matched as well as possible (Hungarian algorithm). `majority`: the same
    when every cluster stands for the class that most of its members have, which more clusters can
    only raise. `nmi`: normalised mutual information (arithmetic mean). `ari`: adjusted Rand index.
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
    }
