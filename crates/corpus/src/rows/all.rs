//! Rows of all kinds: a column for each kind.

use arrow_array::ArrayRef;
use arrow_schema::{ArrowError, DataType};
use encoder::{BgeM3Embedding, MultiVector, SparseVector};
use serde::Serialize;

use crate::{
    ALL_EMBEDDINGS, VectorDtype,
    rows::{StoredColumn, StoredRow, data_type},
};

impl StoredRow for BgeM3Embedding {
    const HAS_FIXED_LENGTH: bool = false;
    const COLUMNS: &'static [&'static str] = &ALL_EMBEDDINGS;
    /// The vectors of tokens are f16 by default. They have length 1, so that all values fit.
    const DTYPE: VectorDtype = VectorDtype::F32;

    fn data_types(dimensions: &[usize], dtype: Option<VectorDtype>) -> Vec<DataType> {
        vec![
            data_type::<Vec<f32>>(dimensions[0], dtype),
            data_type::<SparseVector>(dimensions[1], dtype),
            data_type::<MultiVector>(dimensions[2], dtype),
        ]
    }

    fn columns(rows: &[Self], data_types: &[&DataType]) -> Result<Vec<ArrayRef>, ArrowError> {
        let dense = rows.iter().map(|row| &row.embedding);
        let sparse = rows.iter().map(|row| &row.sparse_embedding);
        let multi_vector = rows.iter().map(|row| &row.multi_vector_embedding);
        Ok(vec![
            Vec::column(dense, data_types[0])?,
            SparseVector::column(sparse, data_types[1])?,
            MultiVector::column(multi_vector, data_types[2])?,
        ])
    }

    fn object(&self) -> impl Serialize {
        self
    }
}
