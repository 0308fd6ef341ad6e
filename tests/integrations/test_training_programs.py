"""Training programs of many kinds, whole: losses and weights of the local CPU, and no wait that they do not ask for."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, rnn

Steps = Iterator[list[Any]]
PROGRAMS: dict[str, tuple[Callable[[str], Steps], int]] = {}


def program(waits: int) -> Callable[[Callable[[str], Steps]], Callable[[str], Steps]]:
    """Enter a program, which yields what each of its steps computed.

    Args:
        waits: how often its last step may wait for the worker.
    """

    def enter(function: Callable[[str], Steps]) -> Callable[[str], Steps]:
        PROGRAMS[function.__name__] = (function, waits)
        return function

    return enter


def _rows(device: str, count: int = 12, width: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, width, generator=generator)
    return x.to(device), torch.randint(0, 3, (count,), generator=generator).to(device)


def _net(device: str, inputs: int = 8, outputs: int = 3) -> nn.Module:
    """A small network; the seed is set after its weights are made, so that dropout draws the same on both sides."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Dropout(0.15), nn.Linear(16, outputs)).to(device)
    torch.manual_seed(7)
    return net


def _step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@program(waits=1)
def q_learning(device: str) -> Steps:
    net = _net(device, 4, 2)
    target = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    state, memory = torch.zeros(4), []
    for step in range(14):
        with torch.no_grad():
            action = int(net(state.to(device).unsqueeze(0)).argmax())
        following = state * 0.9 + torch.tensor([action, 1 - action, 0.1, step * 0.01])
        memory.append((state, action, -float(following.abs().sum()), following))
        state = following
        states, actions, rewards, followers = zip(*memory[-8:], strict=True)
        with torch.no_grad():
            wanted = torch.tensor(rewards, device=device) + 0.9 * target(torch.stack(followers).to(device)).amax(1)
        chosen = net(torch.stack(states).to(device)).gather(1, torch.tensor(actions, device=device)[:, None])
        loss = _step(optimizer, F.smooth_l1_loss(chosen.squeeze(1), wanted))
        for ours, theirs in zip(net.parameters(), target.parameters(), strict=True):
            theirs.data.mul_(0.95).add_(ours.data, alpha=0.05)
        yield [loss, *target.parameters()]


@program(waits=0)
def policy_optimization(device: str) -> Steps:
    policy = _net(device, 4)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    for _ in range(3):
        state = torch.zeros(5, 4, device=device)
        states, actions, chances, rewards = [], [], [], []
        for _ in range(6):
            with torch.no_grad():
                choice = torch.distributions.Categorical(logits=policy(state), validate_args=False)
                action = choice.sample()
            states.append(state)
            actions.append(action)
            chances.append(choice.log_prob(action))
            state = state * 0.9 + F.one_hot(action, 4).float() * 0.1
            rewards.append(-state.sum(1))
        gains = torch.stack(rewards).flip(0).cumsum(0).flip(0).flatten()
        for rows in torch.randperm(30, device=device).split(10):
            choice = torch.distributions.Categorical(logits=policy(torch.cat(states)[rows]), validate_args=False)
            ratio = (choice.log_prob(torch.cat(actions)[rows]) - torch.cat(chances)[rows]).exp()
            gain = gains[rows] - gains.mean()
            loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() - 0.01 * choice.entropy().mean()
            yield [_step(optimizer, loss)]


