"""A graph of PyTorch's compiler as a program for a worker: which ops, on which values, in what order.

A program is a list of `[overload, arguments, keywords]`; values are numbered, inputs first. Nothing is pickled: what
cannot be written this way raises `UnsupportedOpError`, and the graph is then run op by op.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
import torch.fx

from skyproxy import torch_codec
from skyproxy.errors import UnsupportedOpError
from skyproxy.tensor.core.devices import DEVICES, SkyDevice
from skyproxy.tensor.core.torch_private import OpOverload
from skyproxy.tensor.shapes.layers import NORMS
from skyproxy.torch_codec import ALLOWED_NAMESPACES, FORBIDDEN_OPS, GRAPH_FUNCTIONS

aten = torch.ops.aten
_FUNCTION_NAMES = {function: name for name, function in GRAPH_FUNCTIONS.items()}


@dataclass
class GraphProgram:
    """A program: what travels, and what the caller must know of it.

    Attributes:
        nodes: `[overload, arguments, keywords]` each.
        numbers: the number of each node's value.
        inputs: the placeholders.
        constants: tensors that the graph holds; they are inputs too, behind the placeholders.
        results: what the graph returns, as nodes, numbers or None.
        written: the placeholders whose tensors the graph changes.
        devices: the `sky` devices that it mentions.
    """

    nodes: list[object] = field(default_factory=list)
    numbers: dict[torch.fx.Node, int] = field(default_factory=dict)
    inputs: list[torch.fx.Node] = field(default_factory=list)
    constants: list[torch.Tensor] = field(default_factory=list)
    results: list[object] = field(default_factory=list)
    written: dict[torch.fx.Node, None] = field(default_factory=dict)
    devices: dict[int, SkyDevice] = field(default_factory=dict)


def value_of(node: torch.fx.Node) -> object:
    """Return what the compiler knows of a node's value: a fake tensor, a symbolic number, a tuple."""
    return node.meta.get("val", node.meta.get("example_value"))


def program_of(module: torch.fx.GraphModule) -> GraphProgram:
    """The program of a graph of ATen ops.

    Raises:
        UnsupportedOpError: the graph holds what no worker takes.
    """
    program = GraphProgram()
    graph = module.graph
    constants = [node for node in graph.nodes if node.op == "get_attr"]
    program.inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in (*program.inputs, *constants):
        program.numbers[node] = len(program.numbers)
        _note_device(program, value_of(node))
    for node in constants:
        value: object = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            raise UnsupportedOpError(f"a graph with a {type(value).__name__} inside cannot be sent to a worker")
        program.constants.append(value)
    for node in graph.nodes:
        if node.op == "call_function":
            program.nodes.append(_call(program, node))
            program.numbers[node] = len(program.numbers)
        elif node.op == "output":
            program.results = list(node.args[0]) if isinstance(node.args[0], list | tuple) else [node.args[0]]
        elif node.op not in ("placeholder", "get_attr"):
            raise UnsupportedOpError(f"a graph that calls {node.target} cannot be sent to a worker")
    return program


def _note_device(program: GraphProgram, value: object) -> None:
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, torch.Tensor) and item.device.type == "sky":
            device = DEVICES.of(item.device)
            program.devices[device.index] = device


def _call(program: GraphProgram, node: torch.fx.Node) -> list[object]:
    target = node.target
    if isinstance(target, OpOverload):
        name = target.name()
        _check(program, node, target)
    elif target in _FUNCTION_NAMES:
        name = _FUNCTION_NAMES[target]
    else:
        raise UnsupportedOpError(f"{target} cannot run on a worker as part of a graph")
    _note_device(program, value_of(node))
    return [
        name,
        [_argument(program, a) for a in node.args],
        {key: _argument(program, a) for key, a in node.kwargs.items() if key != "pin_memory"},
    ]


