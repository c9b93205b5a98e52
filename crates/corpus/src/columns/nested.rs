//! The children of Arrow's nested types: fields and arrays.

use std::sync::Arc;

use arrow_array::{
    Array, ArrayRef, GenericListArray, GenericListViewArray, OffsetSizeTrait, UInt64Array,
    cast::AsArray, make_array,
};
use arrow_buffer::OffsetBuffer;
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
    let fields: Vec<_> = schema.fields().iter().map(|field| without_dictionary(field)).collect();
    Arc::new(Schema::new_with_metadata(fields, schema.metadata().clone()))
}

fn without_dictionary(field: &Field) -> Arc<Field> {
    let data_type = match field.data_type() {
        DataType::Dictionary(_, value) => value.as_ref().clone(),
        nested => map_children(nested, |_, child| without_dictionary(child)),
    };
    Arc::new(field.clone().with_data_type(data_type))
}

/// The array with each child array replaced by `f(child)`: the elements of a list, the entries of a
/// map, the members of a struct, the values of a run-end encoded array. All other arrays, unions
/// included, are returned unchanged.
///
/// # Errors
/// The errors of `f`; [`ArrowError`] if a child of a field that is not nullable has nulls in visible
/// rows.
pub(crate) fn map_child_arrays(
    array: &ArrayRef,
    f: impl Fn(&ArrayRef) -> Result<ArrayRef, ArrowError>,
) -> Result<ArrayRef, ArrowError> {
    if children(array.data_type()).is_empty() {
        return Ok(array.clone());
    }
    // The first array of a run-end encoded array has the ends of the runs.
    let first = usize::from(matches!(array.data_type(), DataType::RunEndEncoded(..)));
    let data = array.to_data();
    let mut arrays: Vec<_> = data.child_data().iter().cloned().map(make_array).collect();
    for child in &mut arrays[first..] {
        *child = f(child)?;
    }
    let data_type = map_children(array.data_type(), |i, field| {
        let data_type = arrays[first + i].data_type().clone();
        Arc::new(field.as_ref().clone().with_data_type(data_type))
    });
    let arrays = arrays.iter().map(|array| array.to_data()).collect();
    Ok(make_array(data.into_builder().data_type(data_type).child_data(arrays).build()?))
}

/// The array without dictionaries; views contain the values of these rows only. A slice of an array
/// of views (of strings, bytes or lists) keeps the values of the whole array.
///
/// # Errors
/// [`ArrowError`] for a type of dictionary values that `arrow-select` 60.1 does not support.
pub(crate) fn compact(array: &ArrayRef) -> Result<ArrayRef, ArrowError> {
    match array.data_type() {
        DataType::Dictionary(..) => {
            let dictionary = array.as_any_dictionary();
            compact(&take(dictionary.values(), dictionary.keys(), None)?)
        }
        DataType::Utf8View => Ok(Arc::new(array.as_string_view().gc())),
        DataType::BinaryView => Ok(Arc::new(array.as_binary_view().gc())),
        DataType::ListView(_) => compact_lists::<i32>(array.as_list_view()),
        DataType::LargeListView(_) => compact_lists::<i64>(array.as_list_view()),
        _ => map_child_arrays(array, compact),
    }
}

fn compact_lists<O: OffsetSizeTrait>(
    lists: &GenericListViewArray<O>,
) -> Result<ArrayRef, ArrowError> {
    let ranges = (0..lists.len()).map(|row| {
        let (start, length) =
            (lists.value_offset(row).as_usize(), lists.value_size(row).as_usize());
        start..start + if lists.is_valid(row) { length } else { 0 }
    });
    let elements = UInt64Array::from_iter_values(ranges.clone().flatten().map(|i| i as u64));
    let elements = compact(&take(lists.values(), &elements, None)?)?;
    let (DataType::ListView(field) | DataType::LargeListView(field)) = lists.data_type() else {
        unreachable!("an array of list views has one of these types");
    };
    let field = Arc::new(field.as_ref().clone().with_data_type(elements.data_type().clone()));
    let offsets = OffsetBuffer::from_lengths(ranges.map(|range| range.len()));
    let lists = GenericListArray::<O>::try_new(field, offsets, elements, lists.nulls().cloned())?;
    Ok(Arc::new(GenericListViewArray::from(lists)))
}

#[cfg(test)]
mod tests {
    use arrow_array::{
        DictionaryArray, Int32Array, ListArray, ListViewArray, RecordBatch, StringArray,
        StringViewArray, StructArray,
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
