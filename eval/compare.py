"""Trains models side by side and compares them: `python -m eval.compare MODEL... --out DIR`.

Network, data, order of the data, steps and seeds are the same for all, and are checked to be. The
same command continues a study that was interrupted; what a run does is in `train_vqvae`, and the
quantizers of another package that can take part are in `eval.peers`.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from eval.experiment import summarize
from models import MODELS
from softvq import checkpoint, figures
from softvq.program import parse_flags, run_program
from softvq.training import Experiment
from train_vqvae import Run, curve_keys, parse, train

COLUMNS = {
    "test/psnr_soft": ("PSNR soft", "dB"),
    "test/psnr_hard": ("PSNR hard", "dB"),
    "test/psnr_hard_without": ("PSNR hard without", "dB"),
    "test/ssim_hard": ("SSIM hard", ""),
    "test/lpips_hard": ("LPIPS hard", ""),
    "test/nmse_hard": ("NMSE hard", ""),
    "test/utilisation": ("codes in use", "%"),
    "test/perplexity": ("perplexity", ""),
    "test/distinct_codes": ("distinct codes", ""),
    "epochs_to_full_use": ("epochs to 100 %", ""),
    "seconds_per_epoch": ("s / epoch", ""),
}


@dataclass(frozen=True, kw_only=True)
class Study:
    """Flags after `--` go to every run, as in `-- --train.epochs 5 --data.source images.zip`."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Names of models or of peers; the first is what the others are compared with."""
    seeds: tuple[int, ...] = (0,)
    """One run of every model for each."""
    out: str = "runs/compare"
    """Folder of the study: one run folder for each model and seed, the table and the figure."""


def experiments(names: Sequence[str]) -> Mapping[str, Experiment]:
    """The named models, and the peers beside them if `names` has one that is no model of ours.

    Raises ValueError when the peers' package is needed and missing.
    """
    others = [name for name in names if name not in MODELS]
    if not others:
        return MODELS
    try:
        from eval.peers import PEERS  # our own models need no package but those of `train`
    except ImportError as error:
        raise ValueError(
            f"models must be among {', '.join(MODELS)}; got {', '.join(others)}, and peers need "
            f'vector-quantize-pytorch, from pip install -e ".[dev]" ({error})'
        ) from None
    return MODELS | PEERS


def plan(study: Study, flags: Sequence[str]) -> dict[str, list[Run]]:
    """The runs of each model, one per seed.

    Raises ValueError for unknown or repeated models and for models that do not share network,
    data and length of training.
    """
    known = experiments(study.models)
    unknown = [name for name in study.models if name not in known]
    if unknown or not study.models:
        raise ValueError(f"models must be among {', '.join(known)}; got {', '.join(unknown)}")
    if len(set(study.models)) < len(study.models) or len(set(study.seeds)) < len(study.seeds):
        raise ValueError("a model or a seed is given twice")
    if not study.seeds:
        raise ValueError("seeds must be at least one")
    runs = {}
    for name in study.models:
        _, usual = parse([name], known)
        _, run = parse([name, *flags], known)
        if run.train.seed != usual.train.seed or run.out != usual.out:
            raise ValueError("a study has --seeds and --out, before the --; no run has its own")
        runs[name] = [
            replace(
                run,
                train=replace(run.train, seed=seed),
                out=str(Path(study.out) / f"{name}-seed{seed}"),
            )
            for seed in study.seeds
        ]
    first, shared = study.models[0], {name: _shared(part[0]) for name, part in runs.items()}
    for name, values in shared.items():
        for key, value in values.items():
            if value != shared[first][key]:
                raise ValueError(
                    f"{name} and {first} cannot be compared: {key} is {value} and "
                    f"{shared[first][key]}"
                )
    return runs


