//! The transformer block: embeddings, encoder and decoder layers, and the encoder stack.

mod decoder_layer;
pub(crate) mod embeddings;
mod encoder;
mod feed_forward;
mod layer;

pub use decoder_layer::DecoderLayer;
pub use embeddings::BertEmbeddings;
pub use encoder::Encoder;
pub use feed_forward::PositionWiseFeedForward;
pub use layer::EncoderLayer;