@program(waits=0)
def adversaries_with_gradient_penalty(device: str) -> Steps:
    maker, judge = _net(device, 4, 8), _net(device, 8, 1)
    makers, judges = (torch.optim.Adam(net.parameters(), 1e-3, betas=(0.0, 0.9)) for net in (maker, judge))
    real, _ = _rows(device)
    for _ in range(3):
        made = maker(torch.randn(12, 4, device=device))
        share = torch.rand(12, 1, device=device)
        between = (share * real + (1 - share) * made.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
        loss = judge(made.detach()).mean() - judge(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        yield [_step(judges, loss), _step(makers, -judge(made).mean())]


@program(waits=0)
def normed_adversaries_of_images(device: str) -> Steps:
    torch.manual_seed(0)
    judge = nn.Sequential(
        parametrizations.spectral_norm(nn.Conv2d(3, 8, 4, 2, 1)),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        parametrizations.spectral_norm(nn.Linear(128, 1)),
    ).to(device)
    images = torch.randn(4, 3, 8, 8).to(device)
    optimizer = torch.optim.Adam(judge.parameters())
    for _ in range(3):
        leaf = images.clone().requires_grad_()
        opinion = judge(leaf)
        (slope,) = torch.autograd.grad(opinion.sum(), leaf, create_graph=True)
        yield [_step(optimizer, F.softplus(-opinion).mean() + slope.square().sum((1, 2, 3)).mean())]


@program(waits=0)
def learning_to_learn(device: str) -> Steps:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    weights = dict(net.named_parameters())
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)

    def error(weights: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(functional_call(net, weights, (x,)), y)

    def adapted_error(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        changed = weights
        for _ in range(2):
            slopes = grad(error)(changed, x[:3], y[:3])
            changed = {name: weight - 0.1 * slopes[name] for name, weight in changed.items()}
        return error(changed, x[3:], y[3:])

    x = torch.randn(4, 6, 1).to(device)
    for _ in range(3):
        yield [_step(optimizer, vmap(adapted_error)(x, x.sin()).mean())]


@program(waits=0)
def variational_autoencoder(device: str) -> Steps:
    encoder, decoder = _net(device), nn.Linear(4, 8).to(device)
    torch.nn.init.ones_(decoder.weight)
    torch.nn.init.zeros_(decoder.bias)
    encoder.append(nn.Linear(3, 8).to(device))
    torch.nn.init.eye_(encoder[-1].weight)
    torch.nn.init.zeros_(encoder[-1].bias)
    torch.manual_seed(7)
    optimizer = torch.optim.RMSprop([*encoder.parameters(), *decoder.parameters()])
    x = _rows(device)[0].sigmoid()
    for _ in range(3):
        mean, spread = encoder(x).chunk(2, -1)
        guess = torch.distributions.Normal(mean, spread.exp(), validate_args=False)
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean), validate_args=False)
        distance = torch.distributions.kl_divergence(guess, prior).sum(-1)
        likeness = F.binary_cross_entropy_with_logits(decoder(guess.rsample()), x, reduction="none").sum(-1)
        yield [_step(optimizer, (distance + likeness).mean())]


@program(waits=0)
def flow_with_couplings(device: str) -> Steps:
    torch.manual_seed(0)
    nets = nn.ModuleList(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(3)).to(device)
    optimizer = torch.optim.Adamax(nets.parameters())
    data, _ = _rows(device)
    for _ in range(3):
        x, volume = data, torch.zeros(12, device=device)
        for number, net in enumerate(nets):
            kept, changed = x.chunk(2, -1) if number % 2 else x.flip(-1).chunk(2, -1)
            scale, shift = net(kept).chunk(2, -1)
            x = torch.cat([kept, changed * scale.tanh().exp() + shift], -1)
            volume = volume + scale.tanh().sum(-1)
        yield [_step(optimizer, (x.square().sum(-1) / 2 - volume).mean())]


@program(waits=0)
def differential_equation(device: str) -> Steps:
    torch.manual_seed(0)
    slope = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).to(device)
    optimizer = torch.optim.AdamW(slope.parameters(), 1e-2)
    x, _ = _rows(device)
    for _ in range(3):
        y = x
        for _ in range(5):
            first = slope(y)
            second = slope(y + 0.05 * first)
            third = slope(y + 0.05 * second)
            y = y + (first + 2 * second + 2 * third + slope(y + 0.1 * third)) / 60
        yield [_step(optimizer, (y - x.flip(1)).square().mean())]


@program(waits=0)
def physics(device: str) -> Steps:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    torch.manual_seed(7)
    for _ in range(3):
        points = torch.rand(16, 2, device=device, requires_grad=True)
        heat = net(points)
        (first,) = torch.autograd.grad(heat, points, torch.ones_like(heat), create_graph=True)
        (second,) = torch.autograd.grad(first[:, :1], points, torch.ones_like(heat), create_graph=True)
        flow = (first[:, 1:] - 0.1 * second[:, :1]).square().mean()
        yield [_step(optimizer, flow + (heat + torch.sin(math.pi * points[:, :1])).square().mean())]


@program(waits=0)
def contrasts(device: str) -> Steps:
    net = _net(device)
    optimizer = torch.optim.Adagrad(net.parameters(), 0.1)
    x, labels = _rows(device)
    for _ in range(3):
        one, other = F.normalize(net(x)), F.normalize(net(x + 0.1 * torch.randn_like(x)))
        loss = F.cross_entropy(one @ other.T / 0.1, torch.arange(12, device=device))
        same = (labels[:, None] == labels[None]).float().fill_diagonal_(0)
        yield [
            _step(optimizer, loss + F.triplet_margin_loss(one, other, one.roll(1, 0)) - (same * (one @ one.T)).mean())
        ]