def _shared(run: Run) -> dict[str, Any]:
    """What has to be equal; normalisation, width of the codes and ratio of learning rates belong
    to the method."""
    config = run.model
    return {
        "codebook_size": tuple(level.codebook_size for level in config.quantizers),
        "network": (
            config.channels,
            config.hidden,
            config.residual_blocks,
            config.residual_hidden,
            config.downsamplings,
        ),
        "data": run.data,
        "epochs": run.train.epochs,
        "batch_size": run.train.batch_size,
        "lr": run.train.lr,
        "precision": run.train.precision,
    }


def epochs_to_full_use(records: Sequence[dict[str, Any]]) -> int | None:
    """The first epoch after which every code is in use on the test split, if there is one."""
    for record in records:
        levels = (value for key, value in record.items() if key.startswith("test/utilisation"))
        if all(share == 1 for share in levels):
            return record["epoch"]
    return None


def table(summaries: dict[str, dict[str, Any]]) -> str:
    """The comparison in Markdown; what is missing everywhere has no column."""
    names = dict.fromkeys(key for summary in summaries.values() for key in summary)
    shown = {
        key: (name + key.removeprefix(column).replace("_level", " level "), unit)
        for column, (name, unit) in COLUMNS.items()
        for key in names
        if key == column or key.startswith(f"{column}_level")
    }
    heads = [f"{name} [{unit}]" if unit else name for name, unit in shown.values()]
    lines = [["model", *heads], ["---"] * (len(shown) + 1)]
    for name, summary in summaries.items():
        cells = [
            _cell(summary.get(key), shown[key][1], "never" if key == "epochs_to_full_use" else "-")
            for key in shown
        ]
        lines.append([name, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: dict[str, Any] | None, unit: str, missing: str) -> str:
    """Mean and spread; `missing` for what some seed has not."""
    if value is None:
        return "-"
    if value["mean"] is None:
        return missing
    scale = 100 if unit == "%" else 1
    spread = "" if value["sd"] is None else f" ± {_digits(scale * value['sd'], 2)}"
    return f"{_digits(scale * value['mean'], 4)}{spread}"


def _digits(value: float, count: int) -> str:
    """At least that many significant digits, and never an exponent for a large number."""
    return f"{value:.0f}" if value >= 10**count else f"{value:.{count}g}"


def compare(study: Study, flags: Sequence[str]) -> dict[str, Any]:
    """Runs or continues the study, writes `compare.json`, `compare.md` and `curves.png`."""
    runs = plan(study, flags)
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    records: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in runs}
    # One seed of every model before the next: a study cut short is still a comparison.
    for index, seed in enumerate(study.seeds):
        for name in runs:
            print(f"{name}, seed {seed}", file=sys.stderr)
            report = train(name, runs[name][index])
            history = checkpoint.read_records(runs[name][index].out)
            records[name].append(history)
            reports[name].append(report | {"epochs_to_full_use": epochs_to_full_use(history)})
    summaries = {name: summarize(part) for name, part in reports.items()}
    out = Path(study.out)
    every = [record for runs in records.values() for run in runs for record in run]
    keys = curve_keys(every)
    result = {
        "seeds": list(study.seeds),
        "flags": list(flags),
        "models": summaries,
        "absent": {
            key: reason
            for part in reports.values()
            for report in part
            for key, reason in report["absent"].items()
        },
        "figures": [
            str(figures.curves(records, keys, out / "curves.png")),
            *(path for part in reports.values() for path in part[0]["figures"]),
        ],
    }
    checkpoint.write_json(out / "compare.json", result)
    text = table(summaries)
    checkpoint.write_text(out / "compare.md", text + "\n")
    notes = [f"no {key}: {reason}" for key, reason in result["absent"].items()]
    print("\n".join([text, *notes, "figures:", *result["figures"]]), file=sys.stderr)
    return result


def main(arguments: Sequence[str]) -> int:
    """The program; returns its exit status."""
    cut = list(arguments).index("--") if "--" in arguments else len(arguments)

    def action() -> dict[str, Any]:
        study = parse_flags(lambda: tyro.cli(Study, args=arguments[:cut], description=__doc__))
        return compare(study, arguments[cut + 1 :])

    return run_program(action)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
