"""Frameworks as they are, on top of adapter.Optimizer and adapter.Scheduler: they must not notice a difference.

Each trains a few steps of something tiny, and the parameters are compared with the same run on ``torch.optim``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

import functricks
from functricks import adapter, schedules
from tests.helpers import assert_close, assert_same

STEPS = 4
INPUTS = torch.randn(8 * STEPS, 3, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS.sum(1, keepdim=True)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def theirs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def kernel(model: nn.Module) -> torch.optim.Optimizer:
    return adapter.Optimizer(model.parameters(), functricks.adamw, lr=0.01)


def chained(model: nn.Module) -> torch.optim.Optimizer:
    """Not on PyTorch's kernels, so equal to a tolerance."""
    return adapter.Optimizer(model.named_parameters(), functricks.chain(functricks.adamw(0.01), functricks.scale(1.0)))


Make = Callable[[nn.Module], torch.optim.Optimizer]
OURS = pytest.mark.parametrize("make", [kernel, chained])


def compare(make: Make, found: nn.Module, expected: nn.Module) -> None:
    if make is kernel:
        assert_same(values(found), values(expected))
    else:
        assert_close(values(found), values(expected), eps=64)  # some steps of Adam, in another order


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(INPUTS.split(8), TARGETS.split(8), strict=True)


# --- torch itself ----------------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.1),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),  # writes betas, too
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.CosineAnnealingLR(o, 4)], [2]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@OURS
def test_schedulers_of_torch(make: Make, name: str) -> None:
    models = [network(), network()]
    for model, own in zip(models, (theirs, make), strict=True):
        optimizer = own(model)
        scheduler = SCHEDULERS[name](optimizer)
        for x, y in batches():
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    compare(make, models[1], models[0])


