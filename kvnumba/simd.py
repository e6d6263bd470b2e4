"""Vectors in Numba: a small emitter of LLVM vector code, and the operations that depend on the host.

A *micro-kernel* is a Python function that writes LLVM code. It runs once, at compile time, so its Python loops are
unrolled and its Python numbers are constants::

    @microkernel
    def scale_rows(e, rows, count, factor):        # rows: array, count: integer, factor: float32
        with e.range(0, count, LANES) as i:
            e.store(e.load(rows, i, LANES) * e.splat(factor, LANES), rows, i)

and is called from ``@njit`` code like any function. Arrays arrive as pointers with the array's item type, integers as
64-bit, floats as float32, named tuples of these as they are. Nothing is checked: callers own the bounds.

All code is generic LLVM (any target compiles it); where the host has an instruction for the job that LLVM does not
find by itself, the emitter names it: the dot product of bytes, `dot_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from llvmlite.binding import llvm_version_info
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

#: float32 values in one vector: one register of AVX-512, two of AVX2, four of NEON or SSE.
LANES = 16

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F32, F16 = ir.FloatType(), ir.HalfType()

#: 1.5 * 2**23: adding it to a float32 below 2**22 leaves the rounded integer in the low bits; and its own bits.
MAGIC, MAGIC_BITS = 12582912.0, 0x4B400000

LOG2E = 1.4426950408889634
#: ln 2 in two float32 parts; the first has 9 trailing zero bits, so that n * LN2_HIGH is exact for |n| < 512.
LN2_HIGH, LN2_LOW = 0.693145751953125, 1.428606765330187e-06
#: Below this exp(x) counts as 0: the smallest normal float32 is exp(-87.34).
EXP_LOWEST = -87.33654
#: exp(r) on |r| <= ln(2)/2, minimax in the relative error (2e-8 as float32), constant term first.
EXP_POLYNOMIAL = (1.0, 1.0, 0.49999994, 0.16666432, 0.041668002, 0.008374171, 0.0013843635)


#: Flags without effect on the instruction they stand on. Numba's ``fastmath`` gives its flags to every instruction that
#: has none, and with ``reassoc`` LLVM would fold (x + magic) - magic to x: micro-kernels mean what they write.
_AS_WRITTEN = {"fadd": ("arcp",), "fsub": ("arcp",), "fmul": ("arcp",), "fdiv": ("contract",), "fcmp": ("arcp",)}


class Value:
    """An LLVM value with operators; the other operand may be a number, which is taken as a constant of its type."""

    __slots__ = ("builder", "ir")

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder, self.ir = builder, value

    @property
    def is_float(self) -> bool:
        kind = self.ir.type
        return isinstance(kind.element if isinstance(kind, ir.VectorType) else kind, ir.FloatType | ir.HalfType)

    def like(self, other: Value | int | float) -> ir.Value:
        return other.ir if isinstance(other, Value) else constant(self.ir.type, other)

    def _binary(self, integer: str, floating: str | None, other: Value | int | float) -> Value:
        name = floating if self.is_float else integer
        assert name is not None, f"no {integer} of floats"
        flags = {"flags": _AS_WRITTEN[name]} if self.is_float else {}
        return Value(self.builder, getattr(self.builder, name)(self.ir, self.like(other), **flags))

    def __add__(self, other: Value | int | float) -> Value:
        return self._binary("add", "fadd", other)

    def __sub__(self, other: Value | int | float) -> Value:
        return self._binary("sub", "fsub", other)

    def __mul__(self, other: Value | int | float) -> Value:
        return self._binary("mul", "fmul", other)

    def __truediv__(self, other: Value | int | float) -> Value:
        return self._binary("", "fdiv", other)

    def __floordiv__(self, other: Value | int) -> Value:
        return self._binary("sdiv", None, other)

    def __and__(self, other: Value | int) -> Value:
        return self._binary("and_", None, other)

    def __or__(self, other: Value | int) -> Value:
        return self._binary("or_", None, other)

    def __xor__(self, other: Value | int) -> Value:
        return self._binary("xor", None, other)

    def __lshift__(self, other: Value | int) -> Value:
        return self._binary("shl", None, other)

    def __rshift__(self, other: Value | int) -> Value:
        """Shift right, filling with zeros."""
        return self._binary("lshr", None, other)

    def shift_signed(self, other: int) -> Value:
        """Shift right, filling with the sign."""
        return self._binary("ashr", None, other)

    def compare(self, operator: str, other: Value | int | float) -> Value:
        """Ordered comparison of floats (false for NaN), signed comparison of integers."""
        b = self.builder
        if self.is_float:
            return Value(b, b.fcmp_ordered(operator, self.ir, self.like(other), flags=_AS_WRITTEN["fcmp"]))
        return Value(b, b.icmp_signed(operator, self.ir, self.like(other)))


def constant(kind: ir.Type, number: int | float) -> ir.Constant:
    """*number* as a constant of LLVM type *kind*; in every lane if that is a vector."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [constant(kind.element, number)] * kind.count)
    return ir.Constant(kind, number)