def _check(program: GraphProgram, node: torch.fx.Node, target: OpOverload) -> None:
    name = target.name()
    packet = name.partition(".")[0]
    if name.partition("::")[0] not in ALLOWED_NAMESPACES or packet in FORBIDDEN_OPS:
        raise UnsupportedOpError(f"{name} is not known to workers")
    if packet == "aten::_assert_scalar":
        raise UnsupportedOpError("sizes that depend on values are checked here")
    value = value_of(node)
    if (
        torch.Tag.nondeterministic_seeded in target.tags
        and isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
    ):
        raise UnsupportedOpError(f"{name} on the CPU draws from this machine's generator, not from a worker's")
    for i, argument in enumerate(target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        for changed in given if isinstance(given, list | tuple) else (given,):
            if isinstance(changed, torch.fx.Node) and changed.op != "call_function":
                if torch.Tag.inplace_view in target.tags:
                    raise UnsupportedOpError(f"{packet} changes what an input of the graph looks like")
                _note_change(program, changed)


def _note_change(program: GraphProgram, changed: torch.fx.Node) -> None:
    value = value_of(changed)
    if isinstance(value, torch.Tensor) and value.device.type != "sky":
        raise UnsupportedOpError("the graph changes a tensor of the CPU in place")
    program.written[changed] = None


def _argument(program: GraphProgram, value: object) -> list[object]:
    if isinstance(value, torch.device) and value.type == "sky":
        device = DEVICES.of(value)
        program.devices[device.index] = device
        value = device.worker_device
    if isinstance(value, list | tuple) and any(isinstance(item, torch.device) for item in value):
        raise UnsupportedOpError("a list of devices cannot be sent to a worker")
    return torch_codec.encode_graph_argument(
        value, lambda item: program.numbers[item] if isinstance(item, torch.fx.Node) else None
    )


# --- rewriting what the compiler wrote ------------------------------------------------------------------------------


def spell_in_aten(module: torch.fx.GraphModule) -> None:
    """Names ATen's conversion of dtypes where the compiler names its own.

    Dynamo makes a tensor of a number that varies (a learning rate, a temperature), and `prims::convert_element_type`
    gives it the dtype that the number would have had. `_to_copy` is the same copy, under a name that workers take.
    """
    for node in module.graph.nodes:
        if isinstance(node.target, OpOverload) and node.target.name() == "prims::convert_element_type":
            value, dtype = node.args
            node.target, node.args, node.kwargs = aten._to_copy.default, (value,), {"dtype": dtype}
    module.recompile()


def keep_precision_of_statistics(module: torch.fx.GraphModule) -> None:
    """Convert what norms note of inputs in half precision to the dtype that the trace has for it.

    Beside weights in float32 the CPU's kernels note float32, while what the compiler makes of them on a worker rounds
    it.
    """
    graph = module.graph
    for node in list(graph.nodes):
        source = node.args[0] if node.target is operator.getitem else None
        if not isinstance(source, torch.fx.Node) or node.args[1] not in (1, 2):
            continue
        if not isinstance(source.target, OpOverload) or source.target.overloadpacket.__name__ not in NORMS:
            continue
        images = value_of(source.args[0]) if isinstance(source.args[0], torch.fx.Node) else None
        noted = value_of(node)
        if isinstance(noted, torch.Tensor) and isinstance(images, torch.Tensor) and noted.dtype != images.dtype:
            with graph.inserting_after(node):
                kept = graph.call_function(aten._to_copy.default, (node,), {"dtype": noted.dtype})
            kept.meta.update(node.meta)
            node.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)
    module.recompile()


_IN_PLACE = {
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
}
_SLICES = {aten.slice_scatter.default: aten.slice.Tensor, aten.select_scatter.default: aten.select.int}


def write_in_place(module: torch.fx.GraphModule) -> None:
    """Undoes the compiler's copies where a part of an input is replaced: `cache[:, :, i] = k` writes one row again.

    The compiler makes every op free of side effects: the changed cache is a new tensor, copied back at the end. Where
    nobody looks at the old values in between, and the new tensor is not a result, the op can write straight away.
    """
    graph = module.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    for copy in [node for node in graph.nodes if node.target is aten.copy_.default]:
        target, source = copy.args[:2]
        if not isinstance(source, torch.fx.Node) or source.args[:1] != (target,) or not _fits(copy, order):
            continue
        if source.target in _IN_PLACE:
            source.target = _IN_PLACE[source.target]
        elif source.target in _SLICES:
            with graph.inserting_before(source):
                part = graph.call_function(_SLICES[source.target], (target, *source.args[2:]), dict(source.kwargs))
                graph.call_function(aten.copy_.default, (part, source.args[1]))
            source.replace_all_uses_with(target)
            graph.erase_node(copy)
            graph.erase_node(source)
            continue
        else:
            continue
        copy.replace_all_uses_with(target)
        graph.erase_node(copy)
    module.recompile()


def _fits(copy: torch.fx.Node, order: dict[torch.fx.Node, int]) -> bool:
    target, source = copy.args[:2]
    if not isinstance(target, torch.fx.Node) or target.op != "placeholder" or not isinstance(source, torch.fx.Node):
        return False
    old, new = value_of(target), value_of(source)
    if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
        return False
    if old.dtype is not new.dtype or old.shape != new.shape or old.device.type != "sky":
        return False
    if any(user.op == "output" for user in (*source.users, *copy.users)):
        return False
    # Once they are overwritten, nobody reads the old values, through any view.
    return all(user is copy or order.get(user, 1 << 60) <= order[source] for user in _readers(target))


def _readers(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The users of a node, and those of what may share its memory."""
    found: list[torch.fx.Node] = []
    for user in node.users:
        found.append(user)
        schema = getattr(user.target, "_schema", None)
        if schema is None or any(result.alias_info is not None for result in schema.returns):
            if user.op != "output":
                found += _readers(user)
        elif user.op == "call_function" and getattr(user.target, "namespace", "") == "aten":
            # Ops that may or may not copy: a reshape is a view where it can be.
            if user.target in (aten.reshape.default, aten._unsafe_view.default, aten.contiguous.default):
                found += _readers(user)
    return found
