"""Facts about an op, known before it is called: how its arguments travel, what it writes, who handles it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from skyproxy.tensor.core.torch_private import OpOverload, has_kernel, op_names_with_kernel
from skyproxy.tensor.dispatch import tried_ops
from skyproxy.tensor.shapes.on_cuda import CUDA_RULES
from skyproxy.tensor.shapes.rules import Rule
from skyproxy.tensor.shapes.sparse import RULES
from skyproxy.torch_codec import ALLOWED_NAMESPACES, CHANGES_UNSAID, FORBIDDEN_OPS, bare_type, shapes_results

# How an argument travels, and what of it counts for the shape of the result.
TENSOR = 0
"""A tensor, or a number in its place."""
TENSORS = 1
"""A list of tensors."""
SCALAR = 2
"""A number whose type counts, but whose value does not."""
NUMBER = 3
"""A number, or a list of numbers, whose value counts: sizes, dimensions, bounds."""
FIXED = 4
"""Part of the op's signature: flags, names, dtypes, layouts, devices."""
GENERATOR = 5
"""A random generator."""

FIXED_TYPES = frozenset({torch.dtype, torch.layout, torch.memory_format, torch.device, str})
"""Values that are part of a signature wherever they stand: a schema calls dtypes and layouts "int"."""

_KINDS = {
    "Tensor": TENSOR,
    "Tensor[]": TENSORS,
    "List[Tensor]": TENSORS,
    "List[Optional[Tensor]]": TENSORS,
    "number": SCALAR,
    "float": SCALAR,
    "complex": SCALAR,
    "List[number]": SCALAR,
    "Generator": GENERATOR,
}
_INDEXING = frozenset(
    {
        "aten::index",
        "aten::_unsafe_index",
        "aten::index_put",
        "aten::index_put_",
        "aten::_index_put_impl_",
        "aten::_unsafe_index_put",
    }
)

UNDECOMPOSED = frozenset(
    f"aten::{name}"
    for name in (
        "_validate_sparse_coo_tensor_args",
        "conv1d",
        "conv2d",
        "conv3d",
        "cross_entropy_loss",
        "group_norm",
        "layer_norm",
        "linear",
        "log_softmax",
        "matmul",
        "max_pool1d",
        "max_pool2d",
        "one_hot",
        "rms_norm",
        "softmax",
    )
)
"""Composites that the worker takes as one op. In inference mode PyTorch hands composites over undivided; the others
are divided here, because some of them look at devices, values or flags that only this side has."""

