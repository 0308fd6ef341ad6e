"""`generate` of transformers on a remote device: the next token is begun while news of the last one are on their way.

After every token, `generate` asks the device whether all sequences have ended: a wait of at least the network's delay.
transformers can read that answer a step late, and undo the step that was too many; it does so on `mps`. Here it is done
on `sky` devices, as many steps late as the delay takes. What `generate` returns, and the state of the random generator
afterwards, are what they would have been. Where a step cannot be undone (somebody watches it), every token is
waited for, as without this module.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from skyproxy import patching
from skyproxy.patching import When
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.generators import KeptRandomState
from skyproxy.tensor.ops.async_values import PendingTensor

_MOST_STEPS_AHEAD = 64
_OF_RECENT_STEPS = 0.25
"""The share of the last step in the estimate of a step's time."""
_global_hooks = torch.nn.modules.module.__dict__.get


@dataclass(slots=True)
class _Question:
    """A question of a forward that is answered with the news of its step.

    Attributes:
        name: which it is.
        answer: a truth value on the device.
        tell: called where it is true.
    """

    name: str
    answer: torch.Tensor
    tell: Callable[[], object]


@dataclass(slots=True)
class _Call:
    """One call of `_sample` whose steps leave no trace but in what it returns.

    Attributes:
        draws: whether its steps draw random numbers.
        positions: how many positions the model has; behind them a step may fail. None if nobody knows.
        undone: how many steps were too many; known when it ends.
        is_late: whether its steps' news are read late.
        question: what the forward of this step asked: a truth value on the device, and what to do where it is true.
        answered: names of questions that were true once, and are asked no more.
    """

    draws: bool
    positions: int | None
    undone: int = 0
    is_late: bool = False
    question: _Question | None = None
    answered: set[str] = field(default_factory=set)


_current: ContextVar[_Call | None] = ContextVar("skyproxy_generation", default=None)


@dataclass(slots=True)
class _Step:
    """A token whose news are on their way.

    Attributes:
        ended: whether all sequences have ended with it, and behind that the answer to its question, if it had one.
        question: what its forward asked.
        tokens: the tokens, if somebody wants to see them.
        random: the state of the generator behind it.
    """

    ended: PendingTensor
    question: _Question | None
    tokens: PendingTensor | None
    random: KeptRandomState | None


