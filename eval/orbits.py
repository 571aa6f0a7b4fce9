"""Orbits around the Earth in four regimes: a synthetic catalogue, and CelesTrak's.

Altitudes are km above the equator's radius (WGS 84), angles degrees, periods minutes; clustering
them is the matter of `eval.debris`.
"""

import csv
import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

EARTH_RADIUS = 6378.137  # km
EARTH_MU = 398600.4418  # km³/s²
REGIMES = ("LEO", "MEO", "GEO", "HEO")
# Rounded shares of the objects in orbit: nine in ten of those that stay below 2000 km or visit it,
# as in the tables of ESA's Annual Space Environment Report
REALISTIC_SHARES = (0.84, 0.04, 0.05, 0.07)

Range = tuple[float, float]


class Orbits(NamedTuple):
    """Orbits and their regimes, as indices into `REGIMES`."""

    apogee: Float[np.ndarray, "n"]
    perigee: Float[np.ndarray, "n"]
    inclination: Float[np.ndarray, "n"]
    labels: Int[np.ndarray, "n"]

    @property
    def semi_major_axis(self) -> Float[np.ndarray, "n"]:
        """Half of the long axis, km from the Earth's centre."""
        return EARTH_RADIUS + (self.apogee + self.perigee) / 2

    @property
    def eccentricity(self) -> Float[np.ndarray, "n"]:
        """0 for a circle, below 1."""
        return (self.apogee - self.perigee) / (2 * self.semi_major_axis)

    @property
    def period(self) -> Float[np.ndarray, "n"]:
        """Minutes for one revolution, by Kepler's third law."""
        return kepler_period(self.semi_major_axis)


class Population(NamedTuple):
    """A family of orbits: uniform between the bounds of two altitudes and of the inclination.

    `heights` bounds the mean altitude and `eccentricities` the eccentricity (uniform in its
    logarithm), or, with `by_apsides`, perigee and apogee altitude.
    """

    regime: str
    share: float
    """Of the objects of its regime."""
    first: Range
    second: Range
    inclinations: tuple[tuple[float, Range], ...]
    """Weights and bounds."""
    by_apsides: bool = False


# Regions and disposal orbits: IADC Space Debris Mitigation Guidelines (IADC-02-01); classes and
# bands: ESA's Annual Space Environment Report; navigation shells: the interface documents of GPS,
# GLONASS, Galileo and BeiDou; transfer orbits: the user's manuals of Ariane 5, Atlas V, Proton,
# PSLV and Long March 3; bands of fragments: NASA Orbital Debris Quarterly News (Fengyun-1C at 98.8
# degrees, Cosmos 2251 at 74, Iridium 33 at 86). Shares inside a regime are rounded estimates.
_BROAD = ((0.35, (63, 67)), (0.3, (72, 75)), (0.35, (81, 83.5)))
_TRANSFER = ((0.35, (3, 9)), (0.15, (17, 20)), (0.35, (23, 29)), (0.15, (46, 52)))
POPULATIONS = (
    # Constellations and small payloads; sun-synchronous; fragments; 1400 to 1550 km; eccentric
    Population(
        "LEO",
        0.3,
        (450, 580),
        (1e-4, 2e-3),
        ((0.6, (51.6, 53.3)), (0.15, (42.9, 43.1)), (0.25, (97.2, 97.8))),
    ),
    Population("LEO", 0.32, (550, 950), (1e-4, 2e-2), ((0.85, (97.5, 99.5)), (0.15, (85.8, 87)))),
    Population("LEO", 0.24, (550, 1050), (1e-4, 2e-2), _BROAD),
    Population("LEO", 0.07, (1380, 1560), (1e-3, 1e-2), ((0.2, (51.9, 52.1)), (0.8, (73, 83)))),
    Population("LEO", 0.07, (250, 900), (1000, 1990), ((1.0, (28, 102)),), by_apsides=True),
    # GLONASS; GPS; Galileo and BeiDou; O3b; fragments and old payloads from 2000 km upwards
    Population("MEO", 0.32, (19050, 19250), (1e-4, 1e-2), ((1.0, (63, 66.5)),)),
    Population("MEO", 0.26, (20000, 20900), (1e-4, 2e-2), ((1.0, (53, 57)),)),
    Population("MEO", 0.2, (21400, 23700), (1e-4, 1e-2), ((1.0, (54, 57.5)),)),
    Population("MEO", 0.07, (7900, 8250), (1e-4, 2e-3), ((1.0, (0, 0.3)),)),
    Population("MEO", 0.15, (2000, 5500), (1e-2, 0.15), ((0.5, (86, 91)), (0.5, (30, 110)))),
    # Station-kept; drifting since (at most 15 degrees); graveyard; inclined; fragments
    Population("GEO", 0.38, (35771, 35801), (1e-5, 6e-4), ((1.0, (0, 0.1)),)),
    Population("GEO", 0.26, (35686, 35886), (1e-4, 5e-3), ((1.0, (0.5, 15)),)),
    Population("GEO", 0.23, (35986, 36700), (1e-4, 1e-2), ((1.0, (0, 15)),)),
    Population("GEO", 0.05, (35771, 35801), (1e-3, 0.1), ((1.0, (28, 56)),)),
    Population("GEO", 0.08, (33500, 38500), (1e-2, 0.15), ((1.0, (2, 25)),)),
    # Transfer; transfer, decaying; Molniya (period of half a day); higher
    Population("HEO", 0.48, (180, 1000), (33000, 36800), _TRANSFER, by_apsides=True),
    Population("HEO", 0.16, (150, 450), (5200, 33000), _TRANSFER, by_apsides=True),
    Population("HEO", 0.22, (20150, 20250), (0.62, 0.745), ((1.0, (62, 66)),)),
    Population("HEO", 0.14, (300, 9000), (42000, 130000), ((1.0, (3, 66)),), by_apsides=True),
)


