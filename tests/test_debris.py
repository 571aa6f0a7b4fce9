"""Debris: orbits obey Kepler and their ranges, catalogues are read with care, scores are right."""

import json

import numpy as np
import pytest

from eval import debris
from eval.orbits import (
    POPULATIONS,
    REALISTIC_SHARES,
    REGIMES,
    kepler_period,
    read_catalogue,
    regime,
    synthetic_orbits,
)

HEADER = "OBJECT_NAME,OBJECT_ID,NORAD_CAT_ID,OBJECT_TYPE,OPS_STATUS_CODE,OWNER,LAUNCH_DATE,"
HEADER += "LAUNCH_SITE,DECAY_DATE,PERIOD,INCLINATION,APOGEE,PERIGEE,RCS,DATA_STATUS_CODE,"
HEADER += "ORBIT_CENTER,ORBIT_TYPE\n"


def line(apogee, perigee, inclination, decay="", centre="EA") -> str:
    return f"X,1998-067A,1,DEB,,US,1998-11-20,AFETR,{decay},90,{inclination},{apogee},{perigee},,,{centre},ORB\n"  # noqa: E501


@pytest.mark.parametrize(
    ("axis", "minutes"), [(42164.17, 1436.07), (26559.8, 717.95), (6378.137 + 400, 92.56)]
)
def test_kepler_gives_the_known_periods(axis, minutes):
    assert kepler_period(np.array(axis)) == pytest.approx(minutes, abs=0.01)


def test_synthetic_orbits_stay_in_the_ranges_of_their_regime():
    orbits = synthetic_orbits(4000, (1, 1, 1, 1), seed=0)
    for name, (low, high) in {
        "LEO": (88, 128),
        "MEO": (120, 870),
        "GEO": (1300, 1600),
        "HEO": (140, 4000),
    }.items():
        own = orbits.labels == REGIMES.index(name)
        assert 900 < own.sum() < 1100
        assert low < orbits.period[own].min() < orbits.period[own].max() < high
        e = orbits.eccentricity[own]
        assert e.min() > (0.24 if name == "HEO" else 0)
        assert e.max() < {"LEO": 0.13, "MEO": 0.16, "GEO": 0.16, "HEO": 0.95}[name]
    leo = orbits.labels == 0
    assert orbits.apogee[leo].max() < 2000
    assert orbits.perigee.min() > 140
    assert orbits.inclination.min() >= 0
    assert orbits.inclination[leo].max() <= 110
    geo = orbits.labels == 2
    assert np.median(orbits.period[geo]) == pytest.approx(1436.1, abs=3)
    assert orbits.inclination[geo].max() <= 56


def test_shares_and_seeds_are_followed():
    orbits = synthetic_orbits(5000, REALISTIC_SHARES, seed=1)
    counts = np.bincount(orbits.labels) / 5000
    np.testing.assert_allclose(counts, REALISTIC_SHARES, atol=0.02)
    for name in REGIMES:
        assert sum(p.share for p in POPULATIONS if p.regime == name) == pytest.approx(1)
    again, other = (synthetic_orbits(5000, REALISTIC_SHARES, seed=s) for s in (1, 2))
    np.testing.assert_array_equal(orbits.apogee, again.apogee)
    assert not np.array_equal(orbits.apogee, other.apogee)


@pytest.mark.parametrize(
    ("axis", "eccentricity", "expected"),
    [
        (6800, 0.001, "LEO"),
        (8500, 0.02, "MEO"),
        (26560, 0.01, "MEO"),
        (26560, 0.7, "HEO"),
        (42164, 0.0, "GEO"),
        (42164, 0.3, "HEO"),
        (60000, 0.1, None),
    ],
)
def test_the_rule_names_known_orbits(axis, eccentricity, expected):
    assert regime(axis, eccentricity) == expected


