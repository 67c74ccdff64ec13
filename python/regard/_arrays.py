"""NumPy arrays and PyTorch tensors as the engine takes them: where they lie, and in which steps."""

from __future__ import annotations

import operator
import sys
from typing import Any

import numpy as np

_NUMPY = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "bool": "bool", "int64": "i64", "uint64": "u64"}
_CHARS = {"f": "f32", "d": "f64", "e": "f16", "?": "bool"}
"""The same by the character of a type of NumPy's own: ten times as fast to be had as its name."""
_NUMBER = {"f32": "f32", "f64": "f64", "f16": "f32", "bf16": "f32"}
"""What arithmetic on a type is done in, and what small tables are held in."""


def whole(name: str, x: Any) -> int:
    """A whole number that an option needs."""
    try:
        return operator.index(x)
    except TypeError:
        raise TypeError(f"{name}: expected a whole number, found {x!r}") from None


def count(name: str, x: Any) -> int:
    """A whole number from 0 on."""
    found = whole(name, x)
    if found < 0:
        raise ValueError(f"{name}: {found} is not usable; give a whole number from 0 on")
    return found


def number(name: str, x: Any) -> float:
    """A number that an option needs."""
    try:
        found = float(x)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number, found {x!r}") from None
    if not abs(found) < float("inf"):
        raise ValueError(f"{name}: {found} is not usable; give a finite number")
    return found


def is_torch(x: Any) -> bool:
    """Without an import of PyTorch, which may not be there."""
    return hasattr(x, "requires_grad")


def name_of(dtype: Any) -> str:
    """`f32`, `f64`, `f16`, `bf16`, `bool`, `i64`, `u64`, or what the library of the type calls it."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype)).rsplit(".", 1)[-1]
    return _NUMPY.get(name, name)


def dtype_of(x: Any) -> str:
    """The same of what an array holds."""
    dtype = x.dtype
    known = _CHARS.get(getattr(dtype, "char", ""))
    if known is not None and dtype.isnative:
        return known
    name = str(dtype).rsplit(".", 1)[-1]
    return _NUMPY.get(name, name)


def number_of(x: Any) -> str:
    """The type of lse and of small tables beside tensors like this one."""
    dtype = dtype_of(x)
    if dtype not in _NUMBER:
        raise TypeError(f"expected f32, f64, f16 or bf16, found {dtype}")
    return _NUMBER[dtype]


def cast(x: Any, dtype: str, name: str) -> Any:
    """The same numbers as `f32`, `f64` or `i64`, in the library they come in."""
    names = {"f32": "float32", "f64": "float64", "i64": "int64"}
    if is_torch(x):
        if dtype == "i64" and x.is_floating_point():
            raise TypeError(f"{name}: expected whole numbers, found {x.dtype}")
        return x.to(getattr(sys.modules["torch"], names[dtype]))
    try:
        x = np.asarray(x)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if dtype == "i64" and x.size and x.dtype.kind not in "iub":
        raise TypeError(f"{name}: expected whole numbers, found {x.dtype}")
    if x.dtype.kind in "cOSUMm":
        raise TypeError(f"{name}: expected numbers, found {x.dtype}")
    return x.astype(names[dtype], copy=False)


def dense(x: Any) -> Any:
    """The same with elements side by side."""
    return x.contiguous() if is_torch(x) else np.require(x, requirements=("C", "A"))


def rows(x: Any) -> Any:
    """The same where the features of a row lie side by side and no stride is negative: almost always itself. Packed rows, `[total,
    heads, features]`, lie all side by side."""
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
    """Address, type, sizes and strides in elements. The array must outlive the call it is handed to."""
    if type(x) is not np.ndarray and is_torch(x):
        if not x.is_cpu:
            raise TypeError(f"expected a tensor of the CPU, found one of {x.device}; move it there with .cpu()")
        return x.data_ptr(), dtype_of(x), x.shape, x.stride()
    size, shape = x.itemsize, x.shape
    strides = tuple([s // size if n > 1 else 1 for n, s in zip(shape, x.strides)])
    return x.__array_interface__["data"][0], dtype_of(x), shape, strides


def numpy_of(owned: Any) -> np.ndarray:
    """An array of the engine's, without a copy. bf16 needs the package `ml_dtypes`."""
    array = np.asarray(owned)
    if owned.dtype == "bf16":
        import ml_dtypes

        array = array.view(ml_dtypes.bfloat16)
    return array


def torch_of(owned: Any) -> Any:
    """A tensor of the engine's, without a copy."""
    import torch

    array = np.asarray(owned)
    if owned.dtype == "bf16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def like(x: Any, owned: Any) -> Any:
    """An array of the engine's in the library of `x`, without a copy."""
    return torch_of(owned) if is_torch(x) else numpy_of(owned)


def waits_for_gradient(x: Any) -> bool:
    """Whether it is a tensor of PyTorch that autograd follows."""
    return is_torch(x) and x.requires_grad and sys.modules["torch"].is_grad_enabled()


def without_gradients(call: str, **tensors: Any) -> None:
    """Refuses tensors that wait for a gradient from a call that gives none."""
    for name, x in tensors.items():
        if waits_for_gradient(x):
            raise TypeError(f"{name}: it requires a gradient, and {call} gives none; detach it, or call it in torch.no_grad()")
