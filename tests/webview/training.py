"""A program with a web view: it trains, fails once, is profiled, has a job and a pool, then waits for lines."""

from __future__ import annotations

import sys

import torch

import skyproxy


@skyproxy.function
def square(x: int) -> int:
    return x * x


def count() -> None:
    print("one", "two", sep="\n")


def main() -> None:
    with skyproxy.ui() as view:
        print(view.link(), flush=True)
        x, y = torch.randn(256, 64, device="sky:0"), torch.randn(256, 1, device="sky:0")
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).to("sky:0")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def train(steps: int) -> None:
            for _ in range(steps):
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
            torch.sky.synchronize()

        train(20)
        with skyproxy.profile():
            train(3)
        try:
            x[torch.tensor([999], device="sky:0") + 0].sum().item()  # MARK
        except IndexError:
            pass
        job = skyproxy.list_nodes()[0].submit_job(count, name="counting")
        job.wait()
        with skyproxy.Compute(provider=skyproxy.Local(), nodes=2, name="squares", progress=False) as pool:
            assert (square(3) >> pool) == 9
            print("ready", flush=True)
            for _ in iter(sys.stdin.readline, ""):  # a line is a wish for more
                train(20)
                print("trained", flush=True)


if __name__ == "__main__":
    main()
