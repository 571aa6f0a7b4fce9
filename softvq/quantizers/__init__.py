"""The quantizers by name; a new method is one file beside this one and one line in `REGISTRY`.
Methods from elsewhere are added by `register`."""

from typing import Any

from torch import nn

from softvq.quantizers.base import Assignment as Assignment
from softvq.quantizers.base import Codebook as Codebook
from softvq.quantizers.base import CodebookConfig as CodebookConfig
from softvq.quantizers.base import Quantized as Quantized
from softvq.quantizers.ddcl import DDCLCodebook as DDCLCodebook
from softvq.quantizers.ddcl import DDCLConfig as DDCLConfig
from softvq.quantizers.ema import EMAVQ as EMAVQ
from softvq.quantizers.ema import EMAConfig as EMAConfig
from softvq.quantizers.straight_through import StraightThroughConfig as StraightThroughConfig
from softvq.quantizers.straight_through import StraightThroughVQ as StraightThroughVQ

REGISTRY: dict[str, type[Codebook]] = {
    "ddcl": DDCLCodebook,
    "straight_through": StraightThroughVQ,
    "ema": EMAVQ,
}


def register(name: str, method: type[Codebook]) -> None:
    """Adds a method of your own: models are then built with it, trained, saved and loaded.

    `method` is a `Codebook` with a `config_class` of its own: a frozen dataclass that derives from
    `CodebookConfig`, with fields that JSON can hold (numbers, text, `Literal`, `tuple[int, ...]`).
    Import the module that registers it before a run folder is loaded, because `config.json` holds
    nothing but the name of the config class. A class that is defined anew, as in a notebook cell
    that is run again, takes the place of its former self. Raises ValueError when `name`, or the
    name of the config class, is taken by another method.
    """
    for known, other in REGISTRY.items():
        same = (other.__module__, other.__qualname__) == (method.__module__, method.__qualname__)
        if other is method or (same and known == name):
            continue
        if known == name:
            raise ValueError(f"the name {name!r} is taken by {other.__name__}")
        if other.config_class.__name__ == method.config_class.__name__:
            raise ValueError(f"a {method.config_class.__name__} already builds {other.__name__}")
    REGISTRY[name] = method


def build(config: CodebookConfig) -> Codebook:
    """The quantizer whose options `config` holds. Raises ValueError for a class of unknown ones."""
    methods = {method.config_class: method for method in REGISTRY.values()}
    if type(config) not in methods:
        known = ", ".join(config_class.__name__ for config_class in methods)
        raise ValueError(f"no quantizer is built from a {type(config).__name__}; known are {known}")
    return methods[type(config)].from_config(config)


def codebooks(model: nn.Module) -> list[Codebook]:
    """The quantizers of a model, one per level."""
    return [module for module in model.modules() if isinstance(module, Codebook)]


def param_groups(model: nn.Module, lr: float, eps: float) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: those of codebooks at `lr / eps`, all others at `lr`.

    Raises ValueError for an lr that is not positive or an eps outside (0, 1].
    """
    if not 0 < lr < float("inf"):
        raise ValueError(f"lr must be positive and finite, got {lr}")
    if not 0 < eps <= 1:
        raise ValueError(f"eps must lie in (0, 1], got {eps}")
    banks = {parameter for codebook in codebooks(model) for parameter in codebook.parameters()}
    others = [parameter for parameter in model.parameters() if parameter not in banks]
    groups = [{"params": others, "lr": lr, "name": "network"}]
    if banks:
        ordered = [parameter for parameter in model.parameters() if parameter in banks]
        groups.append({"params": ordered, "lr": lr / eps, "name": "prototypes"})
    return groups
