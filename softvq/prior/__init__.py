"""A prior over the codes of a tokenizer: `python -m softvq.prior RUN` trains one on a run.

The transformer, sampling and the codes of a data set are one file each.
"""

from softvq.prior.sampling import SamplingConfig as SamplingConfig
from softvq.prior.sampling import sample as sample
from softvq.prior.transformer import CodePrior as CodePrior
from softvq.prior.transformer import CodePriorConfig as CodePriorConfig
