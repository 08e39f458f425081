"""Building blocks of models: pure functions of arrays, parameters first, static spec last."""
