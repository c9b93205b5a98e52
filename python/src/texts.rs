//! Texts from Python strings and from Arrow arrays. Arrow strings are not copied, except those of
//! dictionary arrays. For a non-ASCII `str`, CPython computes the UTF-8 form and keeps it as long
//! as the `str` lives.

use std::{iter, ops::Range, str::from_utf8};

use arrow_array::{
    Array, ArrayReader, ArrayRef, BinaryArray, BinaryViewArray, LargeBinaryArray,
    cast::AsArray,
    ffi::{FFI_ArrowArray, FFI_ArrowSchema, from_ffi},
    ffi_stream::{ArrayStreamReader, FFI_ArrowArrayStream},
    make_array, new_empty_array,
};
use arrow_schema::DataType;
use pyo3::{
    exceptions::PyTypeError,
    ffi::c_str,
    prelude::*,
    pybacked::PyBackedStr,
    types::{PyCapsule, PyList, PyString, PyTuple},
};

use crate::errors::error;

/// The texts of an argument.
pub enum Texts {
    Python(Vec<PyBackedStr>),
    Arrow(Vec<Strings>),
}

/// An Arrow array of strings. The strings may be invalid UTF-8, because the program that produced
/// the array may not have checked them.
pub enum Strings {
    Small(BinaryArray),
    Large(LargeBinaryArray),
    View(BinaryViewArray),
    /// An array of the type null, with this length.
    Null(usize),
}

/// A text, or the reason why a row has none.
pub type Row<'a> = Result<&'a str, &'static str>;

impl Texts {
    /// Reads a list of `str`, or an object with the Arrow PyCapsule interface.
    ///
    /// # Errors
    /// `TypeError` for an element that is not a `str`; [`crate::errors::EncodleError`] for a `str`
    /// with a lone surrogate and for an Arrow array that has neither strings nor the type null.
    pub fn from_python(texts: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(list) = texts.cast::<PyList>() {
            let text = |(i, text): (usize, Bound<'_, PyAny>)| {
                text.extract::<PyBackedStr>().map_err(|_| not_a_text(i, &text))
            };
            return Ok(Self::Python(list.iter().enumerate().map(text).collect::<PyResult<_>>()?));
        }
        let arrays = if texts.hasattr("__arrow_c_array__")? {
            vec![import_array(&texts.call_method0("__arrow_c_array__")?)?]
        } else {
            import_stream(&texts.call_method0("__arrow_c_stream__")?)?
        };
        Ok(Self::Arrow(arrays.iter().map(Strings::new).collect::<PyResult<_>>()?))
    }

    /// The number of rows.
    pub fn len(&self) -> usize {
        match self {
            Self::Python(texts) => texts.len(),
            Self::Arrow(arrays) => arrays.iter().map(Strings::len).sum(),
        }
    }

    /// The rows in their order.
    pub fn rows(&self) -> Vec<Row<'_>> {
        self.range(0..self.len())
    }

    /// Some of the rows.
    pub fn range(&self, range: Range<usize>) -> Vec<Row<'_>> {
        let arrays = match self {
            Self::Python(texts) => return texts[range].iter().map(|text| Ok(&**text)).collect(),
            Self::Arrow(arrays) => arrays,
        };
        let (mut rows, mut first) = (Vec::with_capacity(range.len()), 0);
        for array in arrays {
            let within = |row: usize| row.clamp(first, first + array.len()) - first;
            rows.extend((within(range.start)..within(range.end)).map(|row| array.row(row)));
            first += array.len();
        }
        rows
    }
}

/// The error for an element of a list that is not a `str`, or that UTF-8 cannot represent.
fn not_a_text(i: usize, element: &Bound<'_, PyAny>) -> PyErr {
    if element.is_instance_of::<PyString>() {
        let got = "has a lone surrogate";
        return error(format!(
            "text {i} {got}: expected Unicode text; decode it again from its bytes"
        ));
    }
    let got = element.get_type().name().map_or("another type".into(), |name| name.to_string());
    PyTypeError::new_err(format!("text {i} is {got}: expected str"))
}

