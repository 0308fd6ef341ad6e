"""Questions to workers that may take long: they go on by themselves, while others are looked after."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from skyproxy_operator.causes import Cause
from skyproxy_operator.compute_spec import ComputeSpec
from skyproxy_operator.probing import TOKEN_REFUSED, ProbeCredentials, Prober
from skyproxy_operator.reaping import Report

Addresses = Sequence[tuple[str, int]]

_PATIENCE_SECONDS = 0.25
"""A worker in the same cluster answers sooner than that; who takes longer must not keep others from a look."""


@dataclass(frozen=True)
class _Question:
    addresses: Addresses
    access: ProbeCredentials
    asking: asyncio.Task[list[Report]]


class Questions:
    """The questions to the workers of Computes, one at a time for each."""

    def __init__(self, prober: Prober, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        self._prober = prober
        self._patience_seconds = patience_seconds
        self._open: dict[str, _Question] = {}

    async def ask(
        self, uid: str, addresses: Addresses, access: ProbeCredentials, answered: Callable[[], None]
    ) -> list[Report] | None:
        """The reports of a Compute's processes; None where they take longer, and the same question gives them later.

        Args:
            uid: of the Compute.
            addresses: host and port of each process.
            access: how they are reached.
            answered: called when the reports are there after all.
        """
        question = self._open.get(uid)
        if question is not None and (question.addresses, question.access) != (addresses, access):
            # What others said at these places, or to another token, says nothing about those that are asked now.
            self.forget(uid)
            question = None
        is_new = question is None
        if question is None:
            question = _Question(addresses, access, asyncio.ensure_future(self._prober.ask(addresses, access)))
            self._open[uid] = question
        await asyncio.wait({question.asking}, timeout=self._patience_seconds if is_new else 0)
        if not question.asking.done():
            if is_new:
                question.asking.add_done_callback(lambda task: None if task.cancelled() else answered())
            return None
        del self._open[uid]
        return question.asking.result()

    def forget(self, uid: str) -> None:
        """Give up what a Compute is being asked."""
        question = self._open.pop(uid, None)
        if question is not None:
            question.asking.cancel()

    async def close(self) -> None:
        """Give up all questions."""
        tasks = [question.asking for question in self._open.values()]
        for uid in list(self._open):
            self.forget(uid)
        await asyncio.gather(*tasks, return_exceptions=True)


def should_answer(spec: ComputeSpec, compute: dict[str, Any]) -> bool:
    """Return whether a worker that cannot be asked is worth a word: a command of the user's own need not be one of
    ours.
    """
    ever_did = "worker" in (compute.get("status") or {})
    looks = spec.idle_timeout_seconds is not None or spec.suspend_after_seconds is not None
    return not spec.command or ever_did or looks


def silence_cause(spec: ComputeSpec, silence: Report) -> Cause:
    """Return why a worker that takes sessions does not tell what it does."""
    text = f"A worker does not report whether it is idle: {silence.problem}."
    if silence.reason == TOKEN_REFUSED:
        text += " It does not accept the token of its Secret."
    if silence.reason:
        text += " A replaced Secret reaches it within two minutes; after that, see its log."
    if spec.idle_timeout_seconds is not None:
        text += " idleTimeout has no effect meanwhile."
    if spec.suspend_after_seconds is not None:
        text += " suspendAfter has no effect meanwhile."
    return Cause(silence.reason or "ActivityUnknown", text, actionable=True)
