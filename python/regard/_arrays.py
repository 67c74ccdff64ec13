"""Conversion of NumPy arrays and PyTorch tensors to address, dtype, shape and strides for the engine."""

from __future__ import annotations

import operator
import sys
from typing import Any

import numpy as np

_NUMPY = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "bool": "bool", "int64": "i64", "uint64": "u64"}
_NUMBER = {"f32": "f32", "f64": "f64", "f16": "f32", "bf16": "f32"}
"""Compute type of each dtype; also the type of lse and of small tables."""


def whole(name: str, x: Any) -> int:
    """Convert an option to `int`."""
    try:
        return operator.index(x)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, found {x!r}") from None


def count(name: str, x: Any) -> int:
    """Convert an option to a non-negative `int`."""
    found = whole(name, x)
    if found < 0:
        raise ValueError(f"{name}: {found} is invalid; use an integer >= 0")
    return found


def number(name: str, x: Any) -> float:
    """Convert an option to a finite `float`."""
    try:
        found = float(x)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number, found {x!r}") from None
    if not abs(found) < float("inf"):
        raise ValueError(f"{name}: {found} is invalid; use a finite number")
    return found


def is_torch(x: Any) -> bool:
    """Whether x is a PyTorch tensor. Does not import PyTorch, which is optional."""
    return hasattr(x, "requires_grad")


def name_of(dtype: Any) -> str:
    """`f32`, `f64`, `f16`, `bf16`, `bool`, `i64`, `u64`, or the library's own name of another dtype."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype)).rsplit(".", 1)[-1]
    return _NUMPY.get(name, name)


_names: dict[Any, str] = {}


def dtype_of(x: Any) -> str:
    """Name of an array's dtype, as in :func:`name_of`."""
    dtype = x.dtype
    known = _names.get(dtype)
    if known is None:
        name = str(dtype).rsplit(".", 1)[-1]
        known = _names[dtype] = _NUMPY.get(name, name)
    return known


def number_of(x: Any) -> str:
    """Compute type of x: the type of lse and of small tables in a call with x."""
    dtype = dtype_of(x)
    if dtype not in _NUMBER:
        raise TypeError(f"expected f32, f64, f16 or bf16, found {dtype}")
    return _NUMBER[dtype]


def cast(x: Any, dtype: str, name: str) -> Any:
    """Cast to `f32`, `f64` or `i64`, in the library of x."""
    names = {"f32": "float32", "f64": "float64", "i64": "int64"}
    if is_torch(x):
        if dtype == "i64" and x.is_floating_point():
            raise TypeError(f"{name}: expected integers, found {x.dtype}")
        return x.to(getattr(sys.modules["torch"], names[dtype]))
    try:
        x = np.asarray(x)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if dtype == "i64" and x.size and x.dtype.kind not in "iub":
        raise TypeError(f"{name}: expected integers, found {x.dtype}")
    if x.dtype.kind in "cOSUMm":
        raise TypeError(f"{name}: expected numbers, found {x.dtype}")
    return x.astype(names[dtype], copy=False)


def dense(x: Any) -> Any:
    """Contiguous copy, or x itself if it is contiguous."""
    return x.contiguous() if is_torch(x) else np.require(x, requirements=("C", "A"))


def rows(x: Any) -> Any:
    """x with a contiguous last axis and no negative strides; copied only if needed. Packed rows, `[total, heads, features]`, are fully
    contiguous."""
    if is_torch(x):
        return x if x.ndim != 3 and (x.ndim == 0 or x.shape[-1] <= 1 or x.stride(-1) == 1) else x.contiguous()
    x = np.asarray(x)
    flags = x.flags
    if x.ndim and flags.c_contiguous and flags.aligned:
        return x
    if x.ndim == 3:
        return np.require(x, requirements=("C", "A"))
    steps = [s for n, s in zip(x.shape, x.strides) if n > 1]
    whole = all(s >= 0 and s % x.itemsize == 0 for s in steps)
    if x.ndim and whole and x.flags.aligned and (x.shape[-1] <= 1 or x.strides[-1] == x.itemsize):
        return x
    return np.require(x, requirements=("C", "A"))


def memory(x: Any) -> tuple[int, str, tuple[int, ...], tuple[int, ...]]:
    """Address, dtype, shape, and strides in elements. The array must outlive the call that uses it."""
    if type(x) is not np.ndarray and is_torch(x):
        if not x.is_cpu:
            raise TypeError(f"expected a CPU tensor, found device {x.device}; move it with .cpu()")
        return x.data_ptr(), dtype_of(x), x.shape, x.stride()
    size, shape = x.itemsize, x.shape
    strides = tuple([s // size if n > 1 and x.size else 1 for n, s in zip(shape, x.strides)])  # NumPy gives an empty array strides of 0
    return x.__array_interface__["data"][0], dtype_of(x), shape, strides


def place(x: Any) -> Any:
    """:func:`memory`, or x itself if the engine reads the array interface of NumPy, which is faster."""
    return x if type(x) is np.ndarray and x.dtype.char in "fde" and x.dtype.isnative else memory(x)


def like_rows(q: Any, dim: int) -> Any:
    """New array for the output of `q [batch, heads, q_len, _]`: `dim` features, in the memory order of q."""
    batch, heads, length, _ = q.shape
    if type(q) is np.ndarray:
        if q.strides[1] < q.strides[2]:
            return np.empty((batch, length, heads, dim), q.dtype).transpose(0, 2, 1, 3)
        return np.empty((batch, heads, length, dim), q.dtype)
    if q.stride(1) < q.stride(2):
        return q.new_empty((batch, length, heads, dim)).transpose(1, 2)
    return q.new_empty((batch, heads, length, dim))


def numpy_of(owned: Any) -> np.ndarray:
    """NumPy array of a result of the engine, zero-copy. bf16 needs the package `ml_dtypes`."""
    array = np.asarray(owned)
    if owned.dtype == "bf16":
        import ml_dtypes

        array = array.view(ml_dtypes.bfloat16)
    return array


def torch_of(owned: Any) -> Any:
    """PyTorch tensor of a result of the engine, zero-copy."""
    import torch

    array = np.asarray(owned)
    if owned.dtype == "bf16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def like(x: Any, owned: Any) -> Any:
    """Result of the engine as an array in the library of `x`, zero-copy."""
    return torch_of(owned) if is_torch(x) else numpy_of(owned)


def waits_for_gradient(x: Any) -> bool:
    """Whether x is a PyTorch tensor that autograd tracks."""
    return is_torch(x) and x.requires_grad and sys.modules["torch"].is_grad_enabled()


def without_gradients(call: str, **tensors: Any) -> None:
    """Raise if a tensor requires a gradient in a call without a backward pass."""
    for name, x in tensors.items():
        if waits_for_gradient(x):
            raise TypeError(f"{name}: requires a gradient, but {call} has no backward pass; detach it, or use torch.no_grad()")
