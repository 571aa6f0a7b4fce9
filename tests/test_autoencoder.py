"""The flat VQ-VAE: sizes, the round trip through indices, DeepMind's network, normalised latents.

The quantizers inside it are tested on their own.
"""

import inspect
import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from softvq.autoencoder import VQVAE, LatentNorm, VQVAEConfig
from softvq.quantizers import DDCLConfig, EMAConfig, StraightThroughConfig, codebooks

CODES = dict(dim=8, codebook_size=16)
QUANTIZERS = {
    "ddcl": DDCLConfig(**CODES),
    "straight_through": StraightThroughConfig(**CODES, init="data"),
    "ema": EMAConfig(**CODES),
}


@pytest.fixture(params=QUANTIZERS.values(), ids=QUANTIZERS)
def model(request) -> VQVAE:
    return small(quantizer=request.param)


def small(**options) -> VQVAE:
    torch.manual_seed(0)
    options = {"quantizer": QUANTIZERS["ddcl"], **options}
    model = VQVAE(VQVAEConfig(hidden=16, residual_hidden=4, **options))
    # One training pass is enough for the running statistics.
    model.norm.momentum = 1.0
    return model


def images(*shape: int, channels: int = 3) -> Tensor:
    batch, height, width = shape
    generator = torch.Generator().manual_seed(1)
    return torch.rand(batch, channels, height, width, generator=generator) * 2 - 1


