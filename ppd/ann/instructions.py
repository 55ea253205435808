"""Two machine instructions that numba lacks: prefetch, and half to single precision."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_READ, _KEEP, _DATA = 0, 3, 1  # llvm.prefetch's arguments: into all levels of the data cache


@intrinsic
def prefetch(typing: Any, rows: Any, row: Any, column: Any) -> Any:
    """Begin to load the cache line of an element: ``prefetch(rows, row, column)``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array_type = signature.args[0]
        array = context.make_array(array_type)(context, builder, args[0])
        at = [context.cast(builder, args[1], signature.args[1], types.intp)]
        at.append(context.cast(builder, args[2], signature.args[2], types.intp))
        pointer = cgutils.get_item_pointer(context, builder, array_type, array, at)
        byte = ir.IntType(8).as_pointer()
        flag = ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag]),
            "llvm.prefetch.p0",
        )
        flags = [ir.Constant(flag, value) for value in (_READ, _KEEP, _DATA)]
        builder.call(function, [builder.bitcast(pointer, byte), *flags])
        return context.get_dummy_value()

    return types.void(rows, row, column), generate


@intrinsic
def single(typing: Any, value: Any) -> Any:
    """Convert a stored number to float32: ``single(x)``. Half precision is stored as uint16."""
    if value == types.uint16:

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            half = builder.bitcast(args[0], ir.HalfType())
            return builder.fpext(half, ir.FloatType())

    else:

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return context.cast(builder, args[0], signature.args[0], types.float32)

    return types.float32(value), generate
