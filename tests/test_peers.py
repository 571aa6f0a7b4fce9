"""Quantizers of vector-quantize-pytorch in our harness: what they find is theirs, bit for bit.

They keep the contract of test_contract but for what their own rules forbid: FSQ's index is not
that of the nearest code and its levels fix the number of codes, only VectorQuantize has codes that
one can set, and the loss is 0 in eval mode (VectorQuantize) or always (FSQ).
"""

import copy
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close
from vector_quantize_pytorch import FSQ, SimVQ, VectorQuantize

from eval import compare
from eval.peers import (
    PEERS,
    FSQConfig,
    Peer,
    SimVQCodebook,
    SimVQConfig,
    VectorQuantizeCodebook,
    VectorQuantizeConfig,
)
from models import MODELS
from softvq import VQVAE, EMAConfig, VQVAEConfig, checkpoint, training
from softvq.data import DataConfig, float_batches, load_images
from softvq.evaluation import Sums
from softvq.quantizers import CodebookConfig, build
from softvq.quantizers.initialization import real_tokens
from train_vqvae import parse

DIM, SIZE = 4, 27
CONFIGS: dict[str, CodebookConfig] = {
    "vqtorch": VectorQuantizeConfig(dim=DIM, codebook_size=SIZE),
    "rotation": VectorQuantizeConfig(dim=DIM, codebook_size=SIZE, rotation_trick=True),
    "simvq": SimVQConfig(dim=DIM, codebook_size=SIZE),
    "fsq": FSQConfig(dim=DIM, codebook_size=SIZE, levels=(3, 3, 3)),
}
FIELDS = {
    VectorQuantizeConfig: {
        "decay": (-0.1, 1.0, math.nan),
        "commitment_weight": (-0.1, math.nan, math.inf),
        "threshold_ema_dead_code": (-1,),
        "kmeans_iterations": (0, -1),
        "dim": (0,),
        "codebook_size": (0,),
    },
    SimVQConfig: {
        "commitment_weight": (-0.1, math.nan, math.inf),
        "input_weight": (-0.1, math.nan, math.inf),
        "dim": (0,),
        "codebook_size": (0,),
    },
    FSQConfig: {
        "levels": ((8, 8, 9), (8, 8), (2, 16, 16), (-8, -8, 8), ()),
        "dim": (0,),
        "codebook_size": (0, 513),
    },
}
MODES = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS)
def config(request) -> CodebookConfig:
    return request.param


