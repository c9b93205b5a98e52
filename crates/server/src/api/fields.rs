//! Deserialises fields more strictly than the code that serde derives.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{Error, IntoDeserializer, MapAccess, Visitor, value::MapAccessDeserializer},
    forward_to_deserialize_any,
};

/// Deserialises an object. For a struct, the code that serde derives would also accept an array of
/// the fields' values in order.
pub fn object<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Object::deserialize(deserializer).map(|Object(value)| value)
}

/// Deserialises an object or null.
pub fn optional_object<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    Ok(Option::deserialize(deserializer)?.map(|Object(value)| value))
}

/// Deserialises the name of an enum's variant, or null. For a value of another type, the error
/// lists the names.
pub fn optional_choice<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    Ok(Option::deserialize(deserializer)?.map(|Choice(value)| value))
}

struct Object<T>(T);

struct ObjectVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
    type Value = Object<T>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Object<T>, M::Error> {
        T::deserialize(MapAccessDeserializer::new(map)).map(Object)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ObjectVisitor(PhantomData))
    }
}

struct Choice<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Choice<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        T::deserialize(NamesOnly(deserializer)).map(Choice)
    }
}

/// A deserializer that accepts only strings for an enum.
struct NamesOnly<D>(D);

impl<'de, D: Deserializer<'de>> Deserializer<'de> for NamesOnly<D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_any(visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.0.deserialize_any(NameVisitor { names, visitor })
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

/// Passes a string to the visitor of an enum.
struct NameVisitor<V> {
    names: &'static [&'static str],
    visitor: V,
}

impl<'de, V: Visitor<'de>> Visitor<'de> for NameVisitor<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "one of `{}`", self.names.join("`, `"))
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<V::Value, E> {
        self.visitor.visit_enum(name.into_deserializer())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    struct Body {
        #[serde(deserialize_with = "object")]
        inputs: Inputs,
        #[serde(default, deserialize_with = "optional_object")]
        parameters: Option<Inputs>,
        #[serde(default, deserialize_with = "optional_choice")]
        side: Option<Side>,
    }

    #[derive(Debug, Deserialize, PartialEq)]
    struct Inputs {
        id: u8,
    }

    #[derive(Debug, Deserialize, PartialEq)]
    #[serde(rename_all = "lowercase")]
    enum Side {
        Left,
        Right,
    }

    #[test]
    fn objects_choices_and_null_are_accepted() {
        let parse = |json| serde_json::from_str::<Body>(json).unwrap();
        let body = parse(r#"{"inputs": {"id": 1}, "parameters": {"id": 2}, "side": "left"}"#);
        assert_eq!(body.inputs, Inputs { id: 1 });
        assert_eq!((body.parameters, body.side), (Some(Inputs { id: 2 }), Some(Side::Left)));
        for json in [
            r#"{"inputs": {"id": 1}}"#,
            r#"{"inputs": {"id": 1}, "parameters": null, "side": null}"#,
        ] {
            let body = parse(json);
            assert_eq!((body.parameters, body.side), (None, None));
        }
    }

    #[test]
    fn other_types_are_refused() {
        for (json, message) in [
            (r#"{"inputs": [1]}"#, "invalid type: sequence, expected an object"),
            (r#"{"inputs": null}"#, "invalid type: null, expected an object"),
            (
                r#"{"inputs": {"id": 1}, "parameters": [1]}"#,
                "invalid type: sequence, expected an object",
            ),
            (
                r#"{"inputs": {"id": 1}, "side": 1}"#,
                "invalid type: integer `1`, expected one of `left`, `right`",
            ),
            (
                r#"{"inputs": {"id": 1}, "side": {"left": null}}"#,
                "invalid type: map, expected one of `left`, `right`",
            ),
            (
                r#"{"inputs": {"id": 1}, "side": "up"}"#,
                "unknown variant `up`, expected `left` or `right`",
            ),
            (r#"{}"#, "missing field `inputs`"),
        ] {
            let error = serde_json::from_str::<Body>(json).unwrap_err().to_string();
            assert!(error.starts_with(message), "{json}: {error}");
        }
    }
}
