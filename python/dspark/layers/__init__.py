"""The layers that targets and drafts share: norm, rotary embedding, projections, decoder layer."""