def tokens(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def started(config: CodebookConfig) -> Peer:
    torch.manual_seed(0)
    codebook = build(config)
    codebook.initialize(tokens(512, DIM, seed=0))
    return codebook


def state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def trained(codebook: Peer, z: torch.Tensor, mask: torch.Tensor | None = None):
    """One training pass: the assignment, the gradient of z and those of the parameters."""
    z = z.clone().requires_grad_()
    assignment = codebook.train().assign(z, mask)
    backward(assignment.quantized, assignment.loss)
    return assignment, z.grad, {name: p.grad for name, p in codebook.named_parameters()}


def backward(quantized: torch.Tensor, loss: torch.Tensor) -> None:
    """Another weight for each coordinate: a rotation of the gradient shows."""
    weights = torch.linspace(-1, 2, quantized.shape[-1], dtype=quantized.dtype)
    (loss + (quantized * weights).square().sum()).backward()


@MODES
def test_codes_loss_and_gradients_are_those_of_the_peer_called_directly(config, training):
    codebook = started(config).train(training)
    peer = copy.deepcopy(codebook.peer)
    for seed in range(3):
        ours, theirs = (tokens(2, 30, DIM, seed=seed).requires_grad_() for _ in range(2))
        out = codebook.assign(ours)
        quantized, indices, *rest = peer(theirs)
        loss = rest[0] if rest else torch.zeros(())
        assert torch.equal(out.indices, indices)
        assert_close(out.quantized, quantized, rtol=1e-6, atol=1e-6)
        assert torch.equal(out.loss, loss)
        if quantized.requires_grad:
            for pair in ((out.quantized, out.loss), (quantized, loss)):
                backward(*pair)
            assert_close(ours.grad, theirs.grad)
            grads = [parameter.grad for parameter in codebook.parameters()]
            assert_close(grads, [parameter.grad for parameter in peer.parameters()])
    assert_close(state(codebook.peer), state(peer), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            VectorQuantizeConfig(decay=0.7, commitment_weight=0.3, threshold_ema_dead_code=5),
            {"commitment_weight": 0.3, "_codebook.decay": 0.7, "rotation_trick": False}
            | {"_codebook.threshold_ema_dead_code": 5, "_codebook.kmeans_iters": 10},
        ),
        (
            VectorQuantizeConfig(kmeans_iterations=3, rotation_trick=True),
            {"rotation_trick": True, "_codebook.kmeans_iters": 3, "_codebook.decay": 0.8}
            | {"commitment_weight": 1.0, "_codebook.threshold_ema_dead_code": 2},
        ),
        (
            SimVQConfig(commitment_weight=0.5, input_weight=0.1, rotation_trick=False),
            {"commitment_weight": 0.5, "input_to_quantize_commit_loss_weight": 0.1}
            | {"rotation_trick": False},
        ),
        (FSQConfig(codebook_size=60, levels=(3, 4, 5)), {"codebook_size": 60, "codebook_dim": 3}),
    ],
)
def test_every_option_reaches_the_peer(config, expected):
    peer = build(config).peer
    for path, value in expected.items():
        part = peer
        for name in path.split("."):
            part = getattr(part, name)
        assert part == value, path


@pytest.mark.parametrize(
    ("config", "default"),
    [
        (SimVQConfig(), SimVQ(256, 512)),
        (VectorQuantizeConfig(), VectorQuantize(256, 512)),
    ],
)
def test_the_defaults_are_those_of_the_package(config, default):
    ours = build(config).peer
    same = ["commitment_weight", "_codebook.decay", "_codebook.eps", "_codebook.kmeans_iters"]
    if isinstance(default, SimVQ):
        same = ["commitment_weight", "input_to_quantize_commit_loss_weight", "rotation_trick"]
    for path in same:
        first, second = ours, default
        for name in path.split("."):
            first, second = getattr(first, name), getattr(second, name)
        assert first == second, path


def test_the_start_is_the_peers_own_k_means():
    config = VectorQuantizeConfig(dim=DIM, codebook_size=SIZE, kmeans_iterations=4)
    z = tokens(9, 60, DIM)
    codebook = build(config)
    torch.manual_seed(3)
    codebook.eval().initialize(z)
    assert not codebook.peer.training
    peer = VectorQuantize(
        DIM,
        SIZE,
        kmeans_init=True,
        kmeans_iters=4,
        threshold_ema_dead_code=2,
        rotation_trick=False,
    )
    torch.manual_seed(3)
    peer(real_tokens(z, None)[None])
    assert_close(state(codebook.peer), state(peer), rtol=0, atol=0)
    assert len(codebook.prototypes.unique(dim=0)) == SIZE


def test_the_first_training_pass_starts_the_codebook_and_no_other_pass_does(config):
    torch.manual_seed(0)
    codebook = build(config)
    before = state(codebook)
    codebook.eval()(tokens(64, DIM))
    with torch.no_grad():
        codebook.train()(tokens(64, DIM))
    codebook.nearest(tokens(64, DIM))
    assert_close(state(codebook), before, rtol=0, atol=0)
    codebook(tokens(64, DIM))
    assert codebook.initialized
    codes = codebook.prototypes.clone()
    codebook(100 + tokens(64, DIM))
    assert (codebook.prototypes < 50).all(1).any()
    if not isinstance(codebook, VectorQuantizeCodebook):
        assert torch.equal(codebook.prototypes, codes)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_start_from_nothing_or_from_broken_tokens_is_refused(config, bad):
    codebook = build(config)
    with pytest.raises(ValueError, match="from 0 tokens"):
        codebook.initialize(torch.zeros(0, DIM))
    with pytest.raises(ValueError, match="not finite: 8 of 8"):
        codebook.initialize(torch.full((8, DIM), bad))
    assert not codebook.initialized