@program(waits=1)
def translation_with_attention(device: str) -> Steps:
    torch.manual_seed(0)
    words, reader = nn.Embedding(20, 8), nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True, dropout=0.15)
    writer, look, speak = nn.LSTMCell(40, 16), nn.Linear(16, 32), nn.Linear(16, 20)
    parts = nn.ModuleList([words, reader, writer, look, speak]).to(device)
    optimizer = torch.optim.Adam(parts.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(7)
    for step in range(3):
        lengths = torch.tensor([[7, 5, 3], [2, 7, 4], [6, 1, 7]][step])
        texts = torch.randint(1, 20, (3, 7), generator=generator).to(device)
        wanted = torch.randint(1, 20, (3, 4), generator=generator).to(device)
        packed = rnn.pack_padded_sequence(words(texts), lengths, batch_first=True, enforce_sorted=False)
        read, _ = rnn.pad_packed_sequence(reader(packed)[0], batch_first=True)
        gaps = (torch.arange(7)[None] >= lengths[:, None]).to(device)
        state = torch.zeros(3, 16, device=device), torch.zeros(3, 16, device=device)
        word, loss = torch.ones(3, dtype=torch.int64, device=device), torch.zeros((), device=device)
        for place in range(4):
            weights = (read @ look(state[0])[..., None]).squeeze(-1).masked_fill(gaps, -math.inf).softmax(-1)
            state = writer(torch.cat([words(word), (weights[:, None] @ read).squeeze(1)], -1), state)
            scores = speak(state[0])
            loss = loss + F.cross_entropy(scores, wanted[:, place], label_smoothing=0.1)
            word = scores.argmax(-1) if place % 2 else wanted[:, place]
        yield [_step(optimizer, loss)]


@program(waits=0)
def random_field_of_labels(device: str) -> Steps:
    torch.manual_seed(0)
    moves, net = nn.Parameter(torch.randn(3, 3).to(device)), _net(device)
    optimizer = torch.optim.Adam([moves, *net.parameters()], 0.05)
    x, labels = (a.unflatten(0, (3, 4)) for a in _rows(device))
    for _ in range(3):
        scores = net(x)
        total, path = scores[:, 0], scores[:, 0]
        for place in range(1, 4):
            total = torch.logsumexp(total[:, :, None] + moves + scores[:, place, None], 1)
            path = (path[:, :, None] + moves).amax(1) + scores[:, place]
        chosen = scores.gather(2, labels[..., None]).sum((1, 2)) + moves[labels[:, :-1], labels[:, 1:]].sum(1)
        yield [_step(optimizer, (torch.logsumexp(total, 1) - chosen).mean()), path.argmax(1)]


@program(waits=0)
def segmentation_in_half_precision(device: str) -> Steps:
    torch.manual_seed(0)
    down = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.InstanceNorm2d(8, affine=True), nn.ReLU(inplace=True))
    deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, 1, 1), nn.GroupNorm(4, 16), nn.Dropout2d(0.15))
    net = nn.ModuleList([down, deep, nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(24, 2, 1)]).to(device)
    optimizer = torch.optim.Adam(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10)
    weights, generator = torch.tensor([0.3, 0.7], device=device), torch.Generator().manual_seed(1)
    torch.manual_seed(7)
    for step in range(6):
        layout = torch.channels_last if step > 1 else torch.contiguous_format
        net.to(memory_format=layout)
        images = torch.randn(1 + step % 2, 3, 16, 16, generator=generator).to(device, memory_format=layout)
        labels = torch.randint(0, 2, (1 + step % 2, 16, 16), generator=generator).to(device)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            shallow = net[0](images)
            scores = net[3](torch.cat([shallow, net[2](net[1](shallow))], 1))
            loss = F.cross_entropy(scores, labels, weight=weights)
        chances, truth = scores.float().softmax(1)[:, 1], (labels == 1).float()
        loss = loss + 1 - (2 * (chances * truth).sum() + 1) / (chances.sum() + truth.sum() + 1)
        yield [_step(optimizer, loss), scores.detach()]
        schedule.step()


@program(waits=1)
def vision_transformer_with_scaled_losses(device: str) -> Steps:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.15, "gelu", batch_first=True, norm_first=True)
    parts = [nn.Conv2d(3, 16, 4, 4), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 3)]
    net = nn.ModuleList(parts).to(device)
    kind = torch.device(device).type
    optimizer, scaler = torch.optim.AdamW(net.parameters(), 1e-3), torch.amp.GradScaler(kind)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(7)
    for step in range(4):
        images = torch.randn(1 + step % 2, 3, 16, 16, generator=generator).to(device)
        labels = torch.randint(0, 3, (1 + step % 2,), generator=generator).to(device)
        with torch.autocast(kind, torch.float16):
            patches = net[0](images).flatten(2).transpose(1, 2)
            loss = F.cross_entropy(net[2](net[1](patches)[:, 0]), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield [loss.detach(), norm, *(parameter.detach().clone() for parameter in net.parameters())]


@program(waits=0)
def distillation_with_averages(device: str) -> Steps:
    teacher, student = _net(device).eval(), _net(device)
    averaged = torch.optim.swa_utils.AveragedModel(
        student, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.Adadelta(student.parameters())
    x, labels = _rows(device)
    for _ in range(3):
        with torch.no_grad():
            known = F.softmax(teacher(x) / 2, -1)
        guess = student(x)
        near = F.kl_div(F.log_softmax(guess / 2, -1), known, reduction="batchmean")
        loss = _step(optimizer, 4 * near + F.cross_entropy(guess, labels))
        averaged.update_parameters(student)
        yield [loss, *averaged.parameters()]


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_program_gives_the_losses_and_weights_of_the_cpu(name: str, sky1: str) -> None:
    run, waits = PROGRAMS[name]
    expected = [[value.detach().clone() for value in step] for step in run("cpu")]
    found, counts = [], [torch.sky.stats()["round_trips"]]
    for step in run(sky1):
        counts.append(torch.sky.stats()["round_trips"])
        found.append([value.detach().clone() for value in step])
    assert counts[-1] - counts[-2] <= waits
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a.dtype, a.stride()) == (b.dtype, b.stride())
            assert torch.equal(a.cpu(), b)
