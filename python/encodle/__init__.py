"""BERT models without PyTorch: sentence embeddings, rerankers, classifiers and attention weights.

>>> import encodle
>>> model = encodle.SentenceTransformer()  # all-MiniLM-L6-v2, which is part of the package
>>> model.encode(["I love AI"]).shape
(1, 384)
"""

from ._encodle import EncodleError, __version__
from .attention import Attention, AttentionReader
from .batch import BatchEmbedder
from .classifiers import MaskFiller, QuestionAnswerer, TextClassifier, TokenClassifier
from .corpus import EmbedSummary, embed_file
from .cross_encoder import CrossEncoder
from .multi_vector_encoder import MultiVectorEncoder
from .quantization import quantize_embeddings
from .sentence_transformer import SentenceTransformer
from .similarity import SimilarityFunction
from .sparse_encoder import SparseEncoder

__all__ = [
    "Attention",
    "AttentionReader",
    "BatchEmbedder",
    "CrossEncoder",
    "EmbedSummary",
    "EncodleError",
    "MaskFiller",
    "MultiVectorEncoder",
    "QuestionAnswerer",
    "SentenceTransformer",
    "SimilarityFunction",
    "SparseEncoder",
    "TextClassifier",
    "TokenClassifier",
    "__version__",
    "embed_file",
    "quantize_embeddings",
]
