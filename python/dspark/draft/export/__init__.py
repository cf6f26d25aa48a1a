"""Writing a draft in another packaging, so that other engines can serve it."""

from dspark.draft.export.configs import FORMATS
from dspark.draft.export.convert import export_draft

__all__ = ["FORMATS", "export_draft"]
