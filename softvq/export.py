"""Exported programs for runtimes that do not know the streaming operators of `softvq`, as ONNX's.

The operators themselves are in `softvq.streaming`, and `torch.export` takes them as they are.
"""

import torch
from torch import Tensor
from torch.export import ExportedProgram

from softvq import streaming


def without_custom_operators(program: ExportedProgram) -> ExportedProgram:
    """The same program in torch's own operators alone: what `torch.onnx.export` takes.

    Every token meets every code at once in it: it holds an n x k matrix, which the operators spare.
    """
    table = torch.export.default_decompositions()
    table[streaming.nearest._opoverload] = _nearest
    table[streaming.soft_assignment._opoverload] = _soft_assignment
    return program.run_decompositions(table)


def _nearest(z: Tensor, p: Tensor) -> Tensor:
    return _logits(z, p).argmax(1)


def _soft_assignment(
    z: Tensor, p: Tensor, temperature: Tensor, weights: Tensor, commitment_weight: float
) -> tuple[Tensor, ...]:
    logits = 2 * _logits(z, p) / temperature
    q, indices = logits.softmax(1), logits.argmax(1)
    mu = q @ p
    entropy = -(q * logits.log_softmax(1)).sum(1)
    reconstruction = (z - mu).square().sum(1)
    variance = (q @ p.square().sum(1) - mu.square().sum(1)).clamp_min(0)
    free_energy = reconstruction + variance - temperature * entropy
    return mu, reconstruction, variance, free_energy, entropy, weights @ q, indices


def _logits(z: Tensor, p: Tensor) -> Tensor:
    """(|z|² - |z - p|²) / 2 with the origin moved to the middle of the codes."""
    centre = p[:: -(-len(p) // 128)].mean(0)
    p = p - centre
    return (z - centre) @ p.T - p.square().sum(1) / 2
