"""From text and token files to batches of numpy arrays. Imports no torch."""

from meshwright.data.batch import IGNORED, Batch, batch_place, evaluation_ids
from meshwright.data.dataset import Dataset, open_dataset
from meshwright.data.order import sample_ids
from meshwright.data.settings import DataSettings
from meshwright.data.split import Split

__all__ = [
    "IGNORED",
    "Batch",
    "DataSettings",
    "Dataset",
    "Split",
    "batch_place",
    "evaluation_ids",
    "open_dataset",
    "sample_ids",
]
