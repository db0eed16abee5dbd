# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiler options of the CPU kernels, same as in kernels/cpu/CMakeLists.txt.

CMakeLists.txt explains the options. tools/bazel_options_test.py checks that
both files have the same ones.
"""

COPTS = [
    "-std=c++17",
    "-O3",
    "-Wall",
    "-Wextra",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
]

DOT_COPTS = [
    "-ffp-contract=fast",
    "-fno-trapping-math",
    "-fno-exceptions",
    "-fno-rtti",
]

QUANTIZE_COPTS = [
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-fno-exceptions",
    "-fno-rtti",
]

_AVX2 = [
    "-mavx2",
    "-mfma",
    "-mf16c",
]

_AVX512 = _AVX2 + [
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mprefer-vector-width=512",
]

_AVX512_BF16 = _AVX512 + [
    "-mavx512vbmi",
    "-mavx512vnni",
    "-mavx512bf16",
]

_ISA_COPTS = {
    "baseline": [],
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512bf16": _AVX512_BF16,
    "amx": _AVX512_BF16 + [
        "-mamx-tile",
        "-mamx-bf16",
    ],
}

_ARM_COPTS = {
    "neon_dotprod": ["-march=armv8.2-a+dotprod"],
    "neon_i8mm": ["-march=armv8.2-a+dotprod+i8mm"],
}

def isa_library(name, copts, deps):
    """cc_library of NAME.cc; the file's name is the instruction set."""
    isa = name.split("/")[-1]
    native.cc_library(
        name = name,
        srcs = [name + ".cc"],
        copts = COPTS + copts + select({
            "@platforms//cpu:x86_64": _ISA_COPTS.get(isa, []),
            "@platforms//cpu:aarch64": _ARM_COPTS.get(isa, []),
            "//conditions:default": [],
        }),
        linkstatic = True,
        deps = deps,
    )
