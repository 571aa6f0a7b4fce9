"""Soft k-means with restarts: the exact step, the restarts, collapse and what it leaves behind."""

import pytest
import torch
from torch.testing import assert_close

from eval.cooling import Cooling, fit_readout, soft_kmeans, soft_kmeans_step, temperatures
from eval.experiment import SplitCheck
from softvq.ddcl import competitive_loss, critical_temperature, nearest, soft_assignment
from softvq.quantizers import codebooks
from softvq.readout import DDCLReadout


def blobs(clusters: int = 5, rows: int = 200) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    centers = 4 * torch.randn(clusters, 6, generator=generator)
    return torch.randn(rows, 6, generator=generator) + centers[torch.arange(rows) % clusters]


@pytest.mark.parametrize("temperature", [0.5, 30.0])
def test_a_step_ends_where_the_detached_gradient_vanishes(temperature, monkeypatch):
    monkeypatch.setattr("eval.cooling._BLOCK", 64)  # the last block is not full
    z = blobs().double()
    p = z[:4].clone().requires_grad_()
    soft = soft_assignment(z, p, temperature)
    (gradient,) = torch.autograd.grad(competitive_loss(soft, "detached").loss.sum(), p)
    expected = p - gradient / (2 * soft.usage[:, None])
    found = soft_kmeans_step(z, p.detach(), temperature)
    assert_close(found, expected.detach(), rtol=1e-10, atol=1e-10)


def test_a_prototype_out_of_reach_stays():
    z, far = blobs(), torch.full((1, 6), 1e3)
    found = soft_kmeans_step(z, torch.cat([z[:1], far]), 0.1)
    assert_close(found, torch.cat([z.mean(0, keepdim=True), far]))


def test_the_temperatures_are_a_geometric_series_between_the_ends():
    found = list(temperatures(Cooling(hottest=0.8, coldest=0.1, steps=4), 10.0))
    assert found == pytest.approx([8.0, 4.0, 2.0, 1.0])
    assert list(temperatures(Cooling(hottest=0.5, steps=1), 10.0)) == pytest.approx([5.0])


def test_the_start_with_the_lowest_loss_on_the_rows_is_kept():
    z, check = blobs(12), SplitCheck()
    cooling = Cooling(hottest=0.01, steps=20, restarts=8)
    cooled = soft_kmeans(z, 12, cooling, 3, check)
    assert len(cooled.losses) == 8
    assert min(cooled.losses) < max(cooled.losses) - 1e-3
    loss = (z - cooled.prototypes[nearest(z, cooled.prototypes)]).square().sum(1).mean()
    assert loss.item() == pytest.approx(cooled.loss, rel=1e-5)
    assert cooled.temperature == pytest.approx(0.001 * critical_temperature(z).item())
    assert (check.checks, check.violations) == (160, 0)
    again = soft_kmeans(z, 12, cooling, 3, SplitCheck())
    assert torch.equal(again.prototypes, cooled.prototypes)


def test_above_the_critical_temperature_everything_merges():
    z = blobs()
    warm = soft_kmeans(z, 5, Cooling(hottest=1.5, coldest=1.5, steps=80), 0, SplitCheck())
    assert_close(warm.prototypes, z.mean(0).expand(5, -1), rtol=0, atol=1e-2)
    cold = soft_kmeans(z, 5, Cooling(steps=80), 0, SplitCheck())
    assert cold.loss < 0.2 * warm.loss


@pytest.mark.parametrize("heads", [1, 2])
def test_a_readout_gets_the_prototypes_of_each_head(heads):
    z, cooling = blobs(), Cooling(steps=30, restarts=3)
    layer = DDCLReadout(dim=6, codebook_size=5, heads=heads, usage_weight=0.0)
    loss = fit_readout(layer, z, cooling, 1, SplitCheck())
    parts = z.split(6 // heads, -1)
    cooled = [soft_kmeans(part.contiguous(), 5, cooling, 1, SplitCheck()) for part in parts]
    assert loss == pytest.approx(sum(part.loss for part in cooled) / heads)
    for bank, part in zip(codebooks(layer), cooled, strict=True):
        assert torch.equal(bank.prototypes, part.prototypes)
        assert bank.temperature.item() == pytest.approx(part.temperature)
    histogram = layer(z[None]).histogram[0]
    assert_close(histogram.sum(-1), torch.ones(heads))
    assert all(torch.equal(bank.prototypes, p.prototypes)
               for bank, p in zip(codebooks(layer), cooled, strict=True))  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coldest": 0.0}, "0 < coldest <= hottest, got 0.5, 0.0"),
        ({"coldest": 0.95}, "0 < coldest <= hottest, got 0.5, 0.95"),
        ({"hottest": float("inf")}, "0 < coldest <= hottest, got inf"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"restarts": -1}, "restarts must be at least 1, got -1"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Cooling(**options)