class Variable:
    """A value that changes inside a loop: a register after optimisation."""

    def __init__(self, emitter: Emitter, value: Value) -> None:
        self._builder = emitter.builder
        self._slot = cgutils.alloca_once(self._builder, value.ir.type)
        self.set(value)

    def get(self) -> Value:
        return Value(self._builder, self._builder.load(self._slot))

    def set(self, value: Value) -> None:
        self._builder.store(value.ir, self._slot)


class Pointer:
    """The data of an array argument: address of its first item and the item's LLVM type."""

    def __init__(self, address: ir.Value, item: ir.Type) -> None:
        self.address, self.item = address, item


class Emitter:
    """Writes LLVM code at the builder's position. Offsets into arrays count items of the array.

    The code is for the processor that the module's triple and *features* name, as in ``"+avx2,+fma"``.
    """

    def __init__(self, builder: ir.IRBuilder, features: str) -> None:
        self.builder = builder
        self.features = {name[1:] for name in features.split(",") if name.startswith("+")}
        triple: str = builder.module.triple
        self.is_x86, self.is_arm = triple.startswith("x86_64"), triple.startswith(("aarch64", "arm64"))

    # constants and vectors ------------------------------------------------------------------------------------------

    def integer(self, number: int, kind: ir.Type = I64) -> Value:
        return Value(self.builder, constant(kind, number))

    def zeros(self, item: ir.Type = F32, lanes: int = LANES) -> Value:
        return self.full(0, item, lanes)

    def full(self, number: float, item: ir.Type = F32, lanes: int = LANES) -> Value:
        return Value(self.builder, constant(ir.VectorType(item, lanes), number))

    def iota(self, item: ir.Type = I32, lanes: int = LANES) -> Value:
        return Value(self.builder, ir.Constant(ir.VectorType(item, lanes), list(range(lanes))))

    def splat(self, scalar: Value, lanes: int = LANES) -> Value:
        """The scalar in every lane."""
        kind = ir.VectorType(scalar.ir.type, lanes)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar.ir, ir.Constant(I32, 0))
        return self.shuffle(Value(self.builder, one), None, [0] * lanes)

    def shuffle(self, a: Value, b: Value | None, lanes: list[int]) -> Value:
        """Lanes of *a* followed by those of *b*, picked by number."""
        other = ir.Constant(a.ir.type, ir.Undefined) if b is None else b.ir
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
        return Value(self.builder, self.builder.shuffle_vector(a.ir, other, mask))

    def join(self, parts: list[Value]) -> Value:
        """Vectors of one type, one after another; their number is a power of two."""
        while len(parts) > 1:
            n = 2 * parts[0].ir.type.count
            parts = [self.shuffle(parts[i], parts[i + 1], list(range(n))) for i in range(0, len(parts), 2)]
        return parts[0]

    def split(self, x: Value, parts: int) -> list[Value]:
        """A vector in equal parts, which `join` puts together again."""
        n = x.ir.type.count // parts
        return [self.shuffle(x, None, list(range(i * n, i * n + n))) for i in range(parts)]

    # memory -----------------------------------------------------------------------------------------------------------

    def _address(self, pointer: Pointer, offset: Value) -> ir.Value:
        return self.builder.gep(pointer.address, [offset.ir], source_etype=pointer.item)

    def load(self, pointer: Pointer, offset: Value, lanes: int | None = None, item: ir.Type | None = None) -> Value:
        """*lanes* items from *offset* on, read as *item* if given; one scalar when *lanes* is None."""
        kind = item or pointer.item
        typ = kind if lanes is None else ir.VectorType(kind, lanes)
        loaded = self.builder.load(self._address(pointer, offset), align=1, typ=typ)
        return Value(self.builder, loaded)

    def store(self, value: Value, pointer: Pointer, offset: Value) -> None:
        address = self.builder.bitcast(self._address(pointer, offset), value.ir.type.as_pointer())
        self.builder.store(value.ir, address, align=1)

    def first_lanes(self, count: Value, lanes: int = LANES) -> Value:
        """Mask that is true in the first *count* lanes."""
        bound = self.splat(self.truncate(count, I32), lanes)
        return self.iota(I32, lanes).compare("<", bound)

    def load_masked(self, pointer: Pointer, offset: Value, mask: Value) -> Value:
        """Items where *mask* is true, 0 elsewhere; memory under a false lane is not touched."""
        kind = ir.VectorType(pointer.item, mask.ir.type.count)
        name = f"llvm.masked.load.v{kind.count}{_suffix(pointer.item)}.p0"
        declared = ir.FunctionType(kind, [ir.PointerType(), mask.ir.type, kind])
        address = self._address(pointer, offset)
        return self.call(name, declared, [Value(self.builder, address), mask, Value(self.builder, constant(kind, 0))])

    def store_masked(self, value: Value, pointer: Pointer, offset: Value, mask: Value) -> None:
        name = f"llvm.masked.store.v{value.ir.type.count}{_suffix(pointer.item)}.p0"
        declared = ir.FunctionType(ir.VoidType(), [value.ir.type, ir.PointerType(), mask.ir.type])
        self.call(name, declared, [value, Value(self.builder, self._address(pointer, offset)), mask])

    def prefetch(self, pointer: Pointer, byte: Value) -> None:
        """Ask for the line of memory at *byte* of an array, to be in the second-level cache when it is read."""
        declared = ir.FunctionType(ir.VoidType(), [ir.PointerType(), I32, I32, I32])
        address = Value(self.builder, self.builder.gep(pointer.address, [byte.ir], source_etype=I8))
        self.call("llvm.prefetch.p0", declared, [address, *(self.integer(n, I32) for n in (0, 2, 1))])

    # arithmetic -------------------------------------------------------------------------------------------------------

    def call(self, name: str, declared: ir.FunctionType, args: list[Value]) -> Value:
        function = cgutils.get_or_insert_function(self.builder.module, declared, name)
        return Value(self.builder, self.builder.call(function, [a.ir for a in args]))

    def call_in_parts(self, name: str, lanes: int, *args: Value) -> Value:
        """A function of vectors that returns *lanes* int32, on as many parts of longer vectors as make `LANES`."""
        pieces = list(zip(*(self.split(x, LANES // lanes) for x in args), strict=True))
        declared = ir.FunctionType(ir.VectorType(I32, lanes), [x.ir.type for x in pieces[0]])
        return self.join([self.call(name, declared, list(piece)) for piece in pieces])

    def unary(self, name: str, x: Value) -> Value:
        return self.call(f"llvm.{name}.{_suffix(x.ir.type)}", ir.FunctionType(x.ir.type, [x.ir.type]), [x])

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c: one rounding where the host has such an instruction, else two."""
        kind = a.ir.type
        return self.call(f"llvm.fmuladd.{_suffix(kind)}", ir.FunctionType(kind, [kind] * 3), [a, b, c])

    def maximum(self, a: Value, b: Value) -> Value:
        """The larger one; *b* where either is NaN (the rule of x86, one instruction there)."""
        return self.select(a.compare(">", b), a, b)

    def minimum(self, a: Value, b: Value) -> Value:
        return self.select(a.compare("<", b), a, b)

    def any(self, mask: Value) -> Value:
        """Whether a lane of *mask* is true."""
        bits = self.builder.bitcast(mask.ir, ir.IntType(mask.ir.type.count))
        return Value(self.builder, self.builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0)))

    def absolute(self, x: Value) -> Value:
        return self.unary("fabs", x)

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        return Value(self.builder, self.builder.select(condition.ir, yes.ir, no.ir))

    def reduce_add(self, x: Value) -> Value:
        """Sum of the lanes, by halving: the order is the same on every host."""
        return self._fold(x, lambda a, b: a + b)

    def reduce_max(self, x: Value) -> Value:
        return self._fold(x, self.maximum)

    def reduce_min(self, x: Value) -> Value:
        return self._fold(x, self.minimum)

    def _fold(self, x: Value, join: Callable[[Value, Value], Value]) -> Value:
        n = x.ir.type.count
        while n > 1:
            n //= 2
            x = join(self.shuffle(x, None, list(range(n))), self.shuffle(x, None, list(range(n, 2 * n))))
        return Value(self.builder, self.builder.extract_element(x.ir, ir.Constant(I32, 0)))

    def sum_each(self, vectors: list[Value]) -> Value:
        """Sums of up to 16 vectors of 16 lanes: lane i of the result is the sum of vector i."""
        return self.fold_each(vectors, lambda a, b: a + b)

    def fold_each(self, vectors: list[Value], join: Callable[[Value, Value], Value]) -> Value:
        """As `sum_each`, for any way to *join* two vectors lane by lane."""
        count = 1 << (len(vectors) - 1).bit_length()
        level = vectors + [vectors[-1]] * (count - len(vectors))
        owner = [[i] * LANES for i in range(count)]  # owner[v][lane]: the vector whose part lies there
        width = LANES  # lanes that still belong to one sum
        while width > 1:
            half = width // 2
            low = [r * width + j for r in range(LANES // width) for j in range(half)]
            if len(level) > 1:
                low += [LANES + i for i in low]
                pairs = list(zip(level[::2], level[1::2], strict=True))
                names = [a + b for a, b in zip(owner[::2], owner[1::2], strict=True)]
            else:
                low += low
                pairs, names = [(level[0], level[0])], [owner[0] + owner[0]]
            high = [i + half for i in low]
            level = [join(self.shuffle(a, b, low), self.shuffle(a, b, high)) for a, b in pairs]
            owner = [[name[i] for i in low] for name in names]
            width = half
        return self.shuffle(level[0], None, [owner[0].index(min(i, count - 1)) for i in range(LANES)])

    def exp(self, x: Value) -> Value:
        """exp(x) for x <= 88, relative error under 2e-7; exactly 0 below -87.34, NaN for NaN."""
        magic = self.same(x, MAGIC)
        shifted = self.fma(x, self.same(x, LOG2E), magic)
        n = shifted - magic
        r = self.fma(n, self.same(x, -LN2_HIGH), x)
        r = self.fma(n, self.same(x, -LN2_LOW), r)
        p = self.same(x, EXP_POLYNOMIAL[-1])
        for c in reversed(EXP_POLYNOMIAL[:-1]):
            p = self.fma(p, r, self.same(x, c))
        integer = ir.VectorType(I32, x.ir.type.count) if isinstance(x.ir.type, ir.VectorType) else I32
        power = self.bitcast(shifted, integer) << 23
        grown = self.bitcast(self.bitcast(p, integer) + power, x.ir.type)
        return self.select(x.compare("<", EXP_LOWEST), self.same(x, 0.0), grown)

    def same(self, x: Value, number: float) -> Value:
        return Value(self.builder, constant(x.ir.type, number))

    # conversions ------------------------------------------------------------------------------------------------------

    def bitcast(self, x: Value, kind: ir.Type) -> Value:
        return Value(self.builder, self.builder.bitcast(x.ir, kind))

    def truncate(self, x: Value, item: ir.Type) -> Value:
        return Value(self.builder, self.builder.trunc(x.ir, _retyped(x, item)))

    def extend(self, x: Value, item: ir.Type, signed: bool = False) -> Value:
        emit = self.builder.sext if signed else self.builder.zext
        return Value(self.builder, emit(x.ir, _retyped(x, item)))

    def to_float(self, x: Value) -> Value:
        return Value(self.builder, self.builder.sitofp(x.ir, _retyped(x, F32)))

    def to_integer(self, x: Value) -> Value:
        """float32 to int32, rounded to nearest even; |x| < 2**22, anything for NaN."""
        return self.bitcast(x + MAGIC, _retyped(x, I32)) - MAGIC_BITS

    @property
    def _has_half(self) -> bool:
        """Whether the host converts float16 by itself; elsewhere LLVM would call a function that is not there."""
        return "f16c" in self.features or self.is_arm

    def widen_half(self, bits: Value) -> Value:
        """float16 bit patterns (uint16) to float32."""
        if self._has_half:
            half = self.bitcast(bits, _retyped(bits, F16))
            return Value(self.builder, self.builder.fpext(half.ir, _retyped(bits, F32)))
        # Exponent and fraction in their places of float32, 112 too small: the product is exact, subnormals included.
        wide = self.extend(bits, I32)
        floats = _retyped(bits, F32)
        size = self.bitcast((wide & 0x7FFF) << 13, floats) * 2.0**112
        huge = (wide & 0x7C00).compare("==", 0x7C00)  # infinity and NaN
        number = self.bitcast(size, wide.ir.type) | self.select(huge, self.same(wide, 0x7F800000), self.same(wide, 0))
        return self.bitcast(number | ((wide & 0x8000) << 16), floats)

    def narrow_half(self, x: Value) -> Value:
        """float32 to float16 bit patterns, rounded to nearest even; a NaN stays a NaN."""
        if self._has_half:
            half = Value(self.builder, self.builder.fptrunc(x.ir, _retyped(x, F16)))
            return self.bitcast(half, _retyped(x, I16))
        bits = self.bitcast(x, _retyped(x, I32))
        size = bits & 0x7FFFFFFF
        odd = (size >> 13) & 1
        normal = (size - ((127 - 15) << 23) + 0xFFF + odd) >> 13
        # A unit in the last place of 0.5 is the smallest float16: the addition rounds.
        small = self.bitcast(self.bitcast(size, x.ir.type) + 0.5, size.ir.type) - 0x3F000000
        number = self.select(size.compare("<", 0x38800000), small, normal)
        number = self.select(size.compare("<", 0x477FF000), number, self.same(size, 0x7C00))  # 65520 and above
        number = self.select(size.compare("<", 0x7F800001), number, ((size >> 13) & 0x3FF) | 0x7E00)  # NaN
        return self.truncate(number | ((bits >> 16) & 0x8000), I16)

    def widen_bfloat(self, bits: Value) -> Value:
        """bfloat16 bit patterns (uint16) to float32."""
        return self.bitcast(self.extend(bits, I32) << 16, _retyped(bits, F32))

    def narrow_bfloat(self, x: Value) -> Value:
        """float32 to bfloat16 bit patterns, rounded to nearest even; a NaN stays a NaN."""
        bits = self.bitcast(x, _retyped(x, I32))
        rounded = bits + ((bits >> 16) & 1) + 0x7FFF
        quiet = bits | 0x400000
        is_nan = Value(self.builder, self.builder.fcmp_unordered("uno", x.ir, x.ir, flags=_AS_WRITTEN["fcmp"]))
        return self.truncate(self.select(is_nan, quiet, rounded) >> 16, I16)

    # bytes ------------------------------------------------------------------------------------------------------------

    def dot_bytes(self, total: Value, unsigned: Value, signed: Value) -> Value:
        """total[i] + sum over j < 4 of unsigned[4i + j] * signed[4i + j], exactly.

        Parameters
        ----------
        total : <16 x i32>
        unsigned, signed : <64 x i8>
            Read as uint8 and int8.
        """
        if "avx512vnni" in self.features or "avxvnni" in self.features:
            lanes = 16 if "avx512vnni" in self.features else 8
            # LLVM 22 takes the bytes as bytes, older versions as words.
            kind = unsigned.ir.type if llvm_version_info[0] >= 22 else total.ir.type
            args = total, self.bitcast(unsigned, kind), self.bitcast(signed, kind)
            return self.call_in_parts(f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", lanes, *args)
        if self.is_arm and "i8mm" in self.features:
            return self.call_in_parts("llvm.aarch64.neon.usdot.v4i32.v16i8", 4, total, unsigned, signed)
        if self.is_arm and "dotprod" in self.features:
            sdot = "llvm.aarch64.neon.sdot.v4i32.v16i8"  # u * s = (u - 128) * s - (-128) * s
            excess = self.call_in_parts(sdot, 4, self.same(total, 0), self.same(signed, -128), signed)
            return self.call_in_parts(sdot, 4, total, unsigned ^ -128, signed) - excess
        pairs = ir.VectorType(I16, 2 * LANES)
        u, s = self.bitcast(unsigned, pairs), self.bitcast(signed, pairs)
        even = self._dot_pairs(u & 255, (s << 8).shift_signed(8))
        return total + even + self._dot_pairs(u >> 8, s.shift_signed(8))

    def _dot_pairs(self, a: Value, b: Value) -> Value:
        """a[2i] * b[2i] + a[2i + 1] * b[2i + 1] of 32 int16 each; every product fits 16 bits."""
        if self.is_x86 and "avx512bw" in self.features:
            return self.call_in_parts("llvm.x86.avx512.pmaddw.d.512", 16, a, b)
        if self.is_x86 and "avx2" in self.features:
            return self.call_in_parts("llvm.x86.avx2.pmadd.wd", 8, a, b)
        if self.is_x86:
            return self.call_in_parts("llvm.x86.sse2.pmadd.wd", 4, a, b)
        if self.is_arm:
            return self.call_in_parts("llvm.aarch64.neon.saddlp.v4i32.v8i16", 4, a * b)
        both = self.bitcast(a * b, ir.VectorType(I32, LANES))
        return (both << 16).shift_signed(16) + both.shift_signed(16)

    # control ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def range(self, start: Value | int, stop: Value | int, step: int = 1) -> Iterator[Value]:
        """A loop; its body is what is emitted inside the ``with`` block."""
        first, last = (x.ir if isinstance(x, Value) else ir.Constant(I64, x) for x in (start, stop))
        with cgutils.for_range_slice(self.builder, first, last, ir.Constant(I64, step), I64) as (index, _):
            yield Value(self.builder, index)

    @contextmanager
    def when(self, condition: Value, likely: bool | None = None) -> Iterator[None]:
        """Code that runs only where *condition* holds."""
        with self.builder.if_then(condition.ir, likely=likely):
            yield

    def variable(self, value: Value) -> Variable:
        return Variable(self, value)


def _suffix(kind: ir.Type) -> str:
    """LLVM's name of a type inside an intrinsic's name."""
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{_suffix(kind.element)}"
    return {"float": "f32", "half": "f16"}.get(str(kind), str(kind))


def _retyped(x: Value, item: ir.Type) -> ir.Type:
    return ir.VectorType(item, x.ir.type.count) if isinstance(x.ir.type, ir.VectorType) else item


def microkernel(emit: Callable[..., Value | None]) -> Any:
    """Make the code that *emit* writes callable from ``@njit`` functions.

    *emit* takes the `Emitter` and one argument per call argument, and returns nothing or a scalar `Value`. It stays at
    hand as the attribute ``emit``, to write the code for another processor than the host.
    """
    names = emit.__code__.co_varnames[1 : emit.__code__.co_argcount]

    def define(typingctx: Any, *args: types.Type) -> tuple[Signature, Callable[..., ir.Value]]:
        def codegen(
            context: Any, builder: ir.IRBuilder, signature: Signature, values: tuple[ir.Value, ...]
        ) -> ir.Value:
            args = (_argument(context, builder, t, v) for t, v in zip(signature.args, values, strict=True))
            result = emit(Emitter(builder, context.codegen()._tm_features), *args)
            return context.get_dummy_value() if result is None else result.ir

        return returned(*args), codegen

    returned = _RETURNS[emit.__annotations__.get("return", "None")]
    # Numba reads the number of arguments from the signature of the definition.
    source = f"lambda typingctx, {', '.join(names)}: define(typingctx, {', '.join(names)})"
    definition = eval(source, {"define": define})
    definition.__name__ = emit.__name__
    definition.__qualname__ = emit.__qualname__
    definition.__module__ = emit.__module__
    definition.__doc__ = emit.__doc__
    kernel = intrinsic(definition)
    kernel.emit = emit
    return kernel


_RETURNS: dict[str, types.Type] = {"None": types.void, "Float": types.float32, "Integer": types.int64}
Float = Value
Integer = Value


def _argument(context: Any, builder: ir.IRBuilder, kind: types.Type, value: ir.Value) -> Any:
    """What a micro-kernel sees of an argument; of a named tuple, one of the same class."""
    if isinstance(kind, types.NamedTuple):
        parts = cgutils.unpack_tuple(builder, value)
        return kind.instance_class(*(_argument(context, builder, t, v) for t, v in zip(kind.types, parts, strict=True)))
    if isinstance(kind, types.Array):
        data = context.make_array(kind)(context, builder, value).data
        return Pointer(data, context.get_data_type(kind.dtype))
    if isinstance(kind, types.Integer):
        return Value(builder, context.cast(builder, value, kind, types.int64))
    if isinstance(kind, types.Float):
        return Value(builder, context.cast(builder, value, kind, types.float32))
    if isinstance(kind, types.Boolean):
        return Value(builder, context.cast(builder, value, kind, types.int64))
    raise TypeError(f"a micro-kernel takes arrays, numbers and named tuples of them, not {kind}")