def test_moving_averages_move_the_codes_towards_their_tokens():
    codebook = started(VectorQuantizeConfig(dim=DIM, codebook_size=SIZE, threshold_ema_dead_code=0))
    z = 0.5 + tokens(600, DIM, seed=2)
    codes, errors = codebook.prototypes.clone(), []
    for _ in range(20):
        errors.append(codebook.assign(z).reconstruction.item())
    assert not torch.isclose(codebook.prototypes, codes).all(1).any()
    assert errors[-1] < 0.95 * errors[0]


def test_dead_codes_are_revived_as_tokens():
    options = dict(dim=DIM, codebook_size=SIZE, decay=0.5)
    revived, left = (
        started(VectorQuantizeConfig(threshold_ema_dead_code=count, **options)) for count in (2, 0)
    )
    for codebook in (revived, left):
        codebook.prototypes[:5] = 1000.0
        codebook.peer._codebook.cluster_size[0, :5] = 1.0
        codebook.peer._codebook.embed_avg[0, :5] = 1000.0
        codebook(tokens(600, DIM, seed=2))
    assert torch.isin(revived.prototypes[:5], tokens(600, DIM, seed=2)).all()
    assert (left.prototypes[:5] > 900).all()


@pytest.mark.parametrize("kind", [VectorQuantizeConfig, SimVQConfig])
def test_the_rotation_trick_changes_gradients_and_no_values(kind):
    results = []
    for rotation_trick in (False, True):
        codebook = started(kind(dim=DIM, codebook_size=SIZE, rotation_trick=rotation_trick))
        results.append(trained(codebook, tokens(50, DIM)))
    (plain, straight, _), (rotated, turned, _) = results
    assert torch.equal(plain.indices, rotated.indices)
    assert torch.equal(plain.quantized, rotated.quantized)
    assert torch.equal(plain.loss, rotated.loss)
    assert not torch.isclose(straight, turned).all(1).any()


def test_only_what_simvq_and_fsq_learn_gets_gradients():
    codebook = started(CONFIGS["simvq"])
    _, _, grads = trained(codebook, tokens(50, DIM))
    assert grads.keys() == {"peer.code_transform.weight"}
    assert grads["peer.code_transform.weight"].any()
    codebook = started(CONFIGS["fsq"])
    assignment, _, grads = trained(codebook, tokens(50, DIM))
    assert assignment.loss == 0
    assert len(grads) == 4
    assert all(grad.any() for grad in grads.values())


def test_prototypes_are_the_peers_codes_of_every_index(config):
    codebook = started(config)
    peer, every = codebook.peer, torch.arange(SIZE)
    expected = (
        peer.get_codes_from_indices(every)
        if isinstance(peer, VectorQuantize)
        else peer.indices_to_codes(every)
    )
    assert_close(codebook.prototypes, expected, rtol=0, atol=1e-6)
    assert codebook.prototypes.shape == (SIZE, DIM)


@pytest.mark.parametrize("levels", [(3, 3, 3), (3, 3, 3, 3), (3, 4, 5, 7, 3)])
def test_fsq_agrees_with_itself_whatever_its_number_of_scalars(levels):
    config = FSQConfig(dim=DIM, codebook_size=math.prod(levels), levels=levels)
    codebook = started(config)
    z = 2 * tokens(9, 70, DIM)
    out = codebook.assign(z)
    assert out.indices.dtype == torch.int64
    assert torch.equal(out.indices, codebook.peer(z)[1])
    assert torch.equal(out.indices, codebook.nearest(z))
    assert isinstance(codebook.peer, FSQ)
    expected = codebook.peer.indices_to_codes(torch.arange(config.codebook_size))
    assert_close(codebook.prototypes, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(50,), (2, 25), (2, 5, 5), (1, 2, 5, 5), ()], ids=str)
