//! Embeddings of relative positions for disentangled attention, projected by each layer.

use std::{
    borrow::Cow,
    sync::{Arc, OnceLock},
};

use candle_core::{Module, Tensor};
use mha::DisentangledPositions;
use ops::{Loaded, NotLoaded, Weights};

use crate::{DisentangledConfig, EncoderConfig, EncoderLayer, Result, block::norm::Norm};

/// The embeddings of relative positions, which all layers share. R is [`DisentangledConfig::rows`].
#[derive(Clone, Debug)]
pub(crate) struct RelativeEmbeddings {
    table: Loaded<Tensor>, // (R, E)
    norm: Option<Norm>,
    config: DisentangledConfig,
    /// The row of `table` for each distance from `−(max_tokens − 1)` to `max_tokens − 1`.
    rows: Arc<[u32]>,
    /// The projections of each layer, computed at the first call. If autograd tracks the weights,
    /// each call computes them.
    projected: Arc<[OnceLock<DisentangledPositions>]>,
}

impl RelativeEmbeddings {
    /// Builds the module from `embeddings` in `weights` and, if `config.norm` is set, from `norm`.
    pub(crate) fn new(
        encoder: &EncoderConfig,
        config: &DisentangledConfig,
        layers: usize,
        weights: Weights,
    ) -> Result<Self> {
        let e = encoder.hidden_size;
        let radius = encoder.max_tokens() as isize - 1;
        Ok(Self {
            table: weights.get((config.rows(), e), "embeddings.weight")?,
            norm: if config.norm { Some(Norm::new(encoder, e, weights.pp("norm"))?) } else { None },
            config: config.clone(),
            rows: (-radius..=radius).map(|distance| config.row(distance)).collect(),
            projected: (0..layers).map(|_| OnceLock::new()).collect(),
        })
    }

    /// The projections of layer `i`.
    pub(crate) fn of_layer(
        &self,
        i: usize,
        layer: &EncoderLayer,
    ) -> Result<Cow<'_, DisentangledPositions>> {
        let cell = self.projected.get(i);
        if let Some(positions) = cell.and_then(OnceLock::get) {
            return Ok(Cow::Borrowed(positions));
        }
        let positions = self.project(layer)?;
        Ok(match cell.filter(|_| !positions.is_tracked()) {
            Some(cell) => Cow::Borrowed(cell.get_or_init(|| positions)),
            None => Cow::Owned(positions),
        })
    }

    fn project(&self, layer: &EncoderLayer) -> Result<DisentangledPositions> {
        let table = self.table.as_ref().map_err(NotLoaded::clone).map_err(ops::Error::from)?;
        let embeddings = match &self.norm {
            Some(norm) => norm.forward(table)?,
            None => table.clone(),
        };
        let (keys, queries) = layer.attention().attention().project_positions(&embeddings)?;
        let keys = Some(keys).filter(|_| self.config.content_to_position);
        let queries = Some(queries).filter(|_| self.config.position_to_content);
        Ok(DisentangledPositions::new(keys, queries, self.rows.clone())?)
    }
}
