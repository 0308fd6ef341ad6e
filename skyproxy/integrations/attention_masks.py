"""Attention masks of transformers whose values are asked for once, in place of once a token.

Before every forward transformers asks whether a mask hides anything: if not, attention needs none. A small mask that
was just uploaded answers by itself. In `generate` the masks of the tokens are the first one with ones behind it, so the
answer to the first is the answer to all. It is kept with the mask's storage, until something writes to that. The mask
of a token that sees all before it is made at once, without comparing positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, TypeGuard

import torch

from skyproxy import patching
from skyproxy.patching import When
from skyproxy.tensor.core.host_copies import sized_by, values_of
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import has_modes_or_transforms
from skyproxy.tensor.torch_api import dynamo

_CAUSAL = ["padding_mask", "q_length", "kv_length", "q_offset", "kv_offset", "local_attention_size"]
_BIDIRECTIONAL = ["padding_mask", "kv_length", "local_attention_size"]
_PREPARED = ["config", "inputs_embeds", "attention_mask"]
_UPDATED = ["self", "outputs", "model_kwargs"]
_MASKS = ("attention_mask", "decoder_attention_mask")
_WHY = "`generate` asks once whether a mask hides anything, in place of one round trip a token"
_TEST = "tests/integrations/test_attention_masks.py::test_a_mask_is_asked_for_once"
_MADE = ["batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask"]
_WHY_MADE = (
    "the mask of a token that sees all before it is made by one operation, in place of two dozen that compare positions"
)
_TEST_MADE = "tests/integrations/test_attention_masks.py::test_the_mask_of_one_token_takes_few_operations"
_ORIGIN = "the mask that this one was made of"
dynamo.trace_through(__file__)


class _Facts:
    """Knowledge of a mask's values, kept until something writes to its storage.

    Args:
        mask: whatever a program gives as a mask.
    """

    def __init__(self, mask: object) -> None:
        self._known: dict[object, object] | None = None
        if type(mask) is RemoteTensor and mask.layout is torch.strided:
            self._known = sized_by(mask._sky)
            self._look = (_Facts, mask._sky.meta)

    @property
    def hides_nothing(self) -> bool | None:
        """True if all of the mask is; None where that is not known."""
        answer = None if self._known is None else self._known.get(self._look)
        return answer if type(answer) is bool else None

    def ask(self, mask: RemoteTensor) -> None:
        """Wait for it where it is not known; where nobody notes who writes to the mask, leave it unknown."""
        if self._known is not None and self.hides_nothing is None:
            self.learn(bool(mask.all()))

    def learn(self, hides_nothing: bool | None) -> None:
        """Note it, for what it was made of as well."""
        if self._known is None or hides_nothing is None:
            return
        self._known[self._look] = hides_nothing
        origin = self._known.get(_ORIGIN)
        if type(origin) is _Facts:
            origin.learn(hides_nothing)

    def follow(self, origin: _Facts) -> None:
        """Note that this mask hides what another one does."""
        if self._known is None or self._known is origin._known:
            return
        if origin.hides_nothing is None:
            self._known[_ORIGIN] = origin
        else:
            self.learn(origin.hides_nothing)


def _prepare(plain: Callable[..., Sequence[object]]) -> Callable[..., object]:
    @wraps(plain)
    def prepare(config: object, inputs: object, attention_mask: object, *args: object, **kwargs: object) -> object:
        prepared = plain(config, inputs, attention_mask, *args, **kwargs)
        if torch.compiler.is_compiling():  # so that nothing else in here is traced
            return prepared
        if type(attention_mask) is RemoteTensor and attention_mask.dim() == 2:
            made, facts = prepared[1], _Facts(attention_mask)
            if facts.hides_nothing is None:
                values = values_of(attention_mask._sky)
                facts.learn(None if values is None else bool(values.all()))  # known where it was uploaded
            if type(made) is RemoteTensor and made.dtype is torch.bool and made.shape == attention_mask.shape:
                _Facts(made).follow(facts)
        return prepared

    return prepare


def _update(plain: Callable[..., Mapping[str, object]]) -> Callable[..., object]:
    @wraps(plain)
    def update(
        self: object, outputs: object, model_kwargs: dict[str, object], *args: object, **kwargs: object
    ) -> object:
        if torch.compiler.is_compiling():
            return plain(self, outputs, model_kwargs, *args, **kwargs)
        before = {name: model_kwargs.get(name) for name in _MASKS}
        updated = plain(self, outputs, model_kwargs, *args, **kwargs)
        for name, mask in before.items():
            longer = updated.get(name)
            if type(mask) is RemoteTensor and type(longer) is RemoteTensor and longer.shape[-1] > mask.shape[-1]:
                _Facts(longer).learn(_Facts(mask).hides_nothing)
        return updated

    return update


def _is_known_here(mask: object, is_traced: Callable[[object], bool]) -> TypeGuard[RemoteTensor]:
    return type(mask) is RemoteTensor and not is_traced(mask)


def _ignore_causal(plain: Callable[..., bool], is_traced: Callable[[object], bool]) -> Callable[..., object]:
    @wraps(plain)
    def ignore(
        padding_mask: torch.Tensor | None,
        q_length: int,
        kv_length: int,
        q_offset: object,
        kv_offset: object,
        local_attention_size: int | None = None,
    ) -> object:
        rest = q_length, kv_length, q_offset, kv_offset, local_attention_size
        if torch.compiler.is_compiling() or not _is_known_here(padding_mask, is_traced) or type(q_offset) is not int:
            return plain(padding_mask, *rest)
        facts, width = _Facts(padding_mask), padding_mask.shape[-1]
        is_whole = q_length == 1 or kv_length == q_length
        # Of a mask that is longer than the keys, its end decides; of the first one, perhaps its part for later tokens.
        decides = width <= kv_length and (q_offset != 0 or kv_length == q_length == width)
        has_window = local_attention_size is not None and kv_length >= local_attention_size
        if decides and is_whole and not has_window:
            facts.ask(padding_mask)
        if facts.hides_nothing and is_whole:
            return plain(None, *rest)
        return False if decides and facts.hides_nothing is False else plain(padding_mask, *rest)

    return ignore


def _ignore_bidirectional(plain: Callable[..., bool], is_traced: Callable[[object], bool]) -> Callable[..., object]:
    @wraps(plain)
    def ignore(padding_mask: torch.Tensor | None, kv_length: int, local_attention_size: int | None = None) -> object:
        if torch.compiler.is_compiling() or not _is_known_here(padding_mask, is_traced):
            return plain(padding_mask, kv_length, local_attention_size)
        facts = _Facts(padding_mask)
        if local_attention_size is None or kv_length < local_attention_size:
            facts.ask(padding_mask)
        if facts.hides_nothing is None:
            return plain(padding_mask, kv_length, local_attention_size)
        return facts.hides_nothing and plain(None, kv_length, local_attention_size)

    return ignore


def _make_causal(plain: Callable[..., object], causal: object) -> Callable[..., object]:
    @wraps(plain)
    def make(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        mask_function: object = causal,
        attention_mask: torch.Tensor | None = None,
        *args: object,
        **kwargs: object,
    ) -> object:
        device = kwargs.get("device")
        sees_all = (
            not torch.compiler.is_compiling()
            and mask_function is causal
            and attention_mask is None
            and q_length == 1
            and {type(kv_length), type(q_offset), type(kv_offset)} == {int}
            and kv_offset + kv_length <= q_offset + 1
            and not (args or kwargs.get("use_vmap") or kwargs.get("allow_is_bidirectional_skip"))
            and kwargs.get("allow_is_causal_skip") is False
            and not has_modes_or_transforms()
        )
        if sees_all and type(device) is torch.device and device.type == "sky":  # as what comparisons make would lie
            mask = torch.ones(1, 1, 1, kv_length, dtype=torch.bool, device=device)
            return mask.expand(batch_size, -1, 1, kv_length)
        given = batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask
        return plain(*given, *args, **kwargs)

    return make


def install(module: Any) -> None:
    """Complete `transformers.masking_utils`, which asks, or `transformers.generation.utils`, whose masks grow by ones.

    A version that does so in other ways is left as it is.
    """
    owner = getattr(module, "GenerationMixin", None)
    if owner is not None:
        _wrap(owner, "_update_model_kwargs_for_generation", _UPDATED, _update)
    is_traced = getattr(module, "is_tracing", None)
    if is_traced is not None:
        _wrap(module, "_preprocess_mask_arguments", _PREPARED, _prepare)
        _wrap(module, "_ignore_causal_mask_sdpa", _CAUSAL, partial(_ignore_causal, is_traced=is_traced))
        bidirectional = partial(_ignore_bidirectional, is_traced=is_traced)
        _wrap(module, "_ignore_bidirectional_mask_sdpa", _BIDIRECTIONAL, bidirectional)
        causal = getattr(module, "causal_mask_function", None)
        if causal is not None:
            make = partial(_make_causal, causal=causal)
            _wrap(module, "sdpa_mask", _MADE, make, why=_WHY_MADE, test=_TEST_MADE)


def _wrap(
    owner: object,
    name: str,
    parameters: list[str],
    make: Callable[..., object],
    why: str = _WHY,
    test: str = _TEST,
) -> None:
    function = vars(owner).get(name)
    if function is not None and list(inspect.signature(function).parameters)[: len(parameters)] == parameters:
        patching.wrap(owner, name, make, why=why, test=test, when=When.TRANSFORMERS)


__all__ = ["install"]
