"""Proof, on the user's machine, that a pair decodes losslessly, and how strong the proof is.

`run.audit_pair` does it all. `reference` is what the engine is compared with; `greedy`, `sampled` and
`coupled` compare; `checks` and `report` hold what was found.
"""
