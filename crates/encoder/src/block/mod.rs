//! The parts of a transformer: embeddings, encoder and decoder layers, and the stack of encoder
//! layers.

mod config;
mod decoder_layer;
pub(crate) mod embeddings;
mod encoder;
mod feed_forward;
mod layer;
mod norm;
mod relative_embeddings;

pub(crate) use config::check_num_hidden_layers;
pub use config::{
    DisentangledConfig, EmbeddingsConfig, EncoderConfig, FeedForwardConfig, FeedForwardKind,
    NormConfig, NormKind, NormPlacement, Positions, RelativeBiasConfig,
};
pub use decoder_layer::DecoderLayer;
pub use embeddings::InputEmbeddings;
pub use encoder::Encoder;
pub use feed_forward::PositionWiseFeedForward;
pub use layer::EncoderLayer;
pub(crate) use norm::Norm;
