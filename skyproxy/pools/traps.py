"""Explanations for those who take a call for its value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

_BINARY = (
    ("add", "+"),
    ("sub", "-"),
    ("mul", "*"),
    ("truediv", "/"),
    ("floordiv", "//"),
    ("mod", "%"),
    ("pow", "**"),
    ("lshift", "<<"),
    ("or", "|"),
    ("xor", "^"),
)


class NotAValue:
    """A base for calls that have not run. They have no truth, no items and no sum, and say what to write instead."""

    @property
    def name(self) -> str:
        """For people."""
        raise NotImplementedError

    def _explain(self, attempt: str, instead: str) -> NoReturn:
        raise TypeError(f"{attempt}: {self.name} has not run yet, it has no value. {instead}")

    # Not for type checkers: without these, they report such a line before it runs.
    if not TYPE_CHECKING:

        def __reduce_ex__(self, protocol: object) -> NoReturn:
            self._explain("it was sent elsewhere", "Run it first, and pass its result: g(f() >> pool) >> pool")

        def __bool__(self) -> bool:
            self._explain("its truth value was used", "Run it first: if (f() >> pool): ...")

        def __iter__(self) -> NoReturn:
            self._explain("it was iterated over", "Run it first: for item in (f() >> pool): ...")

        def __getitem__(self, key: object) -> NoReturn:
            self._explain("it was indexed", "Run it first, in parentheses: (f() >> pool)[0]")

        def __await__(self) -> NoReturn:
            self._explain("it was awaited", "Say where it is to run: await (f() > pool)")

        def __lt__(self, other: object) -> NoReturn:
            self._explain(
                "`<`",
                "The pool goes on the right: f() > pool. Python reads `a > pool > b` as `(a > pool) and (pool > b)`: "
                "write one comparison per line.",
            )

        def __ge__(self, other: object) -> NoReturn:
            self._explain("`>=`", "Use `>>` for its result or `>` for a future.")

        def __le__(self, other: object) -> NoReturn:
            self._explain("`<=`", "Use `>>` for its result or `>` for a future.")

        def __rrshift__(self, other: object) -> NoReturn:
            self._explain(
                "`... >> f()`", "The pool goes on the right: f() >> pool. Results go in as arguments: f(x) >> pool"
            )

        def __rmatmul__(self, other: object) -> NoReturn:
            self._explain("`... @ f()`", "The pool goes on the right: f() @ pool")

        def __rand__(self, other: object) -> NoReturn:
            self._explain(
                f"`{type(other).__name__} & call`",
                "`>>` and `@` bind tighter than `&`: write (a() & b()) >> pool, with parentheses.",
            )


def _arithmetic(symbol: str) -> Any:
    def refuse(self: NotAValue, other: object) -> NoReturn:
        self._explain(
            f"`{symbol}`",
            f"Run it first, in parentheses, for `{symbol}` and `>>` bind otherwise: (f() >> pool) {symbol} 1",
        )

    return refuse


for _name, _symbol in _BINARY:
    for _side in ("", "r"):
        setattr(NotAValue, f"__{_side}{_name}__", _arithmetic(_symbol))
