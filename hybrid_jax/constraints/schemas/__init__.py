"""JSON schemas, written again so that llguidance follows all of them, or refused.

May import: constraints.lark, constraints.matches, constraints.patterns.
"""
