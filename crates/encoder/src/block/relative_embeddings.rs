//! Embeddings of relative positions for disentangled attention, projected by each layer.

use std::{borrow::Cow, sync::Arc};

use candle_core::{Module, Tensor};
use candle_nn::VarBuilder;
use mha::DisentangledPositions;

use crate::{
    DisentangledConfig, EncoderConfig, EncoderLayer, Result, block::norm::Norm,
    load::is_placeholder,
};

/// The embeddings of relative positions, which all layers share. R is [`DisentangledConfig::rows`].
#[derive(Clone, Debug)]
pub(crate) struct RelativeEmbeddings {
    table: Tensor, // (R, E)
    norm: Option<Norm>,
    config: DisentangledConfig,
    /// The row of `table` for each distance from `−(max_tokens − 1)` to `max_tokens − 1`.
    rows: Arc<[u32]>,
    /// The projections of each layer. Empty if autograd tracks the weights (each call then computes
    /// the projections), or if `table` is a placeholder without data.
    projected: Vec<DisentangledPositions>,
}

impl RelativeEmbeddings {
    /// Builds the module from `embeddings` in `vb` and, if `config.norm` is set, from `norm`.
    pub(crate) fn new(
        encoder: &EncoderConfig,
        config: &DisentangledConfig,
        layers: &[EncoderLayer],
        vb: VarBuilder,
    ) -> Result<Self> {
        let e = encoder.hidden_size;
        let radius = encoder.max_tokens() as isize - 1;
        let mut embeddings = Self {
            table: vb.get((config.rows(), e), "embeddings.weight")?,
            norm: match config.norm {
                true => Some(Norm::new(encoder, e, vb.pp("norm"))?),
                false => None,
            },
            config: config.clone(),
            rows: (-radius..=radius).map(|distance| config.row(distance)).collect(),
            projected: vec![],
        };
        if !is_placeholder(&embeddings.table) {
            let projected = layers.iter().map(|layer| embeddings.project(layer));
            let projected = projected.collect::<Result<Vec<_>>>()?;
            if !projected.iter().any(DisentangledPositions::is_tracked) {
                embeddings.projected = projected;
            }
        }
        Ok(embeddings)
    }

    /// The projections of layer `i`.
    pub(crate) fn of_layer(
        &self,
        i: usize,
        layer: &EncoderLayer,
    ) -> Result<Cow<'_, DisentangledPositions>> {
        match self.projected.get(i) {
            Some(positions) => Ok(Cow::Borrowed(positions)),
            None => Ok(Cow::Owned(self.project(layer)?)),
        }
    }

    fn project(&self, layer: &EncoderLayer) -> Result<DisentangledPositions> {
        let embeddings = match &self.norm {
            Some(norm) => norm.forward(&self.table)?,
            None => self.table.clone(),
        };
        let (keys, queries) = layer.attention().attention().project_positions(&embeddings)?;
        let keys = Some(keys).filter(|_| self.config.content_to_position);
        let queries = Some(queries).filter(|_| self.config.position_to_content);
        Ok(DisentangledPositions::new(keys, queries, self.rows.clone())?)
    }
}
