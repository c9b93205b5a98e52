//! Files of vectors to search: .npy, Parquet and Arrow IPC, mapped into memory.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::Cursor,
    path::Path,
};

use anyhow::{Result, anyhow, bail, ensure};
use arrow_array::{
    Array, RecordBatch,
    cast::AsArray,
    types::{Float16Type, Float32Type},
};
use arrow_ipc::reader::FileReader;
use arrow_schema::{DataType, SchemaRef};
use bytes::Bytes;
use encoder::{Nearest, Search};
use half::{
    f16,
    slice::{HalfBitsSliceExt, HalfFloatSliceExt},
};
use parquet::arrow::{
    ProjectionMask,
    arrow_reader::{
        ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder, RowSelection,
    },
};
use rayon::prelude::*;

use crate::{
    ending::ending,
    json_rows::lines,
    records::{EMBEDDING, Input},
};

/// Rows of f16 that are made f32 at a time.
const HALVES: usize = 4096;
/// Batches of an Arrow file that are read before they are scanned.
const BATCHES: usize = 32;

/// A file of vectors `(N, E)`.
pub struct Corpus {
    name: String,
    file: Bytes,
    kind: Kind,
    dimension: usize,
}

enum Kind {
    Npy { rows: u64, start: usize, half: bool },
    Parquet(ArrowReaderMetadata),
    Arrow(SchemaRef),
}

/// Rows of a corpus: numbers, or the objects of JSON that they were written with.
type Objects = BTreeMap<u64, String>;

