"""Proof, on the user's machine, that a pair decodes losslessly, and how strong the proof is.

`audit_pair` runs it; `reference` is what the engine is compared with, `statistics` the tests, `report` the
verdict.
"""
