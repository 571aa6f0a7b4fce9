"""The loop of a training: its epochs, the log and the state on disk, and how it ends early.

What is trained, on what and how it is evaluated is a program's own: it derives from `Trainer`.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor, nn
from tqdm import tqdm

from softvq import checkpoint, distributed
from softvq.evaluation import Sums
from softvq.program import (
    Interrupted,
    Progress,
    interruptions,
    is_first,
    save_state,
    tell,
)
from softvq.training import NonFiniteLoss, Recipe, epoch_order

SAVE_EVERY_SECONDS = 300
REFRESH_EVERY_STEPS = 10

Batch = TypeVar("Batch")


class Trainer(ABC, Generic[Batch]):
    """A model in training, and what one program's steps and epochs are."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, items: Sized, config: Recipe
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.items, self.config = items, config

    @property
    def steps(self) -> int:
        """Steps in an epoch."""
        return -(-len(self.items) // self.config.batch_size)

    @abstractmethod
    def batches(self, order: Int[Tensor, "n"]) -> Iterator[Batch]:
        """The items in that order, `config.batch_size` at a time; the last may be fewer."""

    @abstractmethod
    def step(self, batch: Batch, done: float, sums: Sums) -> None:
        """One update at the fraction `done` of the training, added to the sums of its epoch.

        Raises NonFiniteLoss before anything is updated by a loss that is not finite.
        """

    @abstractmethod
    def live(self, sums: Sums) -> str:
        """What the progress bar shows beside the speed."""

    @abstractmethod
    def record(self, sums: Sums) -> dict[str, Any]:
        """What is logged of an epoch, from the sums of all processes and an evaluation."""

    @abstractmethod
    def summary(self, record: dict[str, Any]) -> str:
        """An epoch in one line, without its number."""


def train_epochs(
    trainer: Trainer[Any],
    out: Path,
    begun: Progress,
    log: Callable[[dict[str, Any]], None] = lambda record: None,
) -> None:
    """Trains on from `begun` to the last epoch; logs and saves after each, and then the weights.

    `log` receives every record in process 0. Raises NonFiniteLoss when the training breaks down,
    and Interrupted after SIGINT.
    """
    records = [item for item in checkpoint.read_records(out) if item["epoch"] <= begun.epoch]
    model, optimizer = trainer.model, trainer.optimizer
    with interruptions() as interrupted:
        for progress in _epochs(trainer, out, begun, interrupted):
            epoch = progress.epoch
            _check_weights(model, epoch, out)
            record = {
                "epoch": epoch,
                "steps": trainer.steps * epoch,
                "seconds": progress.seconds,
                **trainer.record(progress.sums.joined()),
            }
            _check_record(record, out)
            records.append(record)
            if is_first():
                checkpoint.write_records(out, records)
                log(record)
            save_state(out, model, optimizer, Progress(epoch, 0, 0.0, Sums()))
            tell(f"epoch {epoch}: {trainer.summary(record)}")
            if any(distributed.any_process(interrupted())):
                raise Interrupted(f"{out}: stopped after epoch {epoch}")
    if is_first():
        checkpoint.write_tensors(out / checkpoint.MODEL, checkpoint.weights(model))


def _epochs(
    trainer: Trainer[Any], out: Path, begun: Progress, interrupted: Callable[[], bool]
) -> Iterator[Progress]:
    """After each epoch, how far the training is, with the sums of this process."""
    model, optimizer = trainer.model, trainer.optimizer
    config, steps = trainer.config, trainer.steps
    first, step, seconds, sums = begun
    for epoch in range(first, config.epochs):
        order = epoch_order(trainer.items, config.seed, epoch)[step * config.batch_size :]
        name = f"epoch {epoch + 1}/{config.epochs}"
        model.train()
        started = saved = time.monotonic()
        with tqdm(
            total=steps, initial=step, desc=name, mininterval=1, disable=not is_first()
        ) as bar:
            for batch in trainer.batches(order):
                try:
                    trainer.step(batch, (epoch * steps + step) / (config.epochs * steps), sums)
                except NonFiniteLoss as error:
                    place = f"epoch {epoch + 1}, step {step + 1}"
                    raise NonFiniteLoss(f"{error} in {place}; {_what_is_left(out)}") from None
                step += 1
                bar.update()
                if step % REFRESH_EVERY_STEPS == 0:
                    bar.set_postfix_str(trainer.live(sums), refresh=False)
                now = time.monotonic()
                stop, due = distributed.any_process(interrupted(), now - saved > SAVE_EVERY_SECONDS)
                if stop or due:
                    seconds, started, saved = seconds + now - started, now, now
                    save_state(out, model, optimizer, Progress(epoch, step, seconds, sums))
                if stop:
                    raise Interrupted(f"{out}: stopped in epoch {epoch + 1}, step {step}")
        yield Progress(epoch + 1, 0, seconds + time.monotonic() - started, sums)
        step, seconds, sums = 0, 0.0, Sums()


def _check_weights(model: nn.Module, epoch: int, out: Path) -> None:
    """The last step of an epoch shows in no loss. Raises NonFiniteLoss if it broke a weight."""
    for name, value in model.state_dict().items():
        if not value.isfinite().all():
            raise NonFiniteLoss(f"{name} is not finite after epoch {epoch}; {_what_is_left(out)}")


def _check_record(record: dict[str, Any], out: Path) -> None:
    """Raises NonFiniteLoss if an evaluation gave no number."""
    for name, value in record.items():
        if isinstance(value, float) and math.isnan(value):
            epoch = record["epoch"]
            raise NonFiniteLoss(f"{name} is nan after epoch {epoch}; {_what_is_left(out)}")


def _what_is_left(out: Path) -> str:
    kept = (out / checkpoint.STATE).exists()
    return f"the last good state is in {out}" if kept else "no state was saved"
