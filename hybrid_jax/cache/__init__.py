"""The prefix cache: `pools` of frames and slots, the `tree` of prefixes, and the `policy` of what to keep. Integers on
the host, no device and no arrays of state.

May import: nothing of the package.
"""
