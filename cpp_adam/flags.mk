# SPDX-License-Identifier: Apache-2.0
# How the C++ files are compiled: read by the Makefile here and by ../setup.py. One "NAME := words" a line.

# The results must be the same bits on every CPU and with any CFLAGS around: no contraction into fused multiply-adds, no
# -ffast-math, no -march=native. The two last flags change no value, only errno and exception flags, which nobody reads.
FLAGS := -std=c++17 -fno-fast-math -ffp-contract=off -Wall -Wextra -fno-math-errno -fno-trapping-math
OPTIMIZE := -O3

# Compiled for the architecture's base, so that the module loads on any CPU of it.
SOURCES := footprint kernel_scalar kernels pool slab

# One file for each further instruction set, with the flags of that file.
KERNELS_x86_64 := kernel_avx2 kernel_avx512
KERNELS_aarch64 := kernel_neon
FLAGS_kernel_avx2 := -mavx2 -mf16c
# GCC 12's own AVX-512 header sets off the two warnings.
FLAGS_kernel_avx512 := -mavx512f -mavx512bw -mavx512dq -mavx512vl -Wno-uninitialized -Wno-maybe-uninitialized
FLAGS_kernel_neon :=
