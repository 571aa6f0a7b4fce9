"""`python -m eval.sample`, run on a small tokenizer and its prior: files, completion, errors."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from eval import sample as program
from softvq import checkpoint
from softvq.data import load_files, to_float, to_uint8
from softvq.prior import SamplingConfig, sample
from softvq.prior.loading import load_prior


def run(capsys, *arguments) -> tuple[int, str, str]:
    status = program.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def drawn(capsys, *arguments) -> tuple[dict, dict]:
    """The report and the arrays."""
    status, out, err = run(capsys, *arguments, "--device", "cpu")
    assert status == 0, err
    report = json.loads(out)
    with np.load(report["arrays"], allow_pickle=False) as arrays:
        return report, dict(arrays)


def test_the_files_hold_the_images_of_the_codes(generative_run, tmp_path, capsys):
    flags = ("--num", 4, "--class", "flower", "--seed", 3, "--out", tmp_path / "flowers")
    report, arrays = drawn(capsys, generative_run, *flags)
    assert (report["images"], report["classes"], report["seed"]) == (4, ["flower"], 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flowers.npz", "flowers.png"]
    with Image.open(report["grid"]) as picture:
        assert picture.format == "PNG"
    model = checkpoint.load(generative_run)
    prior = load_prior(str(generative_run), model)
    labels = torch.full((4,), prior.config.classes.index("flower"))
    generator = torch.Generator().manual_seed(3)
    expected = sample(prior, 4, SamplingConfig(), labels, generator=generator)
    levels = [arrays[f"codes_level{n + 1}"] for n in range(len(expected))]
    for grid, codes in zip(expected, levels, strict=True):
        assert np.array_equal(grid.numpy(), codes)
    assert report["codes"] == sum(grid.size for grid in levels)
    with torch.no_grad():
        decoded = to_uint8(model.decode_indices(expected))
    assert np.array_equal(arrays["images"], decoded.movedim(1, -1).numpy())
    assert arrays["images"].shape == (4, 16, 16, 3)
    assert arrays["labels"].tolist() == labels.tolist()
    assert arrays["classes"].tolist() == ["china", "flower"]


def test_a_temperature_of_0_is_the_most_probable_code_whatever_the_seed(
    generative_run, tmp_path, capsys
):
    out = ("--num", 2, "--temperature", 0, "--out", tmp_path / "x")
    _, first = drawn(capsys, generative_run, *out, "--seed", 1)
    assert first["labels"].tolist() == [-1, -1]
    for temperature in ("0", "1e-30", "1e-60"):
        flags = ("--seed", 2, "--temperature", temperature)
        _, second = drawn(capsys, generative_run, *out, *flags)
        assert np.array_equal(first["images"], second["images"])


def test_several_classes_get_as_many_images_each(generative_run, tmp_path, capsys):
    flags = ("--num", 4, "--class", "flower", "china", "--out", tmp_path / "x")
    _, arrays = drawn(capsys, generative_run, *flags)
    assert arrays["labels"].tolist() == [1, 1, 0, 0]


def test_a_completion_keeps_the_upper_codes_and_knows_nothing_of_the_lower_half(
    generative_run, tmp_path, capsys, noise_pngs, store
):
    pictures = store(tmp_path / "pictures", noise_pngs(3))
    flags = ("--complete", "--num", 2, "--images", pictures, "--out", tmp_path / "x")
    report, arrays = drawn(capsys, generative_run, *flags)
    assert report["completed"] == str(pictures)
    original = load_files(str(pictures), 2, 16).pixels
    assert np.array_equal(arrays["originals"], original.movedim(1, -1).numpy())
    x = to_float(original)
    mirrored = torch.cat([x[:, :, :8], x[:, :, :8].flip(2)], 2)
    levels = checkpoint.load(generative_run).encode(mirrored)
    for number, level in enumerate(levels):
        half = level.indices.shape[1] // 2
        codes = arrays[f"codes_level{number + 1}"]
        assert np.array_equal(codes[:, :half], level.indices[:, :half].numpy())
    for path in sorted(pictures.iterdir()):  # another lower half
        pixels = np.array(Image.open(path))
        pixels[8:] = 255 - pixels[8:]
        Image.fromarray(pixels).save(path)
    _, changed = drawn(capsys, generative_run, *flags)
    assert np.array_equal(changed["images"], arrays["images"])
    assert not np.array_equal(changed["originals"], arrays["originals"])


def test_without_a_folder_the_test_images_are_completed(generative_run, tmp_path, capsys):
    flags = ("--complete", "--num", 2, "--out", tmp_path / "x")
    report, _ = drawn(capsys, generative_run, *flags)
    assert "test: 2 of 2048 used" in report["completed"]


def test_an_odd_height_leaks_no_middle_row(generative_run):
    model = checkpoint.load(generative_run)
    x = torch.rand(1, 3, 15, 16) * 2 - 1
    changed = x.clone()
    changed[:, :, 7:] = 1
    for grid, other in zip(
        program.upper_half_codes(model, x), program.upper_half_codes(model, changed), strict=True
    ):
        assert torch.equal(grid, other)
        assert (grid[:, grid.shape[1] // 2 :] == -1).all()
        assert (grid[:, : grid.shape[1] // 2] >= 0).all()
    with pytest.raises(ValueError, match="a grid of 1 row of codes has no upper half"):
        program.upper_half_codes(model, x[:, :, :4])


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--num", "0"), "num must be at least 1, got 0"),
        (("--num", "x"), "--num"),
        (("--temperature", "-1"), "temperature must be 0 or more, got -1.0"),
        (("--temperature", "nan"), "temperature must be 0 or more, got nan"),
        (("--top-k", "-1"), "top_k must be 0 or more, got -1"),
        (("--top-p", "0"), "top_p must lie in (0, 1], got 0.0"),
        (("--seed", "-1"), "seed must lie in [0, 2**32), got -1"),
        (("--class", "cow"), "class must be among china, flower; got 'cow'"),
        (("--num", "3", "--class", "china", "flower"), "multiple of the number of classes 2"),
        (("--class", "china", "china"), "class must be given once each, got china china"),
        (("--images", "x"), "give --complete as well as --images"),
        (("--complete", "--images", "/no/such"), "/no/such does not exist"),
        (("--complete", "--num", "3000"), "test_images must be at most 2048"),
        (("--out", "/no/such/x"), "out must be in an existing folder, got /no/such/x"),
        (("--device", "tpu9"), "device 'tpu9' cannot be used"),
        (("--prior", "/no/such"), "/no/such holds no prior; python -m softvq.prior"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(generative_run, capsys, flags, complaint):
    status, out, err = run(capsys, generative_run, *flags)
    assert (status, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1


def test_priors_that_do_not_fit_are_refused(generative_run, tmp_path, capsys):
    model = checkpoint.load(generative_run)
    status, _, err = run(capsys, generative_run, "--prior", generative_run)
    assert status == 2
    assert "holds a run of another kind, no prior" in err
    data = {"type": "DataConfig", "source": "photos", "image_size": 16}
    with torch.no_grad():
        next(model.parameters()).add_(1)
    checkpoint.save_model(tmp_path / "other", model, data=data)
    own = str(generative_run / "prior")
    with pytest.raises(ValueError, match="is of another tokenizer: the weights with SHA-256"):
        load_prior(str(tmp_path / "other"), model, own)
    unfinished, config = tmp_path / "unfinished", generative_run / "prior" / "config.json"
    checkpoint.write_json(unfinished / "config.json", checkpoint.read_json(config))
    with pytest.raises(ValueError, match="unfinished is not finished"):
        load_prior(str(generative_run), checkpoint.load(generative_run), str(unfinished))


def test_a_prior_without_classes_has_none_to_ask_for(generative_run):
    prior = load_prior(str(generative_run), checkpoint.load(generative_run))
    assert program.class_labels(prior, ["", "flower"]).tolist() == [-1, 1]
    object.__setattr__(prior.config, "classes", ())
    with pytest.raises(ValueError, match="among none: the prior was trained without classes"):
        program.class_labels(prior, ["flower"])