impl Corpus {
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let file = File::open(path).map_err(|error| anyhow!("{name} cannot be read: {error}"))?;
        // SAFETY: nobody writes to the file through the map. Whoever else shortened it during the
        // search would end this program, and could not make it compute with what is not there.
        #[allow(unsafe_code)]
        let map = unsafe { memmap2::Mmap::map(&file) };
        let map = map.map_err(|error| anyhow!("{name} cannot be read: {error}"))?;
        let file = Bytes::from_owner(map);
        let (kind, dimension) = match ending(path).as_str() {
            "npy" => npy(&file).map_err(|error| anyhow!("{name}: {error}"))?,
            "parquet" => {
                let cannot = |error| anyhow!("{name} cannot be read as Parquet: {error}");
                let options = ArrowReaderOptions::new();
                let metadata = ArrowReaderMetadata::load(&file, options).map_err(cannot)?;
                let dimension = dimension(&name, metadata.schema())?;
                (Kind::Parquet(metadata), dimension)
            }
            "arrow" | "feather" | "ipc" => {
                let reader = FileReader::try_new(Cursor::new(file.clone()), None);
                let reader = reader
                    .map_err(|error| anyhow!("{name} cannot be read as Arrow IPC: {error}"))?;
                (Kind::Arrow(reader.schema()), dimension(&name, &reader.schema())?)
            }
            _ => bail!("{name} is no file to search: expected .npy, .parquet or .arrow"),
        };
        Ok(Self { name, file, kind, dimension })
    }

    /// E
    pub fn dimension(&self) -> usize {
        self.dimension
    }

    /// What `bert embed` noted of the model that made the vectors.
    pub fn made_by(&self) -> Option<&str> {
        let schema = match &self.kind {
            Kind::Npy { .. } => return None,
            Kind::Parquet(metadata) => metadata.schema(),
            Kind::Arrow(schema) => schema,
        };
        schema.metadata().get("bert").map(String::as_str)
    }

    /// Looks at all vectors.
    pub fn scan(&self, search: &Search) -> Result<Nearest> {
        match &self.kind {
            Kind::Npy { start, half: false, .. } => {
                Ok(search.scan(0, bytemuck::try_cast_slice(&self.file[*start..]).map_err(odd)?)?)
            }
            Kind::Npy { start, half: true, .. } => {
                let bits: &[u16] = bytemuck::try_cast_slice(&self.file[*start..]).map_err(odd)?;
                scan_halves(search, 0, self.dimension, bits.reinterpret_cast())
            }
            Kind::Parquet(metadata) => self.scan_parquet(search, metadata),
            Kind::Arrow(_) => {
                let (mut found, mut first) = (search.nothing(), 0);
                let mut batches = self.arrow(|name| name == EMBEDDING)?;
                loop {
                    let read = batches.by_ref().take(BATCHES).collect::<Result<Vec<_>>>()?;
                    if read.is_empty() {
                        return Ok(found);
                    }
                    let firsts = read.iter().map(|batch| {
                        first += batch.num_rows() as u64;
                        first - batch.num_rows() as u64
                    });
                    let firsts: Vec<u64> = firsts.collect();
                    let parts = read.par_iter().zip(firsts);
                    let parts = parts.map(|(batch, first)| self.scan_batch(search, first, batch));
                    for part in parts.collect::<Result<Vec<_>>>()? {
                        found.merge(part);
                    }
                }
            }
        }
    }

    fn scan_parquet(&self, search: &Search, metadata: &ArrowReaderMetadata) -> Result<Nearest> {
        let groups = metadata.metadata().row_groups();
        let mut first = 0;
        let firsts: Vec<u64> = groups
            .iter()
            .map(|group| {
                first += group.num_rows() as u64;
                first - group.num_rows() as u64
            })
            .collect();
        let parts = firsts.into_par_iter().enumerate().map(|(group, mut first)| {
            let builder = self.parquet(metadata, |name| name == EMBEDDING);
            let mut found = search.nothing();
            for batch in builder.with_row_groups(vec![group]).with_batch_size(HALVES).build()? {
                let batch = batch.map_err(|error| anyhow!("{} is damaged: {error}", self.name))?;
                found.merge(self.scan_batch(search, first, &batch)?);
                first += batch.num_rows() as u64;
            }
            Ok(found)
        });
        parts.try_reduce(
            || search.nothing(),
            |mut found, more| {
                found.merge(more);
                Ok(found)
            },
        )
    }

    fn scan_batch(&self, search: &Search, first: u64, batch: &RecordBatch) -> Result<Nearest> {
        let column = batch.column_by_name(EMBEDDING).expect("it was asked for");
        let vectors = column.as_fixed_size_list();
        ensure!(
            vectors.logical_null_count() == 0 && vectors.values().logical_null_count() == 0,
            "{}: expected vectors in column {EMBEDDING:?}, got null in rows {first} to {}",
            self.name,
            first + batch.num_rows() as u64
        );
        match vectors.values().as_primitive_opt::<Float32Type>() {
            Some(numbers) => Ok(search.scan(first, numbers.values())?),
            None => {
                let halves = vectors.values().as_primitive::<Float16Type>().values();
                scan_halves(search, first, self.dimension, halves)
            }
        }
    }

    /// What some rows were written with; of a .npy file, which has nothing but numbers, that is in
    /// the file that it was made of.
    pub fn objects(&self, rows: &BTreeSet<u64>, records: Option<&Input>) -> Result<Objects> {
        let mut objects = Objects::new();
        if let (Kind::Npy { rows: count, .. }, Some(input)) = (&self.kind, records) {
            let mut read = 0;
            for record in input.open()?.flatten() {
                // Those that were left out have no vectors.
                if rows.contains(&read) {
                    objects.insert(read, record.object()?.to_string() + "}");
                }
                read += 1;
            }
            ensure!(
                read == *count,
                "{} has {read} records: expected the {count} that {} was made of",
                input.name(),
                self.name
            );
            return Ok(objects);
        }
        match &self.kind {
            Kind::Npy { .. } => {}
            Kind::Parquet(metadata) => {
                let total = metadata.metadata().file_metadata().num_rows() as usize;
                let ranges = rows.iter().map(|&row| row as usize..row as usize + 1);
                let selection = RowSelection::from_consecutive_ranges(ranges, total);
                let reader = self.parquet(metadata, |name| name != EMBEDDING);
                let reader = reader.with_row_selection(selection).build()?;
                let mut rows = rows.iter();
                for batch in reader {
                    let lines = lines(&batch?)?;
                    objects.extend(rows.by_ref().copied().take(lines.len()).zip(lines));
                }
            }
            Kind::Arrow(_) => {
                let mut first = 0;
                for batch in self.arrow(|name| name != EMBEDDING)? {
                    let batch = batch?;
                    let end = first + batch.num_rows() as u64;
                    for &row in rows.range(first..end) {
                        let line = lines(&batch.slice((row - first) as usize, 1))?;
                        objects.extend(line.into_iter().map(|line| (row, line)));
                    }
                    first = end;
                }
            }
        }
        Ok(objects)
    }

    /// A reader of some columns.
    fn parquet(
        &self,
        metadata: &ArrowReaderMetadata,
        columns: impl Fn(&str) -> bool,
    ) -> ParquetRecordBatchReaderBuilder<Bytes> {
        let (file, metadata) = (self.file.clone(), metadata.clone());
        let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(file, metadata);
        let fields = builder.parquet_schema().root_schema().get_fields().iter().enumerate();
        let fields = fields.filter(|(_, field)| columns(field.name())).map(|(i, _)| i);
        let mask = ProjectionMask::roots(builder.parquet_schema(), fields.collect::<Vec<_>>());
        builder.with_projection(mask)
    }

    /// Some columns, batch by batch.
    fn arrow(
        &self,
        columns: impl Fn(&str) -> bool,
    ) -> Result<impl Iterator<Item = Result<RecordBatch>>> {
        let Kind::Arrow(schema) = &self.kind else {
            bail!("{} is no Arrow file", self.name);
        };
        let fields = schema.fields().iter().enumerate();
        let fields = fields.filter(|(_, field)| columns(field.name())).map(|(i, _)| i);
        let reader = FileReader::try_new(Cursor::new(self.file.clone()), Some(fields.collect()))?;
        let name = self.name.clone();
        Ok(reader.map(move |batch| batch.map_err(|error| anyhow!("{name} is damaged: {error}"))))
    }
}

