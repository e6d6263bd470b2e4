"""Other processors than this one: the assembly of every micro-kernel, and the same codes and sums on older hosts."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from conftest import bit_equal, check_attend, normal
from llvmlite import binding, ir
from numba import njit

import kvnumba as kv
from kvnumba import kernels
from kvnumba.kernels.ahead import Run
from kvnumba.kernels.codes import split_int8, split_keys
from kvnumba.simd import F32, I8, I16, I64, LANES, Emitter, Pointer, Value, microkernel


class Target(NamedTuple):
    """A processor, and what the parts of a kernel become there: a pattern, and how many at least for each part."""

    triple: str
    cpu: str
    features: str
    register: str  #: a vector register
    parts: dict[str, tuple[str, int]]


def arm(features, dot, each):
    parts = {
        "fmuladd.v16f32": (r"\bfml[as]\s+v\d+\.4s", 4),
        "fpext <16 x half>": (r"\bfcvtl2?\s+v\d+\.4s", 4),
        "fptrunc <16 x float>": (r"\bfcvtn2?\s+v\d+\.[48]h", 4),
        "dot": (dot, each),
    }
    return Target("aarch64-unknown-linux-gnu", "generic", features, r"\b(?:v\d+\.\d|q\d)", parts)


def avx2(features, dot, each):
    parts = {
        "fmuladd.v16f32": (r"\bvfn?m(?:add|sub)\d+ps\s.*%ymm", 2),
        "fpext <16 x half>": (r"\bvcvtph2ps\s.*%ymm", 2),
        "fptrunc <16 x float>": (r"\bvcvtps2ph\s.*%ymm", 2),
        "dot": (dot, each),
    }
    return Target("x86_64-unknown-linux-gnu", "x86-64-v3", f"{AVX2}{features}", "%ymm", parts)


AVX2 = "+avx,+avx2,+fma,+f16c"
OLDEST = {"fmuladd.v16f32": (r"\bmulps\s.*%xmm", 4), "dot": (r"\bpmaddwd\s.*%xmm", 8)}
TARGETS = {
    "aarch64": arm("+neon", r"\bsada?d?lp\s+v\d+\.4s, v\d+\.8h", 8),
    "aarch64-dotprod": arm("+neon,+dotprod", r"\bsdot\s+v\d+\.4s", 4),
    "aarch64-i8mm": arm("+neon,+dotprod,+i8mm", r"\busdot\s+v\d+\.4s", 4),
    "x86-64": Target("x86_64-unknown-linux-gnu", "x86-64", "+sse,+sse2", "%xmm", OLDEST),
    "x86-64-v3": avx2("", r"\bvpmaddwd\s.*%ymm", 4),
    "x86-64-v3-avxvnni": avx2(",+avxvnni", r"\bvpdpbusd\s.*%ymm", 2),
}


class CountingDots(Emitter):
    """An emitter that counts the dot products of bytes."""

    dots = 0

    def dot_bytes(self, total: Value, unsigned: Value, signed: Value) -> Value:
        self.dots += 1
        return super().dot_bytes(total, unsigned, signed)


def found_kernels():
    """Name to micro-kernel, all of the package; those of a table are named after their keys."""
    found = {}
    for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        for name, member in vars(importlib.import_module(module.name)).items():
            table = member if isinstance(member, dict) else {"": member}
            for key, kernel in table.items():
                if hasattr(kernel, "emit") and kernel.__module__ == module.name and kernel not in found.values():
                    suffix = f"-{key.__name__}" if isinstance(key, type) else str(key)
                    found[f"{module.name.rpartition('.')[2]}.{name}{suffix}"] = kernel
    return found


KERNELS = found_kernels()

#: Arguments that are arrays, and of what; `rows` and `out` may be places in `work` instead, see `argument`.
ARRAYS = dict.fromkeys(("params", "work", "source", "target", "x", "rows", "out"), F32) | {"codes": I8, "array": I8}
#: The parts of the argument `far`, a `Run`.
FAR = ("array", "run_start", "run_count")
FLOATS = ("bound", "centre", "factor", "number", "offset")


#: Parts of a kernel that use a few lanes only and so become one narrow instruction: the ratios of up to four rows.
NARROW = {("softmax.update", "fmuladd.v16f32"): 40}


def argument(name: str, names: tuple[str, ...], kernel_name: str) -> tuple[ir.Type, bool]:
    """LLVM type of an argument, of its items if it is an array; whether it is one."""
    row = {"keys_4": I16, "values_4": I8}.get(kernel_name.partition("._")[2].removeprefix("rows_of_"))
    if name == "rows" and row is not None:  # packed rows, in words
        return row, True
    place = (name == "rows" and "start" not in names) or (name == "out" and "out_stride" in names)
    if name not in ARRAYS or place:
        return (F32 if name in FLOATS else I64), False
    rows = I16 if "loat16" in kernel_name else F32
    return (rows if name == "rows" else ARRAYS[name]), True


def written(kernel_name: str, target: Target) -> tuple[str, int]:
    """LLVM code of a kernel as a function of its own, and the dot products of bytes in it."""
    emit = KERNELS[kernel_name].emit
    names = emit.__code__.co_varnames[1 : emit.__code__.co_argcount]
    names = tuple(part for name in names for part in (FAR if name == "far" else (name,)))
    kinds = [argument(name, names, kernel_name) for name in names]
    returned = {"Float": F32, "Integer": I64}.get(emit.__annotations__.get("return"), ir.VoidType())
    module = ir.Module()
    module.triple = target.triple
    declared = ir.FunctionType(returned, [ir.PointerType() if array else kind for kind, array in kinds])
    function = ir.Function(module, declared, "kernel")
    builder = ir.IRBuilder(function.append_basic_block())
    emitter = CountingDots(builder, target.features)
    both = zip(function.args, kinds, strict=True)
    values = [Pointer(arg, kind) if array else Value(builder, arg) for arg, (kind, array) in both]
    if names[-3:] == FAR:
        values[-3:] = [Run(*values[-3:])]
    result = emit(emitter, *values)
    builder.ret_void() if result is None else builder.ret(result.ir)
    return str(module), emitter.dots


def assembly(code: str, target: Target) -> str:
    """*code* optimized for *target*."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(target.triple).create_target_machine(
        target.cpu, target.features, opt=3, codemodel="default"
    )
    module = binding.parse_assembly(code)
    module.verify()
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    return machine.emit_assembly(module)


