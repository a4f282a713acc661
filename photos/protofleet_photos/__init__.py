"""An extractor for colour photos, as one file beside this one: `photos.bundle`. README.md says where it comes from."""

from pathlib import Path

__all__ = ["BUNDLE"]

BUNDLE = Path(__file__).with_name("photos.bundle")
