"""Who looks on while a model's layers attend: the seam between `regard.hf`, which computes, and `regard.lens`, which looks.

    if _watch.watchers:
        out, aux = regard.torch.attention(query, key, value, **options, dropout=dropout, return_aux=True)
        _watch.tell(module, query, key, value, options, aux)

`options` are those of `regard.torch.attention` without dropout, which changes no weight that is looked at: with them and `aux`,
`regard.AttentionView(query, key, aux, **options)` makes the weights of the call again. Tensors may carry gradients; watchers detach them.

A list and not a `ContextVar`: generation that streams runs in a thread of its own, and must be seen as well. A watcher is told of every
model's calls, and knows its own by their module.
"""

from __future__ import annotations

from typing import Any, Callable

Watcher = Callable[[Any, Any, Any, Any, dict, Any], None]

watchers: list[Watcher] = []
"""Empty but within `regard.lens.capture`. Each is called as `watcher(module, query, key, value, options, aux)`."""


def tell(module: Any, query: Any, key: Any, value: Any, options: dict[str, Any], aux: Any) -> None:
    """Tells everyone who looks on of one call that has been computed."""
    for watcher in tuple(watchers):
        watcher(module, query, key, value, options, aux)
