"""CIFAR-10: 8x8 codes from 512, the DDCL codebook (of width 64) beside its hard baselines (of
width 8, which suits EMA better): codes that start as the original does, codes that start from data,
and moving averages; three of them with another 4x4 codes from 512 above them; DDCL with 4,096
codes; and DDCL as the paper has it, with 64 codes.

Run as `python train_vqvae.py cifar10-ddcl --data.source cifar10.zip` (or without the flag, to
download the set); results and times are in the README.
"""

from softvq import (
    DDCLConfig,
    EMAConfig,
    FixedTemperature,
    HierarchicalVQVAEConfig,
    StraightThroughConfig,
    VQVAEConfig,
)
from softvq.data import DataConfig
from softvq.training import Experiment, TrainConfig

_DATA = DataConfig(source="cifar10")

CIFAR10 = {
    "cifar10-ddcl": Experiment(
        model=VQVAEConfig(quantizer=DDCLConfig(dim=64, codebook_size=512)),
        data=_DATA,
        train=TrainConfig(eps=0.03),
    ),
    # With two tokens a code, a batch says little of how often each is used: less is made of it.
    "cifar10-ddcl-k4096": Experiment(
        model=VQVAEConfig(quantizer=DDCLConfig(dim=8, codebook_size=4096, usage_weight=0.02)),
        data=_DATA,
        train=TrainConfig(eps=0.03),
    ),
    "cifar10-vq": Experiment(
        model=VQVAEConfig(
            quantizer=StraightThroughConfig(dim=8, codebook_size=512), normalize=False
        ),
        data=_DATA,
    ),
    "cifar10-vq-data": Experiment(
        model=VQVAEConfig(
            quantizer=StraightThroughConfig(dim=8, codebook_size=512, init="data"), normalize=False
        ),
        data=_DATA,
    ),
    "cifar10-ema": Experiment(
        model=VQVAEConfig(quantizer=EMAConfig(dim=8, codebook_size=512), normalize=False),
        data=_DATA,
    ),
    # The paper does not say its temperature, start or normalisation; these are the kindest reading.
    "cifar10-ddcl-paper": Experiment(
        model=VQVAEConfig(
            quantizer=DDCLConfig(
                dim=8,
                codebook_size=64,
                temperature=FixedTemperature(value=1.0),
                gradient="full",
                commitment_weight=1.0,
                usage_weight=0.0,
                straight_through_weight=0.0,
                dead_below=0.0,
                hard_forward_after=1.0,
            )
        ),
        data=_DATA,
        train=TrainConfig(eps=0.1),
    ),
    "cifar10-ddcl-2level": Experiment(
        model=HierarchicalVQVAEConfig(
            top=DDCLConfig(dim=8, codebook_size=512),
            bottom=DDCLConfig(dim=8, codebook_size=512),
        ),
        data=_DATA,
        train=TrainConfig(eps=0.03),
    ),
    "cifar10-vq-2level": Experiment(
        model=HierarchicalVQVAEConfig(
            top=StraightThroughConfig(dim=8, codebook_size=512),
            bottom=StraightThroughConfig(dim=8, codebook_size=512),
            normalize=False,
        ),
        data=_DATA,
    ),
    "cifar10-ema-2level": Experiment(
        model=HierarchicalVQVAEConfig(
            top=EMAConfig(dim=8, codebook_size=512),
            bottom=EMAConfig(dim=8, codebook_size=512),
            normalize=False,
        ),
        data=_DATA,
    ),
}
