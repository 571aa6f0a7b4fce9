"""`eval.sampling_speed`: what it reports of a small prior, and clean refusals."""

import json

import pytest

from eval import sampling_speed as program


def run(capsys, *arguments) -> tuple[int, str, str]:
    status = program.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_report_has_both_speeds_of_the_prior_and_their_ratio(generative_run, tmp_path, capsys):
    out = tmp_path / "speed.json"
    flags = ("--prior", generative_run / "prior", "--num", 2, "--repeats", 3, "--out", out)
    status, text, err = run(capsys, *flags)
    assert status == 0, err
    report = json.loads(text)
    assert report == json.loads(out.read_text())
    assert (report["width"], report["depth"], report["images"]) == (16, 1, 2)
    speeds, ratio = report["codes_per_second"], report["speedup"]
    assert ratio["ratio"] == pytest.approx(speeds["cached"] / speeds["not_cached"])
    assert 0 < ratio["lowest"] <= ratio["highest"]


def test_both_contestants_draw_all_codes_and_one_of_them_uses_the_cache(capsys, monkeypatch):
    calls = []

    def drawn(prior, count, config, cached):
        calls.append((count, cached))
        return real(prior, count, config, cached=cached)

    real = program.sample
    monkeypatch.setattr(program, "sample", drawn)
    monkeypatch.setattr(program, "CodePriorConfig", small_prior)
    times = {"cached": [2.0, 1.0, 4.0], "not_cached": [8.0, 5.0, 6.0]}

    def alternate(steps, repeats, bar):
        for step in steps.values():
            step()
        return times

    monkeypatch.setattr(program, "alternate", alternate)
    status, text, err = run(capsys, "--num", 3)
    assert status == 0, err
    assert calls == [(3, True), (3, False)]
    report = json.loads(text)
    assert report["codes_per_second"] == {"cached": 3 * 4 / 2, "not_cached": 3 * 4 / 6}
    assert report["speedup"] == {"ratio": 3.0, "lowest": 1.5, "highest": 5.0}


def small_prior():
    from softvq.prior import CodePriorConfig

    return CodePriorConfig(codebook_sizes=(5,), grids=((2, 2),), width=8, depth=1, heads=1)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--num", "0"), "num must be at least 1, got 0"),
        (("--repeats", "0"), "repeats must be at least 1, got 0"),
        (("--threads", "0"), "threads must be at least 1, got 0"),
        (("--out", "/no/such/x.json"), "out must be in an existing folder"),
        (("--prior", "/no/such"), "/no/such/config.json does not exist"),
        (("--device", "tpu9"), "device 'tpu9' cannot be used"),
    ],
)
def test_what_cannot_be_measured_is_one_line(capsys, flags, complaint):
    status, out, err = run(capsys, *flags)
    assert (status, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1


def test_a_tokenizer_is_no_prior(generative_run, capsys):
    status, _, err = run(capsys, "--prior", generative_run)
    assert status == 2
    assert "is that of a run of another kind, no prior" in err