def test_a_frozen_model_stays_as_it_is_within_a_model_that_trains(model):
    x = images(4, 16, 16)
    model(x)
    expected = model.eval()(x)
    outer = nn.Sequential(model.train().freeze(), nn.Conv2d(3, 3, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert [p for p in outer.parameters() if p.requires_grad] == [*outer[1].parameters()]
    outer.train()
    assert outer[1].training
    for scale in (1.0, 0.2, -3.0):
        moved = (scale * x).requires_grad_()
        outer[0](moved).reconstruction.sum().backward()
        assert moved.grad.abs().sum() > 0
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(model(x).reconstruction, expected.reconstruction)


def test_indices_that_are_no_tuple_of_grids_are_refused(model):
    model.eval()
    grid = torch.zeros(2, 8, 8, dtype=torch.int64)
    for indices, shapes in ((grid, "(2, 8, 8)"), ((grid[0],), "(8, 8)"), ((), "")):
        with pytest.raises(ValueError, match="tuple of 1 grids b h w") as caught:
            inspect.unwrap(VQVAE.decode_indices)(model, indices)
        assert str(caught.value).endswith(f"got {shapes}")


@pytest.mark.parametrize(
    "shape", [(2, 32, 32), (2, 33, 47), (2, 4, 4), (3, 1, 1), (1, 1, 1)], ids=str
)
def test_every_size_comes_back_in_training_and_evaluation(model, shape):
    x = images(*shape)
    grid = tuple(math.ceil(side / 4) for side in shape[1:])
    for training in (True, False):
        out = model.train(training)(x)
        assert out.reconstruction.shape == x.shape
        assert out.reconstruction.isfinite().all()
        assert out.assignments[0].indices.shape == (shape[0], *grid)
        assert out.assignments[0].counts.sum() == shape[0] * grid[0] * grid[1]


@pytest.mark.parametrize("downsamplings", [1, 2, 3])
def test_every_stride_and_channel_count_come_back(downsamplings):
    model = small(downsamplings=downsamplings, channels=1, residual_blocks=0)
    x = images(2, 16, 24, channels=1)
    out = model(x)
    assert model.stride == 2**downsamplings
    assert out.reconstruction.shape == x.shape
    assert out.assignments[0].indices.shape == (2, 16 // model.stride, 24 // model.stride)


def test_padding_repeats_the_edges():
    x = images(2, 5, 6)
    rows, columns = (torch.arange(8).clamp_max(side - 1) for side in (5, 6))
    model = small().eval()
    assert_close(model.latents(x), model.latents(x[:, :, rows][..., columns]))


@pytest.mark.parametrize("layout", ["channels last", "transposed", "part of a larger one"])
def test_the_memory_layout_of_images_changes_nothing(autoencoder, layout):
    x = images(2, 17, 22)
    other = {
        "channels last": x.to(memory_format=torch.channels_last),
        "transposed": x.transpose(2, 3).contiguous().transpose(2, 3),
        "part of a larger one": F.pad(x, (3, 2, 1, 4))[:, :, 1:-4, 3:-2],
    }[layout]
    assert torch.equal(x, other)
    assert x.stride() != other.stride()
    autoencoder.eval()
    expected, out = autoencoder(x), autoencoder(other)
    for level, wanted in zip(out.assignments, expected.assignments, strict=True):
        assert torch.equal(level.indices, wanted.indices)
        assert level.indices.shape[0] == 2
    assert_close(out.reconstruction, expected.reconstruction)
    indices = tuple(level.indices for level in out.assignments)
    decoded = autoencoder.decode_indices(indices)[:, :, :17, :22]
    assert_close(decoded, expected.reconstruction)


def test_a_batch_of_two_equals_two_singles(autoencoder):
    x = images(2, 17, 22)
    both, *singles = (autoencoder.eval()(part) for part in (x, x[:1], x[1:]))
    assert_close(both.reconstruction, torch.cat([single.reconstruction for single in singles]))
    for number, level in enumerate(both.assignments):
        parts = [single.assignments[number].indices for single in singles]
        assert torch.equal(level.indices, torch.cat(parts))


@pytest.mark.parametrize("shape", [(3, 16, 16), (3, 3, 16), (2, 3, 3, 16, 16)], ids=str)
def test_images_of_another_rank_are_refused(autoencoder, shape):
    # The function as users call it, without the suite's check of annotations
    with pytest.raises(ValueError, match="images must be b c h w and have 3 channels") as caught:
        inspect.unwrap(type(autoencoder).latents)(autoencoder, torch.zeros(shape))
    assert str(shape) in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_leaves_the_quantizers_in_float32(autoencoder, dtype):
    x = images(2, 24, 24)
    autoencoder.eval()
    with torch.autocast("cpu", dtype):
        latents = [autoencoder.latents(x, n) for n in range(len(codebooks(autoencoder)))]
        out = autoencoder(x)
    for codebook, z, level in zip(codebooks(autoencoder), latents, out.assignments, strict=True):
        expected = codebook.assign(z)
        assert level.loss.dtype == torch.float32
        for name, value in expected._asdict().items():
            assert torch.equal(getattr(level, name), value), name
        exact = codebook.assign(z.float())
        assert torch.equal(level.indices, exact.indices)
        assert_close(level.loss, exact.loss)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_trains_with_finite_loss_and_gradients(autoencoder, dtype):
    autoencoder.train().to(dtype)
    out = autoencoder(images(4, 24, 24).to(dtype))
    (out.loss + out.reconstruction.float().square().mean()).backward()
    assert out.loss.dtype == torch.float32
    assert out.loss.isfinite()
    for name, parameter in autoencoder.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name
    for name, value in autoencoder.state_dict().items():
        kept = "quantizer" in name or "norm" in name
        assert value.dtype == dtype if not kept else value.dtype not in (dtype, torch.float64), name
        assert value.isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_indices_decode_to_the_evaluated_forward_pass_bit_for_bit(model, dtype):
    x = images(2, 33, 47)
    model(x)
    model, x = model.eval().to(dtype), x.to(dtype)
    out = model(x)
    decoded = model.decode_indices(tuple(level.indices for level in out.assignments))
    assert torch.equal(decoded[:, :, :33, :47], out.reconstruction)
    assert out.reconstruction.dtype == dtype
    assert out.assignments[0].loss.dtype == torch.float32


def test_half_precision_reconstructs_what_float32_does(model):
    x = images(4, 16, 16)
    model(x)
    indices = (model.eval().encode(x)[0].indices,)
    expected = model.decode_indices(indices)
    assert_close(model.bfloat16().decode_indices(indices).float(), expected, rtol=0, atol=0.02)


def test_the_loss_is_the_sum_over_levels(model):
    out = model(images(2, 16, 16))
    assert_close(out.loss, sum(level.loss for level in out.assignments))
    assert len(out.assignments) == 1


def test_the_quantizer_sees_the_latents_channels_last(model):
    x = images(2, 16, 16)
    model(x)
    level = model.eval()(x).assignments[0]
    assert torch.equal(level.indices, model.quantizer.nearest(model.latents(x)))
    plain = model.norm(model.encoder(x))
    assert_close(model.latents(x)[1, 2, 3], plain[1, :, 2, 3])


@pytest.mark.parametrize("channels", [1, 4])
def test_another_number_of_channels_is_refused(channels):
    with pytest.raises(ValueError, match=rf"3 channels, got shape \(1, {channels}, 8, 8\)"):
        small()(images(1, 8, 8, channels=channels))


@pytest.mark.parametrize("training", [True, False])
def test_passes_without_gradient_or_in_eval_mode_change_no_state(autoencoder, training):
    before = {name: value.clone() for name, value in autoencoder.state_dict().items()}
    autoencoder.train(training)
    with torch.set_grad_enabled(not training):
        for size in (1, 8, 16):
            autoencoder(images(3, size, size))
    assert_close(autoencoder.state_dict(), before, rtol=0, atol=0)


def test_a_pass_without_gradient_gives_what_one_with_it_does(autoencoder):
    x = images(4, 16, 16)
    with torch.no_grad():
        found = autoencoder.train()(x)
    assert_close(found.reconstruction, autoencoder(x).reconstruction)


def test_encoder_and_quantizer_receive_the_gradient_of_the_reconstruction(model):
    x = images(4, 16, 16)
    out = model(x)
    ((out.reconstruction - x).square().mean() + out.loss).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


# hidden 128, two residual blocks of 32 in encoder and decoder, 64-dimensional codes, 512 of them
CONVOLUTIONS = {
    "encoder": [(3, 64, 4), (64, 128, 4), (128, 128, 3)],
    "residual": 4 * [(128, 32, 3), (32, 128, 1)],
    "to codes": [(128, 64, 1)],
    "decoder": [(64, 128, 3), (128, 64, 4), (64, 3, 4)],
}


def test_the_default_network_has_as_many_parameters_as_deepminds():
    by_hand = 512 * 64 + sum(
        before * after * kernel**2 + after
        for layers in CONVOLUTIONS.values()
        for before, after, kernel in layers
    )
    model = VQVAE(VQVAEConfig())
    assert sum(parameter.numel() for parameter in model.parameters()) == by_hand


def test_the_default_network_computes_deepminds():
    torch.manual_seed(0)
    model = VQVAE(VQVAEConfig(normalize=False))
    x, weights = images(2, 32, 32), iter(model.parameters())

    def conv(x: Tensor, stride: int = 1, padding: int = 1, transposed: bool = False) -> Tensor:
        layer = F.conv_transpose2d if transposed else F.conv2d
        return layer(x, next(weights), next(weights), stride=stride, padding=padding)

    def residual_stack(x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + conv(conv(x.relu()).relu(), padding=0)
        return x.relu()

    hidden = conv(conv(conv(x, 2).relu(), 2).relu()).relu()
    z = conv(residual_stack(hidden), padding=0)
    assert_close(model.encoder(x), z)
    assert next(weights) is model.quantizer.prototypes
    hidden = conv(residual_stack(conv(z)), 2, transposed=True).relu()
    assert_close(model.decoder(z), conv(hidden, 2, transposed=True))
    assert not list(weights)


def test_latents_are_normalised_as_by_batch_normalisation():
    torch.manual_seed(0)
    norm, peer = LatentNorm(8), nn.BatchNorm2d(8, affine=False)
    for _ in range(3):
        z = 5 + 3 * torch.randn(4, 8, 6, 6)
        got = norm(z)
        assert torch.equal(got, peer(z))
        assert_close(got.mean((0, 2, 3)), torch.zeros(8), rtol=0, atol=1e-5)
    assert_close(norm.state_dict(), peer.state_dict(), rtol=0, atol=0)
    assert torch.equal(norm.eval()(z), peer.eval()(z))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_variance_that_half_precision_cannot_hold_is_kept(dtype):
    norm, x = LatentNorm(2).to(dtype), 1000 * torch.randn(4, 2, 8, 8)
    norm.momentum = 1.0
    assert_close(norm(x.to(dtype)).float().var(), torch.tensor(1.0), rtol=0.02, atol=0)
    assert norm.running_var.dtype == torch.float32
    assert_close(norm.running_var, x.to(dtype).float().var((0, 2, 3)), rtol=0.01, atol=0)
    assert_close(norm.eval()(x.to(dtype)).float().var(), torch.tensor(1.0), rtol=0.02, atol=0)


def test_a_single_position_is_normalised_by_the_running_statistics():
    norm = LatentNorm(8)
    norm(5 + 3 * torch.randn(4, 8, 6, 6))
    z, before = torch.randn(1, 8, 1, 1), norm.running_mean.clone()
    got = norm(z)
    assert torch.equal(norm.running_mean, before)
    assert torch.equal(got, norm.eval()(z))


def test_normalisation_can_be_switched_off():
    model = small(normalize=False)
    x = images(2, 16, 16)
    assert torch.equal(model.latents(x).permute(0, 3, 1, 2), model.encoder(x))


# In processes of their own, where no import hook wraps the functions to trace.
COMMON = """
import copy, sys
import torch
from torch.testing import assert_close
from softvq.autoencoder import VQVAE, VQVAEConfig
from softvq.quantizers import DDCLConfig, EMAConfig, StraightThroughConfig

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.rand(2, 3, 18, 16) * 2 - 1
models = {}
for config in (DDCLConfig, StraightThroughConfig, EMAConfig):
    quantizer = config(dim=8, codebook_size=16)
    model = VQVAE(VQVAEConfig(hidden=16, residual_hidden=4, quantizer=quantizer))
    model.norm.momentum = 1.0
    model(x)
    models[config.__name__] = model
"""
EXPORTED = """
class Encode(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model.encode(x)[0].indices


class Decode(Encode):
    def forward(self, indices):
        return self.model.decode_indices((indices,))


for name, model in models.items():
    model.eval()
    indices = Encode(model)(x)
    assert len(indices.unique()) > 1, name
    encode, decode = (
        torch.export.export(program, (argument,)).module()
        for program, argument in ((Encode(model), x), (Decode(model), indices))
    )
    assert torch.equal(encode(x), indices), name
    assert torch.equal(encode(-x), Encode(model)(-x)), name
    assert_close(decode(indices), Decode(model)(indices), msg=name)
"""
# Other numbers of images than the one that was traced; 2 levels as well.
ONNX = (
    EXPORTED.split("for name")[0]
    + """
import io, os, tempfile
import onnxruntime
from softvq.export import without_custom_operators
from softvq.hierarchical import HierarchicalVQVAE, HierarchicalVQVAEConfig


class EncodeLevels(Encode):
    def forward(self, x):
        return tuple(level.indices for level in self.model.encode(x))


class DecodeLevels(Encode):
    def forward(self, *indices):
        return self.model.decode_indices(indices)


def run(program, *arguments):
    batch = torch.export.Dim("batch")
    shapes = [{0: batch} for _ in arguments]
    if isinstance(program, DecodeLevels):
        shapes = [tuple(shapes)]
    exported = torch.export.export(program, arguments, dynamic_shapes=tuple(shapes))
    exported = torch.onnx.export(without_custom_operators(exported), dynamo=True, verbose=False)
    path = os.path.join(tempfile.mkdtemp(), "program.onnx")
    exported.save(path)
    session = onnxruntime.InferenceSession(path)

    def call(*arguments):
        names = [given.name for given in session.get_inputs()]
        found = session.run(None, dict(zip(names, [a.numpy() for a in arguments], strict=True)))
        return [torch.from_numpy(value) for value in found]

    return call


levels = [DDCLConfig(dim=8, codebook_size=size) for size in (8, 16)]
models["two levels"] = HierarchicalVQVAE(
    HierarchicalVQVAEConfig(hidden=16, residual_hidden=4, top=levels[0], bottom=levels[1])
)
models["two levels"](x)
with torch.no_grad():
    for name, model in models.items():
        model.eval()
        indices = EncodeLevels(model)(x)
        encode, decode = run(EncodeLevels(model), x), run(DecodeLevels(model), *indices)
        other = torch.cat([-x, x, x.flip(2)])
        expected = EncodeLevels(model)(other)
        assert all(map(torch.equal, encode(other), expected)), name
        (images,) = decode(*expected)
        assert_close(images, DecodeLevels(model)(*expected), rtol=1e-4, atol=1e-5, msg=name)
"""
)
COMPILED = """
for name in sys.argv[2:]:
    for training in (True, False):
        runs = []
        for compiled in (True, False):
            module = copy.deepcopy(models[name]).train(training)
            run = module
            if compiled:
                run = torch.compile(module, fullgraph=True, backend=sys.argv[1])
            out = run(x)
            ((out.reconstruction - x).square().mean() + out.loss).backward()
            gradients = [p.grad for p in module.parameters()]
            runs.append([*out, gradients, module.state_dict()])
        assert_close(*runs, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name} {training}: {text}")
        torch._dynamo.reset()
"""


def run_alone(script: str, *arguments: str) -> None:
    command = [sys.executable, "-c", COMMON + script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_exported_encoder_and_decoder_equal_eager():
    run_alone(EXPORTED)


@pytest.mark.slow
def test_encoder_and_decoder_in_onnxruntime_equal_eager():
    run_alone(ONNX)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "names"),
    [
        ("aot_eager", ["DDCLConfig", "StraightThroughConfig", "EMAConfig"]),
        ("inductor", ["DDCLConfig"]),
    ],
)
def test_the_whole_model_compiled_as_one_graph_equals_eager(backend, names):
    run_alone(COMPILED, backend, *names)
