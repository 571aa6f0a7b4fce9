"""The quantizers by name; a new method is one file beside this one and one line in `REGISTRY`."""

from torch import nn

from softvq.quantizers.base import Assignment as Assignment
from softvq.quantizers.base import Codebook as Codebook
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

QuantizerConfig = DDCLConfig | StraightThroughConfig | EMAConfig


def build(config: QuantizerConfig) -> Codebook:
    """The quantizer whose options `config` holds."""
    return next(
        method for method in REGISTRY.values() if method.config_class is type(config)
    ).from_config(config)


def codebooks(model: nn.Module) -> list[Codebook]:
    """The quantizers of a model, one per level."""
    return [module for module in model.modules() if isinstance(module, Codebook)]
