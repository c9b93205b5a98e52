//! Deserialises the fields that take one item or lists of items. For an untagged enum, serde first
//! buffers the JSON as a tree, which needs many times the memory of the body; the visitors of this
//! file parse without such a tree.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, SeqAccess, Visitor, value::SeqAccessDeserializer},
};

use super::fields::Entries;
use crate::Limits;

/// A string, a list of strings or numbers, or a list of such lists.
#[derive(Debug, PartialEq)]
pub enum Nested {
    Text(String),
    /// A list without elements.
    Empty,
    Texts(Vec<String>),
    Ids(Vec<u32>),
    Lists(Vec<List>),
}

/// A list of strings or of numbers.
#[derive(Debug, PartialEq)]
pub enum List {
    Empty,
    Texts(Vec<String>),
    Ids(Vec<u32>),
}

/// A string or a whole number.
pub enum Scalar {
    Text(String),
    Number(u64),
}

/// A string, or an object that is read as `T`.
pub enum TextOrObject<T> {
    Text(String),
    Object(T),
}

/// The first element of a list, which determines the type of the others.
enum First {
    Text(String),
    Id(u32),
    List(List),
}

impl Nested {
    /// The lists as token ids; `None` if a list has strings.
    pub fn id_lists(lists: Vec<List>) -> Option<Vec<Vec<u32>>> {
        let ids = |list| match list {
            List::Empty => Some(vec![]),
            List::Ids(ids) => Some(ids),
            List::Texts(_) => None,
        };
        lists.into_iter().map(ids).collect()
    }

    /// The lists as strings; `None` if a list has token ids.
    pub fn text_lists(lists: Vec<List>) -> Option<Vec<Vec<String>>> {
        let texts = |list| match list {
            List::Empty => Some(vec![]),
            List::Texts(texts) => Some(texts),
            List::Ids(_) => None,
        };
        lists.into_iter().map(texts).collect()
    }
}

/// Maximum number of elements of a list. It bounds the memory of lists of short elements. The
/// routes have lower limits, with better messages.
const MAX_ELEMENTS: usize = 2 * Limits::MAX_TEXTS;

/// The elements of a list: those in `all`, then the rest from `seq`.
fn rest<'de, T: Deserialize<'de>, S: SeqAccess<'de>>(
    mut all: Vec<T>,
    mut seq: S,
) -> Result<Vec<T>, S::Error> {
    while let Some(next) = seq.next_element()? {
        if all.len() == MAX_ELEMENTS {
            return Err(Error::custom(format!("a list has more than {MAX_ELEMENTS} elements")));
        }
        all.push(next);
    }
    Ok(all)
}

/// Deserialises a list of at most [`MAX_ELEMENTS`] elements.
pub fn list<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    deserializer.deserialize_seq(ElementsVisitor(PhantomData))
}

struct ElementsVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ElementsVisitor<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<S: SeqAccess<'de>>(self, seq: S) -> Result<Vec<T>, S::Error> {
        rest(vec![], seq)
    }
}

struct NestedVisitor;

impl<'de> Visitor<'de> for NestedVisitor {
    type Value = Nested;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a string or a list, as the field permits")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Nested, E> {
        Ok(Nested::Text(text.to_string()))
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut seq: S) -> Result<Nested, S::Error> {
        Ok(match seq.next_element()? {
            None => Nested::Empty,
            Some(First::Text(text)) => Nested::Texts(rest(vec![text], seq)?),
            Some(First::Id(id)) => Nested::Ids(rest(vec![id], seq)?),
            Some(First::List(list)) => Nested::Lists(rest(vec![list], seq)?),
        })
    }
}

struct ScalarVisitor;

impl Visitor<'_> for ScalarVisitor {
    type Value = Scalar;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a string or a whole number of at least 0")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Scalar, E> {
        Ok(Scalar::Text(text.to_string()))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Scalar, E> {
        Ok(Scalar::Number(number))
    }
}

struct TextOrObjectVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for TextOrObjectVisitor<T> {
    type Value = TextOrObject<T>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a string, or an object whose only field is text")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<TextOrObject<T>, E> {
        Ok(TextOrObject::Text(text.to_string()))
    }

    fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<TextOrObject<T>, M::Error> {
        T::deserialize(Entries(map)).map(TextOrObject::Object)
    }
}

struct FirstVisitor;

