//! Loads checkpoints: file access, tensor names, and one report of every missing, mismatched or
//! unexpected tensor.

mod checkpoint;
mod files;
mod folder;
mod hash;
mod home;
#[cfg(feature = "hub")]
mod hub;
mod json;
mod loading;
mod names;
mod options;
mod packed_cache;
mod pickle;
mod report;
mod save;
mod tensor_info;
mod weights;

pub(crate) use checkpoint::Checkpoint;
pub(crate) use folder::{CONFIG, ModelFolder, WEIGHTS};
pub(crate) use json::{Json, parse_value};
pub(crate) use loading::{Read, check_no_adapter, model, model_with_cache, module, rows, vector};
pub(crate) use names::{
    ATTENTION_OUTPUT, DOWN, HEAD, KEY_VALUE, LABELS, NARROW_NORM, NARROW_POSITIONS, NARROW_TYPES,
    NARROW_VOCAB, NARROWING, NORM, Names, Naming, POSITIONS, PROJECTION, QUERY, Row, SQUARE,
    TWO_OUTPUTS, TYPES, UP, VOCAB,
};
pub(crate) use save::write;
pub(crate) use tensor_info::TensorInfo;
pub(crate) use weights::WeightFiles;

pub use files::ModelFiles;
#[cfg(feature = "hub")]
pub use hub::{DownloadProgress, Hub};
pub use options::LoadOptions;
pub use packed_cache::{PackedCache, PackedCacheFile};
pub use report::{LoadReport, Mismatched, Missing};
