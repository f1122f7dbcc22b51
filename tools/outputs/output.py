"""Names of the places that `pretokenize` writes to."""

from tokenfeed.pipeline.format.store import LocalStore as FolderOutput
from tokenfeed.pipeline.format.store import Place as Output

__all__ = ["FolderOutput", "Output"]
