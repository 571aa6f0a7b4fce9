"""The training of readouts on frozen features: the exact step, equal use, and the temperature."""

import pytest
import torch
from torch.testing import assert_close

from eval import cooling
from eval.cooling import Cooling, train_readout
from eval.features import TokenFeatures
from softvq.quantizers import codebooks
from softvq.readout import DDCLReadout
from softvq.temperature import AnnealedTemperature, FixedTemperature


def features(documents: int = 40) -> TokenFeatures:
    """Five tokens a document, nine in ten near one place and the others near another."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5 * documents, 6, generator=generator)
    x[::10] += 4
    first = 5 * torch.arange(documents)
    return TokenFeatures((x,), torch.stack([0 * first, first, 0 * first + 5], 1))


@pytest.mark.parametrize("heads", [1, 2])
def test_a_full_step_is_the_exact_soft_k_means_step(heads, monkeypatch):
    monkeypatch.setattr(cooling, "_start", lambda *arguments: None)
    data, options = features(), {"temperature": FixedTemperature(value=3.0), "usage_weight": 0.0}
    layer = DDCLReadout(dim=6, codebook_size=3, heads=heads, **options)
    x, mask = data.padded(range(40))
    torch.manual_seed(0)
    layer(x, mask)  # starts it
    before = [bank.prototypes.detach().clone() for bank in codebooks(layer)]
    plain = Cooling(steps=1, batch_size=40, rate=1.0, equal_use=0.0, noise=0.0)
    train_readout(layer, data, plain, seed=0)
    parts = x.flatten(0, 1).split(6 // heads, -1)
    for bank, p, z in zip(codebooks(layer), before, parts, strict=True):
        q = (-(z[:, None] - p).square().sum(-1) / 3.0).softmax(-1)
        assert_close(bank.prototypes.detach(), q.T @ z / q.sum(0)[:, None], rtol=1e-4, atol=1e-5)


def test_the_prior_evens_out_the_use_and_the_temperature_ends_cold():
    spread = {}
    for weight in (0.0, 3.0):
        temperature = AnnealedTemperature(start=0.5, end=0.1)
        layer = DDCLReadout(dim=6, codebook_size=2, temperature=temperature, usage_weight=0.0)
        train_readout(layer, features(), Cooling(steps=60, batch_size=40, equal_use=weight), 0)
        (bank,) = codebooks(layer)
        assert bank.temperature / bank.critical == pytest.approx(0.1, rel=1e-3)
        with torch.no_grad():
            usage = layer(*features().padded(range(40))).heads[0].usage / 200
        spread[weight] = (usage - 0.5).abs().max().item()
    assert spread[3.0] < spread[0.0] - 0.05


def test_a_loss_that_is_not_finite_stops_the_training(monkeypatch):
    layer = DDCLReadout(dim=6, codebook_size=2, usage_weight=0.0)
    monkeypatch.setattr(cooling, "divergence_from_uniform", lambda usage: usage.sum() * torch.nan)
    with pytest.raises(ArithmeticError, match="not finite any more"):
        train_readout(layer, features(), Cooling(steps=3, batch_size=40), 0)