/// E, where the column of vectors is one.
fn dimension(name: &str, schema: &SchemaRef) -> Result<usize> {
    let Some((_, field)) = schema.column_with_name(EMBEDDING) else {
        let names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
        bail!("{name}: expected a column {EMBEDDING:?}, got {}", names.join(", "));
    };
    match field.data_type() {
        DataType::FixedSizeList(number, dimension)
            if *dimension > 0
                && matches!(number.data_type(), DataType::Float32 | DataType::Float16) =>
        {
            Ok(*dimension as usize)
        }
        other => bail!(
            "{name}: expected lists of one length of f32 or f16 in column {EMBEDDING:?}, got {other}"
        ),
    }
}

fn scan_halves(search: &Search, first: u64, dimension: usize, rows: &[f16]) -> Result<Nearest> {
    let parts = rows.par_chunks(HALVES * dimension).enumerate();
    let parts = parts.map(|(part, halves)| {
        let mut numbers = vec![0.0; halves.len()];
        halves.convert_to_f32_slice(&mut numbers);
        search.scan(first + (part * HALVES) as u64, &numbers)
    });
    let mut found = search.nothing();
    for part in parts.collect::<encoder::Result<Vec<_>>>()? {
        found.merge(part);
    }
    Ok(found)
}

fn odd(error: bytemuck::PodCastError) -> anyhow::Error {
    anyhow!("the numbers of a .npy file do not lie where numbers may: {error}")
}

