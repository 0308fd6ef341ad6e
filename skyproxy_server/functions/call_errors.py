"""The errors that end functions, as their callers are told of them."""

from __future__ import annotations

from collections.abc import Sequence

from skyproxy.errors import RemoteFunctionError, add_note
from skyproxy.payloads.pickling import Pickled
from skyproxy_server.functions.full_disks import explain_full_disk
from skyproxy_server.functions.results import describe_error


class CallInterrupt(BaseException):
    """Raised inside a function that its caller has cancelled. Not an `Exception`, so that few functions catch it."""


def describe_failure(
    error: BaseException, name: str, folders: Sequence[str], plain: bool
) -> tuple[dict[str, object], Pickled | None]:
    """Return an error of a function as it travels, with what else is known of its cause.

    Whatever the error's own code does, its caller waits for this: where it takes no notes, say, words alone go.

    Args:
        error: the error.
        name: the function's name.
        folders: the program's folders, which functions import from.
        plain: whether the client wants plain data.

    Raises:
        CallInterrupt: the call was cancelled at this moment.
    """
    try:
        return _describe(error, name, folders, plain)
    except CallInterrupt:
        raise
    except BaseException as problem:
        text = f"{object.__repr__(error)}, which cannot be described: {object.__repr__(problem)}"
        return {"type": type(error).__name__, "message": text, "traceback": ""}, None


def _describe(
    error: BaseException, name: str, folders: Sequence[str], plain: bool
) -> tuple[dict[str, object], Pickled | None]:
    if isinstance(error, ModuleNotFoundError):
        add_note(
            error,
            f"The worker has no module {error.name}. Installed packages come from Image(pip=[...]), "
            f"modules of your own from the program's folders ({', '.join(folders) or 'none'}), or from those of "
            "Image(includes=[...]). Put the module's folder on sys.path of the program, or name it in includes; "
            "compiled modules and those in archives have to be installed on the worker.",
        )
    if full := explain_full_disk(error):
        add_note(error, full)
    if isinstance(error, SystemExit | KeyboardInterrupt):
        # Raised at the caller, these would end the program that waits there.
        did = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else "raised KeyboardInterrupt"
        text = (
            f"{name} {did} on the worker. That ends the function, and neither the worker nor this program. "
            "Return a value, or raise an exception."
        )
        error = RemoteFunctionError(text).with_traceback(error.__traceback__)
    elif isinstance(error, StopIteration | StopAsyncIteration | GeneratorExit):
        # Raised at the caller, these would end a loop there without a word; asyncio's futures cannot even hold them.
        text = (
            f"{name} raised {type(error).__name__} on the worker. Raised here, it would end a loop of whoever waits "
            "for the call. Catch it in the function, or give next() a default: next(items, None)."
        )
        error = RemoteFunctionError(text).with_traceback(error.__traceback__)
    words, pickled = describe_error(error, plain=plain)
    if pickled is not None:
        words.update(pickled.tables)
    return words, pickled
