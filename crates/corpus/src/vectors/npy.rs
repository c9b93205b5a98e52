//! The header of a .npy file.
//!
//! <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>

use crate::{Error, Result, VectorsError, vectors::dtype::VectorDtype};

/// The length of the header that [`header`] returns.
pub(crate) const HEADER_LENGTH: usize = 128;

/// The shape, the dtype and the position of the array of a .npy file.
#[derive(Clone, Debug)]
pub(crate) struct NpyArray {
    pub(crate) rows: u64,
    pub(crate) dimension: usize,
    pub(crate) dtype: VectorDtype,
    /// The offset of the first value in the file.
    pub(crate) start: usize,
}

/// The header of an array `(rows, columns)`, format 1.0, padded so that its length does not depend
/// on the number of rows.
pub(crate) fn header(dtype: VectorDtype, rows: u64, columns: usize) -> Vec<u8> {
    let dict = format!(
        "{{'descr': '<f{}', 'fortran_order': False, 'shape': ({rows}, {columns}), }}",
        dtype.size()
    );
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend(((HEADER_LENGTH - 10) as u16).to_le_bytes());
    header.extend(dict.as_bytes());
    header.resize(HEADER_LENGTH - 1, b' ');
    header.push(b'\n');
    header
}

/// Reads the header of a .npy file with an array `(N, E)` of little-endian f32 or f16.
///
/// # Errors
/// [`VectorsError::Npy`] if the header is not valid, if the file contains an array of another
/// dtype, order or rank, if E is 0, or if the file's length does not match the shape.
pub(crate) fn parse(name: &str, file: &[u8]) -> Result<NpyArray> {
    let error = |expected: &str, got: &str| {
        let (expected, got) = (expected.to_string(), got.trim().to_string());
        Error::Vectors(VectorsError::Npy { name: name.to_string(), expected, got })
    };
    let (start, header) =
        header_text(file).ok_or_else(|| error("a .npy file", "an invalid header"))?;
    let value = |key: &str| Some(header.split_once(&format!("'{key}':"))?.1.trim_start());
    let starts = |key: &str, start: &str| value(key).is_some_and(|value| value.starts_with(start));
    let dtype = match (starts("descr", "'<f4'"), starts("descr", "'<f2'")) {
        (true, _) => VectorDtype::F32,
        (_, true) => VectorDtype::F16,
        _ => return Err(error("little-endian f32 or f16 in row-major order", header)),
    };
    if !starts("fortran_order", "False") {
        return Err(error("little-endian f32 or f16 in row-major order", header));
    }
    let shape = value("shape").and_then(|shape| shape.strip_prefix('(')?.split_once(')'));
    let shape: Option<Vec<usize>> = shape.and_then(|(shape, _)| {
        let sizes = shape.split(',').map(str::trim).filter(|size| !size.is_empty());
        sizes.map(|size| size.parse().ok()).collect()
    });
    let Some([rows, dimension]) = shape.as_deref() else {
        return Err(error("a two-dimensional array", header));
    };
    if *dimension == 0 {
        return Err(error("vectors of at least one value", header));
    }
    let bytes = rows.checked_mul(*dimension).and_then(|n| n.checked_mul(dtype.size()));
    let got = file.len() - start;
    if bytes != Some(got) {
        let expected = format!("{rows} vectors of {dimension} {dtype} values");
        return Err(error(&expected, &format!("{got} bytes")));
    }
    Ok(NpyArray { rows: *rows as u64, dimension: *dimension, dtype, start })
}

/// The offset of the first value, and the header's dictionary.
fn header_text(file: &[u8]) -> Option<(usize, &str)> {
    let (start, length) = match file.strip_prefix(b"\x93NUMPY")?.first()? {
        1 => (10, file.get(8..10)?),
        _ => (12, file.get(8..12)?),
    };
    let length = length.iter().rev().fold(0, |length, &byte| length << 8 | usize::from(byte));
    let end = start + length;
    Some((end, std::str::from_utf8(file.get(start..end)?).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(descr: &str, order: &str, shape: &str, bytes: usize) -> Vec<u8> {
        let header =
            format!("{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n");
        let mut file = b"\x93NUMPY\x01\x00".to_vec();
        file.extend((header.len() as u16).to_le_bytes());
        file.extend(header.as_bytes());
        file.resize(file.len() + bytes, 0);
        file
    }

    #[test]
    fn arrays_of_f32_and_f16_are_read() {
        let array = parse("a", &file("'<f4'", "False", "(2, 3)", 24)).unwrap();
        assert_eq!((array.rows, array.dimension, array.dtype), (2, 3, VectorDtype::F32));
        let array = parse("a", &file("'<f2'", "False", "(0, 5)", 0)).unwrap();
        assert_eq!((array.rows, array.dimension, array.dtype), (0, 5, VectorDtype::F16));
    }

    #[test]
    fn a_written_header_is_read_back() {
        let mut file = header(VectorDtype::F16, 3, 5);
        assert_eq!(file.len(), HEADER_LENGTH);
        file.resize(HEADER_LENGTH + 30, 0);
        let array = parse("a", &file).unwrap();
        assert_eq!((array.rows, array.dimension, array.start), (3, 5, HEADER_LENGTH));
    }

    #[test]
    fn invalid_headers_and_unsupported_arrays_are_errors() {
        let layout = "a: expected little-endian f32 or f16 in row-major order, got {'descr'";
        for (file, error) in [
            (file("'<f8'", "False", "(2, 3)", 48), layout),
            (file("'<f4'", "True", "(2, 3)", 24), layout),
            (file("'<f4'", "False", "(6,)", 24), "a: expected a two-dimensional array"),
            (
                file("'<f4'", "False", "(2, 3)", 20),
                "a: expected 2 vectors of 3 f32 values, got 20 bytes",
            ),
            (file("'<f4'", "False", "(9, 0)", 0), "a: expected vectors of at least one value"),
            (
                file("'<f4'", "False", "(99999999999999999999, 3)", 0),
                "a: expected a two-dimensional array",
            ),
            (
                file("'<f4'", "False", "(9999999999999999999, 9)", 0),
                "a: expected 9999999999999999999",
            ),
            (
                b"\x93NUMPY\x01\0\xff\xff{".to_vec(),
                "a: expected a .npy file, got an invalid header",
            ),
            (b"PK".to_vec(), "a: expected a .npy file"),
            (vec![], "a: expected a .npy file"),
        ] {
            let got = parse("a", &file).unwrap_err().to_string();
            assert!(got.starts_with(error), "{got}");
        }
    }
}