def test_in_eval_mode_quantized_is_the_code_of_its_index_bit_for_bit(config, shape):
    codebook = started(config).eval()
    z = 3 * tokens(*shape, DIM)
    out = codebook.assign(z)
    assert out.indices.shape == shape
    assert out.indices.dtype == torch.int64
    assert torch.equal(out.quantized, codebook.indices_to_codes(out.indices))
    assert torch.equal(out.soft, out.quantized)
    assert torch.equal(out.indices, codebook.nearest(z))
    assert_close(out.reconstruction, (z - out.quantized).square().sum(-1).mean())
    assert torch.equal(out.counts, torch.bincount(out.indices.flatten(), minlength=SIZE))
    assert out.counts.sum() == out.usage.sum() == max(math.prod(shape), 1)
    flat = z.reshape(-1, DIM)
    assert_close((out.mean, out.spread), (flat.mean(0), flat.var(0, correction=0).sum()))
    assert out.variance == out.entropy == 0


@MODES
def test_passes_without_gradient_or_in_eval_mode_change_no_state(config, training):
    codebook = started(config).train(training)
    before = state(codebook)
    with torch.set_grad_enabled(not training):
        for seed in range(3):
            codebook(5 + tokens(64, DIM, seed=seed))
            codebook.nearest(tokens(64, DIM, seed=seed))
    assert_close(state(codebook), before, rtol=0, atol=0)


def test_a_frozen_codebook_stays_while_z_still_learns(config):
    codebook = started(config)
    _, expected, _ = trained(copy.deepcopy(codebook), tokens(64, DIM))
    before = state(codebook.freeze())
    for _ in range(3):
        out, grad, grads = trained(codebook, tokens(64, DIM))
        assert_close(grad, expected)
    assert all(value is None for value in grads.values())
    assert torch.equal(out.quantized, codebook.indices_to_codes(out.indices))
    codebook(5 + tokens(64, DIM))
    assert_close(state(codebook), before, rtol=0, atol=0)


@pytest.mark.parametrize("padding", [math.nan, math.inf, -1e30])
def test_padding_changes_nothing(config, padding):
    z = tokens(3, 5, DIM)
    mask = torch.arange(5) < torch.tensor([[5], [1], [3]])
    codebook = started(config)
    other = copy.deepcopy(codebook)
    torch.manual_seed(2)  # dead codes become tokens at random
    alone, grad, grads = trained(other, z[mask])
    z[~mask] = padding
    torch.manual_seed(2)
    padded, grad_padded, grads_padded = trained(codebook, z, mask)
    for name, value in alone._asdict().items():
        got = getattr(padded, name)
        assert_close(got[mask] if name in ("quantized", "soft", "indices") else got, value)
    assert (padded.indices[~mask] == -1).all()
    assert (padded.quantized[~mask] == 0).all()
    assert_close(grad_padded[mask], grad)
    assert (grad_padded[~mask] == 0).all()
    assert_close(grads_padded, grads)
    assert_close(state(codebook), state(other))


def test_masks_mean_what_the_peers_own_masks_mean():
    codebook = started(CONFIGS["rotation"])
    peer = copy.deepcopy(codebook.peer)
    mask = torch.arange(20) < torch.tensor([[20], [1], [13]])
    ours, theirs = (tokens(3, 20, DIM).requires_grad_() for _ in range(2))
    torch.manual_seed(2)
    out = codebook(ours, mask)
    torch.manual_seed(2)
    quantized, indices, loss = peer(theirs, mask=mask)
    assert torch.equal(out.indices, indices)
    assert_close(out.quantized, quantized, rtol=0, atol=1e-6)
    assert_close(out.loss, loss)
    backward(out.quantized, out.loss)
    backward(quantized, loss)
    assert_close(ours.grad, theirs.grad)
    assert_close(state(codebook.peer), state(peer))


