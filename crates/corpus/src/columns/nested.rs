//! The children of Arrow's nested types: fields and arrays.

use std::sync::Arc;

use arrow_array::{
    Array, ArrayRef, BinaryViewArray, GenericListArray, GenericListViewArray, OffsetSizeTrait,
    PrimitiveArray, RunArray, StringViewArray, UInt64Array, cast::AsArray, downcast_run_array,
    make_array, types::RunEndIndexType,
};
use arrow_buffer::{Buffer, OffsetBuffer};
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};
use arrow_select::take::take;

/// The child fields of a list, map or struct, or the field of the values of a run-end encoded type;
/// empty for all other types, unions included.
pub(crate) fn children(data_type: &DataType) -> Vec<&Arc<Field>> {
    match data_type {
        DataType::List(child)
        | DataType::LargeList(child)
        | DataType::ListView(child)
        | DataType::LargeListView(child)
        | DataType::FixedSizeList(child, _)
        | DataType::Map(child, _)
        | DataType::RunEndEncoded(_, child) => vec![child],
        DataType::Struct(fields) => fields.iter().collect(),
        _ => vec![],
    }
}

/// The type with each child field replaced by `f(i, child)`, where `i` is its index in
/// [`children`].
pub(crate) fn map_children(
    data_type: &DataType,
    f: impl Fn(usize, &Arc<Field>) -> Arc<Field>,
) -> DataType {
    match data_type {
        DataType::List(child) => DataType::List(f(0, child)),
        DataType::LargeList(child) => DataType::LargeList(f(0, child)),
        DataType::ListView(child) => DataType::ListView(f(0, child)),
        DataType::LargeListView(child) => DataType::LargeListView(f(0, child)),
        DataType::FixedSizeList(child, n) => DataType::FixedSizeList(f(0, child), *n),
        DataType::Map(child, sorted) => DataType::Map(f(0, child), *sorted),
        DataType::RunEndEncoded(ends, child) => DataType::RunEndEncoded(ends.clone(), f(0, child)),
        DataType::Struct(fields) => {
            DataType::Struct(fields.iter().enumerate().map(|(i, child)| f(i, child)).collect())
        }
        other => other.clone(),
    }
}

/// The schema with dictionary types replaced by their value types.
pub(crate) fn without_dictionaries(schema: &SchemaRef) -> SchemaRef {
    let fields: Vec<_> = schema.fields().iter().map(without_dictionary).collect();
    Arc::new(Schema::new_with_metadata(fields, schema.metadata().clone()))
}

fn without_dictionary(field: &Arc<Field>) -> Arc<Field> {
    fn plain(data_type: &DataType) -> DataType {
        match data_type {
            DataType::Dictionary(_, value) => plain(value),
            nested => map_children(nested, |_, child| without_dictionary(child)),
        }
    }
    with_type(field, plain(field.data_type()))
}

fn with_type(field: &Field, data_type: DataType) -> Arc<Field> {
    Arc::new(field.clone().with_data_type(data_type))
}