impl<'de> Visitor<'de> for FirstVisitor {
    type Value = First;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a string, a token id, or a list of them, as the field permits")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<First, E> {
        Ok(First::Text(text.to_string()))
    }

    fn visit_u64<E: Error>(self, id: u64) -> Result<First, E> {
        u32::try_from(id).map(First::Id).map_err(|_| too_large(id))
    }

    fn visit_seq<S: SeqAccess<'de>>(self, seq: S) -> Result<First, S::Error> {
        List::deserialize(SeqAccessDeserializer::new(seq)).map(First::List)
    }
}

struct ListVisitor;

impl<'de> Visitor<'de> for ListVisitor {
    type Value = List;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a list of strings or of token ids")
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut seq: S) -> Result<List, S::Error> {
        Ok(match seq.next_element()? {
            None => List::Empty,
            Some(First::Text(text)) => List::Texts(rest(vec![text], seq)?),
            Some(First::Id(id)) => List::Ids(rest(vec![id], seq)?),
            Some(First::List(_)) => {
                return Err(Error::custom(
                    "lists are nested too deep: expected at most two levels",
                ));
            }
        })
    }
}

fn too_large<E: Error>(id: u64) -> E {
    E::custom(format!("token id {id} is too large: expected at most {}", u32::MAX))
}

impl<'de> Deserialize<'de> for Nested {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NestedVisitor)
    }
}

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ScalarVisitor)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for TextOrObject<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TextOrObjectVisitor(PhantomData))
    }
}

impl<'de> Deserialize<'de> for List {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ListVisitor)
    }
}

impl<'de> Deserialize<'de> for First {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FirstVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_with_too_many_elements_is_an_error() {
        let json = |elements: usize| format!("[{}1]", "1,".repeat(elements - 1));
        let parse = |json: &str| serde_json::from_str::<Nested>(json).map_err(|e| e.to_string());
        let Ok(Nested::Ids(ids)) = parse(&json(MAX_ELEMENTS)) else { panic!("expected ids") };
        assert_eq!(ids.len(), MAX_ELEMENTS);
        let error = parse(&json(MAX_ELEMENTS + 1)).unwrap_err();
        assert!(error.starts_with("a list has more than 2097152 elements"), "{error}");
        let parse = |json: &str| {
            let ids = list::<u8, _>(&mut serde_json::Deserializer::from_str(json));
            ids.map_err(|error| error.to_string())
        };
        assert_eq!(parse("[1, 1]"), Ok(vec![1, 1]));
        assert_eq!(parse(&json(MAX_ELEMENTS)).map(|ids| ids.len()), Ok(MAX_ELEMENTS));
        let error = parse(&json(MAX_ELEMENTS + 1)).unwrap_err();
        assert!(error.starts_with("a list has more than 2097152 elements"), "{error}");
    }

    #[test]
    fn items_and_lists_are_parsed() {
        let parse = |json: &str| serde_json::from_str::<Nested>(json).map_err(|e| e.to_string());
        assert_eq!(parse("\"a\\n\""), Ok(Nested::Text("a\n".to_string())));
        assert_eq!(parse("[]"), Ok(Nested::Empty));
        assert_eq!(parse("[\"a\"]"), Ok(Nested::Texts(vec!["a".to_string()])));
        assert_eq!(parse("[1, 2]"), Ok(Nested::Ids(vec![1, 2])));
        let lists = vec![List::Empty, List::Ids(vec![3]), List::Texts(vec!["a".to_string()])];
        assert_eq!(parse("[[], [3], [\"a\"]]"), Ok(Nested::Lists(lists)));
        for (json, message) in [
            ("{}", "invalid type: map, expected a string or a list"),
            ("7", "invalid type: integer `7`, expected a string or a list"),
            ("[{}]", "invalid type: map, expected a string, a token id, or a list of them"),
            ("[null]", "invalid type: null, expected a string, a token id"),
            ("[\"a\", 1]", "invalid type: integer `1`, expected a string"),
            ("[1, -1]", "invalid value: integer `-1`, expected u32"),
            ("[4294967296]", "token id 4294967296 is too large: expected at most 4294967295"),
            ("[[[]]]", "lists are nested too deep"),
            ("[[1], 2]", "invalid type: integer `2`, expected a list of strings or of token ids"),
        ] {
            let error = parse(json).unwrap_err();
            assert!(error.starts_with(message), "{json}: {error}");
        }
    }
}
