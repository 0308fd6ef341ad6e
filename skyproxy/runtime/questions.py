"""The functions of a worker process that wait for answers of their callers, and the function that callers answer by."""

from __future__ import annotations

import threading
from collections.abc import Callable

from skyproxy.runtime.calls import current_call

Answer = Callable[[int, bytes], None]
_lock = threading.Lock()
_asking: dict[tuple[str, str], Answer] = {}


def begin_to_ask(session: str, identity: str, answer: Answer) -> None:
    """A call of a session has asked something: `answer` takes the number of a question, and what is answered."""
    with _lock:
        _asking[session, identity] = answer


def end_questions(session: str, identity: str) -> None:
    """A call has ended; it is not an error if it never asked."""
    with _lock:
        _asking.pop((session, identity), None)


def answer_question(identity: str, number: int, content: bytes) -> None:
    """Take the answer to a question of a call of the session; drop one that comes too late. Clients call it."""
    call = current_call()
    with _lock:
        answer = _asking.get((call.session if call is not None else "", identity))
    if answer is not None:
        answer(number, content)
