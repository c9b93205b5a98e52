//! The parts of a transformer: embeddings, the layer, and the stack of layers.

mod config;
mod decoder_state;
pub(crate) mod embeddings;
mod encoder;
mod feed_forward;
mod layer;
mod norm;
mod relative_embeddings;

pub use config::{
    DisentangledConfig, EmbeddingsConfig, EncoderConfig, FeedForwardConfig, FeedForwardKind,
    NormConfig, NormKind, NormPlacement, Positions, RelativeBiasConfig, RotaryPositions,
};
pub(crate) use config::{check_num_hidden_layers, unsupported};
pub(crate) use decoder_state::Prefix;
pub use decoder_state::{DecoderAttentions, DecoderCache, DecoderMemory};
pub use embeddings::InputEmbeddings;
pub use encoder::Encoder;
pub(crate) use encoder::ReadTokens;
pub use feed_forward::PositionWiseFeedForward;
pub use layer::EncoderLayer;
pub(crate) use norm::Norm;
