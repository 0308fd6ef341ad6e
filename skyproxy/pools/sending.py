"""One payload to many processes: written once for this machine, sent to others at a time, or passed on among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyproxy.functions import Payload
    from skyproxy.functions.call import Call
    from skyproxy.functions.payload_file import PassedPayload, PayloadFile
    from skyproxy.node import Node

_AT_A_TIME = 16


def begin_on_all(
    members: Mapping[int, Node],
    payload: Payload,
    begin: Callable[[int, PayloadFile | PassedPayload | None], Call],
    calls: dict[int, Call],
    addresses: Mapping[int, str] | None = None,
) -> None:
    """Begin a call on each process.

    Args:
        members: the connections, by rank.
        payload: what they are sent.
        begin: begins it on one of them, which may read the payload in a file, or was passed it on.
        calls: gets the calls, by rank; those that were begun, where this raises.
        addresses: by which the processes reach one another, by rank; none where they should not.
    """
    file: PayloadFile | None = None
    if len(members) > 1 and any(node._runner.reads_files for node in members.values()):
        from skyproxy.functions.payload_file import PayloadFile

        file = PayloadFile.of(payload)
    # What takes long, and waits for others: bytes on a network, and the program's modules.
    far = [rank for rank, node in members.items() if not node._runner.shares_files]
    slow = [rank for rank in far if payload.is_large or members[rank]._runner.is_new]
    slow = slow if len(slow) > 1 else []
    try:
        for rank in members:
            if rank not in slow:
                calls[rank] = begin(rank, file)
        if slow and not (addresses and _pass_on(members, addresses, payload, slow, begin, calls)):
            _begin_at_once(slow, lambda rank: begin(rank, None), calls)
    finally:
        if file is not None:
            file.close_after(list(calls.values()))


def _pass_on(
    members: Mapping[int, Node],
    addresses: Mapping[int, str],
    payload: Payload,
    ranks: list[int],
    begin: Callable[[int, PassedPayload | None], Call],
    calls: dict[int, Call],
) -> bool:
    """Begin it on all of them, several of which pass the payload on; return False where they do not."""
    if not payload.is_large:
        return False
    from skyproxy.pools.relaying import Relaying

    relaying = Relaying(members, addresses, payload, ranks)
    if not relaying:
        return False
    relaying.run(begin, calls)
    return True


def _begin_at_once(ranks: list[int], begin: Callable[[int], Call], calls: dict[int, Call]) -> None:
    threads = ThreadPoolExecutor(min(len(ranks), _AT_A_TIME), "skyproxy-broadcast")
    begun = {rank: threads.submit(begin, rank) for rank in ranks}
    try:
        for rank, future in begun.items():
            calls[rank] = future.result()
    except BaseException:
        # Those that are being sent at this moment are cancelled as soon as they can be.
        for rank, future in begun.items():
            if rank not in calls and not future.cancel():
                future.add_done_callback(_cancel)
        raise
    finally:
        threads.shutdown(wait=False)


def _cancel(future: Future[Call]) -> None:
    if future.exception() is None:
        future.result().cancel()