def kepler_period(semi_major_axis: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
    """Minutes for one revolution on an orbit of that semi-major axis in km."""
    return 2 * math.pi * np.sqrt(semi_major_axis**3 / EARTH_MU) / 60


def synthetic_orbits(objects: int, shares: tuple[float, ...], seed: int) -> Orbits:
    """Objects drawn from `POPULATIONS`; the label is the regime of the population.

    `shares` are those of `REGIMES`, in proportion.
    """
    generator = np.random.default_rng(seed)
    parts = np.array(shares) / sum(shares)
    total: dict[str, float] = dict(zip(REGIMES, parts.tolist(), strict=True))
    weights = np.array([population.share * total[population.regime] for population in POPULATIONS])
    drawn = generator.choice(len(POPULATIONS), size=objects, p=weights / weights.sum())
    rows = np.array([_draw(POPULATIONS[number], generator) for number in drawn])
    labels = np.array([REGIMES.index(POPULATIONS[number].regime) for number in drawn])
    return Orbits(rows[:, 0], rows[:, 1], rows[:, 2], labels)


def _draw(population: Population, generator: np.random.Generator) -> tuple[float, float, float]:
    """Apogee, perigee and inclination of one object."""
    weights = [weight for weight, _ in population.inclinations]
    mode = generator.choice(len(weights), p=weights)
    inclination = generator.uniform(*population.inclinations[mode][1])
    if population.by_apsides:
        return (
            generator.uniform(*population.second),
            generator.uniform(*population.first),
            inclination,
        )
    axis = EARTH_RADIUS + generator.uniform(*population.first)
    eccentricity = np.exp(generator.uniform(*np.log(population.second)))
    apogee, perigee = (axis * (1 + sign * eccentricity) - EARTH_RADIUS for sign in (1, -1))
    return apogee, perigee, inclination


def regime(semi_major_axis: float, eccentricity: float) -> str | None:
    """The regime by rule, or None for the few near-circular orbits above the geosynchronous ones.

    HEO: eccentricity above 0.25; LEO: up to 128 minutes; GEO: semi-major axis from 37,948 to
    46,380 km; MEO: between those two. The bounds of HEO and LEO are Space-Track's (11.25
    revolutions a day), and those of GEO are of ESA's extended geostationary orbit.
    """
    if eccentricity > 0.25:
        return "HEO"
    if kepler_period(np.array(semi_major_axis)) <= 128:
        return "LEO"
    if semi_major_axis < 37948:
        return "MEO"
    return "GEO" if semi_major_axis <= 46380 else None


def read_catalogue(path: Path) -> tuple[Orbits, dict[str, int]]:
    """Orbits of CelesTrak's `satcat.csv`, labelled by `regime`, and how many lines were left out.

    Left out, under these names: `broken` (too few fields, or one that is no number), `decayed`,
    `not_around_earth`, `missing` (no elements), `impossible` (perigee above apogee, or below the
    ground), `no_regime`. Raises ValueError for a file without the columns or without an orbit.
    """
    skipped: Counter[str] = Counter()
    rows = []
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            reader = csv.DictReader(file)
            absent = {"DECAY_DATE", "INCLINATION", "APOGEE", "PERIGEE"} - set(
                reader.fieldnames or ()
            )
            if absent:
                raise ValueError(f"{path} has no column {', '.join(sorted(absent))}")
            for line in reader:
                row = _parse(line)
                if isinstance(row, str):
                    skipped[row] += 1
                else:
                    rows.append(row)
    except (OSError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not rows:
        raise ValueError(f"{path} holds no orbit that can be used; left out: {dict(skipped)}")
    values = np.array(rows)
    return Orbits(values[:, 0], values[:, 1], values[:, 2], values[:, 3].astype(int)), dict(skipped)


def _parse(line: dict[str, str | None]) -> tuple[float, float, float, int] | str:
    """Apogee, perigee, inclination and regime of one line, or why it is left out."""
    fields = [line.get(name) for name in ("DECAY_DATE", "APOGEE", "PERIGEE", "INCLINATION")]
    if any(value is None for value in fields):
        return "broken"
    decay, *texts = (str(value).strip() for value in fields)
    if decay:
        return "decayed"
    if (line.get("ORBIT_CENTER") or "EA").strip() not in ("EA", ""):
        return "not_around_earth"
    if not all(texts):
        return "missing"
    try:
        apogee, perigee, inclination = map(float, texts)
    except ValueError:
        return "broken"
    if not (0 < perigee <= apogee < math.inf and 0 <= inclination <= 180):
        return "impossible"
    orbit = Orbits(*(np.array([x]) for x in (apogee, perigee, inclination, 0)))
    name = regime(orbit.semi_major_axis.item(), orbit.eccentricity.item())
    return (apogee, perigee, inclination, REGIMES.index(name)) if name else "no_regime"
