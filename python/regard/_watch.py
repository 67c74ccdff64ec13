"""Callbacks for attention calls of a model: connects `regard.hf`, which computes, with `regard.lens`, which records.

    if _watch.watchers:
        out, aux = regard.torch.attention(query, key, value, **options, dropout=dropout, return_aux=True)
        _watch.tell(module, query, key, value, options, aux)

`options` are those of `regard.torch.attention` without dropout, since recorded weights are those before dropout:
`regard.AttentionView(query, key, aux, **options)` recomputes the weights of the call. Tensors may require gradients; callbacks detach them.

A list instead of a `ContextVar`: streaming generation runs in its own thread and must be recorded too. A callback receives the calls of
all models and filters them by module.
"""

from __future__ import annotations

from typing import Any, Callable

Watcher = Callable[[Any, Any, Any, Any, dict, Any], None]

watchers: list[Watcher] = []
"""Active callbacks; empty outside `regard.lens.capture`. Called as `watcher(module, query, key, value, options, aux)`."""


def tell(module: Any, query: Any, key: Any, value: Any, options: dict[str, Any], aux: Any) -> None:
    """Pass one finished call to all callbacks."""
    for watcher in tuple(watchers):
        watcher(module, query, key, value, options, aux)
