"""Prompts to measure and to train with: files of them, and the sets that come with the package."""

from dspark.prompts.files import read_prompts, read_turns
from dspark.prompts.sets import CODE_ALONE, CODE_BEGINNINGS, GENERAL, SETS, built_in

__all__ = ["CODE_ALONE", "CODE_BEGINNINGS", "GENERAL", "SETS", "built_in", "read_prompts", "read_turns"]