/// The array with each child array replaced by `f(child)`: the elements of a list, the entries of a
/// map, the members of a struct, the values of a run-end encoded array. The children contain the
/// rows of `array` only, also if it is a slice. All other arrays, unions included, are returned
/// unchanged.
///
/// # Errors
/// The errors of `f`; [`ArrowError`] if a child of a field that is not nullable has nulls in
/// visible rows, or if the rows of list views together have more elements than their offsets can
/// represent.
pub(crate) fn map_child_arrays(
    array: &ArrayRef,
    f: impl Fn(&ArrayRef) -> Result<ArrayRef, ArrowError>,
) -> Result<ArrayRef, ArrowError> {
    use DataType as T;

    if children(array.data_type()).is_empty() {
        return Ok(array.clone());
    }
    let Parts { buffers, run_ends, children } = match array.data_type() {
        T::List(_) => Parts::of_lists(array.as_list::<i32>()),
        T::LargeList(_) => Parts::of_lists(array.as_list::<i64>()),
        T::Map(..) => {
            let map = array.as_map();
            Parts::with_offsets(map.offsets(), map.entries())
        }
        T::ListView(_) => Parts::of_views(array.as_list_view::<i32>())?,
        T::LargeListView(_) => Parts::of_views(array.as_list_view::<i64>())?,
        T::RunEndEncoded(..) => downcast_run_array!(
            array => Parts::of_runs(array),
            other => unreachable!("{other} is not run-end encoded")
        ),
        _ => {
            let data = array.to_data();
            let children = data.child_data().iter().cloned().map(make_array).collect();
            Parts { buffers: data.buffers().to_vec(), run_ends: None, children }
        }
    };
    let mapped = children.iter().map(f).collect::<Result<Vec<_>, _>>()?;
    // `build` rejects some arrays that `parquet` 60.1 reads, so an unchanged array is not built.
    // List views are always built: their new child has the elements of the rows only.
    let is_view = matches!(array.data_type(), T::ListView(_) | T::LargeListView(_));
    if !is_view && children.iter().zip(&mapped).all(|(old, new)| Arc::ptr_eq(old, new)) {
        return Ok(array.clone());
    }
    let data_type =
        map_children(array.data_type(), |i, field| with_type(field, mapped[i].data_type().clone()));
    let children = run_ends.iter().chain(&mapped).map(|child| child.to_data());
    let data = array.to_data().into_builder().offset(0).data_type(data_type).buffers(buffers);
    Ok(make_array(data.child_data(children.collect()).build()?))
}

/// The buffers and children of a nested array without the values of rows outside the array.
struct Parts {
    buffers: Vec<Buffer>,
    run_ends: Option<ArrayRef>,
    children: Vec<ArrayRef>,
}

impl Parts {
    fn of_lists<O: OffsetSizeTrait>(lists: &GenericListArray<O>) -> Self {
        Self::with_offsets(lists.offsets(), lists.values())
    }

    fn with_offsets<O: OffsetSizeTrait>(offsets: &OffsetBuffer<O>, values: &dyn Array) -> Self {
        let (first, last) = (offsets[0], offsets[offsets.len() - 1]);
        let values = values.slice(first.as_usize(), (last - first).as_usize());
        let offsets: Vec<O> = offsets.iter().map(|offset| *offset - first).collect();
        Self { buffers: vec![offsets.into()], run_ends: None, children: vec![values] }
    }

    /// # Errors
    /// [`ArrowError::OffsetOverflowError`] if the rows together have more elements than `O` can
    /// represent.
    fn of_views<O: OffsetSizeTrait>(lists: &GenericListViewArray<O>) -> Result<Self, ArrowError> {
        let (mut offsets, mut sizes, mut rows, mut end) = (vec![], vec![], vec![], 0_usize);
        for row in 0..lists.len() {
            let size = if lists.is_valid(row) { lists.value_size(row) } else { O::zero() };
            offsets.push(O::usize_as(end));
            sizes.push(size);
            end += size.as_usize();
            O::from_usize(end).ok_or(ArrowError::OffsetOverflowError(end))?;
            let first = lists.value_offset(row).as_usize() as u64;
            rows.push(first..first + size.as_usize() as u64);
        }
        let elements = UInt64Array::from_iter_values(rows.into_iter().flatten());
        let children = vec![take(lists.values(), &elements, None)?];
        Ok(Self { buffers: vec![offsets.into(), sizes.into()], run_ends: None, children })
    }

    fn of_runs<R: RunEndIndexType>(array: &RunArray<R>) -> Self {
        let (ends, first) = (array.run_ends(), array.run_ends().get_start_physical_index());
        let runs = if array.is_empty() { 0 } else { ends.get_end_physical_index() + 1 - first };
        let run_ends = PrimitiveArray::<R>::from_iter_values(ends.sliced_values().take(runs));
        let children = vec![array.values().slice(first, runs)];
        Self { buffers: vec![], run_ends: Some(Arc::new(run_ends)), children }
    }
}