@MODES
@pytest.mark.parametrize("shape", [(2, 5), (0,), (2, 0, 3)], ids=str)
def test_a_batch_without_tokens_has_no_loss_and_moves_nothing(config, shape, training):
    codebook = started(config).train(training)
    before = state(codebook)
    z = torch.full((*shape, DIM), math.nan).requires_grad_()
    out = codebook.assign(z, torch.zeros(shape, dtype=torch.bool))
    (out.loss + out.quantized.sum()).backward()
    assert torch.equal(out.quantized, torch.zeros_like(z))
    assert torch.equal(out.indices, torch.full(shape, -1))
    assert out.counts.sum() == out.usage.sum() == 0
    assert out.loss == out.reconstruction == out.spread == 0
    assert torch.equal(z.grad, torch.zeros_like(z))
    assert_close(state(codebook), before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_z_of_another_dtype_is_computed_in_that_of_the_codes(config, dtype):
    codebook = started(config)
    z = tokens(64, DIM, dtype=dtype)
    expected, grad, _ = trained(copy.deepcopy(codebook), z.float())
    got, grad_got, _ = trained(codebook.to(dtype) if dtype.itemsize == 2 else codebook, z)
    assert got.quantized.dtype == got.soft.dtype == grad_got.dtype == dtype
    assert torch.equal(got.indices, expected.indices)
    assert torch.equal(got.quantized, expected.quantized.to(dtype))
    assert got.loss.dtype == torch.promote_types(dtype, torch.float32)
    assert_close(got.loss.float(), expected.loss)
    tolerance = 1e-5 if dtype == torch.float64 else 0.02
    assert_close(grad_got.float(), grad, rtol=tolerance, atol=tolerance)
    kept = [value for value in state(codebook).values() if value.is_floating_point()]
    assert {value.dtype for value in kept} <= {torch.float32}


def test_a_codebook_cast_to_double_works(config):
    codebook = started(config).double()
    codebook = copy.deepcopy(codebook)
    out, grad, _ = trained(codebook, tokens(64, DIM, dtype=torch.float64))
    assert out.loss.dtype == out.quantized.dtype == grad.dtype == torch.float64
    codebook.eval()
    assert torch.equal(codebook(grad).quantized, codebook.indices_to_codes(codebook(grad).indices))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_changes_nothing(config, dtype):
    torch.manual_seed(0)
    codebook = build(config)
    other = copy.deepcopy(codebook)
    for seed in range(2):
        z = tokens(400, DIM, seed=seed)
        torch.manual_seed(seed)
        expected = codebook.assign(z)
        torch.manual_seed(seed)
        with torch.autocast("cpu", dtype):
            got = other.assign(z)
            codes = other.prototypes
        assert_close(got._asdict(), expected._asdict(), rtol=0, atol=0)
        assert torch.equal(codes, codebook.prototypes)


def test_another_width_is_refused(config):
    codebook = started(config)
    for call in (codebook, codebook.assign, codebook.nearest, codebook.initialize):
        with pytest.raises(ValueError, match=r"width 4, got shape \(2, 4, 3\)"):
            call(tokens(2, 4, 3))


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        pytest.param(kind, name, value, id=f"{kind.__name__}.{name}={value}")
        for kind, options in FIELDS.items()
        for name, values in options.items()
        for value in values
    ],
)
def test_an_option_out_of_range_is_refused_by_name_and_value(kind, name, value):
    with pytest.raises(ValueError, match=rf"{name}\b.* got ") as caught:
        kind(**{name: value})
    assert "\n" not in str(caught.value)


def test_every_option_is_validated():
    for kind, options in FIELDS.items():
        names = {field.name for field in dataclasses.fields(kind)}
        assert names - {"rotation_trick"} == options.keys()


