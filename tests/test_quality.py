"""Distances between features, the classifier and `eval.quality`: closed forms, loops, real runs."""

import copy
import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from eval import classifier as classifier_program
from eval import quality as program
from eval.classifier import Classifier, ClassifierConfig, augment, load_classifier, predictions
from eval.distances import frechet_distance, kernel_distance
from eval.feature_networks import (
    AlexNetFeatures,
    features,
    load_feature_network,
    weights_hash,
)
from eval.sample import draw, load_generative
from softvq import checkpoint
from softvq.data import load_images, to_float
from softvq.metrics import load_perceptual
from softvq.prior import SamplingConfig

CPU = torch.device("cpu")


def gaussian(count: int, dim: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dim, generator=generator, dtype=torch.float64)


def test_the_frechet_distance_is_the_closed_form_of_commuting_covariances():
    x = gaussian(500, 6, 0)
    x = x - x.mean(0)
    # y has the mean 2 and standard deviations 3 times as large: 6 * 2² + (3 - 1)² tr Cov(x)
    expected = 24 + 4 * x.T.cov().trace().item()
    assert frechet_distance(x, 3 * x + 2) == pytest.approx(expected, rel=1e-8)
    assert frechet_distance(x, x) == pytest.approx(0, abs=1e-6)


def test_the_frechet_distance_is_that_of_square_roots_by_eigenvectors():
    x, y = gaussian(300, 5, 0), gaussian(200, 5, 1) @ gaussian(5, 5, 2) + 1

    def root(matrix):
        values, vectors = torch.linalg.eigh(matrix)
        return vectors @ values.clamp_min(0).sqrt().diag() @ vectors.T

    half = root(x.T.cov())
    cross = root(half @ y.T.cov() @ half).trace()
    expected = (x.mean(0) - y.mean(0)).square().sum()
    expected += x.T.cov().trace() + y.T.cov().trace() - 2 * cross
    assert frechet_distance(x, y) == pytest.approx(expected.item(), rel=1e-6)


def test_the_kernel_distance_is_the_unbiased_estimate_of_a_loop():
    x, y = gaussian(7, 4, 0), gaussian(7, 4, 1) + 0.5

    def kernel(a, b):
        return (a @ b / 4 + 1) ** 3

    total = 0.0
    for i in range(7):
        for j in range(7):
            if i != j:
                total += (kernel(x[i], x[j]) + kernel(y[i], y[j])) / 42
            total -= 2 * kernel(x[i], y[j]) / 49
    # A subset of them all is the whole set whatever its order.
    assert kernel_distance(x, y, 3, 7) == pytest.approx(total.item(), rel=1e-6)
    before = torch.random.get_rng_state()
    assert kernel_distance(x, y, 5, 3) == kernel_distance(x, y, 5, 3)
    assert torch.equal(before, torch.random.get_rng_state())
    with pytest.raises(ValueError, match="at most the number of images 7, got 8"):
        kernel_distance(x, y, 3, 8)


@pytest.fixture(scope="session")
def alexnet(tmp_path_factory) -> str:
    """A file of AlexNet's convolutions with random weights."""
    import torchvision

    torch.manual_seed(0)
    network = torchvision.models.alexnet()
    state = {f"features.{name}": value for name, value in network.features.state_dict().items()}
    path = tmp_path_factory.mktemp("weights") / "alexnet.pth"
    torch.save(state, path)
    return str(path)


def test_alexnet_gives_the_mean_of_its_last_activation(alexnet):
    network = load_feature_network("", alexnet, 40)
    assert (network.frechet, network.kid) == ("frechet_alexnet", "kid_alexnet")
    pixels = torch.randint(0, 256, (3, 3, 40, 40), dtype=torch.uint8)
    perceptual = load_perceptual(alexnet)
    x = (to_float(pixels) - perceptual.scaling_layer.shift) / perceptual.scaling_layer.scale
    for layer in [
        layer for part in range(1, 6) for layer in getattr(perceptual.net, f"slice{part}")
    ]:
        x = layer(x)
    found = features(network.network, pixels, CPU, "x")
    assert found.shape == (3, network.description["dim"])
    assert_close(found.float(), x.mean((2, 3)))


def test_the_hash_is_of_the_weights_in_use(alexnet):
    perceptual = load_perceptual(alexnet)
    first = weights_hash(AlexNetFeatures(perceptual, 64))
    assert first == load_feature_network("", alexnet, 32).description["sha256"]
    with torch.no_grad():
        next(perceptual.net.parameters())[0, 0, 0, 0] += 1
    assert weights_hash(AlexNetFeatures(perceptual, 64)) != first