/// Decodes dictionaries, and copies views (of strings, bytes or lists) so that they contain the
/// values of this array's rows only: a slice of an array of views keeps the values of the whole
/// array.
///
/// # Errors
/// The errors of [`map_child_arrays`]; [`ArrowError`] for a type of dictionary values that
/// `arrow-select` 60.1 does not support.
pub(crate) fn compact(array: &ArrayRef) -> Result<ArrayRef, ArrowError> {
    match array.data_type() {
        DataType::Dictionary(..) => {
            let dictionary = array.as_any_dictionary();
            compact(&take(dictionary.values(), dictionary.keys(), None)?)
        }
        // `gc` of `arrow-array` 60.1 would also copy the bytes of null rows.
        DataType::Utf8View => {
            Ok(Arc::new(array.as_string_view().iter().collect::<StringViewArray>()))
        }
        DataType::BinaryView => {
            Ok(Arc::new(array.as_binary_view().iter().collect::<BinaryViewArray>()))
        }
        _ => map_child_arrays(array, compact),
    }
}

#[cfg(test)]
mod tests {
    use arrow_array::{
        DictionaryArray, Int32Array, ListArray, ListViewArray, RecordBatch, StringArray,
        StructArray,
        types::{Int8Type, Int32Type},
    };

    use super::*;

    #[test]
    fn dictionaries_at_any_depth_are_decoded() -> Result<(), ArrowError> {
        let keys = [Some(1), None, Some(2), Some(1)].into_iter().collect();
        let values: ArrayRef = Arc::new(StringArray::from(vec![Some("a"), Some("b"), None]));
        let words = DictionaryArray::<Int8Type>::try_new(keys, values)?.slice(1, 3);
        let plain: ArrayRef = Arc::new(StringArray::from(vec![None, None, Some("b")]));
        assert_eq!(&compact(&(Arc::new(words.clone()) as ArrayRef))?, &plain);

        let words: ArrayRef = Arc::new(words);
        let field =
            |array: &ArrayRef| Arc::new(Field::new("word", array.data_type().clone(), true));
        let [nested, expected] = [&words, &plain].map(|array| {
            Arc::new(StructArray::from(vec![(field(array), array.clone())])) as ArrayRef
        });
        let schema = RecordBatch::try_from_iter([("nested", nested.clone())])?.schema();
        let compacted = compact(&nested)?;
        assert_eq!(&compacted, &expected);
        assert_eq!(compacted.data_type(), without_dictionaries(&schema).field(0).data_type());
        Ok(())
    }

    #[test]
    fn dictionaries_within_the_values_of_a_dictionary_are_decoded() -> Result<(), ArrowError> {
        let inner: ArrayRef = Arc::new(DictionaryArray::<Int8Type>::from_iter(["a", "b"]));
        let field = Arc::new(Field::new("word", inner.data_type().clone(), true));
        let values: ArrayRef = Arc::new(StructArray::from(vec![(field, inner)]));
        let outer: ArrayRef =
            Arc::new(DictionaryArray::<Int8Type>::try_new(vec![1, 0, 1].into(), values)?);
        let schema = RecordBatch::try_from_iter([("words", outer.clone())])?.schema();
        let compacted = compact(&outer)?;
        assert_eq!(compacted.data_type(), without_dictionaries(&schema).field(0).data_type());
        let words: ArrayRef = Arc::new(StringArray::from(vec!["b", "a", "b"]));
        assert_eq!(compacted.as_struct().column(0), &words);
        Ok(())
    }

