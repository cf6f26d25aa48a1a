"""Measures a pair: acceptance, speed and confidences, beside what needs no trained draft."""
