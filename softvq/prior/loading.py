"""Opens a trained prior, with a check that it belongs to the tokenizer that is to decode its codes.

How it got into its folder is in the program, `softvq.prior.__main__`.
"""

from pathlib import Path

from softvq import checkpoint
from softvq.autoencoder import Autoencoder
from softvq.prior.codes import Tokenizer, read_tokenizer
from softvq.prior.transformer import CodePrior, CodePriorConfig
from softvq.program import stored_data


def prior_folder(run: str, folder: str = "") -> Path:
    """Where the prior of a run is: in that folder, or by default in RUN/prior."""
    return Path(folder or Path(run) / "prior")


def load_prior(run: str, model: Autoencoder, folder: str = "") -> CodePrior:
    """The trained prior of a run with that model, on its device and in eval mode.

    `folder` is as in `prior_folder`. Raises ValueError for one that holds no
    trained prior, and for the prior of another tokenizer, with both values.
    """
    path = prior_folder(run, folder)
    if not (path / checkpoint.CONFIG).exists():
        raise ValueError(f"{path} holds no prior; python -m softvq.prior {run} trains one")
    content, data = checkpoint.read_config(path), stored_data(run)
    if not {"prior", "tokenizer"} <= content.keys():
        raise ValueError(f"{path} holds a run of another kind, no prior")
    if data is None:
        raise ValueError(f"{run} does not say what it was trained on")
    shape = (model.config.channels, data.image_size, data.image_size)
    stored = checkpoint.decode_config(content["tokenizer"], Tokenizer)
    read_tokenizer(run, model, shape).check(stored, str(path))
    if not (path / checkpoint.MODEL).exists():
        raise ValueError(f"the training of the prior in {path} is not finished")
    prior = CodePrior(checkpoint.decode_config(content["prior"], CodePriorConfig))
    checkpoint.load_weights(prior, path / checkpoint.MODEL)
    return prior.to(next(model.parameters()).device).eval()
