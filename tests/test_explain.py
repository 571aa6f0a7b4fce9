"""Explanations: shares that add up, tokens and patches where they belong, and a harmless page."""

import base64
import itertools
import json
import re
import shutil
from html.parser import HTMLParser
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from eval import explain, text
from eval.page import page
from softvq import DDCLConfig, HierarchicalVQVAE, HierarchicalVQVAEConfig, checkpoint
from softvq.data import DataConfig, to_float
from softvq.quantizers import codebooks

HOSTILE = "<script>alert(1)</script> red & green \"><img src=x onerror=alert(1)> ' dog"


# A run folder and an image, made where the peers are imported and read where they are not.
PEER = """
import sys
from dataclasses import replace
import numpy as np, torch
from PIL import Image
from eval.peers import PEERS
from softvq import VQVAE, checkpoint
from softvq.data import DataConfig
config = PEERS["cifar10-simvq"].model
quantizer = replace(config.quantizer, dim=4, codebook_size=8)
model = VQVAE(replace(config, hidden=8, quantizer=quantizer))
model(torch.rand(4, 3, 16, 16))
checkpoint.save_model(sys.argv[1] + "/run", model, data=DataConfig(image_size=16))
pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
Image.fromarray(pixels).save(sys.argv[1] + "/image.png")
"""


