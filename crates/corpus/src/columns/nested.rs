//! The child fields of Arrow's nested types.

use std::sync::Arc;

use arrow_schema::{DataType, Field, Schema, SchemaRef};

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

/// The field with views of strings, bytes and lists replaced by types with offsets. A slice of an
/// array of views keeps the values of the whole array; a cast to this field's type copies only the
/// values of the slice.
pub(crate) fn without_views(field: &Field) -> Arc<Field> {
    let data_type = match field.data_type() {
        DataType::Utf8View => DataType::LargeUtf8,
        DataType::BinaryView => DataType::LargeBinary,
        DataType::ListView(child) => DataType::List(without_views(child)),
        DataType::LargeListView(child) => DataType::LargeList(without_views(child)),
        nested => map_children(nested, |_, child| without_views(child)),
    };
    Arc::new(field.clone().with_data_type(data_type))
}