_PRODUCTS = "addbmm addmm addmv baddbmm bmm convolution dot linear matmul mm mv vdot"
_OF_ONE_DTYPE = frozenset("aten::" + name for name in _PRODUCTS.split())
"""Ops whose kernels refuse operands of several dtypes, which PyTorch's kernels without values let pass."""
_NOT_WAITED_FOR = frozenset({"aten::_assert_async"})
_FAKED_WRONGLY = frozenset(
    {
        "aten::_cudnn_init_dropout_state",
        "aten::_cudnn_rnn",
        "aten::_embedding_bag",
        "aten::_embedding_bag_forward_only",
        "aten::_grouped_mm",
        "aten::_linalg_solve_ex",
        "aten::_log_softmax",
        "aten::_log_softmax_backward_data",
        "aten::_prelu_kernel_backward",
        "aten::_softmax",
        "aten::_softmax_backward_data",
        "aten::block_diag",
        "aten::fractional_max_pool3d",
        "aten::histc",
        "aten::linspace",
        "aten::logspace",
        "aten::max_unpool2d",
        "aten::max_unpool3d",
        "aten::mkldnn_rnn_layer",
        "aten::mkldnn_rnn_layer_backward",
        "aten::multi_margin_loss",
        "aten::multilabel_margin_loss_forward",
        "aten::randint",
        "aten::randint_like",
        "aten::randperm",
        "aten::segment_reduce",
    }
)
"""Ops whose fake kernels give results of other sizes, strides or dtypes than real ones, refuse what those take, or take
what those refuse."""
_WITH_STATISTICS = frozenset(
    {
        "aten::_fused_rms_norm",
        "aten::_native_batch_norm_legit",
        "aten::_batch_norm_no_update",
        "aten::_batch_norm_with_update",
        "aten::_native_batch_norm_legit_no_training",
        "aten::_weight_norm_interface",
        "aten::group_norm",
        "aten::layer_norm",
        "aten::native_batch_norm",
        "aten::native_group_norm",
        "aten::native_group_norm_backward",
        "aten::native_layer_norm",
    }
)
"""Ops that give or take statistics of their input: of half precision, in which dtype depends on the device."""
_SIZED_BY_KIND = frozenset(
    {
        "aten::_batch_norm_no_update",
        "aten::_batch_norm_with_update",
        "aten::_embedding_bag",
        "aten::_embedding_bag_forward_only",
        "aten::_fft_c2r",
        "aten::_fft_r2c",
        "aten::_linalg_svd",
        "aten::_native_batch_norm_legit",
        "aten::_native_batch_norm_legit_no_training",
        "aten::group_norm",
        "aten::linalg_eig",
        "aten::log_sigmoid_forward",
        "aten::native_batch_norm",
        "aten::nonzero_static",
    }
)
"""Ops whose results look otherwise on CUDA: what kernels note for derivatives is empty on one of the two, singular
vectors are conjugates, and eigenvectors, transforms, norms of groups and positions lie otherwise in memory."""
_LOOK_AT_DEVICES_NAMES = (
    "_batch_norm_no_update _batch_norm_with_update _embedding_bag _embedding_bag_forward_only _fft_c2c _fft_c2r "
    "_fft_r2c _fused_rms_norm _linalg_svd _native_batch_norm_legit _native_batch_norm_legit_no_training "
    "_native_multi_head_attention _scaled_dot_product_flash_attention _to_copy _weight_int4pack_mm "
    "batch_norm_backward channel_shuffle convolution convolution_backward linalg_eig log_sigmoid_forward median mode "
    "nanmedian native_batch_norm native_batch_norm_backward native_group_norm native_layer_norm nonzero_static "
    "pixel_shuffle pixel_unshuffle replication_pad2d upsample_nearest2d _upsample_nearest_exact2d"
)
_LOOK_AT_DEVICES = frozenset("aten::" + name for name in _LOOK_AT_DEVICES_NAMES.split())
"""Ops whose kernels for tensors without values ask for the device, or take meta tensors for those of CUDA."""
_FOLLOWED_IN_PLACE = (
    "add_.Tensor add_.Scalar sub_.Tensor sub_.Scalar mul_.Tensor mul_.Scalar fill_.Scalar fill_.Tensor zero_ copy_ "
    "_foreach_add_.Scalar _foreach_add_.List _foreach_add_.Tensor _foreach_add_.ScalarList _foreach_sub_.Scalar "
    "_foreach_mul_.Scalar _foreach_mul_.ScalarList _foreach_mul_.List _foreach_copy_ _foreach_zero_"
)
_FOLLOWED_FRESH = (
    "clone _to_copy zeros ones full add.Tensor sub.Tensor rsub.Scalar mul.Tensor neg abs ceil floor "
    "trunc maximum minimum logical_not logical_and logical_or eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor "
    "ge.Tensor eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar div.Tensor div.Tensor_mode floor_divide "
    "remainder.Scalar reciprocal sqrt"
)
_FOLLOWED = frozenset("aten::" + name for name in (*_FOLLOWED_IN_PLACE.split(), *_FOLLOWED_FRESH.split()))
"""Operations whose results are known where their operands are: never a view, and exact, see `known_results`."""
_DERIVED_NAMES = (
    "arange arange.start arange.start_step ones zeros add.Tensor sub.Tensor rsub.Scalar mul.Tensor eq.Tensor "
    "ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar "
    "logical_and logical_not logical_or bitwise_and.Tensor bitwise_not bitwise_or.Tensor all all.dim any any.dim cat "
    "clone _to_copy cumsum index.Tensor"
)
_DERIVED = frozenset("aten::" + name for name in _DERIVED_NAMES.split())
"""Operations whose fresh results of whole numbers can be computed here, see `derived_copies`: exact on every device.

Without `full`: `generate` makes two a token, and nobody asks for what follows from them."""
_DYNAMIC = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})