class _Elements(HTMLParser):
    """The names and attributes of all elements, and the text between them."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(content)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def assert_harmless(content: str) -> _Elements:
    elements = _Elements(content)
    for tag, attributes in elements.found:
        assert tag not in ("script", "iframe", "object", "link", "a", "form")
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
    assert "http" not in content.replace("http-equiv", "")
    return elements


@pytest.fixture(scope="module")
def readout(bert, tmp_path_factory):
    """Folder of a readout that was trained for a few steps."""
    folder = tmp_path_factory.mktemp("readout")
    rows = [
        {"text": f"{('red green', 'cat dog')[n % 2]} blue {n} {HOSTILE if n == 3 else ''}",
         "label": n % 2}
        for n in range(30)
    ]  # fmt: skip
    (folder / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["--data", str(folder / "d.jsonl"), "--encoder", bert, "--cache", str(folder / "cache")]
    given += ["--max-tokens", "20", "--methods", "ddcl-tokens", "--seeds", "0"]
    given += ["--cooling.steps", "20", "--cooling.restarts", "2"]
    given += ["--codebook-size", "4", "--out", str(folder / "run")]
    (folder / "run").mkdir()
    assert text.main(given) == 0
    return folder / "run"


def test_a_document_is_told_in_shares_of_prototypes(readout, tmp_path, capsys):
    html = tmp_path / "page.html"
    given = [str(readout), "--text", "red green blue cat", "--html", str(html), "--most", "4"]
    capsys.readouterr()
    assert explain.main(given) == 0
    result = json.loads(capsys.readouterr().out)
    (level,) = result["levels"]
    shares = [prototype["share"] for prototype in level["prototypes"]]
    assert sum(shares) == pytest.approx(1, abs=1e-5)
    assert shares == sorted(shares, reverse=True)
    tokens = [here["token"] for prototype in level["prototypes"] for here in prototype["here"]]
    assert sorted(tokens) == ["blue", "cat", "green", "red"]
    for prototype in level["prototypes"]:
        distances = [near["distance"] for near in prototype["training"]]
        assert distances == sorted(distances)
        assert 1 <= len(distances) <= 8
    (red,) = [h for p in level["prototypes"] for h in p["here"] if h["token"] == "red"]
    assert (red["before"], red["after"]) == ("", "green blue cat")
    assert "red green blue cat" in assert_harmless(html.read_text()).text


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "center.safetensors"])
def test_a_pickle_in_place_of_a_readout_is_refused_and_not_executed(
    readout, tmp_path, capsys, hostile, name
):
    # C13
    pickles, trace = hostile
    shutil.copytree(readout, tmp_path / "run")
    capsys.readouterr()
    for content in pickles:
        (tmp_path / "run" / name).write_bytes(content)
        assert explain.main([str(tmp_path / "run"), "--text", "red"]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        assert re.search(rf"{name} (is not a whole safetensors file|cannot be read)", line)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", lambda c: c["encoder"].pop("name"), "EncoderConfig does not have the same"),
        ("config.json", lambda c: c["encoder"].update(max_tokens="8"), "max_tokens cannot be '8'"),
        ("config.json", lambda c: c.update(encoder=[]), r"expected a EncoderConfig, got \[\]"),
        ("config.json", lambda c: c.update(readout=None), "expected a DDCLReadoutConfig, got None"),
        ("config.json", lambda c: c.pop("readout"), "holds no text readout"),
        ("prototypes.json", lambda p: p.pop(), "does not fit the readout"),
        ("prototypes.json", lambda p: p.append(p.pop() and 3), "does not fit the readout"),
        ("prototypes.json", lambda p: p[0].append("red"), "does not fit the readout"),
        ("prototypes.json", lambda p: p[-1].append({"token": "red"}), "does not fit the readout"),
    ],
)
def test_a_damaged_readout_is_one_line(readout, tmp_path, capsys, name, change, message):
    shutil.copytree(readout, tmp_path / "run")
    content = json.loads((tmp_path / "run" / name).read_text())
    change(content)
    (tmp_path / "run" / name).write_text(json.dumps(content))
    capsys.readouterr()
    assert explain.main([str(tmp_path / "run"), "--text", "red"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


def test_hostile_text_is_escaped(readout, tmp_path, capsys):
    html = tmp_path / "page.html"
    document = tmp_path / "document.txt"
    document.write_text(HOSTILE)
    assert explain.main([str(readout), "--file", str(document), "--html", str(html)]) == 0
    content = html.read_text()
    elements = assert_harmless(content)
    assert HOSTILE in elements.text
    assert "<script" not in content
    example = {"weight": 1.0, "before": HOSTILE, "token": HOSTILE, "after": HOSTILE}
    prototype = {"prototype": 0, "share": 1.0, "here": [example], "training": [example]}
    shown = page({"text": HOSTILE, "levels": [{"name": HOSTILE, "prototypes": [prototype]}] * 2})
    assert "<script" not in shown
    assert_harmless(shown)


@pytest.fixture
def autoencoder(model, tmp_path):
    model.eval()
    checkpoint.save_model(tmp_path / "run", model, data=DataConfig(image_size=16))
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image<b>.png")
    return model, tmp_path / "run", tmp_path / "image<b>.png", pixels


def test_an_image_is_told_in_shares_of_prototypes(autoencoder, tmp_path, capsys):
    model, run, image, pixels = autoencoder
    html = tmp_path / "page.html"
    given = [str(run), "--image", str(image), "--html", str(html), "--most", "8"]
    assert explain.main([*given, "--examples", "16"]) == 0
    result = json.loads(capsys.readouterr().out)
    (level,) = result["levels"]
    with torch.no_grad():
        (assignment,) = model.encode(to_float(torch.tensor(pixels).permute(2, 0, 1)[None]))
    usage = assignment.usage / 16
    for prototype in level["prototypes"]:
        assert prototype["share"] == pytest.approx(usage[prototype["prototype"]].item(), abs=1e-5)
        places = [(here["row"], here["column"]) for here in prototype["here"]]
        expected = (assignment.indices[0] == prototype["prototype"]).nonzero().tolist()
        assert sorted(places) == sorted(map(tuple, expected))
        distances = [here["distance"] for here in prototype["here"]]
        assert distances == sorted(distances)
    content = html.read_text()
    elements = assert_harmless(content)
    pictures = [attributes["src"] for tag, attributes in elements.found if tag == "img"]
    assert len(pictures) == 1 + sum(len(p["here"]) for p in level["prototypes"])
    whole = Image.open(BytesIO(base64.b64decode(pictures[0].split(",")[1])))
    assert np.array_equal(np.asarray(whole)[::6, ::6], pixels)
    assert "<b>.png" not in content


@pytest.mark.parametrize("height", [16, 21, 30, 33])
def test_a_patch_shows_the_pixels_of_its_code_at_each_level_and_none_of_the_padding(
    tmp_path, capsys, height
):
    codes = DDCLConfig(dim=4, codebook_size=1)
    torch.manual_seed(0)
    model = HierarchicalVQVAE(HierarchicalVQVAEConfig(top=codes, bottom=codes, hidden=8))
    for level in (0, 1):
        codebooks(model)[level].initialize(torch.randn(50, 4))
    checkpoint.save_model(tmp_path / "run", model.eval(), data=DataConfig(image_size=height))
    # The red of a pixel tells its row, the green its column.
    rows, columns = np.mgrid[:height, :height].astype(np.uint8)
    pixels = np.stack([rows, columns, 0 * rows], 2)
    Image.fromarray(pixels).save(tmp_path / "ramp.png")
    given = [str(tmp_path / "run"), "--image", str(tmp_path / "ramp.png"), "--examples", "400"]
    assert explain.main([*given, "--html", str(tmp_path / "page.html")]) == 0
    levels = json.loads(capsys.readouterr().out)["levels"]
    found = assert_harmless((tmp_path / "page.html").read_text()).found
    shown = iter([attributes["src"] for tag, attributes in found if tag == "img"][1:])
    for stride, level in zip((8, 4), levels, strict=True):
        (prototype,) = level["prototypes"]
        places = {(here["row"], here["column"]) for here in prototype["here"]}
        side = -(-height // stride)
        assert places == set(itertools.product(range(side), repeat=2))
        for here in prototype["here"]:
            picture = Image.open(BytesIO(base64.b64decode(next(shown).split(",")[1])))
            values = np.asarray(picture)
            for channel, place in enumerate((here["row"], here["column"])):
                margin = stride // 2
                first, last = place * stride - margin, (place + 1) * stride + margin - 1
                assert values[..., channel].min() == max(0, first)
                assert values[..., channel].max() == min(height - 1, last)


def test_a_run_of_a_peer_is_explained(tmp_path, python):
    python("-c", PEER, tmp_path)
    printed, _ = python(
        *("-m", "eval.explain", tmp_path / "run", "--image", tmp_path / "image.png"),
        *("--html", tmp_path / "page.html"),
    )
    (level,) = json.loads(printed)["levels"]
    assert sum(prototype["share"] for prototype in level["prototypes"]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "exactly one of --text, --file and --image must be given"),
        (["--text", "a", "--file", "b"], "exactly one of"),
        (["--text", "  "], "the document holds no text"),
        (["--file", "/nowhere.txt"], "/nowhere.txt does not exist"),
        (["--image", "/nowhere.png"], "holds a run of another kind, no autoencoder"),
        (["--text", "a", "--most", "0"], "most must be at least 1"),
        (["--text", "a", "--device", "abacus"], "device 'abacus' cannot be used"),
    ],
)
def test_a_users_mistake_is_one_line(readout, tmp_path, capsys, flags, message):
    capsys.readouterr()
    html = tmp_path / "page.html"
    assert explain.main([str(readout), *flags, "--html", str(html)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert message in line
    assert not html.exists()


def test_a_folder_that_is_no_text_run_and_a_file_that_is_no_image_are_refused(
    autoencoder, tmp_path, capsys
):
    _, run, _, _ = autoencoder
    assert explain.main([str(run), "--text", "a"]) == 2
    assert "holds no text readout; eval.text --out writes one" in capsys.readouterr().err
    (tmp_path / "x.png").write_bytes(b"no image")
    assert explain.main([str(run), "--image", str(tmp_path / "x.png")]) == 2
    assert re.search(r"error: .*x\.png", capsys.readouterr().err)
    assert explain.main([str(run), "--image", str(tmp_path)]) == 2
    assert f"{tmp_path} is no image file" in capsys.readouterr().err
    assert explain.main([str(run), "--image", "a.png", "--html", str(tmp_path)]) == 2
    assert f"html must be a file, got the folder {tmp_path}" in capsys.readouterr().err
    assert explain.main([str(tmp_path), "--text", "a"]) == 2
    assert "config.json does not exist" in capsys.readouterr().err