def small(config: CodebookConfig) -> VQVAEConfig:
    return VQVAEConfig(quantizer=config, hidden=6, residual_blocks=1, normalize=False)


def test_a_run_folder_gives_the_trained_model_back(config, tmp_path, noise_images):
    torch.manual_seed(0)
    model, images = VQVAE(small(config)), noise_images(64)
    training.prepare(model, images, total_steps=4)
    recipe = training.TrainConfig(lr=1e-3)
    optimizer = training.build_optimizer(model, recipe)
    for pixels in images.batches(torch.arange(64), 16):
        training.train_step(model.train(), optimizer, pixels, 0.3, recipe)
    for _ in range(2):  # the second finds its own configuration there
        checkpoint.save_model(tmp_path, model)
    loaded = checkpoint.load(tmp_path)
    assert loaded.config == model.config
    assert isinstance(loaded.quantizer, type(model.quantizer))
    assert_close(state(loaded), state(model), rtol=0, atol=0)
    x = next(float_batches(noise_images(5, seed=1), torch.device("cpu")))
    model.eval()
    (level,), (expected,) = loaded.encode(x), model.encode(x)
    assert torch.equal(level.indices, expected.indices)
    assert torch.equal(level.quantized, expected.quantized)
    assert torch.equal(
        loaded.decode_indices((level.indices,)), loaded.decode((expected.quantized,))
    )
    training.prepare(loaded, noise_images(32, seed=3), total_steps=4)
    loaded.train()(x)
    if not isinstance(loaded.quantizer, VectorQuantizeCodebook):
        assert_close(state(loaded.quantizer), state(model.quantizer), rtol=0, atol=0)


