"""Crops of two photographs: the quickstart, small enough for a laptop's processor.

Run as `python train_vqvae.py` for all three, or `python train_vqvae.py photos-ddcl` for one.
"""

from softvq import DDCLConfig, EMAConfig, StraightThroughConfig, VQVAEConfig
from softvq.data import DataConfig
from softvq.training import Experiment, TrainConfig

_DATA = DataConfig(source="photos")

PHOTOS = {
    "photos-ddcl": Experiment(
        model=VQVAEConfig(quantizer=DDCLConfig(dim=8, codebook_size=128), hidden=32),
        data=_DATA,
        train=TrainConfig(epochs=6, batch_size=64, eps=0.1),
    ),
    "photos-vq": Experiment(
        model=VQVAEConfig(
            quantizer=StraightThroughConfig(dim=8, codebook_size=128), hidden=32, normalize=False
        ),
        data=_DATA,
        train=TrainConfig(epochs=6, batch_size=64),
    ),
    "photos-ema": Experiment(
        model=VQVAEConfig(
            quantizer=EMAConfig(dim=8, codebook_size=128), hidden=32, normalize=False
        ),
        data=_DATA,
        train=TrainConfig(epochs=6, batch_size=64),
    ),
}