class _LateStopCheck:
    """The check that `_sample` asks after every token; it lets generation go on until it knows better.

    Args:
        input_ids: shape (sequences, tokens), on the remote device.
        max_length: tokens after which it ends in any case; None: no such number.
        cache: what `generate` leaves behind, if that is seen by anybody.
        streamer: is given every token, in order, as soon as it is here.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        max_length: int | None,
        cache: Any,
        cache_is_returned: bool,
        streamer: Any = None,
    ) -> None:
        call = _current.get()
        assert call is not None
        call.is_late = True
        self._device = DEVICES.of(input_ids.device)
        self._max_length = max_length
        self._cache = cache if cache_is_returned else None
        self._streamer = streamer
        self._call = call
        self._steps: deque[_Step] = deque()
        self._ended = False
        self._step_seconds = 0.0
        self._last_step_at = time.perf_counter()

    def __call__(self, unfinished_sequences: torch.Tensor, tokens: torch.Tensor, length: int) -> bool:
        """Return whether to stop; called after every token."""
        ended, question = unfinished_sequences.max() == 0, self._call.question
        self._call.question = None
        self._steps.append(
            _Step(
                PendingTensor(ended if question is None else torch.stack([ended, question.answer])),
                question,
                PendingTensor(tokens) if self._streamer is not None else None,
                KeptRandomState(self._device) if self._call.draws else None,
            )
        )
        while (
            self._steps
            and not self._ended
            and (len(self._steps) > self._steps_ahead(length) or self._steps[0].ended.done())
        ):
            self._take_news()
        now = time.perf_counter()
        self._step_seconds += _OF_RECENT_STEPS * (now - self._last_step_at - self._step_seconds)
        self._last_step_at = now
        return self._ended or (self._max_length is not None and length >= self._max_length)

    def _steps_ahead(self, length: int) -> int:
        """Return how many steps may be without news: as many as fit into a round trip, and one that the worker
        computes.
        """
        positions = self._call.positions
        if positions is not None and length >= positions:
            return 0
        delay = self._device.session.round_trip_seconds
        return min(1 + math.ceil(delay / max(self._step_seconds, 1e-5)), _MOST_STEPS_AHEAD)

    def _take_news(self) -> None:
        step = self._steps.popleft()
        ended, *answers = step.ended.result().view(-1).tolist()
        if step.question is not None and answers == [True] and step.question.name not in self._call.answered:
            self._call.answered.add(step.question.name)
            step.question.tell()
        if step.tokens is not None:
            self._streamer.put(step.tokens.result())
        if ended:
            self._ended = True
            if step.random is not None and self._steps:
                step.random.restore()

    def finish(self) -> int:
        """Wait for the news of all steps, undo what those that were too many left in the cache, and return their
        number.
        """
        while self._steps and not self._ended:
            self._take_news()
        too_many = self._call.undone = len(self._steps)
        self._steps.clear()
        if self._cache is not None and too_many:
            self._cache.crop(-too_many)
            for layer in self._cache.layers:
                layer.keys, layer.values = _in_own_memory(layer.keys), _in_own_memory(layer.values)
        return too_many


def ask_with_step(name: str, ask: Callable[[], torch.Tensor], tell: Callable[[], object]) -> bool:
    """Have a question of a forward answered with the news of its step; return False where nobody would read them.

    Args:
        name: which question it is; one that was true once is not asked again.
        ask: gives the answer, a truth value on the device.
        tell: called later where that is true, unless the step was one too many.
    """
    call = _current.get()
    if call is None or not call.is_late:
        return False
    if name not in call.answered and call.question is None:
        call.question = _Question(name, ask(), tell)
    return True


def _in_own_memory(cut: torch.Tensor) -> torch.Tensor:
    """Copy what was cut out of a larger tensor: row by row, without the memory of what is gone."""
    return cut.clone(memory_format=torch.contiguous_format)


def _may_be_undone(cache: object, is_returned: bool) -> bool:
    """Return whether the steps that were too many can be taken out of the cache again, or nobody sees it."""
    if cache is None or not is_returned:
        return True
    # Others forget what they had before a step, or write over it.
    return all(type(layer).__name__ == "DynamicLayer" for layer in getattr(cache, "layers", (None,)))


def _describe(model: Any, arguments: dict[str, Any]) -> _Call | None:
    """A call of `_sample`; None where a step that is too many would be seen."""
    watched = any(_global_hooks(name) for name in ("_global_forward_hooks", "_global_forward_pre_hooks")) or any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules()
    )
    names = ("logits_processor", "stopping_criteria")
    helpers = [type(item) for name in names for item in arguments.get(name) or ()]
    known = all(
        kind.__module__.startswith("transformers.") and kind.__name__ != "PrefixConstrainedLogitsProcessor"
        for kind in itertools.chain((type(model),), helpers)
    )
    options = arguments.get("generation_config")
    if watched or not known or options is None or arguments.get("synced_gpus"):
        return None
    config = model.config.get_text_config(decoder=True)
    return _Call(bool(options.do_sample), getattr(config, "max_position_embeddings", None))


def _keep_signature(sample: Callable[..., Any]) -> Callable[..., object]:
    @functools.wraps(sample)
    def described(self: object, input_ids: object, *args: object, **kwargs: object) -> object:
        remote = isinstance(input_ids, torch.Tensor) and input_ids.device.type == "sky" and not args
        call = _describe(self, kwargs) if remote else None
        token = _current.set(call)
        try:
            result = sample(self, input_ids, *args, **kwargs)
        finally:
            _current.reset(token)
        if call is not None and call.undone:
            if isinstance(result, torch.Tensor):
                return _in_own_memory(result)
            result.sequences = _in_own_memory(result.sequences)
        return result

    described._sky = True  # type: ignore[attr-defined]
    return described


def install(module: Any) -> None:
    """Completes `transformers.generation.utils`; a version that always reads its answer at once is left as it is."""
    plain: Any = getattr(module, "DeferredStopCheck", None)
    if plain is None or not hasattr(plain, "is_supported") or hasattr(module.GenerationMixin._sample, "_sky"):
        return

    class DeferredStopCheck(plain):  # type: ignore[misc]
        def __new__(cls, input_ids: torch.Tensor, *args: object, **kwargs: object) -> Any:
            kind: Any = _LateStopCheck if input_ids.device.type == "sky" else plain
            return kind(input_ids, *args, **kwargs)

        @staticmethod
        def is_supported(device: torch.device, cache: object, cache_is_returned: bool, is_assistant: bool) -> bool:
            if device.type != "sky":
                return bool(plain.is_supported(device, cache, cache_is_returned, is_assistant=is_assistant))
            return _current.get() is not None and not is_assistant and _may_be_undone(cache, cache_is_returned)

    why = "`generate` reads a few tokens late whether it is to stop, in place of one round trip a token"
    test = "tests/integrations/test_generate_ahead.py::test_steps_that_were_too_many_leave_no_trace"
    patching.replace(module, "DeferredStopCheck", DeferredStopCheck, why=why, test=test, when=When.TRANSFORMERS)
    patching.wrap(module.GenerationMixin, "_sample", _keep_signature, why=why, test=test, when=When.TRANSFORMERS)


__all__ = ["ask_with_step", "install"]