@OURS
def test_grad_scaler(make: Make) -> None:
    """With an overflow on the way, which skips a step; and what clips in between."""
    models = [network(), network()]
    for model, own in zip(models, (theirs, make), strict=True):
        optimizer = own(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        for i, (x, y) in enumerate(batches()):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean() * (torch.inf if i == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**8
    compare(make, models[1], models[0])


@OURS
def test_averaged_model_and_update_bn(make: Make) -> None:
    averages = []
    for own in (theirs, make):
        model = nn.Sequential(nn.BatchNorm1d(3), network())
        optimizer = own(model)
        average = swa_utils.AveragedModel(model)
        scheduler = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
        for x, y in batches():
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            average.update_parameters(model)
            scheduler.step()
        swa_utils.update_bn(INPUTS.split(8), average)
        averages.append(average)
    compare(make, averages[1], averages[0])


@pytest.mark.filterwarnings("ignore:Call to deprecated create function:DeprecationWarning")  # tensorboard's protobuf
def test_tensorboard(tmp_path: Path) -> None:
    with warnings.catch_warnings():  # what it warns about while it is imported is its own affair
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

    model = network()
    optimizer = kernel(model)
    scheduler = adapter.Scheduler(optimizer, schedules.exponential_decay(0.01, gamma=0.5))
    with SummaryWriter(str(tmp_path)) as writer:
        for i, (x, y) in enumerate(batches()):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            writer.add_scalar("loss", loss, i)
            writer.add_scalar("lr", scheduler.get_last_lr()[0], i)
            writer.add_histogram("exp_avg", optimizer.state[model[0].weight]["exp_avg"], i)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in events.Scalars("lr")] == pytest.approx([0.01 * 0.5**i for i in range(1, 5)])


# --- accelerate ------------------------------------------------------------------------------------------------------


@OURS
def test_accelerate(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Gradients of two micro-batches a step: the schedule moves with the optimizer's steps."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    schedule = schedules.exponential_decay(0.01, gamma=0.5)
    models = [network(), network()]
    for model, own in zip(models, (theirs, make), strict=True):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = own(model)
        scheduler = (
            lr_scheduler.ExponentialLR(optimizer, 0.5) if own is theirs else adapter.Scheduler(optimizer, schedule)
        )
        loader = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=8)
        wrapped, prepared, loader, follower = accelerator.prepare(model, optimizer, loader, scheduler)
        for x, y in loader:
            with accelerator.accumulate(wrapped):
                accelerator.backward((wrapped(x) - y).square().mean())
                accelerator.clip_grad_norm_(wrapped.parameters(), 0.5)
                prepared.step()
                follower.step()
                prepared.zero_grad()
        assert follower.get_last_lr() == [0.0025]
        accelerator.save_state(str(tmp_path))
        before = copy.deepcopy(optimizer.state_dict())
        for group in optimizer.param_groups:
            group["lr"] = 7.0
        accelerator.load_state(str(tmp_path))
        assert optimizer.param_groups[0]["lr"] == 0.0025
        assert_same(optimizer.state_dict()["state"], before["state"])
    compare(make, models[1], models[0])


# --- HuggingFace -----------------------------------------------------------------------------------------------------


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.arange(6) * (index + 1) % 20
        return {"input_ids": tokens, "attention_mask": torch.ones(6, dtype=torch.int64), "labels": tokens[0] % 2}


@pytest.mark.slow  # imports transformers' trainer
def test_trainer_of_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():  # what it warns about while it is imported is its own affair
        warnings.simplefilter("ignore")
        from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=8,
    )  # fmt: skip

    def run(own: bool, output: Path, resume: str | None = None) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = BertForSequenceClassification(config)
        arguments = TrainingArguments(
            output_dir=str(output), max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            logging_steps=1, save_steps=3, report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
            dataloader_pin_memory=False,
        )  # fmt: skip
        if own:
            optimizer: Any = adapter.Optimizer(model.named_parameters(), functricks.adamw, lr=1e-2, fused=False)
            scheduler: Any = adapter.Scheduler(optimizer, schedules.linear_schedule_with_warmup(1e-2, 2, 6))
        else:
            optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
            from transformers import get_linear_schedule_with_warmup

            scheduler = get_linear_schedule_with_warmup(optimizer, 2, 6)
        trainer = Trainer(model=model, args=arguments, train_dataset=Sentences(), optimizers=(optimizer, scheduler))
        trainer.train(resume_from_checkpoint=resume)
        return model, trainer.state.log_history

    (expected, history), (found, ours) = run(False, tmp_path / "theirs"), run(True, tmp_path / "ours")
    assert_close(values(found), values(expected), eps=64)  # the rates agree to rounding
    rates = [[log["learning_rate"] for log in logs if "learning_rate" in log] for logs in (history, ours)]
    assert rates[1] == pytest.approx(rates[0])
    resumed, _ = run(True, tmp_path / "ours", str(tmp_path / "ours" / "checkpoint-3"))
    assert_same(values(resumed), values(found))


# --- Lightning -------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # imports lightning
@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")  # few workers, no logger
@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning")  # of torch, about lightning
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:DeprecationWarning")
def test_lightning(tmp_path: Path) -> None:
    with warnings.catch_warnings():  # what it warns about while it is imported is its own affair
        warnings.simplefilter("ignore")
        import lightning.pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    class Regression(pl.LightningModule):
        def __init__(self, make: Make) -> None:
            super().__init__()
            self.model, self.make = network(), make

        def training_step(self, batch: Any, index: int) -> Tensor:
            x, y = batch
            loss: Tensor = (self.model(x) - y).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = self.make(self.model)
            if self.make is theirs:
                scheduler: Any = lr_scheduler.ExponentialLR(optimizer, 0.5)
            else:
                scheduler = adapter.Scheduler(optimizer, schedules.exponential_decay(0.01, gamma=0.5))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def fit(make: Make, epochs: int, resume: str | None = None) -> tuple[Regression, Any]:
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=epochs, logger=False, enable_checkpointing=False, gradient_clip_val=0.5,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(tmp_path),
        )  # fmt: skip
        module = Regression(make)
        trainer.fit(module, DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=8), ckpt_path=resume)
        return module, trainer

    (expected, _), (found, _), (_, trainer) = fit(theirs, 2), fit(kernel, 2), fit(chained, 1)
    compare(kernel, found, expected)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, after = fit(chained, 2, str(tmp_path / "half.ckpt"))
    compare(chained, resumed, expected)
    assert after.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**8)
