"""Recurrent networks of CUDA workers by cuDNN, as PyTorch does on CUDA: all layers and steps are one operation.

PyTorch's C++ takes cuDNN for tensors that it knows to be CUDA's, and cells one step after the other for ours, which
round otherwise. What follows is what it does for the former (ATen/native/cudnn/RNN.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyproxy.tensor.core.devices import SkyDevice
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import function_transform_level

Tensor = torch.Tensor
aten = torch.ops.aten
MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""cuDNN's numbers for the kinds of networks."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def takes_cudnn(values: Tensor) -> bool:
    """Return whether PyTorch would compute a network over these values with cuDNN on their worker."""
    if type(values) is not RemoteTensor or not values._sky.device.row.get("cudnn"):
        return False
    usual = values.dtype in _DTYPES and values.numel() > 0 and torch.backends.cudnn.enabled
    return usual and function_transform_level() is None


def compute_network(
    mode: int,
    values: Tensor,
    hiddens: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
    batch_sizes: Sequence[int] = (),
) -> tuple[Tensor, ...]:
    """All layers: (T, N, I), (N, T, I) batch first or (rows, I) packed, to the outputs and the final hidden states.

    Args:
        mode: one of `MODES`.
        values: the sequences, remote.
        hiddens: the hidden state and, of an LSTM, the cells.
        params: the weights, as `nn.RNNBase` orders them.
        batch_sizes: the number of rows of each step of packed sequences; empty for others.
    """
    hx, cx = hiddens[0], hiddens[1] if len(hiddens) > 1 else None
    hidden_size, projected_size = hx.size(2), 0
    if cx is not None and cx.size(2) != hx.size(2):
        hidden_size, projected_size = cx.size(2), hx.size(2)
    device = values._sky.device  # type: ignore[attr-defined]  # they are remote
    width = (4 if has_biases else 2) + (projected_size > 0)
    # The worker brings the weights into cuDNN's order with each call: what they lie in is not one buffer there.
    output, hy, cy, _, _ = aten._cudnn_rnn.default(
        *(values, list(params), width, None, hx, cx, mode, hidden_size, projected_size, num_layers, batch_first),
        *(dropout, train, bidirectional, list(batch_sizes), _state_of_dropout(device, dropout, train)),
    )
    return (output, hy) if cx is None else (output, hy, cy)


def _state_of_dropout(device: SkyDevice, dropout: float, train: bool) -> Tensor | None:
    """Return the state that cuDNN draws from on a device, which its generator seeds once, and again once it is seeded.

    None for networks that draw nothing before any has drawn.
    """
    if train and dropout > 0 and device.dropout_state is None:
        place = device.torch_device
        with torch.no_grad():
            seed = int(torch.empty((), dtype=torch.int64, device=place).random_().item())
            make = aten._cudnn_init_dropout_state.default
            device.dropout_state = make(dropout, True, seed, dtype=torch.uint8, device=place)
    return device.dropout_state


__all__ = ["MODES", "compute_network", "takes_cudnn"]
