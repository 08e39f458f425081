"""Products of few rows on a CPU: machine code that is made at the start, and called from XLA's programs.

XLA has no good product of 1 to 32 rows on a CPU. Here LLVM makes one of text, through the package llvmlite, so nobody
needs a compiler. A program calls it as a target of XLA's foreign function interface (FFI), without Python.

May import: config, pallas_kernels.grouped_linear, process.ownership, products.xla.
Packages: jax, numpy, llvmlite.
"""
