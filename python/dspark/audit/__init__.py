"""Tests, on the user's machine, whether a pair decodes losslessly, and how strong these tests are.

`run.audit_pair` runs a whole audit. `reference` is what the engine is compared with; `greedy`, `sampled` and
`coupled` compare; `checks` and `report` hold what was found.
"""
