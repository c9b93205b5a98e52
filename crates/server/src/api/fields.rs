//! Deserialises the objects of requests. The rule for every field is here: a field that can change
//! the result is obeyed, or refused by its name; a field that cannot, or that has no value, is
//! ignored. A field has no value if it is null, `""`, `[]` or `{}`; a required field always has
//! one.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{
        DeserializeSeed, Error, IgnoredAny, IntoDeserializer, MapAccess, SeqAccess, Unexpected,
        Visitor,
        value::{MapAccessDeserializer, StringDeserializer},
    },
    forward_to_deserialize_any,
};

/// Fields that clients send, and that cannot change the result of any route: they concern a
/// service's queue, cache and records.
const WITHOUT_EFFECT: [&str; 4] = ["priority", "use_cache", "user", "wait_for_model"];

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

/// A struct, from an object whose fields follow the rule of this file.
pub struct Object<T>(pub T);

struct ObjectVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
    type Value = Object<T>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Object<T>, M::Error> {
        T::deserialize(Entries(map)).map(Object)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ObjectVisitor(PhantomData))
    }
}

/// A deserializer for a struct, from the entries of an object.
pub struct Entries<M>(pub M);

impl<'de, M: MapAccess<'de>> Deserializer<'de> for Entries<M> {
    type Error = M::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, M::Error> {
        visitor.visit_map(self.0)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, M::Error> {
        visitor.visit_map(KnownEntries { entries: self.0, fields })
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// The entries of an object for the fields of a struct, without those that are ignored.
struct KnownEntries<M> {
    entries: M,
    fields: &'static [&'static str],
}

impl<'de, M: MapAccess<'de>> MapAccess<'de> for KnownEntries<M> {
    type Error = M::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, M::Error> {
        while let Some(name) = self.entries.next_key::<String>()? {
            if self.fields.contains(&name.as_str()) {
                let name: StringDeserializer<M::Error> = name.into_deserializer();
                return seed.deserialize(name).map(Some);
            }
            // The error comes from the value's seed, so that its path has the field's name.
            self.entries.next_value_seed(UnknownField { name: &name, fields: self.fields })?;
        }
        Ok(None)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, M::Error> {
        self.entries.next_value_seed(WithDefault(seed))
    }
}

/// Reads the value of an unknown field, which is an error unless the field is ignored.
struct UnknownField<'a> {
    name: &'a str,
    fields: &'static [&'static str],
}

impl<'de> DeserializeSeed<'de> for UnknownField<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<(), D::Error> {
        if IgnoredField(self.name).deserialize(value)? {
            Ok(())
        } else {
            Err(Error::unknown_field(self.name, self.fields))
        }
    }
}

/// Reads the value of the field of this name. Returns whether the field is ignored: it cannot
/// change the result, it has no value, or it is an object of such fields.
struct IgnoredField<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for IgnoredField<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<bool, D::Error> {
        if WITHOUT_EFFECT.contains(&self.0) {
            IgnoredAny::deserialize(value).map(|_| true)
        } else {
            value.deserialize_any(IgnoredVisitor)
        }
    }
}

struct IgnoredVisitor;