/// Where the numbers of a .npy file begin and what they are; E.
///
/// <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>
fn npy(file: &[u8]) -> Result<(Kind, usize)> {
    let header = || -> Option<(usize, &str)> {
        let length = |at: std::ops::Range<usize>| {
            Some(
                file.get(at)?.iter().rev().fold(0, |length, &byte| length << 8 | usize::from(byte)),
            )
        };
        let (start, length) = match file.strip_prefix(b"\x93NUMPY")?.first()? {
            1 => (10, length(8..10)?),
            _ => (12, length(8..12)?),
        };
        let end = start + length;
        Some((end, std::str::from_utf8(file.get(start..end)?).ok()?))
    };
    let (start, header) = header().ok_or_else(|| anyhow!("expected a .npy file"))?;
    let value = |key: &str| Some(header.split_once(&format!("'{key}':"))?.1.trim_start());
    let starts = |key: &str, start: &str| value(key).is_some_and(|value| value.starts_with(start));
    let shape = value("shape").and_then(|shape| shape.strip_prefix('(')?.split_once(')'));
    let shape: Option<Vec<usize>> = shape.and_then(|(shape, _)| {
        let sizes = shape.split(',').map(str::trim).filter(|size| !size.is_empty());
        sizes.map(|size| size.parse().ok()).collect()
    });
    let half = starts("descr", "'<f2'");
    ensure!(
        (half || starts("descr", "'<f4'")) && starts("fortran_order", "False"),
        "expected rows of little-endian f32 or f16, got {}",
        header.trim()
    );
    let Some([rows, dimension]) = shape.as_deref() else {
        bail!("expected an array of two dimensions, got {}", header.trim());
    };
    let bytes = rows.checked_mul(*dimension).and_then(|n| n.checked_mul(if half { 2 } else { 4 }));
    ensure!(*dimension > 0, "expected vectors of at least one number, got {}", header.trim());
    ensure!(
        bytes == Some(file.len() - start),
        "expected {rows} vectors of {dimension} numbers, got {} bytes",
        file.len() - start
    );
    Ok((Kind::Npy { rows: *rows as u64, start, half }, *dimension))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(descr: &str, order: &str, shape: &str, numbers: usize) -> Vec<u8> {
        let header =
            format!("{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n");
        let mut file = b"\x93NUMPY\x01\x00".to_vec();
        file.extend((header.len() as u16).to_le_bytes());
        file.extend(header.as_bytes());
        file.resize(file.len() + numbers, 0);
        file
    }

    #[test]
    fn arrays_of_numpy_are_read_or_refused() {
        let (kind, dimension) = npy(&file("'<f4'", "False", "(2, 3)", 24)).unwrap();
        assert!(matches!(kind, Kind::Npy { half: false, .. }) && dimension == 3);
        let (kind, dimension) = npy(&file("'<f2'", "False", "(0, 5)", 0)).unwrap();
        assert!(matches!(kind, Kind::Npy { half: true, .. }) && dimension == 5);
        for (file, error) in [
            (file("'<f8'", "False", "(2, 3)", 48), "expected rows of little-endian f32 or f16"),
            (file("'<f4'", "True", "(2, 3)", 24), "expected rows of little-endian f32 or f16"),
            (file("'<f4'", "False", "(6,)", 24), "expected an array of two dimensions"),
            (file("'<f4'", "False", "(2, 3)", 20), "expected 2 vectors of 3 numbers, got 20 bytes"),
            (file("'<f4'", "False", "(9, 0)", 0), "expected vectors of at least one number"),
            (file("'<f4'", "False", "(99999999999999999999, 3)", 0), "expected an array of two"),
            (file("'<f4'", "False", "(9999999999999999999, 9)", 0), "expected 9999999999999999999"),
            (b"\x93NUMPY\x01\0\xff\xff{".to_vec(), "expected a .npy file"),
            (b"PK".to_vec(), "expected a .npy file"),
            (vec![], "expected a .npy file"),
        ] {
            let got = npy(&file).err().unwrap().to_string();
            assert!(got.starts_with(error), "{got}");
        }
    }
}
