"""Measures a pair: acceptance, speed and confidences, beside baselines that need no trained draft."""
