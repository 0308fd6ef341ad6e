"""Questions of functions on workers to this program: calls of its actors, whose handles they were sent.

Arguments and results are bytes here, and are read on workers only. What a worker says is not trusted beyond what its
handles allow: to call methods of those actors.
"""

from __future__ import annotations

import logging
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING, Any

from skyproxy.errors import ActorDiedError
from skyproxy.functions.payload import Payload
from skyproxy.payloads.sent_actors import SENT_HANDLES, pickled_error
from skyproxy.runtime.questions import answer_question

if TYPE_CHECKING:
    from skyproxy.functions.call import Call, ReceivedEvent
    from skyproxy.functions.waiting_calls import Submits

logger = logging.getLogger("skyproxy")


def pass_on(runner: Submits, call: Call, asked: ReceivedEvent) -> None:
    """Call the actor that a function asks for, and answer it when there is a result. Does not wait.

    Args:
        runner: of the worker that asks.
        call: the function that asks.
        asked: the method, and its arguments.
    """
    words: dict[str, Any] = asked.value
    answer = partial(_answer, runner, call, words["number"])
    try:
        handle = SENT_HANDLES.find(words["actor"])
        if handle is None:
            raise ActorDiedError(
                "this actor has ended: its pool was closed, or the program that made it is another one"
            )
        content = bytes(asked.pieces[0]) if asked.pieces else b""
        future = handle.__dict__["_sky_calls"].submit_for(handle, words["method"], content, words["asker"])
    except Exception as error:
        answer(pickled_error(error))
        return
    if not call.done():  # a stream is done when it has begun
        call.add_done_callback(lambda ended: future.cancel())
    future.add_done_callback(partial(_answer_with_result, answer))


def _answer_with_result(answer: partial[None], future: Future[bytes]) -> None:
    try:
        content = future.result()
    except CancelledError:
        content = pickled_error(ActorDiedError("this call of an actor was cancelled: the actor has ended"))
    except Exception as error:
        content = pickled_error(error)
    answer(content)


def _answer(runner: Submits, call: Call, number: int, content: bytes) -> None:

    if call.ahead.has_end or call.cancelled():
        return
    try:
        sent = runner.submit(Payload.of(answer_question, (call.id, number, content)), results="value", debug=False)
    except Exception as error:  # the worker is gone, and the function with it
        logger.debug("skyproxy: %s cannot be told what an actor answered: %s", call.name, error)
        return
    sent.add_done_callback(partial(_check_answered, call))


def _check_answered(call: Call, sent: Call) -> None:
    """End a function that waits for an answer which its worker did not take: else it would wait forever."""
    if sent.failure:
        logger.warning("skyproxy: %s was ended: its worker took no answer of an actor (%s)", call.name, sent.failure)
        call.cancel()