impl Strings {
    fn new(array: &ArrayRef) -> PyResult<Self> {
        // Reinterprets strings as bytes.
        let bytes = |data_type| {
            let builder = array.to_data().into_builder().data_type(data_type).align_buffers(true);
            builder.build().map_err(error)
        };
        match array.data_type() {
            DataType::Utf8 => Ok(Self::Small(bytes(DataType::Binary)?.into())),
            DataType::LargeUtf8 => Ok(Self::Large(bytes(DataType::LargeBinary)?.into())),
            DataType::Utf8View => Ok(Self::View(bytes(DataType::BinaryView)?.into())),
            DataType::Null => Ok(Self::Null(array.len())),
            DataType::Dictionary(keys, values) if values.is_string() => {
                let binary = match **values {
                    DataType::Utf8 => DataType::Binary,
                    DataType::LargeUtf8 => DataType::LargeBinary,
                    _ => DataType::BinaryView,
                };
                let data = array.to_data();
                let child = data.child_data()[0].clone().into_builder().data_type(binary.clone());
                let child = child.align_buffers(true).build().map_err(error)?;
                let data_type = DataType::Dictionary(keys.clone(), Box::new(binary));
                let data = data.into_builder().data_type(data_type).child_data(vec![child]);
                let data = data.align_buffers(true).build().map_err(error)?;
                data.validate_full().map_err(error)?;
                let plain = arrow_cast::cast(&make_array(data), &DataType::LargeBinary);
                Ok(Self::Large(plain.map_err(error)?.as_binary().clone()))
            }
            other => Err(error(format!(
                "an Arrow array has type {other}: expected strings; pass the column with the texts"
            ))),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Small(array) => array.len(),
            Self::Large(array) => array.len(),
            Self::View(array) => array.len(),
            Self::Null(len) => *len,
        }
    }

    fn row(&self, row: usize) -> Row<'_> {
        let bytes = match self {
            Self::Small(array) => array.is_valid(row).then(|| array.value(row)),
            Self::Large(array) => array.is_valid(row).then(|| array.value(row)),
            Self::View(array) => array.is_valid(row).then(|| array.value(row)),
            Self::Null(_) => None,
        };
        let bytes = bytes.ok_or("the text is null: expected a string")?;
        from_utf8(bytes).map_err(|_| "the text is not valid UTF-8: expected a string")
    }
}

/// Imports the result of `__arrow_c_array__`.
#[expect(unsafe_code)]
fn import_array(capsules: &Bound<'_, PyAny>) -> PyResult<ArrayRef> {
    let capsules = capsules.cast::<PyTuple>()?;
    let (schema, array) = (capsules.get_item(0)?, capsules.get_item(1)?);
    let schema = schema.cast::<PyCapsule>()?.pointer_checked(Some(c_str!("arrow_schema")))?;
    let array = array.cast::<PyCapsule>()?.pointer_checked(Some(c_str!("arrow_array")))?;
    // SAFETY: `pointer_checked` has checked the names of the capsules. By the C data interface,
    // capsules with these names point to an `ArrowSchema` and an `ArrowArray`. The capsules live
    // until the end of this function. `from_raw` moves the array out of its capsule.
    let data = unsafe {
        let array = FFI_ArrowArray::from_raw(array.cast().as_ptr());
        from_ffi(array, schema.cast::<FFI_ArrowSchema>().as_ref())
    };
    Ok(make_array(data.map_err(error)?))
}

/// Imports the result of `__arrow_c_stream__`.
#[expect(unsafe_code)]
fn import_stream(capsule: &Bound<'_, PyAny>) -> PyResult<Vec<ArrayRef>> {
    let capsule = capsule.cast::<PyCapsule>()?;
    let stream = capsule.pointer_checked(Some(c_str!("arrow_array_stream")))?;
    // SAFETY: `pointer_checked` has checked the name of the capsule. By the C stream interface, a
    // capsule with this name points to an `ArrowArrayStream`. The capsule lives until the end of
    // this function. `from_raw` moves the stream out of its capsule.
    let stream = unsafe { FFI_ArrowArrayStream::from_raw(stream.cast().as_ptr()) };
    let reader = ArrayStreamReader::try_new(stream).map_err(error)?;
    // The empty array has the type of the stream, which may contain no arrays.
    let empty = new_empty_array(reader.field().data_type());
    iter::once(Ok(empty)).chain(reader.map(|array| array.map_err(error))).collect()
}