def test_the_micro_kernels_of_the_package_are_found():
    assert {name.partition(".")[0] for name in KERNELS} >= {"codes", "encode", "panels", "rows", "softmax"}
    assert {"codes.score_int8", "codes.accumulate_int4", "rows.score_float16", "encode.seal_int4"} <= set(KERNELS)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_every_micro_kernel_becomes_vector_instructions_and_calls_nothing_but_memset(name, target):
    code, dots = written(name, target)
    text = assembly(code, target)
    called = re.findall(r"^\s+(?:callq?|blr?)\s+(.*)", text, re.M)
    assert {function.removesuffix("@PLT") for function in called} <= {"memset", "memcpy"}
    assert not re.search(r"load <\d+ x", code) or re.search(target.register, text)
    for part, (instruction, each) in target.parts.items():
        count = dots if part == "dot" else len(re.findall(rf"= .*{part}", code)) - NARROW.get((name, part), 0)
        assert len(re.findall(instruction, text)) >= each * count, f"{count} times {part}"


@microkernel
def _dot_bytes(e, total, unsigned, signed, count):
    with e.range(0, count, LANES) as i:
        u, s = (e.load(x, i << 2, 4 * LANES, item=I8) for x in (unsigned, signed))
        e.store(e.dot_bytes(e.load(total, i, LANES), u, s), total, i)


@njit
def dot_bytes(total, unsigned, signed):
    _dot_bytes(total, unsigned, signed, total.size)


