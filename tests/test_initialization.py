"""Starts from data: k-means++ seeds, Lloyd's steps, and degenerate first batches (case C05).

The refill of dead codes is in `test_ema`, masks and reloading are in `test_contract`.
"""

import pytest
import torch
from einops import rearrange, repeat
from sklearn.cluster import KMeans
from torch.testing import assert_close

from softvq.quantizers import DDCLConfig, EMAConfig, StraightThroughConfig, build
from softvq.quantizers.initialization import kmeans_plus_plus, lloyd, real_tokens

CODES = dict(dim=4, codebook_size=8)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(
    params=[
        DDCLConfig(**CODES, init="data"),
        StraightThroughConfig(**CODES, init="data"),
        EMAConfig(**CODES),
    ],
    ids=["ddcl", "straight_through", "ema"],
)
def codebook(request):
    return build(request.param)


def clusters(count: int, each: int = 20, dim: int = 3, dtype: torch.dtype = torch.float32):
    """Tight clusters on a wide grid, cluster by cluster."""
    centres = 100 * torch.cartesian_prod(*[torch.arange(4)] * dim)[:count].to(dtype)
    return repeat(centres, "k d -> (k n) d", n=each) + torch.randn(count * each, dim, dtype=dtype)


@pytest.mark.parametrize("value", [1.0, 0.1, 1e4])
def test_a_constant_first_batch_gives_distinct_codes_around_it(codebook, value):
    codebook.initialize(torch.full((64, 4), value))
    assert codebook.prototypes.shape == (8, 4)
    assert len(codebook.prototypes.unique(dim=0)) == 8
    assert ((codebook.prototypes - value).abs() < 0.1 * value).all()


def test_a_first_batch_that_is_constant_up_to_rounding_gives_distinct_codes(codebook):
    z = torch.ones(64, 4)
    z[0] += 2e-7
    codebook.initialize(z)
    assert len(codebook.prototypes.unique(dim=0)) == 8
    assert_close(codebook.prototypes, torch.ones(8, 4), rtol=0, atol=0.1)


def test_a_first_batch_of_zeros_gives_distinct_codes_near_zero(codebook):
    codebook.initialize(torch.zeros(64, 4))
    assert len(codebook.prototypes.unique(dim=0)) == 8
    assert (codebook.prototypes.abs() < 1e-3).all()


def test_fewer_tokens_than_codes_are_all_taken_and_filled_up(codebook):
    z = torch.randn(3, 4)
    codebook.initialize(z)
    assert codebook.prototypes.shape == (8, 4)
    assert len(codebook.prototypes.unique(dim=0)) == 8
    distances = torch.cdist(codebook.prototypes.detach(), z)
    assert_close(distances.amin(0), torch.zeros(3), rtol=0, atol=1e-6)
    assert (distances.amin(1) < 0.1).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_token_is_refused_and_starts_nothing(codebook, bad):
    z = torch.randn(64, 4)
    z[7, 2] = bad
    before = codebook.prototypes.clone()
    with pytest.raises(ValueError, match="1 of 64"):
        codebook(z)
    assert torch.equal(codebook.prototypes, before)
    assert not codebook.initialized


def test_no_token_is_refused(codebook):
    for z, mask in [(torch.zeros(0, 4), None), (torch.zeros(3, 4), torch.zeros(3).bool())]:
        with pytest.raises(ValueError, match="0 tokens"):
            codebook(z, mask)


def test_the_start_is_decided_by_the_seed(codebook):
    z, starts = torch.randn(64, 4), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        codebook.initialize(z)
        starts.append(codebook.prototypes.detach().clone())
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


def test_half_precision_tokens_start_a_full_precision_codebook(codebook):
    codebook.initialize(1000 * torch.randn(64, 4).half())
    assert codebook.prototypes.dtype == torch.float32
    assert codebook.prototypes.isfinite().all()


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_seeds_fall_into_every_cluster(offset):
    seeds = kmeans_plus_plus(clusters(16) + offset, 16)
    found = ((seeds - offset) / 100).round().unique(dim=0)
    assert len(found) == 16


def test_seeds_are_tokens_and_never_the_same_twice():
    # Above 512 codes several seeds are drawn at once.
    tokens = torch.randn(600, 2)
    seeds = kmeans_plus_plus(tokens, 600)
    assert torch.equal(seeds.unique(dim=0), tokens.unique(dim=0))


def test_seeds_are_drawn_by_squared_distance():
    tokens = rearrange(torch.tensor([0.0, 1.0, 3.0]), "n -> n 1")
    far = sum((kmeans_plus_plus(tokens, 2) == 3).any().item() for _ in range(2000))
    # First seed 0, 1 or 3; the second is 3 with chances 9/10, 4/5, and was first otherwise.
    assert far / 2000 == pytest.approx((0.9 + 0.8 + 1) / 3, abs=0.02)


def test_lloyd_is_k_means():
    tokens = clusters(6, dtype=torch.float64) + 20 * torch.randn(120, 3, dtype=torch.float64)
    seeds = kmeans_plus_plus(tokens, 5)
    peer = KMeans(5, init=seeds.numpy(), n_init=1, max_iter=100, tol=0).fit(tokens.numpy())
    expected = torch.from_numpy(peer.cluster_centers_)
    assert_close(lloyd(tokens, seeds, 100), expected, rtol=1e-10, atol=1e-10)


def test_lloyd_leaves_a_prototype_without_tokens_where_it_is():
    tokens = rearrange(torch.tensor([0.0, 2.0, 4.0]), "n -> n 1")
    prototypes = rearrange(torch.tensor([0.5, 3.5, 100.0]), "k -> k 1")
    assert lloyd(tokens, prototypes, 3)[:, 0].tolist() == [1.0, 4.0, 100.0]


def test_real_tokens_are_the_unmasked_rows_in_random_order():
    z, mask = torch.randn(4, 5, 3), torch.rand(4, 5) < 0.5
    rows = real_tokens(z, mask)
    assert not torch.equal(rows, z[mask])
    assert torch.equal(rows.unique(dim=0), z[mask].unique(dim=0))