    #[test]
    fn children_of_slices_have_the_rows_of_the_slice() -> Result<(), ArrowError> {
        let views: ArrayRef = Arc::new(StringViewArray::from_iter_values(
            (0..10_000).map(|i| format!("a long text with the number {i}")),
        ));
        let size = |array: &ArrayRef| array.get_array_memory_size();
        let field = Arc::new(Field::new_list_field(DataType::Utf8View, true));
        let offsets = OffsetBuffer::from_lengths([2; 5000]);
        let lists: ArrayRef = Arc::new(ListArray::try_new(field, offsets, views.clone(), None)?);
        let ends: Int32Array = (1..=10_000).map(|i| 2 * i).collect();
        let runs: ArrayRef = Arc::new(RunArray::try_new(&ends, &views)?);
        for (array, start) in [(lists, 25), (runs, 101)] {
            let slice = array.slice(start, 3);
            let compacted = compact(&slice)?;
            assert_eq!(&compacted, &slice);
            assert!(20 * size(&compacted) < size(&array), "{compacted:?}");
            let empty = compact(&array.slice(start, 0))?;
            assert_eq!((empty.len(), empty.data_type()), (0, array.data_type()));
        }
        Ok(())
    }

    /// Building an array checks it, and `parquet` 60.1 reads arrays that fail this check: a null
    /// struct with a required list of fixed size.
    #[test]
    fn arrays_without_dictionaries_and_views_are_not_built_again() -> Result<(), ArrowError> {
        let lists = ListArray::from_iter_primitive::<Int32Type, _, _>([Some(vec![Some(1)]), None]);
        let lists: ArrayRef = Arc::new(lists);
        let field = Arc::new(Field::new("lists", lists.data_type().clone(), true));
        let structs: ArrayRef = Arc::new(StructArray::from(vec![(field, lists.clone())]));
        for array in [lists.slice(1, 1), structs] {
            assert!(Arc::ptr_eq(&compact(&array)?, &array), "{array:?}");
        }
        Ok(())
    }

    #[test]
    fn bytes_of_null_views_are_not_copied() -> Result<(), ArrowError> {
        let hidden = StringViewArray::from(vec!["a secret text of many bytes", "b"]);
        let (views, buffers, _) = hidden.into_parts();
        let array: ArrayRef =
            Arc::new(StringViewArray::try_new(views, buffers, Some(vec![false, true].into()))?);
        let compacted = compact(&array)?;
        assert_eq!(&compacted, &array);
        assert!(compacted.as_string_view().data_buffers().is_empty());
        Ok(())
    }

    #[test]
    fn list_views_have_the_elements_of_their_own_rows_in_order() -> Result<(), ArrowError> {
        let element = Arc::new(Field::new_list_field(DataType::Int32, true));
        let numbers = Arc::new(Int32Array::from_iter_values(0..100));
        // The rows overlap, are not in order, and the third is null.
        let (offsets, sizes) = (vec![50, 7, 9, 50, 0].into(), vec![1, 2, 90, 2, 0].into());
        let nulls = vec![true, true, false, true, true].into();
        let lists = ListViewArray::try_new(element, offsets, sizes, numbers, Some(nulls))?;
        let compacted = compact(&(Arc::new(lists.slice(1, 4)) as ArrayRef))?;
        let rows =
            [Some(vec![Some(7), Some(8)]), None, Some(vec![Some(50), Some(51)]), Some(vec![])];
        let expected = ListArray::from_iter_primitive::<Int32Type, _, _>(rows);
        assert_eq!(compacted.as_list_view(), &ListViewArray::from(expected));
        assert_eq!(compacted.as_list_view::<i32>().values().len(), 4);
        Ok(())
    }

    #[test]
    fn compact_columns_are_unchanged() -> Result<(), ArrowError> {
        let plain: ArrayRef = Arc::new(Int32Array::from(vec![1, 2]));
        assert_eq!(&compact(&plain)?, &plain);
        let views: ArrayRef = Arc::new(StringViewArray::from(vec![Some("a"), None]));
        assert_eq!(&compact(&views)?, &views);
        Ok(())
    }
}
