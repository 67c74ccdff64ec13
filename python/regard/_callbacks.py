"""Callbacks for attention calls of a model: connects `regard.hf`, which computes, with `regard.lens`, which records.

    if _callbacks.callbacks:
        out, aux = regard.torch.attention(query, key, value, **options, dropout=dropout, return_aux=True)
        _callbacks.notify(module, query, key, value, options, aux)

`options` are those of `regard.torch.attention` without dropout, since recorded weights are those before dropout:
`regard.AttentionView(query, key, aux, **options)` recomputes the weights of the call. Tensors may require gradients; callbacks detach them.

A list instead of a `ContextVar`: streaming generation runs in its own thread and must be recorded too. A callback receives the calls of
all models and filters them by module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Callable

Callback = Callable[[Any, Any, Any, Any, dict, Any], None]

callbacks: list[Callback] = []
"""Active callbacks; empty outside `regard.lens.capture`. Called as `callback(module, query, key, value, options, aux)`."""

interventions: list[Any] = []
"""Active `regard.hf.intervene`; each plans the changes of a call before it is computed."""

head_means: list[Any] = []
"""Active `regard.hf.head_means`; each is given the output of a call."""


@contextlib.contextmanager
def added(to: list[Any], one: Any) -> Iterator[None]:
    """Add to one of the lists inside a context."""
    to.append(one)
    try:
        yield
    finally:
        to.remove(one)


def notify(module: Any, query: Any, key: Any, value: Any, options: dict[str, Any], aux: Any) -> None:
    """Pass one finished call to all callbacks."""
    for callback in tuple(callbacks):
        callback(module, query, key, value, options, aux)