_TAKE_WHOLE_NUMBERS = (
    "aten::__",
    "aten::bitwise_",
    "aten::gather",
    "aten::gcd",
    "aten::index",
    "aten::lcm",
    "aten::nll_loss",
    "aten::put",
    "aten::scatter",
    "aten::take",
)
"""Names of what takes positions or bits: to these, floating point may be the mistake."""

Special = Callable[..., object]
SPECIALS: dict[str, Special] = {}
"""Ops that are not simply recorded, by name; `special_ops` and its neighbours fill it."""


def implements(*names: str) -> Callable[[Special], Special]:
    """Registers a function for overloads: `f(info, func, args, kwargs)`, called in place of recording."""

    def register(function: Special) -> Special:
        for name in names:
            SPECIALS[name] = function
        return function

    return register


Arguments = tuple[Any, ...]
First = Callable[["OpInfo", Arguments], object]
_FIRST: dict[str, First] = {}


def comes_first(*names: str) -> Callable[[First], First]:
    """Registers a function for overloads: `f(info, args)` sees each call before it is recorded, and may take it.

    It returns the results where it has done so, and None where not.
    """

    def register(function: First) -> First:
        for name in names:
            _FIRST[name] = function
        return function

    return register


class OpInfo:
    """The facts about one overload.

    Attributes:
        name: "aten::add.Tensor".
        kinds: for each argument of the schema, how it travels.
        keyword_kinds: the same by name.
        writes: the names of the arguments that the op changes.
        reshapes: those of them that may look otherwise afterwards: what `out=` forms fill, and what ops such as
            `resize_` and `t_` exist for. All others keep their sizes, or the op is refused.
        returns: for each result, the name of the argument that it is (for in-place and out= forms), or None.
        rule: what tells how the results look, see `shapes.rules`; or None.
        cuda_rule: the same for workers with CUDA, where they have their own; they are asked about what it cannot tell.
        turned: of an op that makes a tensor another view of its memory, the rule of that view; or None.
        unfilled: of an `out=` form, the rule of the form that fills nothing; or None.
        learns: whether there is a rule, of either kind, by which a call that never came before may take the short way.
        special: who handles the op instead, or None.
        creates: whether it makes one tensor of sizes and options alone.
        changes: whether it changes what it was given: 0 no, 1 its first argument and nothing else, 2 more or lists.
        changed_lists: the names of the lists whose tensors it changes, which nobody but its kernel counts.
        for_each: whether it does the same to each item of its lists, which PyTorch does item by item where it must.
        places_host_indices: whether CPU tensors are allowed as indices, as PyTorch allows on every device.
        synchronizes: whether the op exists for its exception only, so that it must be waited for.
        asks_worker_for_shape: whether the worker is asked for the form of the results the first time, because
            PyTorch's fake kernels are not to be trusted with this op.
        asks_worker_for_halves: the same for tensors of half precision only.
        takes_one_dtype: kernels refuse operands of several dtypes.
        asks_cuda_for_shape: the same for workers with CUDA only.
        columns: whether its results for each place of its lists look as if that place came alone.
        is_pointwise: whether it computes each element for itself.
        shrinks: whether a trial of its kernel may take tensors with fewer elements.
        is_tried: whether its kernel may run here, to see whether it takes some dtypes, see `kernel_trials`.
        trial_values: the values of the operands of such trials; one that goes well is enough.
        draws: the dtypes in which it draws random numbers, if it refuses others; else None.
        takes_whole_numbers: whether it takes positions or bits, so that floating point may be a mistake.
        first: who sees a call before it is recorded, and may take it, see `comes_first`; or None.
        followed: whether its result is known where its operands are, see `known_results`.
        derived: whether its result can be computed here where its operands are known, see `derived_copies`.
        is_view: whether its results are views of its arguments, which ATen's own kernels make of meta tensors: fake
            tensors take some by other ways, which give dimensions of size one other strides.
        takes_masks: whether truth values choose elements, and bytes in their place with a warning.
        takes_meta: whether meta tensors tell what the results look like, as fake tensors of the CPU do.
    """

    __slots__ = (
        "asks_cuda_for_shape",
        "asks_worker_for_halves",
        "asks_worker_for_shape",
        "changed_lists",
        "changes",
        "columns",
        "creates",
        "cuda_rule",
        "derived",
        "draws",
        "first",
        "followed",
        "for_each",
        "func",
        "is_pointwise",
        "is_tried",
        "is_view",
        "keyword_kinds",
        "kinds",
        "learns",
        "name",
        "names",
        "places_host_indices",
        "reshapes",
        "returns",
        "rule",
        "shrinks",
        "special",
        "synchronizes",
        "takes_masks",
        "takes_meta",
        "takes_one_dtype",
        "takes_whole_numbers",
        "trial_values",
        "turned",
        "unfilled",
        "writes",
    )

    def __init__(self, func: OpOverload) -> None:
        schema = func._schema
        self.func = func
        self.name = func.name()
        packet = self.name.partition(".")[0]
        self.draws = tried_ops.DRAWN.get(packet)
        self.kinds = tuple(
            NUMBER if shapes_results(a.type, self.name) else _KINDS.get(bare_type(a.type), FIXED)
            for a in schema.arguments
        )
        self.names = tuple(argument.name for argument in schema.arguments)
        self.keyword_kinds = dict(zip(self.names, self.kinds, strict=True))
        written = {
            frozenset(argument.alias_info.before_set): argument.name
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        self.writes = tuple(
            argument.name
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        self.reshapes = frozenset(
            argument.name
            for argument in schema.arguments
            if argument.name in self.writes and (argument.kwarg_only or torch.Tag.inplace_view in func.tags)
        )
        self.returns = tuple(
            written.get(frozenset(result.alias_info.before_set)) if result.alias_info is not None else None
            for result in schema.returns
        )
        self.places_host_indices = packet in _INDEXING
        self.takes_masks = self.places_host_indices or packet.startswith("aten::masked_scatter")
        self.for_each = packet.startswith("aten::_foreach_")
        self.changed_lists = tuple(
            a.name
            for a, kind in zip(schema.arguments, self.kinds, strict=True)
            if kind == TENSORS and a.name in self.writes and (a.kwarg_only or self.for_each)
        )
        only_first = self.writes == self.names[:1] and self.kinds[0] == TENSOR
        self.changes = 1 if only_first else 2 if self.writes or packet in CHANGES_UNSAID else 0
        self.synchronizes = not self.returns and not self.writes and packet not in _NOT_WAITED_FOR
        self.asks_worker_for_shape = not _depends_on_values(func) and (
            packet in _FAKED_WRONGLY
            # Fake kernels give outputs that are resized other strides than the real ones, or forget to resize them.
            or any(a.kwarg_only and a.name in self.writes for a in schema.arguments)
        )
        self.asks_worker_for_halves = packet in _WITH_STATISTICS
        self.takes_one_dtype = self.name in _OF_ONE_DTYPE
        self.asks_cuda_for_shape = packet in _SIZED_BY_KIND
        takes_tensors = not {TENSOR, TENSORS}.isdisjoint(self.kinds)
        self.creates = self.returns == (None,) and not takes_tensors and "device" in self.names
        self.columns = self.for_each or packet.startswith(("aten::_fused_ada", "aten::_fused_sgd"))
        self.first = _FIRST.get(self.name)
        self.is_pointwise = torch.Tag.pointwise in func.tags
        self.shrinks = tried_ops.shrinks(func)
        self.is_tried = tried_ops.may_be_tried(func, draws=GENERATOR in self.kinds)
        self.trial_values = tried_ops.trial_values(func)
        self.takes_whole_numbers = self.name.startswith(_TAKE_WHOLE_NUMBERS) or "shift" in self.name
        self.followed = self.name in _FOLLOWED
        self.derived = self.name in _DERIVED
        knows = not self.asks_worker_for_shape or packet in _FAKED_WRONGLY  # there, a rule is better than fake kernels
        self.rule = RULES.get(self.name) if knows else None
        self.cuda_rule = CUDA_RULES.get(self.name)
        self.turned = _rule_of_view(func) if torch.Tag.inplace_view in func.tags else None
        self.unfilled = _rule_without_out(func) if self.rule is None and self.asks_worker_for_shape else None
        self.learns = self.rule is not None or self.unfilled is not None
        self.special = SPECIALS.get(self.name)
        if self.special is None:
            self.special = self._substitute(packet)
        self.is_view = func.is_view or self.name == "aten::_unsafe_view"
        self.takes_meta = self.is_view or (
            # Not for what the dispatcher does not have, such as `prim::layout`: an error would end the process there.
            self.special is None
            and any(has_kernel(self.name, key) for key in ("Meta", "CompositeExplicitAutograd"))
            and packet not in _LOOK_AT_DEVICES
            and not _depends_on_values(func)
        )

    def _substitute(self, packet: str) -> Special | None:
        """Choose the handler of an op that the worker would not take as it is."""
        if packet in FORBIDDEN_OPS:
            return SPECIALS["refused"]
        if self.name.partition("::")[0] not in ALLOWED_NAMESPACES:
            return SPECIALS["foreign"]
        if packet not in UNDECOMPOSED and is_decomposed(self.name):
            return SPECIALS["composite"]
        return None

    def __repr__(self) -> str:
        return f"<info about {self.name}>"


class _PlainOp:
    """An overload that is simply recorded; called, it is the overload."""

    __slots__ = ("_sky_info",)

    def __init__(self, func: OpOverload) -> None:
        self._sky_info = OpInfo(func)
        self._sky_info.special = None

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._sky_info.func(*args, **kwargs)


def plain_op(func: OpOverload) -> OpOverload:
    """Make what a `special` hands to `hot_path.dispatch_remote` in place of its overload."""
    return _PlainOp(func)  # type: ignore[return-value]  # all that is asked of it


def is_decomposed(name: str) -> bool:
    """Return whether PyTorch divides the op into others on every device.

    A few have a formula for devices in general, and kernels for some, whose results differ in the last bit: the worker
    takes those whole, because it may have the kernel (`silu_backward`).
    """
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")


def decomposed_ops() -> set[str]:
    """Return the names of all ops for which `is_decomposed` holds, in a fraction of the time."""
    return {*op_names_with_kernel("CompositeImplicitAutograd")}.difference(op_names_with_kernel("CPU"))


def _rule_of_view(func: OpOverload) -> Rule | None:
    """Return the rule of `transpose` for `transpose_`, and its like."""
    packet, _, overload = func.name().partition(".")
    view = packet.removesuffix("_")
    return next((RULES[name] for name in (f"{view}.{overload or 'int'}", view) if name in RULES), None)


def _rule_without_out(func: OpOverload) -> Rule | None:
    """Return the rule of the overload that takes the same but for `out=`."""
    given = [
        (a.name, str(a.type))
        for a in func._schema.arguments
        if not (a.kwarg_only and a.alias_info is not None and a.alias_info.is_write)
    ]
    packet = func._overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        if [(a.name, str(a.type)) for a in other._schema.arguments] == given:
            return RULES.get(other.name())
    return None


def _depends_on_values(func: OpOverload) -> bool:
    """Return whether the sizes of the results depend on values. PyTorch tags the functional overloads only."""
    packet = func._overloadpacket
    return any(_DYNAMIC.intersection(getattr(packet, name).tags) for name in packet.overloads())


def info_named(name: str) -> OpInfo | None:
    """Return the facts about the overload that is called this on the wire, `aten::add.Tensor`; None: there is none."""
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    try:
        info = info_of(getattr(getattr(getattr(torch.ops, space), packet), overload or "default"))
    except (AttributeError, RuntimeError):
        return None
    return info if info.name == name else None


def info_of(func: OpOverload) -> OpInfo:
    """Return the facts about an overload, gathered once and kept on it: an attribute is twice as fast as a table."""
    try:
        info: OpInfo = func._sky_info  # type: ignore[attr-defined]
    except AttributeError:
        info = func._sky_info = OpInfo(func)  # type: ignore[attr-defined]
    return info