def test_a_network_must_be_given_or_cached_and_only_one(alexnet, tmp_path, monkeypatch, hostile):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(ValueError, match="give alexnet-weights or inception-weights"):
        load_feature_network("", "", 64)
    with pytest.raises(ValueError, match="not both"):
        load_feature_network("x", alexnet, 64)
    with pytest.raises(ValueError, match="inception weights /no/such: no such file"):
        load_feature_network("/no/such", "", 64)
    with pytest.raises(ValueError, match="not those of FID"):
        load_feature_network(alexnet, "", 64)
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(alexnet, tmp_path / "checkpoints" / "alexnet-owt-7be5be79.pth")
    assert load_feature_network("", "", 64).frechet == "frechet_alexnet"
    contents, trace = hostile
    for content in contents:
        (tmp_path / "bad.pth").write_bytes(content)
        with pytest.raises(ValueError, match="not those of FID"):
            load_feature_network(str(tmp_path / "bad.pth"), "", 64)
    assert not trace.exists()


def test_inception_is_called_fid_given_or_cached(tmp_path, monkeypatch):
    """With random weights in the shapes of the published file."""
    from torch_fidelity import feature_extractor_inceptionv3 as extractor

    monkeypatch.setattr(extractor.FeatureExtractorInceptionV3, "load_state_dict", lambda *a: None)
    monkeypatch.setattr(extractor, "load_state_dict_from_url", lambda *a, **k: {})
    torch.manual_seed(0)
    built = extractor.FeatureExtractorInceptionV3("x", ["2048"])
    monkeypatch.undo()
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    path = tmp_path / "checkpoints" / "weights-inception-2015-12-05-6726825d.pth"
    path.parent.mkdir()
    torch.save(built.state_dict(), path)
    pixels = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    given = load_feature_network(str(path), "", 64)
    assert (given.frechet, given.kid, given.description["resize"]) == ("fid", "kid", 299)
    assert given.description["sha256"] == load_feature_network("", "", 64).description["sha256"]
    found = features(given.network, pixels, CPU, "x")
    assert_close(found.float(), built(pixels)[0])


SMALL = ("--widths", "8", "16", "--data.source", "photos", "--data.image-size", "16")
SMALL += ("--data.train-images", "48", "--data.test-images", "24", "--data.workers", "0")
SMALL += ("--train.batch-size", "16", "--train.epochs", "20", "--device", "cpu")


