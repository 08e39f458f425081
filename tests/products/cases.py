"""The formats with which tests run. A format that the package gets has a file like those here, and a line below."""

from __future__ import annotations

from tests.products import int4, int8

CASES = {case.name: case for case in (int8.CASE, int4.CASE)}
