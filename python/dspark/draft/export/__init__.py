"""Writing a draft in another packaging, so that other engines can serve it."""

from dspark.draft.export.convert import FORMATS, export_draft

__all__ = ["FORMATS", "export_draft"]
