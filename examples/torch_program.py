"""A complete PyTorch training, to copy. Interrupted and started again, it goes on where it was."""

import anyio
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import asynchooks as ah

EPOCHS, NUM_PARTS = 20, 2  # a step accumulates the gradients of so many batches
device = "cuda" if torch.cuda.is_available() else "cpu"
x, y = (torch.tensor(each) for each in load_digits(return_X_y=True))
rows = torch.randperm(len(x), generator=torch.manual_seed(0)).split([1200, 297, 300])
train, valid, test = (TensorDataset(x[each].float() / 16, y[each]) for each in rows)
steps_per_epoch = len(train) // (30 * NUM_PARTS)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)).to(device)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98)).eval()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * steps_per_epoch)
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")  # bfloat16 needs no scale


def step(parts):
    optimizer.zero_grad()
    with torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
        loss = sum(nn.functional.cross_entropy(model(x.to(device)), y.to(device)) for x, y in parts)
    scaler.scale(loss / NUM_PARTS).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    average.update_parameters(model)
    return {"loss": loss.item() / NUM_PARTS, "rate": scheduler.get_last_lr()[0]}


@torch.inference_mode()
def accuracy(x, y):
    return (average(x.to(device)).argmax(dim=1).cpu() == y).float().mean().item()


async def main():
    def one_pass(epoch):  # a resumed run reads the rest of it in the same order
        loader = DataLoader(train, 30, shuffle=True, generator=torch.Generator().manual_seed(epoch))
        return ah.data.batch(loader, NUM_PARTS, collate=list)

    moving = {"model": model, "average": average, "optimizer": optimizer, "scheduler": scheduler}
    saver = ah.StateDictSaver(**moving, scaler=scaler, random=ah.RandomStates())
    validation = ah.EvaluationHook(lambda *_: {"accuracy": accuracy(*valid[:])}, every_n_epochs=1)
    best = {"metric": validation.metric("accuracy"), "retention": ah.Retention(2, keep_best=1)}
    hooks = [
        ah.PreemptionHook(),  # Ctrl-C and signals save the last step
        ah.FeedHook(ah.data.repeat(one_pass, EPOCHS), "parts"),
        validation,
        ah.EarlyStoppingHook(best["metric"], patience=5),
        ah.CheckpointSaverHook("digits", save_steps=steps_per_epoch, saver=saver, **best),
        ah.MetricsHook(ah.metrics.TensorBoardSink("digits/logs"), "loss", every_n_steps=10),
        ah.StopAtStepHook(last_step=EPOCHS * steps_per_epoch),
        ah.ProgressHook(["loss", "rate"]),
    ]
    async with ah.MonitoredSession(hooks, step) as session:
        while not session.should_stop():
            await session.run([])
    saver.restore(ah.checkpoints.CheckpointDirectory("digits").best().prefix)
    print(f"test accuracy of the best weights: {accuracy(*test[:]):.3f}")


anyio.run(main)
