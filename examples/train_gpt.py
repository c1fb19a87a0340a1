"""Train a character GPT on Paradise Lost, on as many processes as torchrun starts.

    torchrun --standalone --nproc-per-node=2 examples/train_gpt.py --plan zero3=2

`train` is the loop of a single-device script. The only line that makes it parallel is
`sw.parallelize` in `main`. At the end rank 0 trains the first steps again with the same
loop on one device, and compares losses, parameters, memory and speed.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable
from itertools import islice, pairwise

import torch
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import shardwright as sw
from gpt import GPT, GPTConfig
from text import DATA, Characters

WARM_UP = 20
Optimizer = torch.optim.Optimizer
Batch = tuple[Tensor, Tensor]
Report = Callable[[int, float], None]


def build(args: argparse.Namespace, vocab: int, device: torch.device) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(args.seed)
    model = GPT(GPTConfig(vocab=vocab, seq=args.seq, n_layer=args.layers, n_head=args.heads, d=args.width))
    model.to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=args.lr)


def train(model: nn.Module, optimizer: Optimizer, batches: Iterable[Batch], report: Report) -> None:
    """An ordinary training loop: nothing here knows how many processes there are."""
    # Without a warm-up the loss jumps to 7 at step 14, and there float32 rounding grows ten-thousandfold.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    model.train()
    for step, (x, y) in enumerate(batches):
        loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        report(step, loss.item())


def main() -> None:
    args = parse()
    device = pick_device()
    console = Console(quiet=int(os.environ.get("RANK", "0")) != 0)  # only rank 0 speaks
    text = Characters(DATA)

    def batches(steps: int) -> Iterable[Batch]:
        return islice(text.batches(batch=args.batch, seq=args.seq, seed=args.seed, device=device), steps)

    model, optimizer = build(args, len(text.alphabet), device)
    with console.status(f"compiling for {args.plan}"):
        model, optimizer = sw.parallelize(model, optimizer, example=next(iter(batches(1))), plan=args.plan)
    console.print(sw.explain(model.plan))

    losses: list[float] = []
    ends = [time.perf_counter()]  # of the steps
    early: dict[str, Tensor] = {}  # the parameters after the steps that are compared
    with progress_bar(console) as progress:
        task = progress.add_task("training", total=args.steps, loss=float("nan"))

        def report(step: int, loss: float) -> None:
            losses.append(loss)
            ends.append(time.perf_counter())
            if step + 1 == args.compare:
                early.update({name: value.clone() for name, value in model.full_state_dict().items()})
            progress.update(task, advance=1, loss=loss)

        train(model, optimizer, batches(args.steps), report)
    console.print(loss_table(losses))
    final, rank_bytes = model.full_state_dict(), stored(model, optimizer)
    console.print(f"generated code: {model.generated}", soft_wrap=True)

    if console.quiet:
        return
    single, single_optimizer = build(args, len(text.alphabet), device)
    expected: list[float] = []
    single_ends = [time.perf_counter()]

    def report_single(step: int, loss: float) -> None:
        expected.append(loss)
        single_ends.append(time.perf_counter())

    with console.status(f"the first {args.compare} steps again, on one device"):
        train(single, single_optimizer, batches(args.compare), report_single)
    console.print(parity_table(losses, expected, early, single.state_dict()))
    console.print(cost_table(rank_bytes, stored(single, single_optimizer), step_time(ends), step_time(single_ends)))

    single.load_state_dict(final)  # the original keys: the plain model takes them
    console.print(Panel(text.decode(sample(single, text, args.seq)), title="a sample of the trained model", width=72))
    if worst(losses, expected) > args.tolerance:
        raise SystemExit(f"the losses differ by more than {args.tolerance}")


@torch.no_grad()
def sample(model: nn.Module, text: Characters, seq: int, length: int = 300) -> Tensor:
    model.eval()
    generator = torch.Generator().manual_seed(1)
    tokens = text.tokens[:16].tolist()  # the title
    for _ in range(length):
        logits = model(torch.tensor([tokens[-seq:]], device=next(model.parameters()).device))[0, -1]
        tokens.append(int(torch.multinomial((logits.cpu() / 0.8).softmax(-1), 1, generator=generator)))
    return torch.tensor(tokens)


def worst(losses: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, expected, strict=False))


def loss_table(losses: list[float]) -> Table:
    table = Table("step", "loss", title="loss, mean of ten")
    marks = [round(i * (len(losses) - 10) / 5) for i in range(6)] if len(losses) > 15 else [0]
    for start in marks:
        window = losses[start : start + 10]
        table.add_row(f"{start + 1} to {start + len(window)}", f"{sum(window) / len(window):.3f}")
    return table


def parity_table(
    losses: list[float], expected: list[float], parameters: dict[str, Tensor], reference: dict[str, Tensor]
) -> Table:
    table = Table("", "parallel", "one device", "difference", title=f"parity over the first {len(expected)} steps")
    for step in sorted({0, len(expected) // 2, len(expected) - 1}):
        a, b = losses[step], expected[step]
        table.add_row(f"loss at step {step + 1}", f"{a:.7f}", f"{b:.7f}", f"{abs(a - b):.1e}")
    table.add_row("largest difference of a loss", "", "", f"{worst(losses, expected):.1e}")
    if parameters:
        apart = sum((parameters[k].to(v) - v).square().sum() for k, v in reference.items())
        whole = sum(v.square().sum() for v in reference.values())
        table.add_row("all parameters, relative norm", "", "", f"{float((apart / whole).sqrt()):.1e}")
    return table


def stored(model: nn.Module, optimizer: Optimizer) -> tuple[int, int]:
    """Bytes of the parameters and of the optimizer state that this process holds."""
    state = [value for states in optimizer.state.values() for value in states.values() if isinstance(value, Tensor)]
    return sum(parameter.nbytes for parameter in model.parameters()), sum(value.nbytes for value in state)


def step_time(ends: list[float]) -> float:
    """The median; the first steps fill caches."""
    return statistics.median(end - start for start, end in pairwise(ends))


def cost_table(rank: tuple[int, int], single: tuple[int, int], step: float, single_step: float) -> Table:
    table = Table("", "a rank", "one device", "", title="memory and speed")
    for name, ours, theirs in zip(("parameters", "optimizer state"), rank, single, strict=True):
        table.add_row(name, f"{ours / 2**20:.2f} MiB", f"{theirs / 2**20:.2f} MiB", f"{ours / theirs:.0%}")
    speed = f"{single_step / step:.2f} x as fast"
    table.add_row("a step", f"{1e3 * step:.0f} ms", f"{1e3 * single_step:.0f} ms", speed)
    return table


def progress_bar(console: Console) -> Progress:
    loss = TextColumn("loss {task.fields[loss]:.3f}")
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), loss, TimeElapsedColumn(), console=console
    )


def pick_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="zero3=2", help="for example dp=2, tp=2, sp=2, zero3=2, dp=2,tp=2")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--compare", type=int, default=20, help="steps that are repeated on one device")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="how far a float32 loss may be from one device's")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