impl<'de> Visitor<'de> for IgnoredVisitor {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: Error>(self) -> Result<bool, E> {
        Ok(true)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<bool, E> {
        Ok(text.is_empty())
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut seq: S) -> Result<bool, S::Error> {
        let is_empty = seq.next_element::<IgnoredAny>()?.is_none();
        IgnoredAny.visit_seq(seq)?;
        Ok(is_empty)
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<bool, M::Error> {
        let mut is_ignored = true;
        while let Some(name) = map.next_key::<String>()? {
            is_ignored &= map.next_value_seed(IgnoredField(&name))?;
        }
        Ok(is_ignored)
    }
}

/// The value of a known field. An `Option` of a field without a value is `None`.
struct WithDefault<T>(T);

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for WithDefault<S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<S::Value, D::Error> {
        self.0.deserialize(WithDefault(value))
    }
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for WithDefault<D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_any(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_any(OptionVisitor(visitor))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.0.deserialize_enum(name, variants, visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct newtype_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

/// Passes a value to the visitor of an `Option`.
struct OptionVisitor<V>(V);

impl<'de, V: Visitor<'de>> Visitor<'de> for OptionVisitor<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.0.expecting(f)
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.0.visit_none()
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<V::Value, E> {
        if text.is_empty() {
            self.0.visit_none()
        } else {
            self.0.visit_some(text.into_deserializer())
        }
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<V::Value, E> {
        self.0.visit_some(value.into_deserializer())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<V::Value, E> {
        self.0.visit_some(value.into_deserializer())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<V::Value, E> {
        self.0.visit_some(value.into_deserializer())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<V::Value, E> {
        self.0.visit_some(value.into_deserializer())
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut seq: S) -> Result<V::Value, S::Error> {
        match seq.next_element::<IgnoredAny>()? {
            None => self.0.visit_none(),
            Some(_) => self.0.visit_some(RestOfList(seq)),
        }
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<V::Value, M::Error> {
        match map.next_key::<String>()? {
            None => self.0.visit_none(),
            first => self.0.visit_some(MapAccessDeserializer::new(WithFirst { first, map })),
        }
    }
}

/// A list whose first element is lost. It can only be ignored: no optional field is a list.
struct RestOfList<S>(S);

impl<'de, S: SeqAccess<'de>> Deserializer<'de> for RestOfList<S> {
    type Error = S::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, S::Error> {
        Err(Error::invalid_type(Unexpected::Seq, &visitor))
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, S::Error> {
        visitor.visit_seq(self.0)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map struct enum identifier
    }
}

/// The entries of an object, the first key of which has been read.
struct WithFirst<M> {
    first: Option<String>,
    map: M,
}

impl<'de, M: MapAccess<'de>> MapAccess<'de> for WithFirst<M> {
    type Error = M::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, M::Error> {
        match self.first.take() {
            None => self.map.next_key_seed(seed),
            Some(name) => {
                let name: StringDeserializer<M::Error> = name.into_deserializer();
                seed.deserialize(name).map(Some)
            }
        }
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, M::Error> {
        self.map.next_value_seed(seed)
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

    /// The fields of requests.
    #[derive(Debug, Default, Deserialize, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct Fields {
        text: String,
        #[serde(default)]
        name: Option<String>,
        #[serde(default)]
        count: Option<u8>,
        #[serde(default)]
        refused: Option<IgnoredAny>,
        #[serde(default, deserialize_with = "optional_object")]
        inner: Option<Inner>,
    }

    #[derive(Debug, Deserialize, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct Inner {
        #[serde(default)]
        scale: Option<f32>,
        #[serde(default)]
        flag: Option<bool>,
    }

    fn fields(json: &str) -> Result<Fields, String> {
        let parsed = serde_json::from_str(json).map(|Object(fields)| fields);
        parsed.map_err(|error| error.to_string())
    }

    #[test]
    fn a_field_without_a_value_is_ignored() {
        for value in ["null", "\"\"", "[]", "{}"] {
            for name in ["name", "count", "refused", "inner", "unknown"] {
                let json = format!(r#"{{"{name}": {value}, "text": ""}}"#);
                assert_eq!(fields(&json), Ok(Fields::default()), "{json}");
            }
        }
        let required = fields(r#"{"text": null}"#).unwrap_err();
        assert!(required.starts_with("invalid type: null, expected a string"), "{required}");
    }

    #[test]
    fn a_field_without_effect_is_ignored() {
        for json in [
            r#"{"text": "a", "user": "b", "priority": 3}"#,
            r#"{"options": {"use_cache": true, "wait_for_model": [1], "x": {"y": null}}, "text": "a"}"#,
            r#"{"text": "a", "inner": {"user": 1, "other": ""}}"#,
        ] {
            assert_eq!(fields(json).map(|fields| fields.text), Ok("a".to_string()), "{json}");
        }
    }

    #[test]
    fn other_fields_are_obeyed_or_refused_by_name() {
        let json = r#"{"text": "a", "name": "b", "count": 3, "refused": [1, [2]],
                       "inner": {"scale": 0.5, "flag": true}}"#;
        let inner = Some(Inner { scale: Some(0.5), flag: Some(true) });
        let expected = Fields {
            text: "a".to_string(),
            name: Some("b".to_string()),
            count: Some(3),
            refused: Some(IgnoredAny),
            inner,
        };
        assert_eq!(fields(json), Ok(expected));
        for (json, message) in [
            (
                r#"{"text": "a", "other": 0}"#,
                "unknown field `other`, expected one of `text`, `name`",
            ),
            (r#"{"text": "a", "other": [null]}"#, "unknown field `other`, expected one of `text`"),
            (
                r#"{"options": {"use_cache": true, "n": 2}}"#,
                "unknown field `options`, expected one",
            ),
            (
                r#"{"text": "a", "inner": {"flag": true, "n": false}}"#,
                "unknown field `n`, expected",
            ),
            (r#"{"text": "a", "count": [3]}"#, "invalid type: sequence, expected u8"),
            (r#"{"text": "a", "count": {"a": 3}}"#, "invalid type: map, expected u8"),
            (
                r#"{"text": "a", "inner": ["a", true]}"#,
                "invalid type: sequence, expected an object",
            ),
        ] {
            let error = fields(json).unwrap_err();
            assert!(error.starts_with(message), "{json}: {error}");
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
