"""Run folders: `config.json`, `metrics.jsonl`, `model.safetensors`, training state and report.

The only reader and writer of that format; nothing is pickled, and every file is written under a
temporary name and renamed. What the training state means is known to `softvq.training`.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from softvq.autoencoder import Autoencoder, NetworkConfig, VQVAEConfig
from softvq.hierarchical import HierarchicalVQVAEConfig, build_autoencoder
from softvq.quantizers import REGISTRY
from softvq.temperature import AnnealedTemperature, EntropyTemperature, FixedTemperature

FORMAT = 1
CONFIG, METRICS, MODEL = "config.json", "metrics.jsonl", "model.safetensors"
STATE, REPORT, LOCK = "state.safetensors", "report.json", ".lock"


class UnknownConfig(ValueError):
    """A configuration of a class that is not known here: a method that is not registered yet."""


def load(run: str | os.PathLike, device: str | torch.device = "cpu") -> Autoencoder:
    """The trained model of a run folder, in eval mode and float32.

    Raises ValueError for a folder that is no run, a file that is damaged or of another format, and
    weights that do not fit the configuration.
    """
    config = read_config(run)
    if "model" not in config:
        raise ValueError(f"{run} holds a run of another kind, no autoencoder")
    model = build_autoencoder(decode_config(config["model"], NetworkConfig))
    load_weights(model, Path(run) / MODEL)
    return model.to(device).eval()


def save_model(run: str | os.PathLike, model: Autoencoder, **sections: Any) -> None:
    """Writes what `load` reads; `sections` are further dataclasses for `config.json`.

    Raises ValueError if the folder holds a run with another configuration.
    """
    write_config(run, model=model.config, **sections)
    write_tensors(Path(run) / MODEL, weights(model))


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """The state dict under the names of the plain module, whatever wraps or compiled it."""
    return {
        name.replace("_orig_mod.", "").removeprefix("module."): value
        for name, value in model.state_dict().items()
    }


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Fills `model`. Raises ValueError that names the first entry that does not fit."""
    given, _ = read_tensors(path)
    wanted = weights(model)
    for name in [*wanted, *given]:
        if name not in given or name not in wanted:
            where = "is missing from" if name not in given else "is unknown, but in"
            raise ValueError(f"{name} {where} {path}")
        if given[name].shape != wanted[name].shape:
            found, expected = tuple(given[name].shape), tuple(wanted[name].shape)
            raise ValueError(f"{name} has shape {found} in {path}; the model has {expected}")
    model.load_state_dict(given)


@contextmanager
def only_writer(run: str | os.PathLike) -> Iterator[None]:
    """Keeps every other process out of a run folder, until this one is done or dead.

    Raises ValueError if another one is in it.
    """
    Path(run).mkdir(parents=True, exist_ok=True)
    lock = FileLock(Path(run) / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"{run} is in use by another process") from None
    try:
        yield
    finally:
        lock.release()


def write_config(run: str | os.PathLike, **sections: Any) -> None:
    """Writes `config.json`, in place of that of a start from which nothing came.

    Raises ValueError as `check_config` does.
    """
    check_config(run, **sections)
    path, content = Path(run) / CONFIG, _content(sections)
    if not path.exists() or read_config(run) != content:
        write_json(path, content)


def check_config(run: str | os.PathLike, **sections: Any) -> None:
    """Raises ValueError for a folder with a run of another kind, or work of another configuration.

    Names the first setting that differs, with both values.
    """
    if not (Path(run) / CONFIG).exists():
        return
    there, here = read_config(run), _content(sections)
    if there.keys() != here.keys():
        kinds = (", ".join(key for key in part if key != "format") for part in (there, here))
        raise ValueError(f"{run} holds a run of another kind: {next(kinds)}; not {next(kinds)}")
    difference = _first_difference(there, here)
    if difference and holds_work(run):
        raise ValueError(f"{run} holds a run with another configuration: {difference}")


def holds_work(run: str | os.PathLike) -> bool:
    """Whether a training has come as far as to leave something in the folder."""
    return any((Path(run) / name).exists() for name in (METRICS, MODEL, STATE))


def _content(sections: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, **{name: encode_config(part) for name, part in sections.items()}}


def read_config(run: str | os.PathLike) -> dict[str, Any]:
    """`config.json` as plain data. Raises ValueError for a missing one or another format."""
    content = read_json(Path(run) / CONFIG)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{Path(run) / CONFIG} has format {found}; this version reads {FORMAT}")
    return content


