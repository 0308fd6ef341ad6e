"""Entries of the cache of shapes: of an op on arguments that look a certain way, its results and number on the wire."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from skyproxy.protocol import commands
from skyproxy.tensor.core.metadata import Meta
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.dispatch.op_info import TENSORS
from skyproxy.tensor.shapes.rules import TARGET, Look, RuleAnswer

if TYPE_CHECKING:
    from skyproxy.tensor.dispatch.binding import BoundCall


@dataclass(slots=True)
class Output:
    """One result of an op. Exactly one of the fields says what it is; with none of them, it is `value`.

    Attributes:
        meta: a fresh tensor that looks like this.
        shares: with `meta`: the argument (by its number among the tensors) whose storage it shares.
        items: a list of fresh tensors, each with what it shares.
        argument: the argument of this name, which the op changed.
        tensor: the argument with this number among the tensors: the op handed it back.
        value: a plain value, or None.
    """

    meta: Meta | None = None
    shares: int | None = None
    items: list[tuple[Meta, int | None]] | None = None
    argument: str | None = None
    tensor: int | None = None
    value: object = None

    @property
    def template(self) -> str:
        if self.meta is not None:
            return commands.NEW
        return commands.NEW_LIST if self.items is not None else commands.IGNORED


_NEW = (commands.NEW,)
_NEW_LIST = (commands.NEW_LIST,)
_IGNORED = (commands.IGNORED,)
_FIRST = (Output(tensor=0),)


class Entry:
    """The results of one op on arguments that look a certain way.

    What the fast path handles has fields of its own in place of an `Output`: there may be tens of thousands of entries,
    and the garbage collector looks at each object in them.

    Attributes:
        outputs: its results.
        changed: which tensors (by number) look otherwise afterwards, and how.
        number: the op's number on the wire.
        simple: whether the fast path may handle it: one fresh plain tensor, or the first argument itself.
        meta: in the simple case, what the fresh tensor looks like; None if the first argument is the result.
        several: for the fast path, the looks of the results, if these are several fresh plain tensors; a look that is
            None stands for a result that is None.
        listed: for the fast path, the looks of the fresh plain tensors in the list that is the one result.
        nothing: whether there is no result at all, for the fast path.
        targets: for the fast path, the names of the results, if these are arguments that are given by name and keep
            their looks, as those of `out=`.
        shares_first: for the fast path, whether a fresh tensor shares the first tensor's storage.
        output_templates: how each result is kept, see `protocol.commands`.
        is_guessed: whether kernels without values told of it, which let pass much that others refuse.
        may_overlap: whether the fast path looks where the memory of its tensors lies, see `overlaps`, before it takes
            what would else be `simple` or `nothing`, or has `targets`.
        made: what the fresh tensors look like, then those that were written; the worker checks it the first time.
    """

    __slots__ = (
        "_made",
        "_outputs",
        "changed",
        "is_guessed",
        "listed",
        "may_overlap",
        "meta",
        "nothing",
        "number",
        "output_templates",
        "several",
        "shares_first",
        "simple",
        "targets",
    )

    def __init__(self, outputs: Sequence[Output] | None, changed: Sequence[tuple[int, Meta]] = ()) -> None:
        self._outputs = outputs
        self._made: Sequence[Meta] | None = ()
        self.changed = changed
        self.number = 0
        self.simple = self.nothing = self.shares_first = self.is_guessed = self.may_overlap = False
        self.meta: Meta | None = None
        self.several: Sequence[Look] | None = None
        self.listed: list[tuple[Meta, int | None]] | None = None
        self.targets: Sequence[str] = ()
        self.output_templates: Sequence[str] = ()

    @property
    def outputs(self) -> Sequence[Output]:
        if self._outputs is not None:
            return self._outputs
        if self.listed is not None:
            return (Output(items=self.listed),)
        if self.several is not None:
            return [Output(meta, shares) for meta, shares in self.several]
        if self.targets:
            return [Output(argument=name) for name in self.targets]
        return (Output(self.meta, 0 if self.shares_first else None),)

    @property
    def made(self) -> Sequence[Meta]:
        found = self._made
        return (self.meta,) if found is None else found  # type: ignore[return-value]  # it is simple

    @staticmethod
    def of_rule(found: RuleAnswer, *, has_tensors: bool = True) -> Entry:
        """Make an entry of what a shape rule tells of an op.

        Args:
            found: what the rule answered; a look that is None stands for a result that is None.
            has_tensors: whether there are tensors among the arguments.
        """
        if found is TARGET:
            entry = Entry(_FIRST)
            entry.simple, entry.output_templates = True, _IGNORED
            return entry
        if len(found) == 1 and type(found[0]) is tuple:  # the usual case
            only, shares = found[0]
            if only is not None:
                if has_tensors and only.plain and not shares:
                    entry = Entry(None)
                    entry.simple, entry.meta, entry.shares_first = True, only, shares == 0
                    entry._made = None
                else:
                    entry = Entry((Output(only, shares),))
                    entry._made = (only,)
                entry.output_templates = _NEW
                return entry
        if not found:
            entry = Entry(())
            entry.nothing = True
            return entry
        made: list[Meta] = []
        if len(found) > 1 and any(type(look) is list for look in found):  # a list beside others: not for the fast path
            outputs = [Output(items=look) if type(look) is list else Output(*look) for look in found]
            entry = Entry(outputs)
            for output in outputs:
                made += [meta for meta, _ in output.items or ((output.meta, None),) if meta is not None]
            entry._made, entry.output_templates = made, tuple([output.template for output in outputs])
            return entry
        entry = Entry(None)
        listed = found[0] if type(found[0]) is list else None
        looks: Sequence[Look] = found if listed is None else listed  # type: ignore[assignment]  # no list, or it alone
        for meta, shares in looks:
            if meta is None:
                continue
            made.append(meta)
            if shares or not meta.plain:
                has_tensors = False
            elif shares is not None:
                entry.shares_first = True
        entry._made = made
        if listed is not None:
            entry.listed, entry.output_templates = listed, _NEW_LIST
        else:
            entry.several = looks
            entry.output_templates = (
                _NEW * len(made)
                if len(made) == len(looks)
                else tuple([commands.IGNORED if meta is None else commands.NEW for meta, _ in looks])
            )
        if not (has_tensors and (listed is not None or len(looks) > 1)):  # not for the fast path
            entry._outputs, entry.listed, entry.several = entry.outputs, None, None
            entry.shares_first = False
        return entry

    @staticmethod
    def of_targets(names: Sequence[str], looks: Sequence[Meta]) -> Entry:
        """Make an entry of an op whose results are its arguments of these names, which keep their looks."""
        entry = Entry(None)
        entry.targets, entry._made, entry.output_templates = names, looks, _IGNORED * len(names)
        return entry

    @staticmethod
    def of_change(output: Output, meta: Meta) -> Entry:
        """Make an entry of an op whose one result is its first tensor, which then looks like `meta`."""
        entry = Entry((output,), [(0, meta)])
        entry.output_templates, entry._made = _IGNORED, (meta,)
        return entry

    def guard(self) -> None:
        """Have the fast path look where the memory of its tensors lies, each time."""
        if (self.simple and self.meta is None) or self.nothing:
            self.simple, self.nothing, self.may_overlap = False, False, True
        elif self.targets:
            self.may_overlap = True

    def settle(self, call: BoundCall) -> Entry:
        """Fills in what follows from outputs and changes."""
        self.output_templates = tuple([output.template for output in self.outputs])
        made: list[Meta] = []
        for output in self.outputs:
            if output.meta is not None:
                made.append(output.meta)
            elif output.items is not None:
                made += [meta for meta, _ in output.items]
        looks = dict(self.changed)
        self._made = [*made, *(looks.get(i, call.tensors[i]._sky.meta) for i in written_tensors(call))]
        quiet = not self.changed and not call.info.synchronizes and not gives_parts(call)
        self.nothing = quiet and not self.outputs
        names = [output.argument for output in self.outputs]
        if quiet and names and all(name in call.kwargs for name in names):
            self.targets = call.info.returns  # type: ignore[assignment]  # none of them is None
        if (
            quiet
            and len(self.outputs) > 1
            and all(
                output.meta is not None and output.meta.plain and output.shares in (None, 0) for output in self.outputs
            )
        ):
            self.several = [(output.meta, output.shares) for output in self.outputs]
            self.shares_first = any(output.shares == 0 for output in self.outputs)
        if quiet and len(self.outputs) == 1 and call.tensors:
            output = self.outputs[0]
            if output.meta is not None and output.meta.plain and output.shares in (None, 0):
                self.simple, self.meta, self.shares_first = True, output.meta, output.shares == 0
                if len(self._made) == 1:
                    self._outputs = self._made = None  # they follow from these
            elif output.items is not None and all(m.plain and shares in (None, 0) for m, shares in output.items):
                self.listed, self.shares_first = output.items, any(shares == 0 for _, shares in output.items)
            elif output.argument is not None and output.argument == call.info.names[0]:
                self.simple = bool(call.args) and type(call.args[0]) is RemoteTensor
        return self


def gives_parts(call: BoundCall) -> bool:
    """Return whether the results are parts of a sparse tensor: each time other tensors on the same memory."""
    return call.info.is_view and any(tensor._sky.meta.layout is not torch.strided for tensor in call.tensors)


def expectation(entry: Entry, key: Iterable[object]) -> list[object]:
    """The operand of EXPECT: what the results should look like, and the tensors that they were inferred from.

    Args:
        key: what `entry` is kept under, or the `Meta`s of the call's tensors.
    """
    made = entry._made
    described: list[object] = [entry.meta.encoded] if made is None else [meta.encoded for meta in made]  # type: ignore[union-attr]
    for part in key:
        kind = type(part)
        if kind is Meta:
            described.append(part.encoded)  # type: ignore[attr-defined]
        elif kind is tuple:
            described += [meta.encoded for meta in part if type(meta) is Meta]  # type: ignore[attr-defined]
    return described


def written_tensors(call: BoundCall) -> list[int]:
    """The numbers, among the call's tensors, of those that the op changes, in the worker's order."""
    return numbers_of(call, call.info.writes)


def numbers_of(call: BoundCall, arguments: Collection[str]) -> list[int]:
    """The numbers, among the call's tensors, of those in the arguments of these names, in order."""
    found: list[int] = []
    if not arguments:
        return found
    number = 0
    for name, a in (*zip(call.info.names, call.args, strict=False), *call.kwargs.items()):
        if type(a) is RemoteTensor:
            count = 1
        elif isinstance(a, list | tuple) and call.info.keyword_kinds[name] == TENSORS:
            count = sum(item is not None for item in a)
        else:
            continue
        if name in arguments:
            found += range(number, number + count)
        number += count
    return found


__all__ = ["Entry", "Output", "expectation", "gives_parts", "numbers_of", "written_tensors"]
