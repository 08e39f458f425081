"""The key-value store of `jax.distributed`, for threads of one process in the place of processes."""

from __future__ import annotations

import threading

import jax


class Store:
    """As the client of `jax.distributed`, for threads of this process."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()
        self.most = 0

    def key_value_set(self, key, value):
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.most = max(self.most, len(self.values))
            self.changed.notify_all()

    def blocking_key_value_get(self, key, wait_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, wait_ms / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: it is not there")
            return self.values[key]

    def key_value_delete(self, folder):
        with self.changed:
            self.values = {k: v for k, v in self.values.items() if not k.startswith(folder)}