def train(capsys, *arguments) -> tuple[int, str, str]:
    status = classifier_program.main([str(argument) for argument in (*SMALL, *arguments)])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A classifier of twenty epochs of three steps."""
    out = tmp_path_factory.mktemp("classifier")
    assert classifier_program.main([*SMALL, "--out", str(out)]) == 0
    return out


def test_the_report_of_a_classifier_is_what_its_file_gives(trained, capsys):
    report = checkpoint.read_json(trained / "report.json")
    config = classifier_program.Training(out="").data
    images = load_images(
        type(config)(source="photos", image_size=16, test_images=24, workers=0), "test"
    )
    network = load_classifier(str(trained), CPU)
    names = [network.config.classes[n] for n in predictions(network, images.pixels)]
    right = [name == label for name, label in zip(names, images.labels, strict=True)]
    assert report["test/accuracy"] == sum(right) / 24
    assert report["test/accuracy"] > 0.8  # blue sky and yellow petals are easily told apart
    status, out, err = train(capsys, "--out", trained)
    assert (status, json.loads(out)) == (0, report)
    assert "is finished" in err


def test_a_stopped_classifier_ends_like_another(trained, tmp_path, capsys, monkeypatch):
    step, calls = classifier_program._train_step, []

    def interrupted(*arguments):
        calls.append(0)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return step(*arguments)

    monkeypatch.setattr(classifier_program, "_train_step", interrupted)
    status, _, err = train(capsys, "--out", tmp_path)
    assert status == 130
    assert err.splitlines()[-1].endswith("the same command continues it")
    with pytest.raises(ValueError, match="is not finished"):
        load_classifier(str(tmp_path), CPU)
    assert train(capsys, "--out", tmp_path)[0] == 0
    model = checkpoint.MODEL
    assert (tmp_path / model).read_bytes() == (trained / model).read_bytes()


@pytest.mark.parametrize("size", [16, 8])
@pytest.mark.parametrize(("count", "steps"), [(65, 2), (5, 1), (2, 1)])
def test_a_classifier_learns_from_few_images_and_from_a_last_batch_of_one(
    tmp_path, capsys, noise_pngs, store, count, steps, size
):
    # C08: at 8 x 8 pixels the last block has one position, which has no variance in one image.
    files = {f"train/{'ab'[n % 2]}/{n}.png": c for n, c in enumerate(noise_pngs(count).values())}
    files |= {f"test/{'ab'[n % 2]}/{n}.png": c for n, c in enumerate(noise_pngs(3).values())}
    flags = ("--data.source", store(tmp_path / "images", files), "--data.image-size", size)
    flags += ("--data.train-images", 0, "--data.test-images", 0, "--train.batch-size", 64)
    flags += ("--widths", 4, 8, 8, 8, "--train.epochs", 2, "--out", tmp_path / "x")
    status, out, err = train(capsys, *flags)
    assert status == 0, err
    report = json.loads(out)
    assert (report["train_images"], report["test_images"]) == (count, 3)
    state, _ = checkpoint.read_tensors(tmp_path / "x" / checkpoint.STATE)
    assert state["optimizer/head.weight/step"] == 2 * steps
    for record in checkpoint.read_records(tmp_path / "x"):
        assert all(math.isfinite(value) for value in record.values())
    weights, _ = checkpoint.read_tensors(tmp_path / "x" / checkpoint.MODEL)
    torch.manual_seed(0)
    fresh = Classifier(ClassifierConfig(classes=("a", "b"), widths=(4, 8, 8, 8))).state_dict()
    for name, value in weights.items():
        assert value.isfinite().all(), name
        assert "weight" not in name or not torch.equal(value, fresh[name]), name


def test_one_position_is_normalised_by_running_statistics_and_others_as_by_torch():
    torch.manual_seed(0)
    classifier = Classifier(ClassifierConfig(classes=("a", "b"), widths=(4, 6)))
    peer = copy.deepcopy(classifier)
    for module in peer.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = nn.BatchNorm2d
    x = torch.randn(5, 3, 8, 8)
    for mode in (True, False):
        assert torch.equal(classifier.train(mode)(x), peer.train(mode)(x))
    assert_close(classifier.state_dict(), peer.state_dict(), rtol=0, atol=0)
    single = torch.randn(1, 3, 1, 1)
    assert torch.equal(classifier.train()(single), peer.eval()(single))
    with pytest.raises(ValueError, match="more than 1 value"):
        peer.train()(single)


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        (("--train.epochs", "3"), "train.epochs is 20 there and 3 here"),
        (("--train.lr", "0.5"), "train.lr is 0.003 there and 0.5 here"),
        (("--data.train-images", "47"), "data.train_images is 48 there and 47 here"),
    ],
)
def test_other_flags_in_the_folder_of_a_classifier_are_refused(trained, capsys, flags, difference):
    # C12
    status, out, err = train(capsys, "--out", trained, *flags)
    assert (status, out) == (2, "")
    assert difference in err
    assert err.count("\n") == 1


def test_a_pickle_in_place_of_a_classifier_is_refused_and_not_executed(
    trained, generative_run, alexnet, tmp_path, capsys, hostile
):
    # C13
    pickles, trace = hostile
    folder = tmp_path / "classifier"
    shutil.copytree(trained, folder)
    for content in pickles:
        (folder / checkpoint.MODEL).write_bytes(content)
        flags = ("--alexnet-weights", alexnet, "--classifier", folder)
        status, out, err = measure(capsys, generative_run, *flags)
        assert (status, out) == (2, "")
        assert "model.safetensors is not a whole safetensors file" in err
        (tmp_path / "weights.pth").write_bytes(content)
        for name in ("--alexnet-weights", "--inception-weights"):
            status, out, err = measure(capsys, generative_run, name, tmp_path / "weights.pth")
            assert (status, out) == (2, "")
            assert "weights.pth: not" in err
            assert err.count("\n") == 1
    (folder / checkpoint.REPORT).unlink()
    for content in pickles:
        (folder / checkpoint.STATE).write_bytes(content)
        status, out, err = train(capsys, "--out", folder)
        assert (status, out) == (2, "")
        assert "state.safetensors is not a whole safetensors file" in err
    assert not trace.exists()


def test_broken_images_are_named_in_place_of_a_report(
    generative_run, alexnet, tmp_path, capsys, noise_pngs, store
):
    # C10
    files = {**noise_pngs(4, "train/"), **noise_pngs(4, "test/"), "test/zero.png": b""}
    files["test/cut.png"] = files["test/000.png"][:300]
    images = store(tmp_path / "images", files)
    flags = ("--alexnet-weights", alexnet, "--data", images, "--kid-subset-size", 2)
    status, out, err = measure(capsys, generative_run, *flags, "--num", 6)
    assert (status, out) == (2, "")
    assert "2 of 6 images cannot be used" in err
    assert "test/cut.png" in err
    assert "test/zero.png (empty file)" in err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--train.epochs", "0"), "epochs must be at least 1, got 0"),
        (("--train.lr", "0"), "lr must be positive and finite, got 0.0"),
        (("--train.warmup", "1"), "warmup must lie in [0, 1), got 1.0"),
        (("--train.weight-decay", "-1"), "weight_decay must be 0 or more, got -1.0"),
        (("--train.seed", "-1"), "seed must lie in [0, 2**32), got -1"),
        (("--widths", "0"), "widths must each be at least 1, got (0,)"),
    ],
)
def test_a_classifier_that_cannot_be_is_one_line(tmp_path, capsys, flags, complaint):
    status, out, err = train(capsys, "--out", tmp_path / "x", *flags)
    assert (status, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1


def test_images_without_classes_are_refused(tmp_path, capsys, noise_pngs, store):
    folder = store(tmp_path / "pictures", noise_pngs(12))
    status, _, err = train(capsys, "--out", tmp_path / "x", "--data.source", folder,
                           "--data.train-images", 0, "--data.test-images", 0)  # fmt: skip
    assert status == 2
    assert "needs the same class folders" in err


def test_augmentation_mirrors_and_moves_whole_pixels():
    torch.manual_seed(0)
    x = torch.arange(2 * 64.0).reshape(2, 1, 8, 8)
    for _ in range(10):
        for image, found in zip(x, augment(x), strict=True):
            padded = nn.functional.pad(image, (4,) * 4, mode="replicate")
            choices = [
                view[:, top : top + 8, left : left + 8]
                for view in (padded, padded.flip(2))
                for top in range(9)
                for left in range(9)
            ]
            assert any(torch.equal(found, choice) for choice in choices)


def measure(capsys, run, *flags) -> tuple[int, str, str]:
    status = program.main([str(f) for f in (run, "--device", "cpu", *flags)])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_report_is_that_of_its_parts(generative_run, trained, alexnet, tmp_path, capsys):
    flags = ("--alexnet-weights", alexnet, "--resize", 32, "--kid-subset-size", 4)
    flags += ("--kid-subsets", 3, "--classifier", trained, "--out", tmp_path / "report.json")
    status, out, err = measure(capsys, generative_run, *flags, "--seeds", 0, 5)
    assert status == 0, err
    report = json.loads(out)
    assert report == checkpoint.read_json(tmp_path / "report.json")
    assert (report["n"], report["features"]["resize"], report["seeds"]) == (8, 32, [0, 5])
    assert "fid" not in report
    assert "kid" not in report
    config = program.QualityConfig(run=str(generative_run), device="cpu")
    generative = load_generative(config)
    test = load_images(generative.data, "test")
    train = load_images(
        type(generative.data)(source="photos", image_size=16, train_images=8), "train"
    )
    network = load_feature_network("", alexnet, 32).network
    labels = torch.tensor([("china", "flower").index(name) for name in test.labels])
    drawn = [draw(generative, labels, SamplingConfig(), seed).pixels for seed in (0, 5)]
    with torch.no_grad():
        decoded = generative.model(to_float(test.pixels)).reconstruction
    decoded = ((decoded + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    sets = {"train_against_test": train.pixels, "reconstruction": decoded}
    reference = features(network, test.pixels, CPU, "x")
    for name, pixels in sets.items():
        other = features(network, pixels, CPU, "x")
        expected = frechet_distance(reference, other)
        assert report["frechet_alexnet"][name] == pytest.approx(expected)
        expected = kernel_distance(reference, other, 3, 4)
        assert report["kid_alexnet"][name] == pytest.approx(expected)
    each = [frechet_distance(reference, features(network, x, CPU, "x")) for x in drawn]
    found = report["frechet_alexnet"]["samples"]
    assert found["mean"] == pytest.approx(sum(each) / 2)
    assert found["sd"] == pytest.approx(abs(each[0] - each[1]) / math.sqrt(2))
    judge, shares = load_classifier(str(trained), CPU), report["class_accuracy"]
    right = [(predictions(judge, x) == labels).double().mean().item() for x in drawn]
    assert shares["samples"]["mean"] == pytest.approx(sum(right) / 2)
    real = (predictions(judge, test.pixels) == labels).double().mean().item()
    assert shares["real"] == pytest.approx(real)
    assert shares["chance"] == max(test.labels.count(name) for name in ("china", "flower")) / 8
    accuracy = checkpoint.read_json(trained / "report.json")["test/accuracy"]
    assert shares["classifier_test_accuracy"] == accuracy


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--num", "1"), "num must be at least 2, or 0 for all, got 1"),
        (("--num", "9999"), "test_images must be at most 2048"),
        (("--seeds", "1", "1"), "seeds must be given, each once, got (1, 1)"),
        (("--seeds", "1" * 20), "seeds must lie in [0, 2**63)"),
        (("--resize", "30"), "resize must be at least 31, got 30"),
        (("--kid-subsets", "0"), "kid_subsets must be at least 1, got 0"),
        (("--kid-subset-size", "9"), "between 2 and the number of images 8, got 9"),
        (("--temperature", "-1"), "temperature must be 0 or more"),
        (("--classifier", "/no/such"), "/no/such/config.json does not exist"),
        (("--out", "/no/such/x.json"), "out must be in an existing folder"),
    ],
)
def test_what_cannot_be_measured_is_one_line(generative_run, alexnet, capsys, flags, complaint):
    status, out, err = measure(capsys, generative_run, "--alexnet-weights", alexnet, *flags)
    assert (status, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1


def test_images_without_a_class_are_refused_by_the_classifier_alone(
    generative_run, trained, alexnet, tmp_path, capsys, store, noise_pngs
):
    files = {f"{split}/{name}/{n}": content
             for split in ("train", "test") for name in ("china", "flower")
             for n, content in noise_pngs(4).items()}  # fmt: skip
    files |= {f"test/{name}": content for name, content in noise_pngs(3).items()}
    flags = ("--alexnet-weights", alexnet, "--kid-subset-size", 4, "--kid-subsets", 1)
    flags += ("--seeds", 0, "--data", store(tmp_path / "x.zip", files))
    status, out, err = measure(capsys, generative_run, *flags)
    assert status == 0, err
    status, out, err = measure(capsys, generative_run, *flags, "--classifier", trained)
    assert (status, out) == (2, "")
    assert "3 of 8 test images have no class that the classifier knows" in err


def test_a_classifier_of_other_classes_is_refused(generative_run, alexnet, tmp_path, capsys):
    config = ClassifierConfig(classes=("cat", "dog"), widths=(4,))
    checkpoint.write_config(tmp_path, classifier=config)
    checkpoint.write_tensors(tmp_path / checkpoint.MODEL, Classifier(config).state_dict())
    checkpoint.write_json(tmp_path / checkpoint.REPORT, {"test/accuracy": 1.0})
    flags = ("--alexnet-weights", alexnet, "--classifier", tmp_path)
    status, _, err = measure(capsys, generative_run, *flags)
    assert status == 2
    assert "the classifier knows the classes cat, dog, the prior china, flower" in err
    status, _, err = measure(capsys, generative_run, *flags[:2], "--classifier", generative_run)
    assert status == 2
    assert "holds a run of another kind, no classifier" in err


def test_on_real_images_the_floor_is_lowest_and_noise_is_far():
    folder = os.environ.get("SOFTVQ_TEST_DATA")
    if not folder:
        pytest.skip("SOFTVQ_TEST_DATA is not set")
    from softvq.data import DataConfig

    sizes = dict(train_images=128, test_images=128, workers=0)
    data = DataConfig(source=f"{folder}/cifar10.zip", **sizes)
    test, train = (load_images(data, split).pixels for split in ("test", "train"))
    (weights,) = Path(folder, "perceptual-weights").glob("*.pth")
    network = load_feature_network("", str(weights), 32).network
    blurred = nn.functional.interpolate(nn.functional.avg_pool2d(test.float(), 2), scale_factor=2)
    noise = torch.randint(0, 256, test.shape, dtype=torch.uint8)
    reference, *others = (
        features(network, x, CPU, "x") for x in (test, train, blurred.to(torch.uint8), noise)
    )
    floor, blur, far = (frechet_distance(reference, x) for x in others)
    assert floor < blur < far
    kernel_floor, kernel_blur, kernel_far = (kernel_distance(reference, x, 10, 100) for x in others)
    assert kernel_floor < kernel_blur < kernel_far
