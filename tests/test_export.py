"""The plain formulas that exported programs hold are those of the streaming operators.

Whole models in an ONNX runtime are in `test_autoencoder`.
"""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from softvq import ddcl
from softvq.export import without_custom_operators


class Soft(nn.Module):
    def forward(self, z, p, temperature, mask):
        return tuple(ddcl.soft_assignment(z, p, temperature, mask))


class Nearest(nn.Module):
    def forward(self, z, p):
        return ddcl.nearest(z, p)


def plain(module: nn.Module, *arguments: torch.Tensor) -> nn.Module:
    program = without_custom_operators(torch.export.export(module, arguments))
    assert "softvq" not in str(program.graph)
    return program.module()


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("temperature", [0.02, 1.0, 30.0])
def test_soft_assignment_and_nearest_are_those_of_the_operators(temperature, offset):
    torch.manual_seed(0)
    z, p = (offset + torch.randn(n, 3, dtype=torch.float64) for n in (40, 9))
    arguments = (z, p, torch.tensor(temperature, dtype=torch.float64), torch.arange(40) % 4 > 0)
    assert_close(plain(Soft(), *arguments)(*arguments), Soft()(*arguments), rtol=1e-8, atol=1e-9)
    assert torch.equal(plain(Nearest(), z, p)(z, p), Nearest()(z, p))