def test_a_catalogue_with_broken_lines_is_read_and_counted(tmp_path):
    path = tmp_path / "satcat.csv"
    path.write_text(
        HEADER
        + line(420, 410, 51.6)
        + line(20200, 20150, 55)
        + line(35790, 35780, 0.1)
        + line(35700, 250, 7)
        + line(300, 250, 51, decay="2001-03-23")
        + line("", "", "")
        + line(100, 200, 10)  # apogee below perigee
        + line("n/a", 200, 10)
        + line(100, 90, 10, centre="MO")
        + line(60000, 55000, 10)
        + "cut,off\n"
        + "\n"
    )
    orbits, skipped = read_catalogue(path)
    assert [REGIMES[i] for i in orbits.labels] == ["LEO", "MEO", "GEO", "HEO"]
    assert orbits.inclination.tolist() == [51.6, 55, 0.1, 7]
    assert skipped == {
        "decayed": 1,
        "missing": 1,
        "impossible": 1,
        "broken": 2,
        "not_around_earth": 1,
        "no_regime": 1,
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no column APOGEE"),
        ("APOGEE,PERIGEE\n1,2\n", "has no column DECAY_DATE, INCLINATION"),
        (HEADER, "holds no orbit that can be used"),
        (HEADER + line(300, 250, 51, decay="2001-03-23"), "left out: {'decayed': 1}"),
    ],
)
def test_a_catalogue_without_orbits_is_refused(tmp_path, capsys, text, complaint):
    path = tmp_path / "satcat.csv"
    path.write_text(text)
    assert debris.main(["--catalogue", str(path)]) == 2
    assert complaint in error_line(capsys.readouterr())


def error_line(captured) -> str:
    assert captured.out == ""
    (found,) = [x for x in captured.err.splitlines() if x.startswith("error:")]
    assert "Traceback" not in captured.err
    return found


def test_the_program_scores_all_methods(tmp_path, capsys):
    flags = ["--seeds", "0", "1", "--objects", "120", "--cooling.steps", "15"]
    flags += ["--cooling.restarts", "2"]
    assert debris.main([*flags, "--out", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {path.name for path in tmp_path.iterdir()} == {"debris.json", "debris.png"}
    assert report["split"] == {"checks": 60, "violations": 0} | {
        "largest": report["split"]["largest"]
    }
    assert report["scores"].keys() == {"ddcl", "kmeans", "gaussian_mixture"}
    for scores in report["scores"].values():
        assert 0.4 < scores["accuracy"]["mean"] <= scores["majority"]["mean"] <= 1
        assert scores["accuracy"]["sd"] >= 0
    assert [sum(counts.values()) for counts in report["objects"]] == [120, 120]
    assert min(report["agreement_of_labels_with_the_rule"]) > 0.98
    difference = report["verdict"]["accuracy_difference"]
    means = [report["scores"][name]["accuracy"]["mean"] for name in ("ddcl", "kmeans")]
    assert difference == pytest.approx(means[0] - means[1])


def test_the_program_reads_a_catalogue(tmp_path, capsys):
    path = tmp_path / "satcat.csv"
    orbits = synthetic_orbits(60, (1, 1, 1, 1), seed=0)
    rows = zip(orbits.apogee, orbits.perigee, orbits.inclination, strict=True)
    path.write_text(HEADER + "".join(line(*row) for row in rows) + line("", "", ""))
    flags = ["--catalogue", str(path), "--seeds", "0", "--cooling.steps", "9"]
    assert debris.main(flags) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["catalogue"] == str(path)
    assert report["skipped"] == {"missing": 1}
    assert sum(report["objects"][0].values()) == 60
    assert report["verdict"]["largest_spread"] is None


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--cooling.coldest", "2"), "0 < coldest <= hottest, got 0.5, 2.0"),
        (("--objects", "3"), "objects must be at least codes, got 3"),
        (("--shares", "odd"), "odd"),
        (("--catalogue", "nowhere.csv"), "nowhere.csv cannot be read"),
        (("--cooling.steps", "0"), "steps must be at least 1, got 0"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(capsys, flags, complaint):
    assert debris.main(flags) == 2
    assert complaint in error_line(capsys.readouterr())