def check_dot_products():
    """Compare sums with NumPy's: every pair of bytes, and four times the products that are largest and smallest."""
    rng = np.random.default_rng(5)
    unsigned, signed = (np.arange(1 << 16) >> 8).astype(np.uint8), np.arange(1 << 16).astype(np.uint8).view(np.int8)
    order = rng.permutation(1 << 16)
    unsigned, signed = unsigned[order], signed[order]
    unsigned[:128], signed[:64], signed[64:128] = 255, -128, 127
    total = rng.integers(-(2**30), 2**30, unsigned.size // 4).astype(np.int32)
    expected = total + (unsigned.astype(np.int32) * signed).reshape(-1, 4).sum(1, dtype=np.int32)
    dot_bytes(total, unsigned, signed)
    assert bit_equal(total, expected)


PAIRS = [("int8", "int4"), ("int4", "int8")]


def made_up(k_format, v_format):
    """A cache of 300 tokens whose channels differ in size, keys, values, and a query for each head."""
    rng = np.random.default_rng(6)
    k, v = (normal(rng, 1, 2, 300, 72) * np.exp(normal(rng, 1, 2, 1, 72)) for _ in range(2))
    cache = kv.KVCache(2, 72, k_format=k_format, v_format=v_format)
    cache.append(k, v)
    return cache, normal(rng, 1, 8, 1, 72), k, v


@njit
def _byte_weights(params, work):
    nothing = Run(params, 0, 0)
    split_keys(params, 0, 160, 32, 7.5, work, 0, 80, 1024, 8192, 4, nothing)
    split_int8(params, 0, 64, 64, work, 0, 80, 6144, 4, 10000, 10100, nothing)


def byte_weights():
    """The bytes that codes are multiplied by, four to an int32: 40 times of 32 blocks of keys and of 64 values.

    So many because a fused multiply and add would change one in 4,000.
    """
    rng, found = np.random.default_rng(7), []
    for _ in range(40):
        params, work = np.exp(normal(rng, 32 * 160)), np.zeros(10200, np.float32)
        work[:320] = np.abs(normal(rng, 320))
        _byte_weights(params, work)
        found.append(work[1024:6272].view(np.int32))
    assert all(words[:5120].any() and words[5120:].any() for words in found)
    return np.array(found)


def results():
    """Arrays by name: those named "out ..." are of attention, the others must be the same to the bit on every host."""
    found = {"weights": byte_weights()}
    for k_format, v_format in PAIRS:
        cache, q, _, _ = made_up(k_format, v_format)
        found[f"out {k_format} {v_format}"] = cache.attend(q)
        for side, store in (("k", cache.buffers.k), ("v", cache.buffers.v)):
            found |= {f"{side}.{name} {k_format} {v_format}": array for name, array in store._asdict().items()}
    return found


def run_on(processor, code, *args):
    """Run Python code that is compiled for *processor*; this module is imported as ``test_targets``."""
    cpu, features = PROCESSORS[processor]
    folders = (Path(kv.__file__).parents[1], Path(__file__).parent)
    environment = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    command = [sys.executable, "-c", f"import sys, numpy, test_targets; {code}", *map(str, args)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def processors():
    """Older processors whose code this one can run: name to LLVM's name and features."""
    here = binding.get_host_cpu_features()
    older = {
        "x86-64-v3": ("haswell", AVX2),
        "x86-64-v3-avxvnni": ("alderlake", f"{AVX2},+avxvnni"),
        "x86-64-v4": ("skylake-avx512", f"{AVX2},+avx512f,+avx512bw,+avx512dq,+avx512vl"),
    }
    runs = {k: v for k, v in older.items() if all(here.get(name[1:]) for name in v[1].split(","))}
    return {"generic": ("generic", ""), **runs}


PROCESSORS = processors()


@pytest.mark.parametrize("processor", PROCESSORS)
def test_dot_products_of_bytes_are_exact_on_older_processors(processor):
    run_on(processor, "test_targets.check_dot_products()")


def test_dot_products_of_bytes_are_exact_on_this_processor():
    check_dot_products()


@pytest.mark.slow
@pytest.mark.parametrize("processor", [name for name in ("generic", "x86-64-v3") if name in PROCESSORS])
def test_codes_of_older_processors_are_the_same_to_the_bit_and_attention_is_as_exact(processor, tmp_path):
    path = tmp_path / "results.npz"
    run_on(processor, "numpy.savez(sys.argv[1], **test_targets.results())", path)
    with np.load(path) as there:
        for name, array in results().items():
            assert name.startswith("out ") or bit_equal(array, there[name]), name
        for k_format, v_format in PAIRS:
            cache, q, k, v = made_up(k_format, v_format)
            check_attend(cache, q, k, v, out=there[f"out {k_format} {v_format}"])