def test_a_run_goes_on_from_its_training_state_bit_for_bit(config, noise_images):
    recipe, images = training.TrainConfig(lr=1e-3), noise_images(64)

    def go_on(model: VQVAE, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        for pixels in images.batches(torch.arange(64), 16):
            training.train_step(model.train(), optimizer, pixels, 0.3, recipe)
        return state(model)

    torch.manual_seed(0)
    model = VQVAE(small(config))
    training.prepare(model, images, total_steps=8)
    optimizer = training.build_optimizer(model, recipe)
    go_on(model, optimizer)
    kept = training.training_state(model, optimizer, Sums())
    kept = {name: value.clone() for name, value in kept.items()}
    expected = go_on(model, optimizer)
    torch.manual_seed(1)
    again = VQVAE(small(config))
    optimizer = training.build_optimizer(again, recipe)
    training.restore(kept, again, optimizer)
    training.prepare(again, images, total_steps=8)
    assert_close(go_on(again, optimizer), expected, rtol=0, atol=0)


def test_levels_are_a_tuple_again_and_nothing_else_is_taken_for_one(tmp_path):
    config = small(CONFIGS["fsq"])
    content = json.loads(json.dumps(checkpoint.encode_config(config)))
    assert content["quantizer"]["levels"] == [3, 3, 3]
    assert checkpoint.decode_config(content, VQVAEConfig) == config
    for wrong in (27, "333", [3, "3", 3], [[3], 9], None, {"type": "FSQConfig"}):
        content["quantizer"]["levels"] = wrong
        with pytest.raises(ValueError, match=r"levels cannot be|expected a tuple|fields"):
            checkpoint.decode_config(content, VQVAEConfig)


def test_a_model_starts_from_the_same_network_whatever_its_quantizer():
    weights = []
    for config in (EMAConfig(dim=DIM, codebook_size=SIZE), *CONFIGS.values()):
        torch.manual_seed(4)
        weights.append(state(VQVAE(small(config)).decoder))
    for other in weights[1:]:
        assert_close(other, weights[0], rtol=0, atol=0)
    first, second = (started(CONFIGS["simvq"]) for _ in range(2))
    assert isinstance(first, SimVQCodebook)
    assert_close(state(first), state(second), rtol=0, atol=0)


def test_the_named_peers_can_be_compared_with_our_models():
    large = {name for name in PEERS if name.endswith("-k4096")}
    names = ("cifar10-ddcl", "cifar10-ema", *sorted(PEERS.keys() - large))
    runs = compare.plan(compare.Study(models=names), [])
    names = ("cifar10-ddcl-k4096", "cifar10-ema", "cifar10-simvq", *large)
    flags = ("--model.quantizer.codebook-size", "4096", "--model.quantizer.dim", "8")
    runs |= {
        name: planned
        for name, planned in compare.plan(compare.Study(models=names), flags).items()
        if name in large
    }
    assert runs.keys() > PEERS.keys()
    for name in PEERS:
        (run,) = runs[name]
        assert run.train == MODELS["cifar10-ema"].train
        assert run.data == MODELS["cifar10-ema"].data
        assert dataclasses.replace(run.model, quantizer=MODELS["cifar10-ema"].model.quantizer) == (
            MODELS["cifar10-ema"].model
        )


def test_flags_reach_the_options_of_a_peer(capsys):
    larger = ("--model.quantizer.levels", *"8888", "--model.quantizer.codebook-size", "4096")
    (run,) = compare.plan(compare.Study(models=("cifar10-fsq",)), larger)["cifar10-fsq"]
    assert run.model.quantizer == FSQConfig(dim=8, codebook_size=4096, levels=(8, 8, 8, 8))
    with pytest.raises(ValueError, match=r"levels must multiply to codebook_size 4096"):
        compare.plan(compare.Study(models=("cifar10-fsq",)), larger[-2:])
    _, run = parse(["cifar10-vqtorch", "--model.quantizer.rotation-trick"], PEERS)
    assert run.model.quantizer.rotation_trick
    with pytest.raises(ValueError, match="must be one of photos-ddcl"):
        parse(["cifar10-vqtorch"])


def test_models_may_differ_in_width_and_not_in_the_number_of_codes(monkeypatch):
    fsq = dataclasses.replace(
        PEERS["cifar10-fsq"],
        model=VQVAEConfig(quantizer=FSQConfig(dim=3, levels=(8, 8, 8)), normalize=False),
    )
    monkeypatch.setitem(PEERS, "narrow", fsq)
    compare.plan(compare.Study(models=("cifar10-ddcl", "narrow")), [])
    other = FSQConfig(dim=8, codebook_size=343, levels=(7, 7, 7))
    fewer = dataclasses.replace(fsq, model=dataclasses.replace(fsq.model, quantizer=other))
    monkeypatch.setitem(PEERS, "fewer", fewer)
    with pytest.raises(ValueError, match=r"codebook_size is \(343,\) and \(512,\)"):
        compare.plan(compare.Study(models=("cifar10-ddcl", "fewer")), [])


def test_an_unknown_model_is_refused_with_the_names_of_models_and_peers():
    with pytest.raises(
        ValueError, match=r"must be among photos-ddcl, .*cifar10-fsq-k4096; got nope"
    ):
        compare.plan(compare.Study(models=("cifar10-fsq", "nope")), [])


def pngs(folder: Path, count: int, seed: int) -> None:
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    for number in range(count):
        pixels = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
        Image.fromarray(pixels).save(folder / f"{number}.png")


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """The folder of a small study of our model and two peers."""
    folder = tmp_path_factory.mktemp("peers")
    pngs(folder / "images" / "train", 40, seed=0)
    pngs(folder / "images" / "test", 12, seed=1)
    images = ("--data.source", str(folder / "images"), "--data.train-images", "0")
    recipe = ("--train.epochs", "2", "--train.batch-size", "20", "--model.hidden", "8")
    flags = (*images, "--data.test-images", "0", "--data.workers", "0", *recipe)
    names = ("cifar10-ddcl", "cifar10-vqtorch-rotation", "cifar10-fsq")
    arguments = [*names, "--out", str(folder / "study"), "--", *flags]
    for _ in range(2):  # the second time all is finished
        assert compare.main(arguments) == 0
    return folder / "study"


@torch.no_grad()
def test_a_study_with_peers_reports_what_its_models_do(study):
    result = json.loads((study / "compare.json").read_text())
    assert list(result["models"]) == ["cifar10-ddcl", "cifar10-vqtorch-rotation", "cifar10-fsq"]
    table = (study / "compare.md").read_text()
    images = load_images(DataConfig(source=str(study.parent / "images"), test_images=0), "test")
    for name, summary in result["models"].items():
        run = study / f"{name}-seed0"
        report = json.loads((run / "report.json").read_text())
        assert f"| {name} |" in table
        assert summary["test/psnr_hard"]["mean"] == report["test/psnr_hard"]
        assert summary["seconds_per_epoch"]["mean"] > 0
        model = checkpoint.load(run)
        assert report["parameters"] == sum(value.numel() for value in model.parameters())
        (x,) = float_batches(images, torch.device("cpu"))
        (level,) = model.encode(x)
        codes = model.quantizer.indices_to_codes(level.indices)
        error = (model.decode((codes,)) - x).double().square().mean().item()
        share = level.counts[level.counts > 0].double() / level.counts.sum()
        assert report["test/psnr_hard"] == pytest.approx(10 * math.log10(4 / error), abs=1e-3)
        assert report["test/utilisation"] == (level.counts > 0).sum().item() / 512
        assert report["test/perplexity"] == pytest.approx(
            math.exp(-(share * share.log()).sum().item()), rel=1e-6
        )
        assert report["test/l_ols"] == pytest.approx(level.reconstruction.item(), rel=1e-4)
        if name != "cifar10-ddcl":
            assert report["test/psnr_soft"] == report["test/psnr_hard"]


# A package that cannot be imported, as after an installation of the extra `train` alone.
WITHOUT = """
import sys

sys.modules["vector_quantize_pytorch"] = None
from eval import compare

out, *flags = sys.argv[1:]
ours = compare.main(["photos-ddcl", "photos-ema", "--out", out + "/ours", "--", *flags])
peers = compare.main(["cifar10-ddcl", "cifar10-fsq", "--out", out + "/peers", "--", *flags])
print(ours, peers)
"""


def test_without_their_package_our_models_work_and_peers_are_refused_in_one_line(tmp_path, python):
    images = ("--data.train-images", "8", "--data.test-images", "4", "--data.workers", "0")
    network = ("--model.hidden", "4", "--model.quantizer.codebook-size", "8")
    out, said = python("-c", WITHOUT, tmp_path, *images, *network, "--train.epochs", "1")
    printed, _, statuses = out.strip().rpartition("\n")
    assert list(json.loads(printed)["models"]) == ["photos-ddcl", "photos-ema"]
    assert statuses == "0 2"
    last = said.splitlines()[-1]
    assert last.startswith("error: models must be among photos-ddcl, ")
    assert "got cifar10-fsq, and peers need vector-quantize-pytorch" in last
    assert 'pip install -e ".[dev]"' in last
    assert "Traceback" not in said
    assert not (tmp_path / "peers").exists()


def test_reconstruct_opens_a_peers_run_in_a_process_that_knows_none(study, python):
    for name in ("cifar10-vqtorch-rotation", "cifar10-fsq"):
        out, _ = python("-m", "eval.reconstruct", study / f"{name}-seed0")
        report = json.loads((study / f"{name}-seed0" / "report.json").read_text())
        assert json.loads(out)["test/psnr_hard"] == pytest.approx(report["test/psnr_hard"])


def test_a_peers_run_says_what_is_missing_before_its_quantizers_are_registered(study, python):
    script = "import sys, softvq; softvq.load(sys.argv[1])"
    with pytest.raises(AssertionError, match="unknown configuration 'FSQConfig'"):
        python("-c", script, study / "cifar10-fsq-seed0")
