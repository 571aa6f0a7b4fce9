"""Soft vector quantization: the DDCL codebook, autoencoders around it, and their checkpoints."""

from softvq.autoencoder import VQVAE as VQVAE
from softvq.autoencoder import VQVAEConfig as VQVAEConfig
from softvq.autoencoder import VQVAEOutput as VQVAEOutput
from softvq.checkpoint import load as load
from softvq.checkpoint import save_model as save_model
from softvq.export import without_custom_operators as without_custom_operators
from softvq.hierarchical import HierarchicalVQVAE as HierarchicalVQVAE
from softvq.hierarchical import HierarchicalVQVAEConfig as HierarchicalVQVAEConfig
from softvq.quantizers import EMAVQ as EMAVQ
from softvq.quantizers import Assignment as Assignment
from softvq.quantizers import Codebook as Codebook
from softvq.quantizers import DDCLCodebook as DDCLCodebook
from softvq.quantizers import DDCLConfig as DDCLConfig
from softvq.quantizers import EMAConfig as EMAConfig
from softvq.quantizers import Quantized as Quantized
from softvq.quantizers import StraightThroughConfig as StraightThroughConfig
from softvq.quantizers import StraightThroughVQ as StraightThroughVQ
from softvq.quantizers import param_groups as param_groups
from softvq.readout import DDCLHierarchy as DDCLHierarchy
from softvq.readout import DDCLReadout as DDCLReadout
from softvq.readout import DDCLReadoutConfig as DDCLReadoutConfig
from softvq.readout import ReadoutOutput as ReadoutOutput
from softvq.temperature import AnnealedTemperature as AnnealedTemperature
from softvq.temperature import EntropyTemperature as EntropyTemperature
from softvq.temperature import FixedTemperature as FixedTemperature
