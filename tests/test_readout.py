"""DDCL-Attention on the tokens of an encoder: heads, masks, residual, summaries and stacks.

The soft assignment of one head is tested with the codebook.
"""

import inspect
import math

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.testing import assert_close

from softvq import ddcl, param_groups
from softvq.quantizers import DDCLCodebook
from softvq.readout import DDCLHierarchy, DDCLReadout, DDCLReadoutConfig
from softvq.temperature import FixedTemperature

F64 = torch.float64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tokens(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def readout(dim: int = 12, codes: int = 5, **options) -> DDCLReadout:
    torch.manual_seed(0)
    layer = DDCLReadout(dim=dim, codebook_size=codes, **options).double()
    layer(tokens(4, 10, dim))
    return layer


def keep(*lengths: int, n: int = 6) -> Tensor:
    return torch.arange(n) < torch.tensor(lengths)[:, None]


def weights_of(codebook: DDCLCodebook, z: Tensor) -> Tensor:
    distances = (z[..., None, :] - codebook.prototypes).square().sum(-1)
    return (-distances / codebook.temperature).softmax(-1)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("residual", [False, True])
def test_every_value_is_that_of_the_plain_formula(heads, residual):
    layer = readout(heads=heads, residual=residual).eval()
    x, mask = tokens(3, 6, 12, seed=1), keep(6, 4, 1)
    out = layer(x, mask)
    centroids = []
    for head, (codebook, part) in enumerate(zip(layer.codebooks, x.chunk(heads, -1), strict=True)):
        q = weights_of(codebook, part) * mask[..., None]
        assert_close(out.weights[:, :, head], q, rtol=0, atol=1e-12)
        assert_close(out.histogram[:, head], q.sum(1) / mask.sum(1, keepdim=True))
        centroids.append(q @ codebook.prototypes)
        real = part[mask]
        distances = (real[:, None] - codebook.prototypes).square().sum(-1)
        competitive = (q[mask] * distances).sum(-1).mean()
        terms = out.heads[head]
        assert terms.variance >= 0
        assert_close(terms.reconstruction + terms.variance, competitive, rtol=0, atol=1e-10)
        assert_close(
            terms.indices,
            distances.new_full(mask.shape, -1).long().masked_scatter(mask, distances.argmin(-1)),
        )
    expected = torch.cat(centroids, -1)
    if residual:
        expected = nn.functional.layer_norm(x + expected, (12,), *layer.norm.parameters())
    expected = expected * mask[..., None]
    assert_close(out.tokens, expected, rtol=0, atol=1e-10)
    assert_close(out.summary, expected.sum(1) / mask.sum(1, keepdim=True), rtol=0, atol=1e-10)
    assert_close(out.loss, torch.stack([head.loss for head in out.heads]).mean())


def test_centroids_are_soft_in_training_and_evaluation():
    layer, x = readout(), tokens(2, 6, 12, seed=1)
    evaluated = layer.eval()(x).tokens
    trained = layer.train()(x).tokens
    assert_close(trained, evaluated)
    hard = layer.codebooks[0].prototypes[layer.eval()(x).heads[0].indices]
    assert (evaluated - hard).abs().max() > 0.01


def test_heads_have_prototypes_and_temperatures_of_their_own():
    layer = DDCLReadout(dim=12, codebook_size=5, heads=2)
    x = tokens(8, 10, 12, dtype=torch.float32)
    x[..., 6:] *= 100
    layer(x)
    first, second = layer.codebooks
    assert first.prototypes.shape == (5, 6)
    assert 1e3 < second.temperature / first.temperature < 1e5


@pytest.mark.parametrize("filling", [0.0, float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("residual", [False, True])
def test_padding_never_matters(filling, residual):
    layer = readout(heads=2, residual=residual)
    x, mask = tokens(3, 6, 12, seed=1), keep(6, 3, 0)
    padded = torch.where(mask[..., None], x, filling).requires_grad_()
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    out = layer(padded, mask)
    (out.summary[:2].square().sum() + out.loss + out.histogram.square().sum()).backward()
    gradients = [parameter.grad.clone() for parameter in layer.parameters()]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert padded.grad.isfinite().all()
    assert not padded.grad[~mask].any()
    layer.load_state_dict(state)
    layer.eval()
    for row, length in enumerate((6, 3)):
        alone = layer(x[row : row + 1, :length])
        for field in ("summary", "histogram"):
            assert_close(getattr(out, field)[row], getattr(alone, field)[0], rtol=0, atol=1e-10)
        assert_close(out.tokens[row, :length], alone.tokens[0], rtol=0, atol=1e-10)
    for value in (out.tokens, out.weights):
        assert not value[~mask].any()
    assert_close(out.weights[mask].sum(-1), torch.ones_like(out.weights[mask].sum(-1)))


def test_the_opposite_mask_gives_another_result():
    layer, x, mask = readout(heads=2).eval(), tokens(2, 6, 12, seed=1), keep(6, 2)
    out, opposite = layer(x, mask), layer(x, ~mask)
    for field in ("tokens", "weights"):
        assert torch.equal(getattr(out, field).flatten(2).any(-1), mask)
        assert torch.equal(getattr(opposite, field).flatten(2).any(-1), ~mask)
    for field in ("summary", "histogram"):
        assert not torch.isclose(getattr(out, field), getattr(opposite, field)).any()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_that_is_all_padding_is_zero_in_every_precision(dtype, training):
    layer = DDCLReadout(dim=16, codebook_size=4, heads=2, residual=True)
    layer(tokens(4, 10, 16, dtype=torch.float32))
    layer.to(dtype).train(training)
    x = tokens(2, 5, 16, seed=1, dtype=dtype).requires_grad_()
    out = layer(x, keep(5, 0, n=5))
    out.summary[0].float().square().sum().backward()
    assert out.tokens.dtype == dtype
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)
    for value in (out.tokens, out.weights, out.summary, out.histogram):
        assert value.isfinite().all()
        assert not value[1].any()
    assert_close(out.weights[0].sum(-1).float(), torch.ones(5, 2))
    alone = layer.eval()(x[:1])
    # A training pass has moved T a little in between, but not before its own weights.
    tolerance = 1e-6 if dtype == torch.float32 and not training else 0.02
    assert_close(out.summary[0].float(), alone.summary[0].float(), rtol=tolerance, atol=tolerance)
    if not training:
        assert torch.equal(out.weights[0], alone.weights[0])


@pytest.mark.parametrize("training", [True, False])
def test_a_row_that_is_all_padding_harms_no_level_of_a_hierarchy(training):
    torch.manual_seed(0)
    sizes = (8, 4)
    levels = tuple(DDCLReadoutConfig(dim=6, codebook_size=k, residual=True) for k in sizes)
    model, x, mask = DDCLHierarchy(levels), tokens(3, 5, 6, dtype=torch.float32), keep(5, 0, 2, n=5)
    x[1] = math.nan
    x[2, 2:] = math.inf
    with torch.no_grad():
        for level in model.levels:
            level.norm.bias.fill_(1.0)  # what normalisation makes of zeros
    model(x, mask)
    outputs = model.train(training)(x.requires_grad_(), mask)
    sum(out.summary[0].square().sum() + out.loss for out in outputs).backward()
    for out in outputs:
        for value in (out.tokens, out.weights, out.summary, out.histogram, out.loss):
            assert value.isfinite().all()
        assert not out.tokens[~mask].any()
        assert not out.summary[1].any()
        assert not out.histogram[1].any()
    assert x.grad.isfinite().all()
    assert not x.grad[~mask].any()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("shape", [(2, 0, 12), (0, 5, 12), (3, 1, 12)], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_no_token_and_one_token_work(shape, training):
    layer = readout(heads=3, residual=True).train(training)
    x = tokens(*shape, seed=1).requires_grad_()
    out = layer(x)
    (out.summary.sum() + out.loss).backward()
    assert out.summary.shape == (shape[0], 12)
    assert out.histogram.shape == (shape[0], 3, 5)
    assert out.summary.isfinite().all()
    assert out.loss.isfinite()
    if shape[1] == 0:
        assert not out.summary.any()
    elif shape[0]:
        assert_close(out.summary, out.tokens[:, 0])


def test_gradients_reach_tokens_and_prototypes_through_every_output():
    layer = readout(heads=2).train()
    for part in ("tokens", "weights", "summary", "histogram", "loss"):
        x = tokens(2, 6, 12, seed=1).requires_grad_()
        layer.zero_grad()
        value = getattr(layer(x), part)
        (value * tokens(*value.shape, seed=2)).sum().backward()
        assert x.grad.any(), part
        for codebook in layer.codebooks:
            assert codebook.prototypes.grad.any(), part


def test_weights_have_the_gradient_of_the_plain_formula():
    z, p = tokens(7, 3).requires_grad_(), tokens(5, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda z, p: ddcl.assignment_weights(z, p, 0.7), (z, p))


@pytest.mark.parametrize("temperature", [1.0, 1e-6, 1e-30])
def test_weights_agree_with_the_streaming_core(temperature):
    z, p = tokens(2, 9, 4) + 100, tokens(6, 4, seed=1) + 100
    q = ddcl.assignment_weights(z, p, temperature)
    soft = ddcl.soft_assignment(z, p, temperature)
    assert_close(q @ p, soft.mu, rtol=0, atol=1e-10)
    assert_close(q.sum((0, 1)), soft.usage, rtol=0, atol=1e-10)
    assert_close(q.argmax(-1), soft.indices)


def test_every_level_of_a_hierarchy_reads_the_one_before_at_its_own_temperature():
    torch.manual_seed(0)
    levels = (
        DDCLReadoutConfig(dim=8, codebook_size=12),
        DDCLReadoutConfig(dim=8, codebook_size=4, heads=2),
    )
    model, x = DDCLHierarchy(levels).double(), tokens(6, 10, 8)
    mask = keep(10, 10, 7, 5, 2, 1, n=10)
    model(x, mask)
    first, second = model.eval()(x, mask)
    again = model.levels[1](model.levels[0](x, mask).tokens, mask)
    assert_close(second.tokens, again.tokens)
    assert second.histogram.shape == (6, 2, 4)
    for out in (first, second):
        assert all(head.variance >= 0 for head in out.heads)
    model.train()
    for _ in range(300):
        outputs = model(x, mask)
    # Each follows the covariance of what it reads itself; the centroids' is the smaller one.
    lower = ddcl.critical_temperature(x, mask)
    assert_close(model.levels[0].codebooks[0].critical, lower, rtol=0.02, atol=0)
    for head, part in zip(model.levels[1].codebooks, outputs[0].tokens.chunk(2, -1), strict=True):
        upper = ddcl.critical_temperature(part, mask)
        assert upper < lower
        assert_close(head.critical, upper, rtol=0.1, atol=0)


def test_it_reads_a_transformer_encoder_and_trains_with_two_learning_rates():
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(block, 1, enable_nested_tensor=False)
    layer, head = DDCLReadout(dim=16, codebook_size=6, heads=2), nn.Linear(16, 2)
    model = nn.ModuleList([encoder, layer, head])
    groups = param_groups(model, lr=3e-3, eps=0.1)
    assert [group["lr"] for group in groups] == [3e-3, 3e-2]
    prototypes = {id(codebook.prototypes) for codebook in layer.codebooks}
    assert {id(parameter) for parameter in groups[1]["params"]} == prototypes
    optimizer = torch.optim.Adam(groups)
    x, mask = tokens(64, 6, 16, dtype=torch.float32), keep(*(2 + i % 5 for i in range(64)))
    labels = (torch.where(mask[..., None], x, 0)[..., 0].sum(1) > 0).long()
    losses = []
    for _ in range(60):
        out = layer(encoder(x, src_key_padding_mask=~mask), mask)
        loss = nn.functional.cross_entropy(head(out.summary), labels)
        optimizer.zero_grad()
        (loss + 0.1 * out.loss).backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("eps", [0.0, 1.5, float("nan")])
def test_learning_rates_out_of_bounds_are_refused(eps):
    with pytest.raises(ValueError, match=r"eps must lie in \(0, 1\]"):
        param_groups(nn.Linear(2, 2), 1e-3, eps)
    with pytest.raises(ValueError, match="lr must be positive"):
        param_groups(nn.Linear(2, 2), -eps - 1.0, 0.1)


@pytest.mark.parametrize("heads", [0, 5, -1])
def test_heads_that_do_not_divide_the_width_are_refused(heads):
    with pytest.raises(ValueError, match=f"heads must divide dim 12, got {heads}"):
        DDCLReadout(dim=12, codebook_size=4, heads=heads)


def test_tokens_and_levels_of_other_widths_are_refused():
    with pytest.raises(ValueError, match=r"width 12, got shape \(2, 3, 8\)"):
        readout()(tokens(2, 3, 8))
    levels = tuple(DDCLReadoutConfig(dim=dim, codebook_size=4) for dim in (8, 12))
    with pytest.raises(ValueError, match=r"share one width, got \[8, 12\]"):
        DDCLHierarchy(levels)
    with pytest.raises(ValueError, match=r"got \[\]"):
        DDCLHierarchy(())


@pytest.mark.parametrize("shape", [(12, 12), (5, 12), (2, 3, 5, 12)], ids=str)
def test_tokens_of_another_rank_are_refused(shape):
    # The functions as users call them, without the suite's check of annotations; 12 tokens without
    # a batch axis would broadcast.
    forward = inspect.unwrap(DDCLReadout.forward)
    with pytest.raises(ValueError, match="tokens must be b n d and have width 12") as caught:
        forward(readout(), tokens(*shape))
    assert str(shape) in str(caught.value)


@pytest.mark.parametrize(
    "mask", [keep(3, n=5)[0], keep(3, 1, n=5).T, keep(3, 1, n=5).long()], ids=["1d", "T", "int"]
)
def test_a_mask_that_does_not_fit_is_refused(mask):
    forward = inspect.unwrap(DDCLReadout.forward)
    with pytest.raises(ValueError, match=r"mask must be boolean of shape \(2, 5\).* got torch"):
        forward(readout(), tokens(2, 5, 12), mask)


def test_another_memory_layout_and_another_batch_change_nothing():
    layer, x = readout(heads=3, residual=True).eval(), tokens(4, 6, 12, seed=1)
    out = layer(x)
    transposed = x.transpose(1, 2).contiguous().transpose(1, 2)
    singles = [layer(row[None]) for row in x]
    for field in ("tokens", "weights", "summary", "histogram"):
        value = getattr(out, field)
        assert torch.equal(getattr(layer(transposed), field), value)
        assert_close(torch.cat([getattr(single, field) for single in singles]), value)


def at(codes: list[list[float]], temperature: float, **options) -> DDCLReadout:
    """In training mode, with these prototypes in its only head."""
    policy = FixedTemperature(value=temperature)
    k, d = len(codes), len(codes[0])
    layer = DDCLReadout(dim=d, codebook_size=k, init="uniform", temperature=policy, **options)
    layer(torch.zeros(1, 1, d))
    with torch.no_grad():
        layer.codebooks[0].prototypes.copy_(torch.tensor(codes))
    return layer


@pytest.mark.parametrize("how", ["cast", "autocast", "float16 tokens", "bfloat16 tokens"])
@pytest.mark.parametrize("training", [True, False])
def test_tokens_far_from_zero_survive_half_precision(how, training):
    # C01: |x|² = 102400 overflows float16
    layer, x = at([[41.0] * 64, [40.0] * 64], 1.0).train(training), torch.full((1, 1, 64), 40.0)
    if how == "cast":
        layer, x = layer.half(), x.half()
    if how.endswith("tokens"):
        x = x.to(getattr(torch, how.split()[0]))
    x.requires_grad_()
    with torch.autocast("cpu", torch.float16, enabled=how == "autocast"):
        out = layer(x)
    (out.loss + out.tokens.float().sum() + out.weights[..., 0].sum()).backward()
    assert_close(out.weights[0, 0, 0], torch.tensor([math.exp(-64), 1.0]), rtol=1e-4, atol=0)
    assert_close(out.histogram[0, 0], torch.tensor([math.exp(-64), 1.0]), rtol=1e-4, atol=0)
    assert torch.equal(out.tokens, x)
    assert out.loss.isfinite()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert all(value.dtype != torch.float16 for value in layer.state_dict().values())


@pytest.mark.parametrize("temperature", [1e-2, 1e-20, 1e-38, 1e-60, 1e-300])
def test_a_cold_readout_is_hard_and_finite(temperature):
    # C02: d = [25, 16]
    layer, x = at([[0.0], [1.0]], temperature), torch.tensor([[[5.0]]], requires_grad=True)
    out = layer(x)
    (out.loss + out.tokens.sum() + out.weights[..., 0].sum()).backward()
    assert_close(out.weights, torch.tensor([[[[0.0, 1.0]]]]), rtol=0, atol=1e-7)
    assert_close(out.tokens, torch.ones(1, 1, 1), rtol=0, atol=1e-6)
    assert x.grad.isfinite().all()
    tied = at([[2.0], [-2.0]], temperature)(torch.zeros(1, 1, 1))
    assert tied.weights.tolist() == [[[[0.5, 0.5]]]]


def test_the_temperature_divides_the_squared_distance():
    out = at([[0.0], [1.0]], 0.5).eval()(torch.zeros(1, 1, 1))
    assert_close(out.weights[0, 0, 0], torch.tensor([0.8808, 0.1192]), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("beta", "slope"), [(0.25, 0.5), (0.5, 1.0)])
def test_the_commitment_weight_moves_the_tokens_and_not_the_prototypes(beta, slope):
    # C03
    layer, x = at([[0.0]], 1.0, commitment_weight=beta), torch.ones(1, 1, 1, requires_grad=True)
    loss = layer(x).loss
    loss.backward()
    assert loss.item() == pytest.approx(1.0)
    assert x.grad.item() == pytest.approx(slope)
    assert layer.codebooks[0].prototypes.grad.item() == pytest.approx(-2.0)


@pytest.mark.parametrize("training", [True, False])
def test_passes_without_gradient_or_in_eval_mode_change_no_state(training):
    for layer in (readout(heads=2, residual=True), DDCLReadout(dim=12, codebook_size=5).double()):
        before = {name: value.clone() for name, value in layer.state_dict().items()}
        layer.train(training)
        with torch.set_grad_enabled(not training):
            for seed in range(3):
                layer(tokens(2, 6, 12, seed=seed))
        assert_close(layer.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "x", [torch.ones(4, 16, 6), tokens(1, 3, 6, dtype=torch.float32)], ids=["constant", "3 tokens"]
)
def test_a_start_from_fewer_distinct_tokens_than_prototypes_fills_up(x):
    # C05
    torch.manual_seed(0)
    layer = DDCLReadout(dim=6, codebook_size=8, heads=2)
    layer(x)
    for codebook, part in zip(layer.codebooks, x.chunk(2, -1), strict=True):
        assert codebook.prototypes.shape == (8, 3)
        assert len(codebook.prototypes.unique(dim=0)) == 8
        distances = torch.cdist(codebook.prototypes.detach(), part.flatten(0, 1))
        assert (distances.amin(1) < 0.1).all()
    assert all(value.isfinite().all() for value in layer.state_dict().values())


def test_a_start_from_a_broken_token_is_refused_and_starts_nothing():
    layer, x = DDCLReadout(dim=6, codebook_size=8, heads=2), tokens(4, 16, 6, dtype=torch.float32)
    x[2, 3, 5] = math.nan
    with pytest.raises(ValueError, match="1 of 64"):
        layer(x)
    assert not layer.codebooks[1].initialized


def test_a_loaded_readout_does_not_start_again_and_a_seed_decides_the_start():
    layer = readout(heads=2)
    assert_close(layer.state_dict(), readout(heads=2).state_dict(), rtol=0, atol=0)
    other = DDCLReadout.from_config(layer.config).double()
    other.load_state_dict(layer.state_dict())
    before = other.codebooks[1].prototypes.clone()
    other(100 + tokens(4, 10, 12))
    assert torch.equal(other.codebooks[1].prototypes, before)


def test_weights_and_state_come_back_from_a_state_dict():
    layer, x = readout(heads=2, residual=True).eval(), tokens(2, 6, 12, seed=1)
    other = DDCLReadout.from_config(layer.config).double().eval()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x).tokens, other(x).tokens)
    assert torch.equal(layer(x).weights, other(x).weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_summary_is_a_mean_where_the_sum_does_not_fit_into_half_precision(dtype):
    torch.manual_seed(0)
    readout, x = DDCLReadout(dim=4, codebook_size=2), 200 + torch.randn(2, 900, 4)
    mask = torch.arange(900) < torch.tensor([[900], [400]])
    readout(x)
    readout.eval()
    expected = readout(x, mask).summary
    found = readout(x.to(dtype), mask).summary
    assert found.dtype == dtype
    assert_close(found.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


# In a process of its own, where no import hook wraps the functions to trace.
COMPILED = """
import torch
from torch.testing import assert_close
from softvq import DDCLReadout, FixedTemperature

torch.manual_seed(0)
policy = FixedTemperature(value=0.5)
layer = DDCLReadout(dim=12, codebook_size=5, heads=2, residual=True, temperature=policy)
x = torch.randn(2, 6, 12)
layer(x)
layer.eval()
mask = torch.arange(6) < torch.tensor([[6], [2]])
compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
got, expected = compiled(x, mask), layer(x, mask)
for field in ("tokens", "weights", "summary", "histogram", "loss"):
    assert_close(getattr(got, field), getattr(expected, field))
"""


def test_the_whole_layer_compiles_as_one_graph(python):
    python("-c", COMPILED)


def test_the_share_of_a_document_is_what_its_tokens_say():
    """60 % of the tokens at one prototype, 40 % at another."""
    layer = DDCLReadout(
        dim=2, codebook_size=2, init="uniform", temperature=FixedTemperature(value=1e-3)
    )
    with torch.no_grad():
        layer.codebooks[0].prototypes.copy_(torch.tensor([[0.0, 0.0], [5.0, 5.0]]))
    document = torch.tensor([[0.0, 0.1], [5.0, 5.1], [0.1, 0.0], [0.0, 0.0], [5.2, 5.0]])
    out = layer.eval()(rearrange(document, "n d -> 1 n d"))
    assert_close(out.histogram, torch.tensor([[[0.6, 0.4]]]))
