"""The named models, one file per data set: configurations only, no modules and no logic."""

from models.cifar10 import CIFAR10
from models.photos import PHOTOS
from softvq.training import Experiment

MODELS: dict[str, Experiment] = {**PHOTOS, **CIFAR10}
