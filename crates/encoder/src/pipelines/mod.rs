//! Pipelines from texts to results: embeddings, labels, entities, answers, tokens for masks, and
//! attention weights. Also the search for vectors, and the inspection of model folders.

mod attention_reader;
mod bge_m3;
mod bge_m3_embedder;
mod classifier;
mod dense;
mod distinct;
mod embed;
mod embed_options;
mod embedder;
mod embedding_kind;
mod inspect;
mod mask_filler;
mod modules;
mod multi_vector;
mod multi_vector_embedder;
mod multi_vector_modules;
mod multi_vector_search;
mod pooling;
mod question_answerer;
mod rank_fusion;
mod recent_rows;
mod reranker;
mod search;
mod span;
mod sparse_auto_encoder;
mod sparse_embedder;
mod sparse_index;
mod sparse_vector;
mod splade;
mod static_embedding;
mod task;
mod token_classifier;
mod token_mask;
mod token_pooling;
mod tokenized_texts;
mod with_tokenizer;

pub use attention_reader::{AttentionKind, AttentionReader, TextAttention};
pub use bge_m3_embedder::{BgeM3Embedder, BgeM3Embedding};
pub use classifier::{Classified, LogitActivation, TextClassifier, TextClassifierParams};
pub use distinct::Distinct;
pub use embed::{Embed, Row};
pub use embed_options::{EmbedOptions, LongTexts, TextRole};
pub use embedder::{Embedder, Embeddings};
pub use embedding_kind::EmbeddingKind;
pub use inspect::Inspection;
pub use mask_filler::{Candidate, Filled, MaskFiller, MaskFillerParams};
pub use multi_vector::{LateInteraction, MultiVector};
pub use multi_vector_embedder::MultiVectorEmbedder;
pub use multi_vector_search::MultiVectorSearch;
pub use ops::VectorSlice;
pub use pooling::{Pooling, PoolingMode};
pub use question_answerer::{Answers, QuestionAnswerer, QuestionAnswererParams};
pub use rank_fusion::reciprocal_rank_fusion;
pub use recent_rows::RecentRows;
pub use reranker::{Ranking, Reranker};
pub use search::{Hit, Nearest, Search};
pub use span::Span;
pub use sparse_embedder::SparseEmbedder;
pub use sparse_index::{SparseIndex, SparseIndexBuilder};
pub use sparse_vector::SparseVector;
pub use task::{
    Example, Parameter, ParameterKind, Params, Pipeline, TaskOutput, TaskSize, TaskVisitor,
    TextResult, TokenizedText,
};
pub use token_classifier::{Aggregation, Entity, Tagged, TokenClassifier, TokenClassifierParams};
pub use tokenized_texts::{Batch, TEXTS_PER_CHUNK, TokenizedTexts, Truncated, unless_stopped};

/// Calls [`TaskVisitor::visit`] for each task. The commands, the routes and the classes of the
/// Python package are those of these tasks. A server loads a model for the first task that it can
/// do.
pub fn for_each_task(visitor: &mut impl TaskVisitor) {
    visitor.visit::<TextClassifier>();
    visitor.visit::<TokenClassifier>();
    visitor.visit::<QuestionAnswerer>();
    visitor.visit::<MaskFiller>();
}