def encode_config(config: Any) -> Any:
    """A dataclass as the plain data that JSON gives back, its class under `type`."""
    if isinstance(config, tuple):
        return [encode_config(value) for value in config]
    if not is_dataclass(config):
        return config
    values = {f.name: encode_config(getattr(config, f.name)) for f in fields(config)}
    return {"type": type(config).__name__, **values}


def decode_config(content: Any, expected: Any) -> Any:
    """Inverts `encode_config` for a configuration of class `expected` or one derived from it.

    Raises UnknownConfig for an unknown class, and ValueError for fields that are missing or
    unknown and for values of another type.
    """
    wanted = getattr(expected, "__name__", expected)
    if not isinstance(content, dict):
        raise ValueError(f"expected a {wanted}, got {content!r}")
    name, classes = content.get("type"), _config_classes()
    if isinstance(expected, type) and not expected.__subclasses__():
        classes[expected.__name__] = expected
    if not isinstance(name, str) or name not in classes:
        raise UnknownConfig(
            f"unknown configuration {name!r}; known are {', '.join(classes)}, and those of the "
            "quantizers that an imported module registers"
        )
    config_class = classes[name]
    if not issubclass(config_class, expected):
        raise ValueError(f"expected a {wanted}, got a {name}")
    known, given = {f.name for f in fields(config_class)}, set(content) - {"type"}
    if known != given:
        names = ", ".join(sorted(known ^ given))
        raise ValueError(f"{name} does not have the same fields in this version: {names}")
    types = get_type_hints(config_class)
    return config_class(
        **{key: _decode_value(content[key], types[key], f"{name}.{key}") for key in known}
    )


def _config_classes() -> dict[str, type]:
    """What a model's configuration is made of, by name; methods may be registered at any time."""
    classes = (
        VQVAEConfig,
        HierarchicalVQVAEConfig,
        *(method.config_class for method in REGISTRY.values()),
        EntropyTemperature,
        AnnealedTemperature,
        FixedTemperature,
    )
    return {config_class.__name__: config_class for config_class in classes}


def _decode_value(content: Any, expected: Any, name: str) -> Any:
    origin = get_origin(expected)
    if isinstance(content, dict) and origin not in (tuple, Literal):
        return decode_config(content, expected)
    if origin is tuple and isinstance(content, list):
        item, *_ = get_args(expected)
        return tuple(_decode_value(value, item, name) for value in content)
    if expected is float and type(content) is int:
        return float(content)  # other writers of JSON say 1 for 1.0
    if origin is Literal:
        fits = content in get_args(expected)
    else:
        fits = origin is not tuple and isinstance(content, expected)
        fits = fits and (expected is bool or not isinstance(content, bool))
    if not fits:
        raise ValueError(f"{name} cannot be {content!r}")
    return content


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """One safetensors file, whole or not at all."""
    contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_bytes(path, save(contiguous, dict(metadata or {})))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors on the CPU and metadata. Raises ValueError for a file missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from None


def write_json(path: Path, content: Any) -> None:
    """One JSON file, whole or not at all; numbers that are not finite become null."""
    write_text(path, json.dumps(strict(content), indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """One text file, whole or not at all."""
    write_bytes(path, text.encode())


def read_json(path: Path) -> Any:
    """Raises ValueError for a file missing or damaged."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_records(run: str | os.PathLike) -> list[dict[str, Any]]:
    """The epochs of `metrics.jsonl`, one dict each; none if there is no file."""
    path = Path(run) / METRICS
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def write_records(run: str | os.PathLike, records: list[dict[str, Any]]) -> None:
    """Writes `metrics.jsonl`, one JSON object a line."""
    lines = (f"{json.dumps(strict(record))}\n" for record in records)
    write_text(Path(run) / METRICS, "".join(lines))


def strict(content: Any) -> Any:
    """Plain data that any JSON reader takes: numbers that are not finite become None."""
    if isinstance(content, dict):
        return {key: strict(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [strict(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write_bytes(path: Path, content: bytes) -> None:
    """One file, whole or not at all; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _first_difference(old: Any, new: Any, name: str = "") -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        # Another quantizer explains the options beside it that differ with it.
        keys.sort(key=lambda key: (key != "type", not isinstance(old.get(key), dict)))
        parts = (
            _first_difference(old.get(key, "absent"), new.get(key, "absent"), f"{name}.{key}")
            for key in keys
        )
        return next(filter(None, parts), "")
    return "" if old == new else f"{name.lstrip('.')} is {old!r} there and {new!r} here"
