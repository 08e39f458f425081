"""Studies of the cache on virtual time: traces through the very classes an engine runs, without a model."""
